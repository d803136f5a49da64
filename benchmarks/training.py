"""Training steps of a model as variants to time, each checked against the first steps in ``bf16-mixed``."""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.memory import saved_bytes
from benchmarks.trainer_precisions import REFERENCE, Setting, settings
from lightning_fp8.conversion.convert import is_converted, scaling_state
from lightning_fp8.tools import timing
from lightning_fp8.tools.timing import Variant

# relative error of the losses of the first steps, and cosine of all gradients of the first step as a single vector
LOSS_LIMIT, COSINE_LIMIT = 0.02, 0.98
WARM_UP = 3
_STEPS_CHECKED = 3


class Training(ABC):
    """A model in one precision, and its steps.

    Args:
        model: in fp32, on the device; changed in place.
        setting: the precision.

    Attributes:
        model: in the precision.
        plugin: of the precision.
        scaling: the scaling state, if any.
        leaves: tensors whose gradients a step computes, by name: the parameters, and inputs that subclasses add.
    """

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.plugin = setting.plugin()
        with _without_notes():
            self.model = self.plugin.convert_module(setting.prepare(model))
        self.scaling = scaling_state(self.model) if is_converted(self.model) else None
        self.leaves: dict[str, Tensor] = dict(self.model.named_parameters())

    @abstractmethod
    def forward(self) -> Tensor:
        """Forward of one micro-batch, in the precision."""

    @abstractmethod
    def backward(self) -> Tensor:
        """Compute the gradients of a step; gives an output for :meth:`loss`."""

    @abstractmethod
    def update(self) -> None:
        """The rest of the step, after :meth:`backward`."""

    @abstractmethod
    def loss(self, output: Tensor) -> float:
        """A number that must be about the same in all precisions."""

    def step(self) -> Tensor:
        """A whole step."""
        output = self.backward()
        self.update()
        return output


class Start(NamedTuple):
    """The first steps of a training.

    Attributes:
        losses: of each of them.
        gradients: of the first, by name, on the CPU.
    """

    losses: list[float]
    gradients: dict[str, Tensor]


def start_of(training: Training) -> Start:
    """Take the first steps."""
    losses = [training.loss(training.backward())]
    leaves = training.leaves.items()
    gradients = {name: leaf.grad.to("cpu", copy=True) for name, leaf in leaves if leaf.grad is not None}
    training.update()
    losses += [training.loss(training.step()) for _ in range(1, _STEPS_CHECKED)]
    return Start(losses, gradients)


def difference(start: Start, reference: Start) -> str | None:
    """None if losses and gradients are close enough, else what is not."""
    for number, (loss, expected) in enumerate(zip(start.losses, reference.losses, strict=True)):
        error = abs(loss - expected) / abs(expected)
        # NaN is not close either
        if not error <= LOSS_LIMIT:
            where = f"where {REFERENCE} has {expected:.4f} and {LOSS_LIMIT:.0%} is the limit"
            return f"a loss of {loss:.4f} in step {number + 1}, {where}"
    for name, gradient in reference.gradients.items():
        if name not in start.gradients or start.gradients[name].shape != gradient.shape:
            return f"no gradient of {name} of shape {tuple(gradient.shape)}"
    cosine = _cosine(start.gradients, reference.gradients)
    if not cosine >= COSINE_LIMIT:
        return f"gradients at a cosine of {cosine:.4f} to those of {REFERENCE}, where {COSINE_LIMIT} is the least"
    return None


def _cosine(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    product, square, reference_square = 0.0, 0.0, 0.0
    for name, expected in reference.items():
        got, target = gradients[name].double(), expected.double()
        product += float((got * target).sum())
        square += float(got.square().sum())
        reference_square += float(target.square().sum())
    both = (square * reference_square) ** 0.5
    return product / both if both else float("nan")


def variants(
    make: Callable[[Setting, bool], Training], compiled: bool, tokens: int, device: torch.device
) -> list[Variant]:
    """Each precision, checked against eager ``bf16-mixed``.

    Args:
        make: creates a training in a precision, compiled or not; the same weights and data at each call.
        compiled: whether the timed variants are compiled.
        tokens: per step.
        device: where they train.
    """
    every = settings(device)

    @functools.cache
    def reference() -> Start:
        return _freed(lambda: start_of(make(every[REFERENCE], False)))

    def variant(name: str, setting: Setting) -> Variant:
        work = Work(functools.partial(make, setting, compiled), reference)
        return Variant(name, work.step, work.check, around=work.around, tokens=tokens, saved_bytes=work.saved_bytes)

    return [variant(name, setting) for name, setting in every.items()]


class Work:
    """A training that is created when it is needed and released afterwards.

    Args:
        make: creates one.
        reference: gives the first steps to compare with.
    """

    def __init__(self, make: Callable[[], Training], reference: Callable[[], Start]) -> None:
        self.make, self.reference = make, reference
        self.training: Training | None = None

    def check(self) -> str | None:
        """Compare the first steps of a new training with the reference."""
        expected = self.reference()
        with _compiling():
            return difference(_freed(lambda: start_of(self.make())), expected)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Create a training in the steady state, for use inside.

        Raises:
            RuntimeError: if an FP8 state does not know its histories after the warm-up.
        """
        with _compiling():
            self.training = self.make()
            try:
                for _ in range(WARM_UP):
                    self.training.step()
                timing.synchronize()
                state = self.training.scaling
                if state is not None and not state.every_tensor_has_history:
                    raise RuntimeError("The scaling state has not seen its own histories: this would time first steps.")
                yield
            finally:
                self.training = None

    def step(self, at: int) -> None:
        """One step of the current training."""
        self._there.step()

    def saved_bytes(self) -> int:
        """Bytes that one forward of the current training saves for backward."""
        return saved_bytes(self._there.model, self._there.forward)

    @property
    def _there(self) -> Training:
        if self.training is None:
            raise RuntimeError("There is a training only in `around`.")
        return self.training


def _freed(start: Callable[[], Start]) -> Start:
    made = start()
    timing.release()
    return made


@contextmanager
def created_on(device: torch.device, seed: int) -> Iterator[None]:
    """Create modules on the device from a seed, leaving the generators outside unchanged."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        yield


@contextmanager
def _without_notes() -> Iterator[None]:
    # silences the note on how many layers were converted, which each model repeats
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _compiling() -> Iterator[None]:
    # each precision recompiles the same code; past the limit it fails, rather than running eagerly unnoticed
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        yield
