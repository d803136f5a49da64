"""The activations of feed-forward blocks, and a training step of a block that returns all of its results."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fp8 import scaling_state

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": nn.GELU("tanh"),
    "silu": F.silu,
    "swiglu": lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
}


def training_step(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Output, all gradients, and the scaling state after the step."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    y.float().square().sum().backward()
    state = scaling_state(model)
    state.update()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [y.detach(), x.grad, *gradients, state.scale.clone(), state.amax_history[0].clone()]


def assert_same_steps(reference: nn.Module, model: nn.Module, steps: int = 3, autocast: bool = False) -> None:
    """Outputs, gradients, scales and amaxes agree, at the first use of every tensor and with delayed scales."""
    dtype = next(reference.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(2, 7, 32, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected, actual = training_step(reference, reference, x), training_step(model, model, x)
        assert len(expected) >= 4
        for this, that in zip(expected, actual, strict=True):
            assert that.dtype == this.dtype
            assert torch.equal(that, this)
