"""Warnings about a scaling state: each is given once, and none waits for a device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fp8.runtime.device import is_capturing

if TYPE_CHECKING:
    from lightning_fp8.scaling.state import ScalingState

# a warning is given after this many steps of one optimizer without an update of the scales
_STEPS_WITHOUT_UPDATE = 3


class Notices:
    """The events of one scaling state that may need a warning, and the warnings already given."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._steps: dict[int, int] = {}
        self._nonfinite = _Nonfinite()

    def on_step_without_update(self, state: ScalingState, optimizer: int) -> None:
        """An optimizer, by its ``id``, has changed weights, and amaxes have been recorded since the last update."""
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

    def on_late_layers(self, names: Sequence[str]) -> None:
        """Layers that could run in FP8 have been added to the model since its conversion."""
        if names:
            self._say(
                f"Layers that were added after the conversion run without FP8: {_some(names)}. Call"
                " `lightning_fp8.convert(model)` after adding them: it converts them too, and the others keep their"
                " histories."
            )

    def on_update(self, state: ScalingState) -> None:
        """The scales have been updated."""
        self._steps.clear()
        self._report_nonfinite(state)

    def on_end(self, state: ScalingState) -> None:
        """A run has ended. Waits for the device."""
        self._nonfinite.wait()
        self._report_nonfinite(state)

    def on_load(self, state: ScalingState) -> None:
        """The state has been loaded or copied: non-finite values counted before belong to another run."""
        # on a CPU, `.cpu()` would return the counters themselves, not a copy
        self._nonfinite = _Nonfinite(state.nonfinite_steps.to("cpu", copy=True))

    def _report_nonfinite(self, state: ScalingState) -> None:
        event = self._nonfinite.look(state)
        if event is None:
            return
        rows, step = event
        # every process sees a reduced amax, so only the first one warns
        rank, _ = state.recipe.processes()
        if not rank:
            self._say(
                f"inf or NaN in {_some([state.names[row] for row in rows])} at optimizer step {step} of this model. The"
                " cast to FP8 makes inf the largest number (NaN stays NaN), so the loss may stay finite, and other"
                " checks see nothing. The scales of such a step are left as they were. This warning is"
                " given once; `lightning_fp8.Fp8Monitor` follows it up, and `nonfinite_steps` of the scaling state"
                " counts such steps."
            )

    def is_first(self, what: str) -> bool:
        """Whether this warning, known by its text or by a name, has not been given for the model before."""
        is_first = what not in self._said
        self._said.add(what)
        return is_first

    def _say(self, message: str) -> None:
        if self.is_first(message):
            warnings.warn(f"lightning_fp8: {message}", stacklevel=2)


class _Nonfinite:
    """Finds the first tensors whose ``nonfinite_steps`` increase; on a GPU, a step or two late."""

    def __init__(self, before: Tensor | None = None) -> None:
        self._before = before
        self._copy: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        # the number of updates at the time of the copy, and at the time of the previous copy
        self._at = self._clean = 0
        self._found = False

    def look(self, state: ScalingState) -> tuple[list[int], str] | None:
        """The rows with new non-finite values, and the step or steps at which these began, as text; None if none."""
        is_on_cpu = state.device.type == "cpu"
        if self._found or (not is_on_cpu and is_capturing(state.amax.is_cuda)):
            return None
        if is_on_cpu:
            self._copy, self._at = state.nonfinite_steps, state.updates
        elif self._copied is not None and not self._copied.query():
            return None
        rows = self._news()
        step = str(self._at) if self._at - self._clean <= 1 else f"{self._clean + 1} to {self._at}"
        self._clean, self._found = self._at, bool(rows)
        if not is_on_cpu:
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


def _some(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name or "(root)") for name in names[:most]) + more
