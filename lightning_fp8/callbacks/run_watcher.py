"""What the callbacks that watch a run have in common: they log to all loggers, and let go when the run ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class RunWatcher(Callback):
    """A callback that holds on to something during a fit: :meth:`_stop` lets go of it, however the fit ends."""

    def _stop(self) -> None:
        raise NotImplementedError

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()


def log_to_all(trainer: Trainer, metrics: Mapping[str, float]) -> int:
    """Log on rank 0 to every logger; gives the step it was logged at."""
    # the axis of everything else that Lightning logs, as its own callbacks have it
    step = trainer.fit_loop.epoch_loop._batches_that_stepped
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(dict(metrics), step=step)
    return step


def log_folder(trainer: Trainer) -> Path | None:
    """The folder of the run's logs; None without a logger, with one that has no folder, and for a remote one.

    It asks the other processes, so all of them have to call it.
    """
    # without a logger `log_dir` would be the folder that the program runs in
    if not trainer.loggers:
        return None
    folder = trainer.log_dir
    return None if folder is None or "://" in str(folder) else Path(folder)
