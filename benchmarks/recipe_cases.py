"""The cases that recipes are compared on: training of small models, and events in one layer fed with random tensors.

All trainings with the same seed start from the same weights and see the same batches, whatever the recipe. Everything
outside FP8 layers, and the whole model without FP8, is in bf16, or in fp32 on a CPU that emulates bf16 products.

The *outlier* is channel 0 of the norm outputs that the linear layers of each GPT block read. Its weights are zero and
stay zero: the model computes the same with an outlier of any size, so all harm comes from its effect on the scale.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_fp8 import PrecisionSchedule, convert, scaling_state
from lightning_fp8.examples import ByteGPT, Digits, EncoderClassifier, StdlibText
from lightning_fp8.examples.transformer_block import Block
from lightning_fp8.runtime.cpu import emulates_bf16
from lightning_fp8.scaling import ScalingState
from lightning_fp8.scalings.recipe import Recipe

CONTEXT = 32
# interval in steps at which casts are counted; prime, so that it meets every phase of a periodic event
COUNT_EVERY = 7
# the layer of the events: its sizes, the steps before the event, and the steps after the event has left the window
ROWS, FEATURES, BEFORE, AFTER = 128, 64, 40, 8
# a step counts as harmed if a larger share of a tensor is clipped or underflows
HARMED = 0.01


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        model: creates the model.
        data: gives training and validation data, each as tensors of one length.
        batch: examples in a step.
        steps: optimizer steps.
        last: number of last steps that the final loss is the mean of.
        cycle: steps of the learning rate's cosine, after which it starts again; all steps if None.
        outlier: size of the outlier at a step; None: no channel is an outlier.
    """

    model: Callable[[], LightningModule]
    data: Callable[[], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]
    batch: int
    steps: int
    last: int
    cycle: int | None = None
    outlier: Callable[[int], float] | None = None

    def learning_rate(self, step: int) -> float:
        """The learning rate relative to its peak: linear warm-up over 30 steps, then cosines from 1 to 0.1."""
        cycle = self.cycle or self.steps
        return min(1.0, (step + 1) / 30, 0.1 + 0.45 * (1 + math.cos(math.pi * (step % cycle) / cycle)))


@cache
def _windows() -> tuple[tuple[Tensor], tuple[Tensor]]:
    data = StdlibText(context=CONTEXT, val_windows=512)
    data.setup("fit")
    return (data.train_set,), (data.val_set,)


@cache
def _digits() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    data = Digits()
    data.setup("fit")
    return data.train_set.tensors, data.val_set.tensors


_GPT = partial(Training, partial(ByteGPT, layers=1, width=64, heads=2, context=CONTEXT), _windows, 8)
TRAININGS = {
    "gpt": _GPT(2000, 200),
    "restarts": _GPT(300, 100, cycle=150),
    "outlier": _GPT(300, 100, outlier=lambda step: 1000.0 if step >= 150 else 1.0),
    "spikes": _GPT(300, 100, outlier=lambda step: 1e5 if step % 100 == 50 else 1.0),
    "encoder": Training(partial(EncoderClassifier, layers=1), _digits, 64, 400, 100),
}
# the factor on the input and the gradient of the layer, by steps since the event
EVENTS: dict[str, Callable[[int], float]] = {
    "one spike": lambda step: 1e5 if step == 0 else 1.0,
    "growth": lambda step: 100.0 if step >= 0 else 1.0,
}


def train(training: Training, recipe: Recipe | None, seed: int) -> dict[str, float | None]:
    """Losses, the accuracy of a classifier, and the shares of values that casts of inputs and gradients lose.

    Args:
        training: what to train.
        recipe: None for the baseline, without FP8.
        seed: of weights and batches.
    """
    run = Run(training, recipe, seed)
    run.advance(training.steps)
    return run.result()


class Run:
    """A training in progress. A copy goes on by itself, unless the training has an outlier.

    Args:
        training: what to train.
        recipe: None for the baseline, without FP8.
        seed: of weights and batches.
    """

    def __init__(self, training: Training, recipe: Recipe | None, seed: int) -> None:
        torch.manual_seed(seed)
        self.training, self.recipe = training, recipe
        self.data, self.model = training.data(), training.model()
        self.gain = _outlier_gain(self.model) if training.outlier else None
        if recipe is not None:
            # the encoder's first and last layers have fewer than 16 features
            convert(self.model, recipe, min_features=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), fused=True)
        self.losses: list[Tensor] = []
        self.counts = torch.zeros(4, dtype=torch.int64)
        self.random = torch.get_rng_state()

    def __deepcopy__(self, memo: dict[int, Any]) -> Run:
        clone = copy.copy(self)
        parts = (self.model, self.optimizer, self.losses, self.counts)
        clone.model, clone.optimizer, clone.losses, clone.counts = copy.deepcopy(parts, memo)
        return clone

    def advance(self, until: int, schedule: PrecisionSchedule | None = None) -> None:
        """Train up to this step; ``schedule`` says what the layers run in."""
        training, model, optimizer = self.training, self.model, self.optimizer
        state = None if self.recipe is None else scaling_state(model)
        torch.set_rng_state(self.random)
        for step in range(len(self.losses), until):
            if self.gain is not None and training.outlier is not None:
                self.gain[0] = training.outlier(step)
            if schedule is not None:
                schedule.before_step(model, step, training.steps)
            optimizer.param_groups[0]["lr"] = model.learning_rate * training.learning_rate(step)  # type: ignore[operator]
            examples = self.data[0]
            chosen = torch.randint(len(examples[0]), (training.batch,))
            with counting(state if step % COUNT_EVERY == 0 else None) as counted:
                with computing():
                    loss = _loss(model, [part[chosen] for part in examples])[0]
                loss.backward()
            self.counts += counted().sum(0)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if state is not None:
                state.update()
            optimizer.step()
            optimizer.zero_grad()
            self.losses.append(loss.detach())
        self.random = torch.get_rng_state()

    def result(self) -> dict[str, float | None]:
        """What the training has come to; see :func:`train`."""
        self.model.eval()
        held_out = self.data[1]
        if self.gain is not None:
            self.gain[0] = 1.0
        with torch.no_grad(), computing():
            val_loss, logits = _loss(self.model, held_out)
        accuracy = (logits.argmax(-1) == held_out[-1]).double().mean().item() if len(held_out) > 1 else None
        loss = torch.stack(self.losses[-self.training.last :]).mean().item()
        shares = _shares(self.counts, self.recipe)
        return {"loss": loss, "val_loss": val_loss.item(), "val_accuracy": accuracy, **shares}


def _loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Loss and logits of a batch: of the next bytes in windows ``[batch, time + 1]``, or of images and labels."""
    inputs, targets = (batch[0][:, :-1].long(), batch[0][:, 1:].long()) if len(batch) == 1 else batch
    logits = model(inputs).float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten()), logits


def computing() -> AbstractContextManager[Any]:
    """Autocast to bf16; nothing, for fp32, on a CPU that emulates bf16 products."""
    return nullcontext() if emulates_bf16() else torch.autocast("cpu", torch.bfloat16)


def _outlier_gain(model: nn.Module) -> Tensor:
    """The factors of the channels of the norms' outputs, ``[width] float32``, to be changed in place."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    gain = torch.ones(blocks[0].qkv.in_features)

    def amplify(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * gain

    def stay(gradient: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(gradient[:, :1]), gradient[:, 1:]], dim=1)

    for block in blocks:
        for norm, linear in ((block.norm_attention, block.qkv), (block.norm_mlp, block.up)):
            norm.register_forward_hook(amplify)
            linear.weight.data[:, 0] = 0
            linear.weight.register_hook(stay)
    return gain


@contextmanager
def counting(state: ScalingState | None) -> Iterator[Callable[[], Tensor]]:
    """Gives a function for the counts of values lost inside, ``[D, 4] int64`` as in :class:`CastCounts`."""
    counts = [torch.zeros(1, 4, dtype=torch.int64)]
    if state is not None:
        state.cast_counts.start(counts)
    yield lambda: counts[0]
    if state is not None:
        assert state.cast_counts.values is not None
        counts[0] = state.cast_counts.values[: state.delayed]
        state.cast_counts.stop(counts)


def _shares(counts: Tensor, recipe: Recipe | None) -> dict[str, float | None]:
    if recipe is None:
        return {"saturated_fraction": None, "underflowed_fraction": None}
    numbers, saturated, nonzero, underflowed = counts.tolist()
    return {"saturated_fraction": saturated / numbers, "underflowed_fraction": underflowed / nonzero}


def watch(event: str, recipe: Recipe, seed: int) -> dict[str, Any]:
    """What a layer's casts lose around an event: the number of harmed steps, and the largest share lost in a step.

    Returns:
        From the event on, ``clipped_steps`` and ``clipped_fraction`` of the gradient, and ``zero_steps`` and
        ``zero_fraction`` of the input. ``steady_clipped_fraction`` is the mean share clipped in the steps before the
        event, ``clipped_fractions`` that of each step from ``AFTER`` steps before the event to ``AFTER`` after it.
    """
    torch.manual_seed(seed)
    layer = convert(nn.Linear(FEATURES, FEATURES, bias=False), recipe)
    state = scaling_state(layer)
    shares = []
    for step in range(-BEFORE, recipe.window + AFTER):
        size = EVENTS[event](step)
        with counting(state) as counted:
            layer(torch.randn(ROWS, FEATURES) * size).backward(torch.randn(ROWS, FEATURES) * size)
        state.update()
        numbers, saturated, nonzero, underflowed = counted().double().unbind(1)
        shares.append(torch.stack([(saturated / numbers)[1], (underflowed / nonzero)[0]]))
    before, (clipped, zero) = torch.stack(shares[:BEFORE]), torch.stack(shares[BEFORE:]).unbind(1)
    return {
        "clipped_steps": int((clipped > HARMED).sum()),
        "clipped_fraction": clipped.max().item(),
        "zero_steps": int((zero > HARMED).sum()),
        "zero_fraction": zero.max().item(),
        # the first step has no history
        "steady_clipped_fraction": before[1:, 0].mean().item(),
        "clipped_fractions": [round(share[0].item(), 6) for share in shares[BEFORE - AFTER : BEFORE + AFTER]],
    }
