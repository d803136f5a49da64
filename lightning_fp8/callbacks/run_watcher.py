"""Shared by the callbacks that watch a run: logging to all loggers, and clean-up when the run ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class RunWatcher(Callback):
    """A callback that holds resources during a fit: :meth:`_stop` releases them, however the fit ends."""

    def _stop(self) -> None:
        raise NotImplementedError

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()


def log_to_all(trainer: Trainer, metrics: Mapping[str, float]) -> int:
    """Log to every logger, on rank 0; returns the step under which it is logged."""
    # the step axis of Lightning's own callbacks
    step = trainer.fit_loop.epoch_loop._batches_that_stepped
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(dict(metrics), step=step)
    return step


def log_folder(trainer: Trainer) -> Path | None:
    """The folder of the run's logs; None without a logger, and if the logger's folder is missing or remote.

    It communicates, so all processes have to call it.
    """
    # without a logger `log_dir` would be the folder that the program runs in
    if not trainer.loggers:
        return None
    folder = trainer.log_dir
    return None if folder is None or "://" in str(folder) else Path(folder)
