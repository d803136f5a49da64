"""Progress as lines of text, where a progress bar has no terminal to draw on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_fp8.callbacks.every_n_steps import EveryNSteps


class ProgressLines(Callback):
    """A line every few optimizer steps with the loss and the speed, and one after each validation.

    Args:
        every_n_steps: optimizer steps between two lines.
        write: takes each line, in the first process.

    Raises:
        ValueError: if ``every_n_steps`` is below 1.
    """

    def __init__(self, every_n_steps: int = 10, write: Callable[[str], None] = print) -> None:
        self._due = EveryNSteps("ProgressLines", every_n_steps)
        self._write = write
        self._last_line = (0, 0.0)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._due.start(trainer.global_step)
        self._last_line = (trainer.global_step, time.monotonic())

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._due.ends(trainer.global_step) and trainer.is_global_zero:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            steps, began = self._last_line
            self._last_line = (trainer.global_step, time.monotonic())
            speed = (self._last_line[0] - steps) / max(self._last_line[1] - began, 1e-9)
            of_all = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
            # Lightning divides the loss of a micro-batch by their number
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            said = "" if loss is None else f" loss {float(loss) * parts:.4f},"
            self._write(f"step {trainer.global_step}{of_all}:{said} {speed:.2g} steps/s")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            metrics = [f"{name} {float(value):.4f}" for name, value in sorted(trainer.callback_metrics.items())]
            self._write(f"validation after step {trainer.global_step}: {', '.join(metrics)}")
        # its time is not that of steps
        self._last_line = (trainer.global_step, time.monotonic())
