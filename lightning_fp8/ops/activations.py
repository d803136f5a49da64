"""The activations that can be fused into a cast, in torch's own operators; a result has the dtype of its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    return F.silu(gate) * up


def gated_gradients(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, given the gradient ``dy`` of :func:`gated`."""
    return torch.ops.aten.silu_backward(dy * up, gate), dy * F.silu(gate)


# swiglu(x) with x = [gate | up], twice as wide as the result
_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "swiglu": lambda x: gated(*x.chunk(2, dim=-1)),
}
ACTIVATIONS = tuple(_FORWARD)


def activate(x: Tensor, activation: str) -> Tensor:
    """``activation(x)``."""
    return _FORWARD[activation](x)


def activated_width(width: int, activation: str) -> int:
    """Columns of ``activation(x)`` for an x of ``width`` columns."""
    return width // 2 if activation == "swiglu" else width


def activation_gradient(x: Tensor, dy: Tensor, activation: str) -> Tensor:
    """The gradient of x, given the gradient ``dy`` of ``activation(x)``."""
    aten = torch.ops.aten
    if activation == "none":
        return dy
    if activation == "relu":
        return aten.threshold_backward(dy, x, 0)
    if activation in ("gelu", "gelu_tanh"):
        return aten.gelu_backward(dy, x, approximate="tanh" if activation == "gelu_tanh" else "none")
    if activation == "silu":
        return aten.silu_backward(dy, x)
    gate, up = x.chunk(2, dim=-1)
    return torch.cat(gated_gradients(gate, up, dy), dim=-1)


@dataclass(frozen=True)
class Activation:
    """A function of one tensor, or of gate and up.

    Attributes:
        inputs: how many tensors it takes.
        value: of its inputs.
        gradients: of its inputs, from these and the gradient of the value.
    """

    inputs: int
    value: Callable[..., Tensor]
    gradients: Callable[..., tuple[Tensor, ...]]


_aten = torch.ops.aten
# by the name that kernels know
FUSED = {
    "relu": Activation(1, F.relu, lambda x, dy: (_aten.threshold_backward(dy, x, 0),)),
    "gelu": Activation(1, F.gelu, lambda x, dy: (_aten.gelu_backward(dy, x, approximate="none"),)),
    "gelu_tanh": Activation(
        1,
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x, dy: (_aten.gelu_backward(dy, x, approximate="tanh"),),
    ),
    "silu": Activation(1, F.silu, lambda x, dy: (_aten.silu_backward(dy, x),)),
    "swiglu": Activation(2, gated, gated_gradients),
}
