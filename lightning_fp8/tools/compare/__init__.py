"""``python -m lightning_fp8 compare``: one configuration under several precisions, side by side."""

from lightning_fp8.tools.compare.command import compare

__all__ = ["compare"]
