"""Callbacks that show what FP8 does to a run."""

from lightning_fp8.callbacks.dtype_audit import DtypeAudit
from lightning_fp8.callbacks.scale_factor_logger import ScaleFactorLogger

__all__ = ["DtypeAudit", "ScaleFactorLogger"]
