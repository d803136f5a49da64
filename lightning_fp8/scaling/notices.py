"""Warnings about a scaling state: each is given once, and none waits for a device."""

from __future__ import annotations

import math
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from lightning_fp8.runtime.device import is_capturing
from lightning_fp8.scaling.scales import Scales

# a warning is given after this many steps of one optimizer without an update of the scales
_STEPS_WITHOUT_UPDATE = 3

# and one if the histories have been emptied in this many steps in a row
_STEPS_THAT_EMPTY = 5

# as many batches as checks before a training have: those of Lightning's Trainer, and of many loops by hand
FORWARDS_BEFORE_TRAINING = 2


class Notices:
    """The events of one scaling state that may need a warning, and the warnings already given.

    Attributes:
        forwards_before_training: how many forwards without gradients each layer may have before they are an evaluation:
            infinitely many in ``fit`` until it validates, none in ``validate``, ``test`` and ``predict``.
    """

    def __init__(self) -> None:
        self.forwards_before_training: float = FORWARDS_BEFORE_TRAINING
        self._forwards: Counter[int | None] = Counter()
        self._said: set[str] = set()
        self._silent = 0
        self._steps: dict[int, int] = {}
        # how many steps in a row have emptied the histories, and the number of updates at the last one
        self._emptied, self._emptied_at = 0, 0
        self._nonfinite = _Nonfinite()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Suppress the warning about evaluation, in a forward that is none."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    def on_cast_without_scales(self, state: Scales, index: Tensor | None) -> None:
        """A tensor, known by its ``index``, is cast without being recorded, and there are no scales that its histories
        give: none from training, or those of other weights.

        It is an evaluation, and reported, without gradients in a Trainer's validation (but for its sanity check), test
        and prediction, and elsewhere from the third time on that a layer runs so before it is trained.
        """
        expected = self._silent or math.isinf(self.forwards_before_training)
        if expected or torch.is_grad_enabled() or _in_backward() or _is_recomputed():
            return
        layer = None if index is None else index.data_ptr()
        self._forwards[layer] += 1
        if self._forwards[layer] > self.forwards_before_training:
            with_what = (
                "with weights other than those that its scales belong to, as they were loaded or changed by something"
                " other than an optimizer"
                if state.model.has_scales
                else "without scales from training"
            )
            self._say(
                f"A model with FP8 layers ({_some(state.module_names)}) is evaluated {with_what}: each batch is scaled"
                " by itself, so results depend on which samples are in it. `load_state_dict` brings no scales: after it"
                " call `lightning_fp8.load_scales(model, file)` with the file of the weights, or load both by"
                " `trainer.validate(model, ckpt_path=file)`. A file with weights alone is for"
                ' `precision="bf16-mixed"`, after `lightning_fp8.unconvert(model)`. A model that has not been trained'
                " with these weights gets scales in training."
            )

    def on_export_without_scales(self, state: Scales) -> None:
        """``torch.export`` sees a cast, and there are no scales from training."""
        # a logger traces the model before it is trained
        if not math.isinf(self.forwards_before_training):
            self._say(
                f"A model with FP8 layers ({_some(state.module_names)}) is exported without scales from training: the"
                " program scales each batch by itself, so results depend on which samples are in it. Train the model,"
                " or call `lightning_fp8.load_scales(model, checkpoint)`, before the export."
            )

    def on_step_without_update(self, state: Scales, optimizer: int) -> None:
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

    def on_emptied(self, state: Scales) -> None:
        """The histories have been emptied, as weights have been changed by something other than an optimizer."""
        self._emptied = self._emptied + 1 if self._emptied_at in (state.updates - 1, state.updates) else 1
        self._emptied_at = state.updates
        if self._emptied >= _STEPS_THAT_EMPTY:
            self._say(
                f"Something other than an optimizer changes weights of a model with FP8 layers"
                f" ({_some(state.module_names)}) at each step, as clipping and projections do. So its histories begin"
                " anew each time, and all tensors are scaled by their own values, as under `fp8-current`. Make such"
                " changes part of the step: `optimizer.register_step_post_hook(...)`."
            )

    def on_update(self, state: Scales) -> None:
        """The scales have been updated."""
        self._steps.clear()
        self._forwards.clear()
        self._report_nonfinite(state)

    def on_end(self, state: Scales) -> None:
        """A run has ended. Waits for the device."""
        self._nonfinite.wait()
        self._report_nonfinite(state)

    def on_load(self, state: Scales) -> None:
        """The state has been loaded or copied: non-finite values counted before belong to another run."""
        # on a CPU, `.cpu()` would return the counters themselves, not a copy
        self._nonfinite = _Nonfinite(state.nonfinite_steps.to("cpu", copy=True))

    def _report_nonfinite(self, state: Scales) -> None:
        event = self._nonfinite.look(state)
        if event is None:
            return
        rows, step = event
        # every process sees a reduced amax, so only the first one warns
        is_reduced = state.recipe.reduce_amax and dist.is_available() and dist.is_initialized()
        if not is_reduced or not dist.get_rank():
            self._say(
                f"inf or NaN in {_some([state.names[row] for row in rows])} at optimizer step {step} of this model. The"
                " cast to FP8 makes inf the largest number (NaN stays NaN), so the loss may stay finite, and other"
                " checks see nothing. The scales of such a step are left as they were. This warning is"
                " given once; `lightning_fp8.ScaleWatchdog` follows it up, and `nonfinite_steps` of the scaling state"
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
        # how many updates there had been at the time of the copy, and of the previous copy
        self._at = self._clean = 0
        self._found = False

    def look(self, state: Scales) -> tuple[list[int], str] | None:
        """The rows, and the step or range of steps where it began, as text; None if there is nothing new."""
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

    def _fetch(self, state: Scales) -> None:
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
