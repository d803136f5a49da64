"""Precision over time: what the layers of a run compute in, by optimizer step."""

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
    """Changes what the layers of an FP8 run compute in: ``PrecisionSchedule({0.9: "bf16"})`` ends a run in bf16.

    A key is the number of optimizer steps made before, as ``trainer.global_step`` counts them, or a share of the steps
    that the run plans, rounded down to a step. From there on the value holds, up to the next key:

    - ``"bf16"``: all products are in bf16, as after :func:`lightning_fp8.conversion.fall_back`.
    - ``"fp8"``, or the string of the run's recipe: as converted. Products that the recipe or
      ``overrides`` have in bf16 are in bf16 under every value.
    - ``{"fprop": "bf16"}``: these products are in bf16, the others as converted.
    - ``"fp8-current"``, in a run with histories: inputs and gradients are scaled by their own values, together with
      those of layers that take the same input.
    - ``{"blocks.0": "bf16", "*.down": {"wgrad": "bf16"}}``: any of these by ``fnmatch`` pattern on module paths, for
      what it matches and everything inside; later patterns win, product by product. Other layers are as converted.

    So ``{0: "bf16", 500: "fp8"}`` is a warm-up in bf16. The precision follows from the step alone: checkpoints do not
    hold it, and a run that is resumed with the same schedule goes on bit for bit. A layer that ``Fp8Monitor`` or
    ``fall_back`` has moved stays where it is under every value. After a switch the run is, bit for bit, one that is
    resumed from the checkpoint of that step with the new precision.

    Switches are made before the first batch of an optimizer step, on all processes at the same one. A layer keeps no
    history while none of its products takes the tensor in FP8: back in FP8 it begins as at its first use. When the run
    ends, the model stays as it is; the next fit begins as converted. Compiled code is compiled again at its first use
    after a switch. Rank 0 says once what each switch did, and logs to all loggers, at the steps around a switch and at
    both ends:

    - ``fp8/schedule``: the entry in force, counted from 1; 0 before the first.

    In a loop of your own, call :meth:`before_step`; with Fabric's callbacks,
    ``fabric.call("before_step", model, step, steps)``. ``transformers.Trainer`` takes
    ``Fp8Callback(schedule={0.9: "bf16"})``. Under another precision it warns once and does nothing.

    Args:
        schedule: the values by step or share, in increasing order.

    Raises:
        TypeError: if ``schedule`` is no mapping.
        ValueError: for keys that are none or in another order, and unknown values; when the run starts, for a share of
            a run without a planned number of steps, a pattern that matches no FP8 layer, a recipe that the run cannot
            change to, and bf16 for a weight that exists in FP8 only or is gathered in FP8.

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
        """For a loop of your own: let the model run as the schedule says, before the forwards of each optimizer step.

        Args:
            model: the converted model, wrapped or not.
            step: how many optimizer steps have been made before, those before a resumption included.
            planned_steps: how many the whole run makes; needed for shares.

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
        # all processes switch at the same step, whatever each of them knows about its data
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
    """How many optimizer steps a run plans to make, if anything says it."""
    if not model.automatic_optimization:
        # a batch makes as many as the model likes
        return trainer.max_steps if trainer.max_steps >= 0 else None
    steps = trainer.estimated_stepping_batches
    return None if math.isinf(steps) else int(steps)
