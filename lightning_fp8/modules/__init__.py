"""Converted modules: ``torch.nn`` layers whose GEMMs run in FP8."""

from lightning_fp8.modules.attention import Fp8MultiheadAttention
from lightning_fp8.modules.linear import Fp8Linear

__all__ = ["Fp8Linear", "Fp8MultiheadAttention"]
