"""Warnings about a scaling state: each is given once, and none waits for a device."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from lightning_fp8.runtime.device import is_capturing

if TYPE_CHECKING:
    from lightning_fp8.scaling.state import ScalingState

# a warning is given after this many steps of one optimizer without an update of the scales
_STEPS_WITHOUT_UPDATE = 3


class Notices:
    """The events of one scaling state that may need a warning, and the warnings already given."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._silent = 0
        self._steps: dict[int, int] = {}
        self._nonfinite = _Nonfinite()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Suppress the warning about evaluation, where an evaluation before the first step is expected."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    def see_cast_without_scales(self, state: ScalingState) -> None:
        """An input or gradient is cast without being recorded, and there are no scales from training."""
        # without gradients it is an evaluation
        if not (self._silent or torch.is_grad_enabled() or _in_backward() or _is_recomputed()):
            self._say(
                f"A model with FP8 layers ({_some(state.module_names)}) is evaluated without scales from training: each"
                " batch is scaled by itself, so results depend on which samples are in it. `load_state_dict` brings no"
                " scales, and drops those of other weights: after it call `lightning_fp8.load_scales(model, file)` with"
                " the file of the weights, or load both by `trainer.validate(model, ckpt_path=file)`. A file with"
                ' weights alone is for `precision="bf16-mixed"`, after `lightning_fp8.unconvert(model)`. A model that'
                " has not been trained gets scales in training."
            )

    def see_export_without_scales(self, state: ScalingState) -> None:
        """``torch.export`` sees a cast, and there are no scales from training."""
        self._say(
            f"A model with FP8 layers ({_some(state.module_names)}) is exported without scales from training: the"
            " program scales each batch by itself, so results depend on which samples are in it. Train the model, or"
            " call `lightning_fp8.load_scales(model, checkpoint)`, before the export."
        )

    def see_optimizer_step(self, state: ScalingState, optimizer: int) -> None:
        """An optimizer, by its ``id``, has changed weights of the model."""
        if not state.has_recorded:
            return
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if self._steps[optimizer] >= _STEPS_WITHOUT_UPDATE:
            self._say(
                f"A model with FP8 layers ({_some(state.module_names)}) has been trained for {_STEPS_WITHOUT_UPDATE}"
                " optimizer steps, and nothing has updated its scales: they stay as they are, and larger values are"
                ' clipped. Under a Trainer or Fabric use `precision="fp8-delayed"` and step the optimizers it gives'
                " you (not those of `use_pl_optimizer=False`, none inside backward); give `transformers.Trainer` a"
                " `lightning_fp8.integrations.Fp8Callback()`; in a loop of your own call"
                " `lightning_fp8.scaling_state(model).update()` once per optimizer step, after backward."
            )

    def see_update(self, state: ScalingState) -> None:
        """The scales have been updated."""
        self._steps.clear()
        self._report_nonfinite(state)

    def see_end(self, state: ScalingState) -> None:
        """A run has ended. Waits for the device."""
        self._nonfinite.wait()
        self._report_nonfinite(state)

    def see_load(self, state: ScalingState) -> None:
        """The state has been loaded or copied: non-finite values counted before belong to another run."""
        # on a CPU, `.cpu()` would return the counters themselves, not a copy
        self._nonfinite = _Nonfinite(state.nonfinite_steps.to("cpu", copy=True))

    def _report_nonfinite(self, state: ScalingState) -> None:
        found = self._nonfinite.look(state)
        # every process sees a reduced amax, so only the first one warns
        is_mine = (
            not (state.recipe.reduce_amax and dist.is_available() and dist.is_initialized()) or not dist.get_rank()
        )
        if found and is_mine:
            rows, step = found
            self._say(
                f"inf or NaN in {_some([state.names[row] for row in rows])} at optimizer step {step} of this model. The"
                " cast to FP8 makes inf the largest number (NaN stays NaN), so the loss may stay finite, and other"
                " checks see nothing. The scales of such a step are left as they were. This warning is"
                " given once; `lightning_fp8.ScaleWatchdog` follows it up, and `nonfinite_steps` of the scaling state"
                " counts such steps."
            )

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(f"lightning_fp8: {message}", stacklevel=2)


class _Nonfinite:
    """Finds the first tensors whose ``nonfinite_steps`` increase; on a GPU, a step or two late."""

    def __init__(self, before: Tensor | None = None) -> None:
        self._before = before
        self._copy: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        # how many updates there had been at the time of the copy, and of the previous copy
        self._at = self._clean = 0
        self._found = False

    def look(self, state: ScalingState) -> tuple[list[int], str] | None:
        """The rows, and the step or range of steps where it began, as text; None if there is nothing new."""
        if self._found or is_capturing(state.amax.is_cuda):
            return None
        if state.device.type == "cpu":
            self._copy, self._at = state.nonfinite_steps, state.updates
        elif self._copied is not None and not self._copied.query():
            return None
        rows = self._news()
        step = str(self._at) if self._at - self._clean <= 1 else f"{self._clean + 1} to {self._at}"
        self._clean, self._found = self._at, bool(rows)
        if state.device.type != "cpu":
            self._fetch(state)
        return (rows, step) if rows else None

    def wait(self) -> None:
        """Wait for a copy in flight."""
        if self._copied is not None:
            self._copied.synchronize()

    def _news(self) -> list[int]:
        if self._copy is None:
            return []
        before = torch.zeros_like(self._copy) if self._before is None else self._before
        rows: list[int] = (self._copy > before).nonzero().flatten().tolist()
        return rows

    def _fetch(self, state: ScalingState) -> None:
        if self._copy is None:
            self._copy = torch.empty_like(state.nonfinite_steps, device="cpu", pin_memory=state.device.type == "cuda")
        self._copy.copy_(state.nonfinite_steps, non_blocking=True)
        self._at = state.updates
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(state.device))


def _in_backward() -> bool:
    # gradients are disabled in every backward, whether or not it belongs to training
    return torch._C._current_graph_task_id() != -1


def _is_recomputed() -> bool:
    # Reentrant checkpointing runs a training forward without gradients. Frames are searched until a warning is given.
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
    return False


def _some(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name or "(root)") for name in names[:most]) + more
