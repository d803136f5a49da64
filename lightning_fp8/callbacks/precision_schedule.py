"""Precision over time: the precision of a run's layers, by optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_fp8.callbacks.run_watcher import log_to_all, refuse_gather
from lightning_fp8.conversion.convert import is_converted
from lightning_fp8.conversion.schedule import Schedule


class PrecisionSchedule(Callback):
    """Changes the precision of an FP8 run's layers during the run: ``PrecisionSchedule({0.9: "bf16"})`` ends in bf16.

    A key is the number of optimizer steps made before the switch, as ``trainer.global_step`` counts them, or a share of
    the planned steps, rounded down to a step. Each value applies from its key up to the next one:

    - ``"bf16"``: all products are in bf16, as after :func:`lightning_fp8.conversion.fall_back`.
    - ``"fp8"``, or the string of the run's recipe: as converted. Products that the recipe or
      ``overrides`` have in bf16 are in bf16 under every value.
    - ``{"fprop": "bf16"}``: these products are in bf16, the others as converted.
    - ``"fp8-current"``, in a run with histories: inputs and gradients are scaled by their own values, also in layers
      with the same input.
    - ``{"blocks.0": "bf16", "*.down": {"wgrad": "bf16"}}``: any of these values by ``fnmatch`` pattern on module paths.
      A pattern applies to the modules it matches and everything inside; later patterns win, product by product. Other
      layers are as converted.

    So ``{0: "bf16", 500: "fp8"}`` is a warm-up in bf16. The precision depends only on the step: checkpoints do not hold
    it, and a run that is resumed with the same schedule continues bit for bit. A layer that ``Fp8Monitor`` or
    ``fall_back`` has moved stays where it is under every value. After a switch, the run is bit-identical to a run that
    is resumed from the checkpoint of that step with the new precision.

    Switches happen before the first batch of an optimizer step, at the same step on all processes. A tensor loses its
    history while no product takes it in FP8; back in FP8, it starts as at its first use. When the run ends, the model
    stays as it is; the next fit starts as converted. Compiled code is compiled again at its first use after a switch.
    Rank 0 says once what each switch did, and logs to all loggers, at the steps around a switch and at both ends:

    - ``fp8/schedule``: the entry in force, counted from 1; 0 before the first.

    In a loop of your own, call :meth:`before_step`; with Fabric's callbacks,
    ``fabric.call("before_step", model, step, steps)``. ``transformers.Trainer`` takes
    ``Fp8Callback(schedule={0.9: "bf16"})``. Under another precision it warns once and does nothing.

    Args:
        schedule: the values by step or share, in increasing order.

    Raises:
        TypeError: if ``schedule`` is not a mapping.
        ValueError: for invalid or unordered keys, and unknown values; when the run starts, for a share of a run without
            a planned number of steps, a pattern that matches no FP8 layer, a recipe that the run cannot change to, and
            bf16 for a weight that exists in FP8 only or is gathered in FP8.

    Sources: bf16 for the last part of a run: MLPerf's FP8 recipes; in forward alone: arXiv 2509.25149, appendix D.
    """

    def __init__(self, schedule: Mapping[Any, Any]) -> None:
        self._schedule = Schedule(schedule)
        self._is_running = False
        self._logged: int | None = None

    @property
    def schedule(self) -> dict[int | float, Any]:
        """The values by step or share."""
        return self._schedule.entries

    def before_step(self, model: nn.Module, step: int, planned_steps: int | None = None) -> None:
        """Apply the schedule in your own loop: call this before the forwards of each optimizer step.

        Args:
            model: the converted model, wrapped or not.
            step: how many optimizer steps have been made, including those before a resumption.
            planned_steps: how many steps the whole run makes; needed for shares.

        Raises:
            ValueError: at the first call for a model, as the class says.
        """
        if not self._schedule.is_for(model, planned_steps):
            self._schedule.start(model, planned_steps)
        self._apply(step)

    def _apply(self, step: int) -> None:
        said = self._schedule.apply(step)
        if said:
            rank_zero_info(said)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_running, self._logged = is_converted(pl_module), None
        if not self._is_running:
            rank_zero_warn(
                f"PrecisionSchedule: no layer runs in FP8 under precision={trainer.precision!r}; nothing to switch."
            )
            return
        # all processes must switch at the same step, even if they know different numbers of batches
        planned = trainer.strategy.broadcast(_planned_steps(trainer, pl_module))
        self._schedule.start(pl_module, planned)
        if self._schedule.needs_weights:
            refuse_gather(trainer, "a `PrecisionSchedule` with bf16", "Gather in bf16.")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # the step count is the same for all micro-batches of a step
        if self._is_running:
            self._apply(trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = self._schedule.now
        if self._is_running and (now != self._logged or now != self._schedule.entry_at(trainer.global_step)):
            self._log(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_running and self._logged is not None:
            self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        self._logged = self._schedule.now
        log_to_all(trainer, {"fp8/schedule": float(self._schedule.now or 0)})


def _planned_steps(trainer: Trainer, model: LightningModule) -> int | None:
    """How many optimizer steps a run plans to make; None if unknown."""
    if not model.automatic_optimization:
        # with manual optimization, the model decides how many steps a batch makes
        return trainer.max_steps if trainer.max_steps >= 0 else None
    steps = trainer.estimated_stepping_batches
    return None if math.isinf(steps) else int(steps)
