"""Training steps of a layer or a model as variants to time, each checked against the first steps in eager fp32.

A step is forward and backward of all micro-batches, then what a Trainer does: the update of the scales, clipping of the
gradients, and AdamW. Of a layer without an optimizer it has the consequences for FP8: updated scales, and changed
weights, which are therefore cast in each step.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from benchmarks import baselines
from benchmarks.memory import bytes_of, saved_bytes, weight_copies
from benchmarks.settings import FP32, Setting
from benchmarks.timing import Variant, release, synchronize
from lightning_fp8.conversion.convert import is_converted, scaling_state
from lightning_fp8.examples.optimization import adamw
from lightning_fp8.ops.cuda import kernels

WARM_UP = 3
# relative error of a loss; of a gradient, relative to its norm and to that of all gradients together
LOSS_LIMIT, GRADIENT_LIMIT, WHOLE_LIMIT = 0.02, 0.2, 0.01
_STEPS_CHECKED = 3
_CLIPPED_TO = 1.0


class Task(NamedTuple):
    """What is trained, the same in all precisions.

    Attributes:
        make: creates a layer, or a model whose ``loss`` takes a micro-batch; on the default device, seeded.
        tokens: in a step.
        shape: of a layer's input, which needs a gradient; () for a model.
        out_features: of a layer.
        text: gives a model's micro-batches by step, to be repeated: ``[steps, accumulate, ...]``.
        learning_rate: of a model.
        compiled: whether it runs under ``torch.compile``; on the CPU without code generation.
        copies: number of trainings that are stepped in turn, so that tensors are not found in the L2 cache.
    """

    make: Callable[[], nn.Module]
    tokens: int
    shape: tuple[int, ...] = ()
    out_features: int = 0
    text: Callable[[], Tensor] | None = None
    learning_rate: float = 0.0
    compiled: bool = False
    copies: int = 1


class Training:
    """A task in one precision, and its steps.

    Args:
        task: what is trained.
        setting: the precision.
        compiled: whether forward and backward are compiled.
        device: where it is created.

    Attributes:
        model: in the precision.
        scaling: the scaling state, if any.
        leaves: tensors whose gradients a step computes, by name: the parameters, and a layer's input.
        inputs: of the micro-batches of each step.
    """

    def __init__(self, task: Task, setting: Setting, compiled: bool, device: torch.device) -> None:
        with created_on(device, seed=0):
            model = task.make()
        self.weights_change, self._plugin = setting.weights_change, setting.plugin()
        self.model = self._plugin.convert_module(setting.prepare(model))
        self.scaling = scaling_state(self.model) if is_converted(self.model) else None
        self.leaves: dict[str, Tensor] = dict(self.model.named_parameters())
        if task.text is None:
            x, self._gradient = self._layers_tensors(task, device)
            self.leaves["x"] = x
            steps: Any = [[x]]
            run, self._optimizer = self.model, None
        else:
            steps = task.text().to(device)
            self._gradient = torch.tensor(1 / steps.shape[1], device=device)
            run, self._optimizer = self.model.loss, adamw(self.model, task.learning_rate, device)  # type: ignore[assignment]
        self.inputs, self._first = itertools.cycle(steps), steps[0][0]
        self._run = baselines.compiled(run, device) if compiled else run

    def _layers_tensors(self, task: Task, device: torch.device) -> tuple[Tensor, Tensor]:
        """x and dy: values in bf16 for all, and bf16 in all but fp32, as a layer before this one would give it."""
        dtype = torch.float32 if self._plugin.precision == FP32 else torch.bfloat16
        generator = torch.Generator(device).manual_seed(1)
        x, dy = (
            torch.randn(*task.shape[:-1], width, generator=generator, device=device).mul_(size).bfloat16().to(dtype)
            for width, size in ((task.shape[-1], 1.0), (task.out_features, 1e-3))
        )
        return x.requires_grad_(), dy

    def forward(self, x: Tensor | None = None) -> Tensor:
        """The output of a layer or the loss of a model, of the first micro-batch or another."""
        with self._plugin.forward_context():
            return self._run(self._first if x is None else x)

    def backward(self) -> list[Tensor]:
        """The gradients of the next step, in place of earlier ones; gives the outputs of its micro-batches."""
        for leaf in self.leaves.values():
            leaf.grad = None
        outputs = []
        for x in next(self.inputs):
            y = self.forward(x)
            y.backward(self._gradient)
            outputs.append(y.detach())
        return outputs

    def update(self) -> None:
        """The rest of the step, after :meth:`backward`, in the order of a Trainer."""
        if self._optimizer is None:
            # as an in-place change does, so that weights are cast again
            torch.autograd.graph.increment_version(list(self.model.parameters()))
        if self.scaling is not None:
            self.scaling.update()
        if self._optimizer is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), _CLIPPED_TO)
            self._optimizer.step()

    def step(self) -> list[Tensor]:
        """A whole step; gives the outputs."""
        outputs = self.backward()
        self.update()
        return outputs

    def figures(self) -> dict[str, Any]:
        """Exact bytes, each storage counted once, and of a model what one more step changes: columns of the row.

        - ``saved_bytes``: what one forward saves for backward, without parameters, kept copies and the FP8 state.
        - ``weight_copy_bytes``: copies of weights in another dtype that layers keep until the next optimizer step.
        - ``loss``: of the first micro-batch, after that step.
        - ``unchanged_fraction``: share of the elements with a non-zero gradient that this step did not change. In bf16
          an update below half a unit in the last place is lost, and a smaller learning rate loses more of them.
        """
        if self._optimizer is None:
            return {"saved_bytes": saved_bytes(self.model, self.forward)}
        parameters = list(self.model.parameters())
        self.backward()
        before = [parameter.detach().clone() for parameter in parameters]
        self.update()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        counted = [gradient.ne(0) for gradient in gradients]
        unchanged = [was.eq(now) & count for was, now, count in zip(before, parameters, counted, strict=True)]
        moments = [x for state in self._optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        return {
            "parameter_bytes": bytes_of(parameters),
            "gradient_bytes": bytes_of(gradients),
            "optimizer_bytes": bytes_of(moments),
            "weight_copy_bytes": bytes_of(weight_copies(self.model)),
            "saved_bytes": saved_bytes(self.model, self.forward),
            "loss": self.forward().item(),
            "unchanged_fraction": sum(int(x.sum()) for x in unchanged) / sum(int(x.sum()) for x in counted),
        }


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
    losses = [_loss(training.backward())]
    leaves = training.leaves.items()
    gradients = {name: leaf.grad.to("cpu", copy=True) for name, leaf in leaves if leaf.grad is not None}
    training.update()
    losses += [_loss(training.step()) for _ in range(1, _STEPS_CHECKED)]
    return Start(losses, gradients)


def _loss(outputs: Sequence[Tensor]) -> float:
    """The loss of a step; of a layer, the mean square of its output."""
    of_each = [y.item() if y.dim() == 0 else y.float().square().mean().item() for y in outputs]
    return sum(of_each) / len(of_each)


def difference(start: Start, reference: Start) -> str | None:
    """None if losses and gradients are close enough, else what is not."""
    for number, (loss, expected) in enumerate(zip(start.losses, reference.losses, strict=True)):
        # NaN is not close either
        if not abs(loss - expected) <= LOSS_LIMIT * abs(expected):
            where = f"where {FP32} has {expected:.4f} and {LOSS_LIMIT:.0%} is the limit"
            return f"a loss of {loss:.4f} in step {number + 1}, {where}"
    norms = {name: float(gradient.double().norm()) for name, gradient in reference.gradients.items()}
    whole = math.hypot(*norms.values())
    for name, gradient in reference.gradients.items():
        got = start.gradients.get(name)
        if got is None or got.shape != gradient.shape:
            return f"no gradient of {name} of shape {tuple(gradient.shape)}"
        error, limit = float((got.double() - gradient).norm()), GRADIENT_LIMIT * norms[name] + WHOLE_LIMIT * whole
        if not error <= limit:
            return f"a gradient of {name} that is {error:.3g} away from that of {FP32}, where {limit:.3g} is the limit"
    return None


def variants(task: Task, settings: Mapping[str, Setting], device: torch.device) -> list[Variant]:
    """The task in each precision, checked against eager fp32."""

    @functools.cache
    def reference() -> Start:
        return _freed(lambda: start_of(Training(task, Setting(Precision), False, device)))

    def variant(name: str, setting: Setting) -> Variant:
        work = Work(lambda: Training(task, setting, task.compiled, device), reference, task.copies)
        return Variant(
            name, work.step, work.check, task.copies, around=work.around, tokens=task.tokens, figures=work.figures
        )

    return [variant(name, setting) for name, setting in settings.items()]


class Work:
    """Trainings that are created when they are needed and released afterwards.

    Args:
        make: creates one.
        reference: gives the first steps to compare with.
        copies: number of trainings.
    """

    def __init__(self, make: Callable[[], Training], reference: Callable[[], Start], copies: int = 1) -> None:
        self.make, self.reference, self.copies = make, reference, copies
        self.trainings: list[Training] = []

    def check(self) -> str | None:
        """Compare the first steps of a new training with the reference."""
        expected = self.reference()
        with _compiling():
            return difference(_freed(lambda: start_of(self.make())), expected)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Create trainings in the steady state, for use inside.

        Raises:
            RuntimeError: if an FP8 state does not know its histories after the warm-up.
        """
        with _compiling():
            try:
                for _ in range(self.copies):
                    self.trainings.append(self._warm())
                yield
            finally:
                self.trainings.clear()

    def _warm(self) -> Training:
        training = self.make()
        for _ in range(WARM_UP):
            training.step()
        synchronize()
        if training.scaling is not None and not training.scaling.every_tensor_has_history:
            raise RuntimeError("The scaling state has not seen its own histories: this would time first steps.")
        return training

    def step(self, at: int) -> None:
        """One step of a training, or one micro-batch of it where its weights do not change."""
        training = self.trainings[at]
        if training.weights_change:
            training.step()
        else:
            training.backward()

    def figures(self) -> dict[str, Any]:
        """Those of the first training."""
        return self.trainings[0].figures()


def casts_are_served(device: torch.device, activation: str = "none") -> bool:
    """Whether there are kernels for the casts of inputs, gradients and weights, also through an activation."""
    between = set() if activation == "none" else {("e4m3", activation, False), ("e5m2", activation, True)}
    casts = {("e4m3", "none", False), ("e5m2", "none", False)} | between
    served = all(kernels.cast_kernel(device, torch.bfloat16, *cast) is not None for cast in sorted(casts))
    return served and kernels.weights_kernel(device, False) is not None


def _freed(start: Callable[[], Start]) -> Start:
    result = start()
    release()
    return result


@contextmanager
def created_on(device: torch.device, seed: int) -> Iterator[None]:
    """Create modules on the device from a seed, leaving the generators outside unchanged."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        yield


@contextmanager
def _compiling() -> Iterator[None]:
    # each precision recompiles the same code; past the limit it fails, rather than running eagerly unnoticed
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        yield
