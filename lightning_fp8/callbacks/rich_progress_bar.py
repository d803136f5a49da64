"""Lightning's rich progress bar, with the headroom that is left in the FP8 formats."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from torch import Tensor
from typing_extensions import override

from lightning_fp8.conversion.convert import is_converted, scaling_state
from lightning_fp8.runtime.every_n_steps import check_count
from lightning_fp8.scaling.state import ScalingState
from lightning_fp8.scaling.statistics import headroom_bits

_THEME = RichProgressBarTheme()


class Fp8RichProgressBar(RichProgressBar):
    """Lightning's ``RichProgressBar`` with one more column after the training bar, such as ``headroom 0.31 bits``.

    The headroom is the smallest ``log2(FP8_MAX / (amax * scale))`` over all tensors, in bits, with the amax of the step
    and the scale of its cast: how many powers of two the step stayed below the largest value of the format. A negative
    headroom means that something was clipped. (:class:`ScaleFactorLogger` combines the same amax with the scale of the
    next step.) A tensor's first step, which is cast with its own amax, is left out.

    It is read at most every ``every_n_steps`` optimizer steps, by copying one scalar to the host. The column is empty
    until the second step, under another precision, and in the bars of validation, test and prediction. Logs nothing to
    loggers. Needs ``rich``: ``pip install rich``.

    Args:
        every_n_steps: optimizer steps between two readings.
        refresh_rate: as in Lightning: redraws of the bars per second; 0 shows none.
        leave: as in Lightning: whether each epoch's finished bar stays in the terminal.
        theme: as in Lightning: styles of the parts; the column has the style of ``metrics``.
        console_kwargs: as in Lightning: arguments for the ``rich.console.Console``.

    Attributes:
        headroom_bits: of the newest reading; None where there is none.

    Raises:
        ValueError: unless ``every_n_steps`` is an integer of at least 1.
        ModuleNotFoundError: if ``rich`` is not installed.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        refresh_rate: int = 100,
        leave: bool = False,
        theme: RichProgressBarTheme = _THEME,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_count("Fp8RichProgressBar: `every_n_steps`", every_n_steps)
        try:
            super().__init__(refresh_rate, leave, theme, console_kwargs)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "Fp8RichProgressBar: needs `rich`, which is not installed. Run `pip install rich`."
            ) from error
        self.every_n_steps = every_n_steps
        self.headroom_bits: float | None = None
        self._state: ScalingState | None = None
        # on the device, until the batch is over
        self._reading: Tensor | None = None
        self._steps_to_go = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._let_go()
        self.headroom_bits, self._steps_to_go = None, 1
        if self.is_enabled and is_converted(pl_module):
            self._state = scaling_state(pl_module)
            self._state.before_update.append(self._see_update)
        super().on_train_start(trainer, pl_module)

    def _see_update(self, amax: Tensor) -> None:
        if self._state is None:
            return
        self._steps_to_go -= 1
        if self._steps_to_go <= 0:
            self._reading = _smallest_headroom(self._state, amax)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._reading is not None:
            smallest, self._reading = self._reading.item(), None
            # until there is a number, look at every step
            if smallest < float("inf"):
                self.headroom_bits, self._steps_to_go = smallest, self.every_n_steps
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._let_go()
        super().teardown(trainer, pl_module, stage)

    def _let_go(self) -> None:
        if self._state is not None and self._see_update in self._state.before_update:
            self._state.before_update.remove(self._see_update)
        self._state = self._reading = None

    @override
    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Lightning's columns, and the headroom."""
        return [*super().configure_columns(trainer), _headroom_column(self)]


def _smallest_headroom(state: ScalingState, amax: Tensor) -> Tensor:
    """``[] float32``, over the tensors that were cast with a scale from their history; inf if there is none."""
    # a weight has no history, and its scale leaves no headroom
    amax, scale, fp8_max = (tensor[: state.delayed] for tensor in (amax, state.scale, state.fp8_max))
    bits = headroom_bits(fp8_max, amax, scale)
    counts = amax.isfinite() & (amax > 0) & (state.amax_history[0] > 0)
    return torch.where(counts, bits, float("inf")).min()


def _headroom_column(bar: Fp8RichProgressBar) -> Any:
    """A column that draws what ``bar`` has read. Another thread draws it, so it reads nothing from the device."""
    # imported here, because the package also works without rich
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class HeadroomColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            if bar.headroom_bits is None or task.id != bar.train_progress_bar_id:
                return Text()
            # adding 0.0 turns -0.0, which would be shown as "-0.00", into 0.0
            return Text(f"headroom {round(bar.headroom_bits, 2) + 0.0:.2f} bits", style=bar.theme.metrics)

    return HeadroomColumn()
