"""Callbacks that show what FP8 does to a run, and what a run does in FP8."""

from lightning_fp8.callbacks.dtype_audit import DtypeAudit
from lightning_fp8.callbacks.monitor import Fp8Monitor
from lightning_fp8.callbacks.precision_schedule import PrecisionSchedule
from lightning_fp8.callbacks.run_record import RunRecord
from lightning_fp8.callbacks.scale_factor_logger import ScaleFactorLogger
from lightning_fp8.callbacks.throughput_monitor import Fp8ThroughputMonitor

__all__ = [
    "DtypeAudit",
    "Fp8Monitor",
    "Fp8ThroughputMonitor",
    "PrecisionSchedule",
    "RunRecord",
    "ScaleFactorLogger",
]
