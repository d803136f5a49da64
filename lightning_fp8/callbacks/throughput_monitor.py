"""Throughput, and model FLOPs utilisation (MFU) against the peak of the precision that actually runs.

Lightning's ``ThroughputMonitor`` takes the peak of the dtype that it infers from the precision plugin: fp32 for FP8, or
the ``reduce_dtype``, in which nothing is multiplied. This makes MFU 30 times too high on an H100. Its table of chips
has no FP8, and its int8 numbers are no substitute: some include sparsity, count two GPUs, or are twice the FP8 rate
with fp32 accumulation. So FP8 has its own table: ``lightning_fp8.runtime.peaks``. Lightning's bf16 peaks are used
unchanged, even if they are doubtful (two GPUs for the H100 NVL, an L4 for the L40S); ``peak_flops`` replaces them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_fp8.plugins.core import PrecisionCore
from lightning_fp8.runtime.peaks import dense_fp8_flops
from lightning_fp8.scalings.recipe import RECIPES


class Fp8ThroughputMonitor(ThroughputMonitor):
    """Lightning's ``ThroughputMonitor`` with MFU relative to the peak of this package's precisions.

    - The ``"fp8-"`` precisions, whatever their ``compute_dtype``: the device's dense FP8 peak. For a chip that is not
      in this package's table, twice Lightning's bf16 peak, with one warning. No MFU if Lightning does not know the chip
      either, nor on the CPU.
    - ``bf16-mixed`` and ``bf16-true``: Lightning's peak of the compute dtype, bf16, under FSDP too.
    - Lightning's own precisions: the peak that Lightning takes.

    Logs to every logger of the Trainer, with the Trainer's ``log_every_n_steps``. ``<stage>`` is ``train``,
    ``validate``, ``test`` or ``predict``, and ``/`` is the ``separator``; rates are averages over the last
    ``window_size`` batches and appear once there are that many:

    - ``<stage>/time``: seconds since the stage began; for training, without its validations.
    - ``<stage>/batches``, ``<stage>/samples``: number of batches and samples of one device since then; a second
      ``trainer.validate`` or ``test`` continues the count.
    - ``<stage>/lengths``: number of items of one device since then; with ``length_fn``.
    - ``<stage>/device/batches_per_sec``, ``<stage>/device/samples_per_sec``: batches or samples per second, of one
      device.
    - ``<stage>/device/items_per_sec``: items (tokens) per second, of one device; with ``length_fn``.
    - ``<stage>/device/flops_per_sec``: FLOP/s of one device; if the ``LightningModule`` has ``flops_per_batch``.
    - ``<stage>/device/mfu``: these FLOP/s divided by the peak, 0 to 1, no unit; if the peak is known as well.
    - ``<stage>/batches_per_sec``, ``<stage>/samples_per_sec``, ``<stage>/items_per_sec``,
      ``<stage>/flops_per_sec``: the same over all devices; with more than one.

    In FP8, MFU is the model's FLOPs over the FP8 peak. Only the matrix products of converted layers can run at that
    peak: attention itself and layers that are not converted compute in bf16, at half of it or less. So MFU is a lower
    bound on how well the device is used, and cannot reach 1.

    ``flops_per_batch`` are the FLOPs of one batch on one device, as counted by Lightning's ``measure_flops``. Converted
    models have as many as in bf16. Count them on a second model on the meta device, or on this model in
    ``eval()``: in training mode a forward records amaxes, which change the scales.

    Args:
        batch_size_fn: batch -> its number of samples. In YAML a dotted path, such as ``builtins.len``.
        length_fn: batch -> its number of items, such as tokens.
        window_size: number of batches to average over.
        separator: between the parts of a key.
        peak_flops: FLOP/s of one device, in place of any table and under any precision; for a slice of a GPU (MIG), a
            lower power limit, or a chip for which a table is wrong.

    Raises:
        ValueError: if ``peak_flops`` is not a positive finite number, or ``window_size`` is below 2.
        TypeError: at set-up, under a precision of ``pytorch_lightning`` that is not this package's.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int],
        length_fn: Callable[[Any], int] | None = None,
        window_size: int = 100,
        separator: str = "/",
        peak_flops: float | None = None,
    ) -> None:
        if peak_flops is not None and not 0 < peak_flops < math.inf:
            raise ValueError(
                f"Fp8ThroughputMonitor: `peak_flops` must be a positive number of FLOP/s, got {peak_flops!r}."
            )
        if window_size < 2:
            raise ValueError(f"Fp8ThroughputMonitor: `window_size` must be at least 2, got {window_size}.")
        super().__init__(batch_size_fn, length_fn, window_size=window_size, separator=separator)
        self.peak_flops = peak_flops
        self._estimate_is_known = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        plugin = trainer.precision_plugin
        if not isinstance(plugin, Precision):
            raise TypeError(
                f"Fp8ThroughputMonitor: {type(plugin).__name__} is a precision of `pytorch_lightning`, which this"
                " callback does not support. Import `lightning.pytorch` in place of `pytorch_lightning`, or use a"
                " precision of lightning_fp8."
            )
        if self.peak_flops is None and not isinstance(plugin, PrecisionCore):
            super().setup(trainer, pl_module, stage)
            return
        with warnings.catch_warnings():
            # a warning about a peak that is replaced below
            warnings.simplefilter("ignore")
            super().setup(trainer, pl_module, stage)
        peak = self.peak_flops if self.peak_flops is not None else self._peak(trainer.strategy.root_device, plugin)
        self.available_flops = peak  # type: ignore[assignment]
        for throughput in self._throughputs.values():
            throughput.available_flops = peak

    def _peak(self, device: torch.device, plugin: Any) -> float | None:
        if plugin.precision not in RECIPES:
            return get_available_flops(device, plugin.compute_dtype)
        if device.type != "cuda":
            # the CPU runs the reference implementation, which has no meaningful peak
            return None
        name = torch.cuda.get_device_name(device)
        return dense_fp8_flops(name) or self._estimate(device, name)

    def _estimate(self, device: torch.device, name: str) -> float | None:
        bf16 = get_available_flops(device, torch.bfloat16)
        if bf16 is None:
            return None
        if not self._estimate_is_known:
            self._estimate_is_known = True
            rank_zero_warn(
                f"Fp8ThroughputMonitor: the FP8 peak of {name!r} is not known. MFU is relative to twice Lightning's"
                f" bf16 peak, {2 * bf16 / 1e12:g} TFLOP/s; pass `peak_flops` to set the right one."
            )
        return 2.0 * bf16
