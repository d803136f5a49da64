"""Shared by the callbacks that watch a run: logging to all loggers, and what to do when the run ends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_fp8.conversion.convert import is_converted
from lightning_fp8.conversion.one_state import state_now
from lightning_fp8.runtime.every_n_steps import EveryNSteps
from lightning_fp8.scaling.state import ScalingState


class RunWatcher(Callback):
    """A callback that acts every N steps of an FP8 run. It warns if a run has no FP8, or fewer than N steps.

    Attributes:
        every_n_steps: the argument.
    """

    def __init__(self, every_n_steps: int) -> None:
        self.every_n_steps = every_n_steps
        self._model: LightningModule | None = None
        self._when = EveryNSteps(type(self).__name__, every_n_steps)

    def _starts(self, trainer: Trainer, model: LightningModule, what_for: str) -> bool:
        """Begin a fit; returns whether any layer runs in FP8, and warns that there is nothing to do if none does."""
        self._stop()
        self._when.start(trainer.global_step)
        if is_converted(model):
            self._model = model
            return True
        rank_zero_warn(
            f"{type(self).__name__}: no layer runs in FP8 under precision={trainer.precision!r}; nothing to {what_for}."
        )
        return False

    @property
    def _state(self) -> ScalingState | None:
        """The current scaling state of the model that is watched; None between fits."""
        return None if self._model is None else state_now(self._model)

    def _stop(self) -> None:
        """Release what the callback holds during a fit, however the fit ends."""
        raise NotImplementedError

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        said = self._when.in_vain()
        if said and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(said)
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()


def refuse_gather(trainer: Trainer, setup: str, instead: str) -> None:
    """Raise a ValueError if the run gathers weights in FP8, so that they cannot be multiplied in bf16."""
    if getattr(trainer.precision_plugin, "fp8_all_gather", False):
        raise ValueError(
            f"{setup} and `fp8_all_gather=True` cannot be combined: a layer whose weight is gathered in FP8 cannot fall"
            f" back. {instead}"
        )


def log_to_all(trainer: Trainer, metrics: Mapping[str, float]) -> int:
    """Log to every logger, on rank 0; returns the step under which it is logged."""
    step = step_of_logs(trainer)
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(dict(metrics), step=step)
    return step


def step_of_logs(trainer: Trainer) -> int:
    """The step axis of Lightning's own callbacks, which a resumed run continues: ``global_step``, except that a batch
    with steps of several optimizers counts once."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def run_folder(trainer: Trainer) -> Path | None:
    """The folder of this run's logs, which no other run writes to.

    It is the ``log_dir`` of the first logger that has one; else ``<save_dir>/<name>/<version>``, where Lightning keeps
    the run's checkpoints. None if there is no local one, and on all ranks but 0.
    """
    if not trainer.is_global_zero:
        return None
    folders = [getattr(logger, "log_dir", None) for logger in trainer.loggers]
    for logger in trainer.loggers:
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        folders.append(None if logger.save_dir is None else os.path.join(logger.save_dir, str(logger.name), version))
    return next((Path(folder) for folder in folders if folder is not None and "://" not in str(folder)), None)
