"""What a cast does to a tensor, as torchmetrics metrics: standalone, in a ``MetricCollection``, or logged by a
trainer."""

from lightning_fp8.metrics.fractions import SaturationFraction, UnderflowFraction
from lightning_fp8.metrics.sqnr import SQNR

__all__ = ["SQNR", "SaturationFraction", "UnderflowFraction"]
