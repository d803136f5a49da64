"""Which layers run in FP8, why the others do not, and how a model becomes one of FP8 layers."""

from lightning_fp8.conversion.convert import fall_back
from lightning_fp8.conversion.linear_layers import register_linear

__all__ = ["fall_back", "register_linear"]
