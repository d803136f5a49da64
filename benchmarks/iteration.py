"""One training iteration of a block, forward and backward, and a check of its numbers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.conversion.convert import scaling_state
from lightning_fp8.metrics.sqnr import signal_and_noise
from lightning_fp8.tools import timing
from lightning_fp8.tools.timing import Variant


@dataclass(frozen=True)
class Precision:
    """The precision of a block, and how close to fp32 its results must be.

    Attributes:
        make: converts a block in fp32, in place or not, to the block that is timed.
        in_fp8: whether that is an FP8 block, which is timed in the steady state of training.
        autocast: whether it runs under autocast to bf16.
        weights_change: whether the weights change before each iteration, as by an optimizer step.
        forward_db: lowest SQNR of the output, compared with fp32.
        backward_db: lowest SQNR of each gradient.
    """

    make: Callable[[Any], nn.Module]
    in_fp8: bool = False
    autocast: bool = True
    weights_change: bool = True
    forward_db: float = 20.0
    backward_db: float = 15.0


def bf16_precisions() -> dict[str, Precision]:
    """Two precisions: fp32 weights under autocast, and weights in bf16."""
    return {
        "bf16 autocast": Precision(lambda block: block, forward_db=40.0, backward_db=40.0),
        "bf16": Precision(lambda block: block.bfloat16(), autocast=False, forward_db=40.0, backward_db=40.0),
    }


@dataclass(frozen=True)
class Iteration:
    """One copy of a block with its input and the gradient of its output.

    Attributes:
        block: what runs.
        x: input, whose gradient is taken as well.
        dy: gradient of the output.
        precision: in which it runs.
    """

    block: nn.Module
    x: Tensor
    dy: Tensor
    precision: Precision

    @functools.cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The block's parameters by name."""
        return dict(self.block.named_parameters())

    def run(self) -> Tensor:
        """Forward and backward; gives the output."""
        self.x.grad = None
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.precision.weights_change:
            # an optimizer's in-place change increments the version, which the caches of casts check
            torch.autograd.graph.increment_version(list(self.parameters.values()))
            if self.precision.in_fp8:
                scaling_state(self.block).model.take_as_known()
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.precision.autocast):
            y = self.block(self.x)
        y.backward(self.dy)
        return y

    def results(self) -> dict[str, Tensor]:
        """Run one iteration; gives the output and all gradients."""
        y = self.run().detach()
        gradients = {"x": self.x, **self.parameters}
        return {
            "y": y,
            **{f"gradient of {name}": tensor.grad for name, tensor in gradients.items() if tensor.grad is not None},
        }


def reach_steady_state(iteration: Iteration) -> None:
    """Run two steps of a converted block, after which every tensor has a history, and the host knows it.

    Raises:
        RuntimeError: if the host does not know of all histories afterwards.
    """
    state = scaling_state(iteration.block)
    for _ in range(2):
        iteration.run()
        state.update()
        timing.synchronize()
    if not state.every_tensor_has_history:
        raise RuntimeError("The scaling state has not seen its own histories: this would time the first steps.")


def variants(block: nn.Module, x: Tensor, dy: Tensor, precisions: dict[str, Precision], copies: int) -> list[Variant]:
    """``copies`` of the block in each precision, checked against fp32.

    Args:
        block: in fp32, on the device.
        x: ``[tokens, features] bfloat16``.
        dy: as the output, bfloat16.
        precisions: by the name of the variant.
        copies: of the block and its tensors.
    """

    @functools.cache
    def exact() -> dict[str, Tensor]:
        plain = Precision(lambda block: block, autocast=False)
        return Iteration(copy.deepcopy(block), x.float().requires_grad_(), dy.float(), plain).results()

    def variant(name: str, precision: Precision) -> Variant:
        made: list[Iteration] = []

        def prepared() -> list[Iteration]:
            # created at the check, so that an exception counts as this variant's failure
            while len(made) < copies:
                own = precision.make(copy.deepcopy(block))
                made.append(Iteration(own, x.clone().requires_grad_(), dy.clone(), precision))
                if precision.in_fp8:
                    reach_steady_state(made[-1])
            return made

        return Variant(name, lambda at: _run(made[at]), lambda: difference(prepared()[0], exact()), copies)

    return [variant(name, precision) for name, precision in precisions.items()]


def variants_of(
    make: Callable[[], nn.Module], sizes: tuple[int, int, int], precisions: dict[str, Precision], device: torch.device
) -> list[Variant]:
    """A new block in each precision, on normally distributed values; ``sizes``: tokens, features in, features out."""
    tokens, columns_in, columns_out = sizes
    with torch.random.fork_rng(devices=[]):
        # created on the CPU, so that it is the same on all devices
        torch.manual_seed(0)
        block = make().to(device)
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(tokens, columns_in, generator=generator, device=device).bfloat16()
    dy = torch.randn(tokens, columns_out, generator=generator, device=device).mul_(1e-3).bfloat16()
    size = x.nbytes + dy.nbytes + sum(parameter.nbytes for parameter in block.parameters())
    return variants(block, x, dy, precisions, timing.copies_for(size, device))


def _run(iteration: Iteration) -> None:
    # only gradients outlive an iteration, as in training
    iteration.run()


def difference(iteration: Iteration, exact: dict[str, Tensor]) -> str | None:
    """None if the output and each gradient are close enough to fp32, else the first that is not."""
    found = iteration.results()
    for name, target in exact.items():
        least = iteration.precision.forward_db if name == "y" else iteration.precision.backward_db
        if name not in found or found[name].shape != target.shape:
            return f"no {name} of shape {tuple(target.shape)}"
        signal, noise = signal_and_noise(found[name], target)
        reached = float(10 * torch.log10(signal / noise))
        # NaN is not enough either
        if not reached >= least:
            return f"{name} with an SQNR of {reached:.1f} dB against fp32, where {least:g} is the least"
    return None
