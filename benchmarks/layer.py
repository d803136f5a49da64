"""The suite ``layer``: forward and backward of one transformer layer, eager and compiled, in each precision.

The layer is the block of the example GPT, which the models of the suite ``train`` are made of. All its GEMMs are plain
linear layers, which every variant converts; in torch's own encoder layer, torchao would leave the attention's input
projection in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import baselines, linear, training
from benchmarks.case import Case
from benchmarks.trainer_precisions import Setting
from benchmarks.training import Training, created_on
from lightning_fp8.examples.transformer_block import Block, initialize
from lightning_fp8.tools.timing import Variant


def cases(device: torch.device) -> list[Case]:
    """Eager and compiled; on the CPU tiny, in place of 4096 wide with 8 sequences of 2048 tokens."""
    sizes = (4096, 32, 8, 2048) if device.type == "cuda" else (64, 4, 2, 32)
    return [Layer(*sizes, compiled) for compiled in (False, True)]


@dataclass(frozen=True)
class Layer:
    """A transformer layer; its input and its weights need gradients.

    Attributes:
        width: of the residual stream.
        heads: of attention, causal.
        batch: number of sequences.
        time: tokens in each of them.
        compiled: whether it runs under ``torch.compile``; on the CPU without code generation.
    """

    width: int
    heads: int
    batch: int
    time: int
    compiled: bool

    bytes = None
    flops = None

    @property
    def name(self) -> str:
        """Sizes, and how it runs."""
        how = "compiled" if self.compiled else "eager"
        return f"layer {self.width} wide, {self.batch} x {self.time} tokens, {how}"

    def is_served(self, device: torch.device) -> bool:
        """Whether there are kernels for all casts, or none are expected."""
        return device.type != "cuda" or linear.casts_are_served(device)

    def variants(self, device: torch.device) -> list[Variant]:
        """``lightning_fp8``, ``bf16-mixed``, ``bf16-true``, and torchao where it is installed."""

        def make(setting: Setting, compiled: bool) -> Training:
            return LayerTraining(self, setting, compiled, device)

        return training.variants(make, self.compiled, self.batch * self.time, device)


class LayerTraining(Training):
    """A layer, its input and the gradient of its output, the same for all precisions.

    A step is forward and backward. For FP8 it also includes the consequences of an optimizer step: updated scales, and
    changed weights, which are therefore cast in each step.

    Args:
        case: the sizes.
        setting: the precision.
        compiled: whether forward and backward are compiled.
        device: where it is created.
    """

    def __init__(self, case: Layer, setting: Setting, compiled: bool, device: torch.device) -> None:
        with created_on(device, seed=0):
            block = Block(case.width, case.heads)
            initialize(block)
        super().__init__(block, setting)
        shape = (case.batch, case.time, case.width)
        generator = torch.Generator(device).manual_seed(1)
        # bf16 for all, as two of the precisions would get it from the layer before
        self.x = torch.randn(shape, generator=generator, device=device).bfloat16().requires_grad_()
        self.dy = torch.randn(shape, generator=generator, device=device).mul_(1e-3).bfloat16()
        self.leaves["x"] = self.x
        self._run = baselines.compiled(self.model, device) if compiled else self.model

    def forward(self) -> Tensor:
        """x ``[batch, time, width] bfloat16`` -> the same shape."""
        with self.plugin.forward_context():
            return self._run(self.x)

    def backward(self) -> Tensor:
        """Forward and backward; gives the output."""
        for leaf in self.leaves.values():
            leaf.grad = None
        y = self.forward()
        y.backward(self.dy)
        return y.detach()

    def update(self) -> None:
        """Mark the weights as changed and update the scales, as an optimizer step does."""
        # an in-place change increments the version, which the caches of casts check
        torch.autograd.graph.increment_version(list(self.model.parameters()))
        if self.scaling is not None:
            self.scaling.update()

    def loss(self, output: Tensor) -> float:
        """In place of a loss, the mean square of what the layer adds to its input."""
        return (output.float() - self.x.detach().float()).square().mean().item()
