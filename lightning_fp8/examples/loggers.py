"""A logger for configurations that must run with and without TensorBoard."""

from __future__ import annotations

from importlib.util import find_spec

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger


def tensorboard_if_present(save_dir: str, name: str = "") -> Logger:
    """A ``TensorBoardLogger`` where TensorBoard is installed, else a logger that does nothing.

    Args:
        save_dir: folder of all runs.
        name: folder of this experiment in it.
    """
    if find_spec("tensorboard") or find_spec("tensorboardX"):
        return TensorBoardLogger(save_dir, name)
    return DummyLogger()
