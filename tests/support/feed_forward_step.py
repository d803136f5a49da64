"""The activations of feed-forward blocks, and a training step of a block that returns all of its results."""

from __future__ import annotations

from collections.abc import Callable

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
