"""The suite ``train``: whole training steps of GPTs on real text, eager and compiled, in each precision.

A step is forward and backward of all micro-batches, then what a Trainer does: the update of the scales, clipping of the
gradients, and AdamW.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import baselines, linear, training
from benchmarks.case import Case
from benchmarks.trainer_precisions import Setting
from benchmarks.training import Training, created_on
from lightning_fp8.examples import ByteGPT, StdlibText
from lightning_fp8.examples.optimization import adamw
from lightning_fp8.tools.timing import Variant

_LEARNING_RATE = 1e-4
_CLIPPED_TO = 1.0
# number of steps whose text is kept on the device and repeated
_STEPS_OF_TEXT = 4


def cases(device: torch.device) -> list[Case]:
    """Eager and compiled GPTs of 1.3B, 124M and 350M parameters; on the CPU a tiny one.

    Sizes and sequences per step are those of ``configs/``, but without activation checkpointing, as precisions differ
    in what they keep for backward. To fit on a GPU of 80 GB, the 16 sequences of 2048 bytes of the 1.3B model are split
    into 4 micro-batches of 4. For ``bf16-mixed`` the estimate is 21 GB for parameters, gradients and the optimizer's
    two moments, 3 GB for weights cast to bf16, and 17 GB for activations. The smaller models take their 16 sequences
    of 1024 bytes at once.
    """
    if device.type != "cuda":
        models = [Model("tiny", 1, 64, 2, 32, 4, 2)]
    else:
        models = [
            Model("1.3B", 26, 2048, 16, 2048, 4, 4),
            Model("124M", 17, 768, 12, 1024, 16, 1),
            Model("350M", 28, 1024, 16, 1024, 16, 1),
        ]
    return [Train(model, compiled) for model in models for compiled in (False, True)]


@dataclass(frozen=True)
class Model:
    """A GPT and the sequences of a step.

    Attributes:
        name: of its size.
        layers: number of blocks.
        width: of the residual stream.
        heads: of attention.
        context: bytes in a sequence, each of them a token.
        batch: sequences in a micro-batch.
        accumulate: micro-batches in a step.
    """

    name: str
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    accumulate: int


@dataclass(frozen=True)
class Train:
    """A GPT in training.

    Attributes:
        model: sizes.
        compiled: whether it runs under ``torch.compile``, from bytes to the loss; on the CPU without code generation.
    """

    model: Model
    compiled: bool

    bytes = None
    flops = None

    @property
    def name(self) -> str:
        """Model, micro-batches x sequences x tokens of a step, and how it runs."""
        of = self.model
        how = "compiled" if self.compiled else "eager"
        return f"GPT {of.name}, {of.accumulate} x {of.batch} x {of.context} tokens, {how}"

    def is_served(self, device: torch.device) -> bool:
        """Whether there are kernels for all casts, or none are expected."""
        return device.type != "cuda" or linear.casts_are_served(device)

    def variants(self, device: torch.device) -> list[Variant]:
        """``lightning_fp8``, ``bf16-mixed``, ``bf16-true``, and torchao where it is installed."""

        def make(setting: Setting, compiled: bool) -> Training:
            return GptTraining(self.model, setting, compiled, device)

        tokens = self.model.accumulate * self.model.batch * self.model.context
        return training.variants(make, self.compiled, tokens, device)


class GptTraining(Training):
    """A GPT, its optimizer and its text, the same for all precisions.

    Args:
        of: the sizes.
        setting: the precision.
        compiled: whether forward and backward are compiled.
        device: where it is created.
    """

    def __init__(self, of: Model, setting: Setting, compiled: bool, device: torch.device) -> None:
        with created_on(device, seed=0):
            gpt = ByteGPT(of.layers, of.width, of.heads, of.context)
        super().__init__(gpt, setting)
        text = text_of(of)
        self.steps = itertools.cycle(text.to(device))
        self._first = text[0, 0].to(device)
        # the example's, without its schedule
        self._optimizer = adamw(self.model, _LEARNING_RATE, device)
        self._loss = baselines.compiled(gpt.loss, device) if compiled else gpt.loss

    def forward(self) -> Tensor:
        """Loss of the first micro-batch."""
        return self._loss_of(self._first)

    def backward(self) -> Tensor:
        """Gradients of all micro-batches of the next step; gives the mean loss."""
        batches = next(self.steps)
        losses = []
        for batch in batches:
            loss = self._loss_of(batch)
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def update(self) -> None:
        """Update the scales, clip the gradients and step the optimizer, in the order of a Trainer."""
        if self.scaling is not None:
            self.scaling.update()
        nn.utils.clip_grad_norm_(self.model.parameters(), _CLIPPED_TO)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def loss(self, output: Tensor) -> float:
        """Cross-entropy in nats."""
        return output.item()

    def _loss_of(self, batch: Tensor) -> Tensor:
        with self.plugin.forward_context():
            return self._loss(batch)


@functools.cache
def text_of(of: Model) -> Tensor:
    """Python's own source: ``[steps, accumulate, batch, context + 1] uint8``."""
    count = _STEPS_OF_TEXT * of.accumulate * of.batch
    data = StdlibText(of.context, of.batch, val_windows=1, max_bytes=count * (of.context + 1))
    data.setup("fit")
    return data.train_set.view(_STEPS_OF_TEXT, of.accumulate, of.batch, of.context + 1)
