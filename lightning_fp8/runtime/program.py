"""The name under which the command line was called."""

from __future__ import annotations

import sys
from pathlib import Path


def program() -> str:
    """``lightning-fp8`` if that was called, else ``python -m lightning_fp8``, which always works."""
    return "lightning-fp8" if Path(sys.argv[0]).stem == "lightning-fp8" else "python -m lightning_fp8"
