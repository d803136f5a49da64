"""Scale factors and their effect on the tensors, in all loggers of the Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_fp8.callbacks.run_watcher import RunWatcher, log_to_all
from lightning_fp8.conversion.convert import scaling_state
from lightning_fp8.modules.paths import as_patterns, matching_tensors
from lightning_fp8.scaling.state import ScalingState
from lightning_fp8.scaling.statistics import by_role, tensor_statistics


class ScaleFactorLogger(RunWatcher):
    """Logs the scales of an FP8 run, and their effect on the tensors.

    For each tensor ``<module path>.<role>`` that a pattern matches, with the roles input, weight and grad_output:

    - ``fp8/<tensor name>/scale``: multiplier before the cast in the next step; for a weight, which has no history, in
      its last cast. No unit.
    - ``fp8/<tensor name>/amax``: largest absolute value in the newest recorded step, or in a weight's last cast, in the
      unit of the tensor; 0 until there is one.
    - ``fp8/<tensor name>/amax_history_max``: largest amax in the history, in the unit of the tensor; not for weights.
    - ``fp8/<tensor name>/headroom_bits``: ``log2(FP8_MAX / (amax * scale))``, powers of two by which that amax may grow
      before the next cast clips it, in bits. Not logged until there is an amax, nor for weights, which are never
      clipped.
    - ``fp8/<tensor name>/saturated_fraction``: share of the numbers that this step's casts clipped, 0 to 1.
    - ``fp8/<tensor name>/underflowed_fraction``: share of the nonzero numbers that this step's casts turned into zero,
      0 to 1. Neither fraction is logged for a tensor that was not cast.
    - ``fp8/<tensor name>/smallest_exponent`` and ``largest_exponent``, under recipes with blocks: log2 of the smallest
      and largest ``1 / scale`` of the blocks of this step's casts, in both layouts; under ``fp8-mx`` these are the
      stored exponents, whole numbers from -126 to 127. Blocks of zeros are left out, and under ``fp8-mx`` also blocks
      with inf or NaN; under ``fp8-block`` the latter have the scale 1, so they count as 0.
    - ``fp8/<tensor name>/nonfinite_steps``: number of steps so far in which the tensor held inf or NaN, which left its
      scale and history unchanged.

    With ``summaries``, over all tensors of a role that have the quantity:

    - ``fp8/<role>/<quantity>/min``, ``median`` and ``max``, in the unit of the quantity.

    With ``histograms``, for loggers that support them (TensorBoard), over all tensors of a role that have a scale:
    ``fp8/<role>/log2_scale``, no unit.

    With ``prog_bar``, in the progress bar and ``trainer.callback_metrics``, not in loggers:

    - ``fp8/saturated_fraction`` and ``fp8/underflowed_fraction``: the largest fraction of any tensor that was cast.

    It takes one device-to-host copy per logging step; fractions are counted in logging steps only. With several
    processes, fractions and exponents are over all of them, and rank 0 logs. Under another precision it warns once and
    does nothing. After a run of fewer than ``every_n_steps`` steps, it warns that it has logged nothing.

    Args:
        every_n_steps: optimizer steps between two logging steps.
        patterns: ``fnmatch`` patterns on tensor names; a tensor is logged if any of them matches; ``()`` logs
            only the summaries.
        summaries: whether to log summaries.
        histograms: whether to log histograms.
        prog_bar: whether the progress bar shows the two worst fractions.

    Raises:
        ValueError: if ``every_n_steps`` is not an integer of at least 1, or a pattern matches no tensor of the model.
        TypeError: if ``patterns`` is a single string.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        patterns: Sequence[str] = ("*",),
        summaries: bool = True,
        histograms: bool = True,
        prog_bar: bool = False,
    ) -> None:
        super().__init__(every_n_steps)
        self.patterns = as_patterns(patterns, "patterns")
        self.summaries = summaries
        self.histograms = histograms
        self.prog_bar = prog_bar

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._starts(trainer, pl_module, "log"):
            matching_tensors(scaling_state(pl_module).names, self.patterns, "ScaleFactorLogger")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # from the first micro-batch of a step that is to be logged
        if (state := self._state) is not None and self._when.begins():
            state.cast_counts.start(self)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        state = self._state
        if state is not None and self._when.ends(trainer.global_step):
            values = tensor_statistics(state, lambda counts, op: trainer.strategy.reduce(counts, reduce_op=op))
            state.cast_counts.stop(self)
            if self.prog_bar:
                for quantity in ("saturated_fraction", "underflowed_fraction"):
                    largest = values[quantity].nan_to_num(0.0).max()
                    pl_module.log(f"fp8/{quantity}", largest, prog_bar=True, logger=False)
            if trainer.is_global_zero:
                self._log(trainer, state, values)

    @override
    def _stop(self) -> None:
        if (state := self._state) is not None:
            state.cast_counts.stop(self)
        self._model = None

    def _log(self, trainer: Trainer, state: ScalingState, values: dict[str, Tensor]) -> None:
        metrics: dict[str, float] = {}
        rows = matching_tensors(state.names, self.patterns, "ScaleFactorLogger")
        for quantity, tensor in values.items():
            numbers = tensor.tolist()
            for row in rows:
                if numbers[row] == numbers[row]:
                    metrics[f"fp8/{state.names[row]}/{quantity}"] = numbers[row]
            if self.summaries:
                metrics |= _summaries(quantity, tensor)
        step = log_to_all(trainer, metrics)
        for logger in trainer.loggers:
            draw = getattr(getattr(logger, "experiment", None), "add_histogram", None) if self.histograms else None
            if draw is not None:
                for role, scales in by_role(values["scale"]).items():
                    draw(f"fp8/{role}/log2_scale", scales.log2(), global_step=step)


def _summaries(quantity: str, values: Tensor) -> dict[str, float]:
    summaries: dict[str, float] = {}
    for role, some in by_role(values).items():
        numbers = {"min": some.min(), "median": some.quantile(0.5), "max": some.max()}
        summaries |= {f"fp8/{role}/{quantity}/{name}": number.item() for name, number in numbers.items()}
    return summaries
