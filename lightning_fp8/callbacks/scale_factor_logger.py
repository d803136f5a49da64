"""Scale factors and amaxes in whatever loggers the Trainer has."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_fp8.convert import is_converted, scaling_state


class ScaleFactorLogger(Callback):
    """Logs the scales of an ``fp8-delayed`` run.

    For each tensor ``<module path>.<role>``, with the roles input, weight and grad_output:

    - ``fp8/<tensor name>/scale``: multiplier before the cast, as the next step will use it; no unit.
    - ``fp8/<tensor name>/amax``: largest absolute value in the newest step that counted, in the unit of the tensor; 0
      until there is one.

    One device-to-host copy per logging step, none between. In another precision it warns once and does nothing.

    Args:
        every_n_steps: optimizer steps between two loggings.
        patterns: ``fnmatch`` patterns on tensor names; a tensor is logged if any of them matches.

    Raises:
        ValueError: if ``every_n_steps`` is below 1, or a pattern matches no tensor of the model.
    """

    def __init__(self, every_n_steps: int = 50, patterns: Sequence[str] = ("*",)) -> None:
        if every_n_steps < 1:
            raise ValueError(f"ScaleFactorLogger: `every_n_steps` must be at least 1, got {every_n_steps}.")
        if isinstance(patterns, str):
            raise TypeError(
                f"ScaleFactorLogger: `patterns` must be a sequence of patterns, got the string {patterns!r}."
            )
        self.every_n_steps = every_n_steps
        self.patterns = tuple(patterns)
        self._rows: list[int] = []
        self._last_step = 0

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rows, self._last_step = [], trainer.global_step
        if not is_converted(pl_module):
            rank_zero_warn(
                f"ScaleFactorLogger: no layer runs in FP8 under precision={trainer.precision!r}; nothing to log."
            )
            return
        names = scaling_state(pl_module).names
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"ScaleFactorLogger: the pattern {pattern!r} matches none of the {len(names)} tensors of the model."
                    f" The first ones are: {', '.join(names[:6])}."
                )
        self._rows = [
            row for row, name in enumerate(names) if any(fnmatchcase(name, pattern) for pattern in self.patterns)
        ]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # while gradients are accumulated the step stands still
        if not self._rows or step == self._last_step or step % self.every_n_steps:
            return
        self._last_step = step
        state = scaling_state(pl_module)
        scale, amax = torch.stack([state.scale, state.amax_history[0]])[:, self._rows].tolist()
        metrics = {}
        for position, row in enumerate(self._rows):
            metrics[f"fp8/{state.names[row]}/scale"] = scale[position]
            metrics[f"fp8/{state.names[row]}/amax"] = amax[position]
        for logger in trainer.loggers:
            # the axis of everything else that Lightning logs, as its own callbacks have it
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
