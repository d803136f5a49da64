"""The activations that can be fused into a cast, in torch's own operators; a result has the dtype of its input."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Activation:
    """A function of one tensor, or of gate and up.

    Attributes:
        value: computes the value from the inputs.
        gradients: computes the gradients of the inputs, from the inputs and the gradient of the value.
        is_it: whether a function or module of a model is this activation.
        inputs: how many tensors it takes.
    """

    value: Callable[..., Tensor]
    gradients: Callable[..., tuple[Tensor, ...]]
    is_it: Callable[[Any], bool] = lambda function: False
    inputs: int = 1


_aten = torch.ops.aten


def _gelu(approximate: str) -> Activation:
    def is_it(function: Any) -> bool:
        if type(function) is nn.GELU:
            return function.approximate == approximate
        if approximate == "none":
            return function is F.gelu
        is_partial = isinstance(function, functools.partial) and function.func is F.gelu and not function.args
        # `gelu_new` of transformers writes the approximation out
        return _is_of_transformers(function, "NewGELUActivation") or (
            is_partial and function.keywords == {"approximate": approximate}
        )

    return Activation(
        functools.partial(F.gelu, approximate=approximate),
        lambda x, dy: (_aten.gelu_backward(dy, x, approximate=approximate),),
        is_it,
    )


def _is_of_transformers(function: Any, name: str) -> bool:
    # by name, so that models without them do not need `transformers`
    return (type(function).__module__, type(function).__name__) == ("transformers.activations", name)


# By the name that kernels know: `gelu_tanh` is `GeluTanh` in `kernels_cuda/activations.cuh`. All are 0 at 0, as kernels
# load 0 for what is outside of a matrix and cast its activation.
ACTIVATIONS = {
    "relu": Activation(
        F.relu,
        lambda x, dy: (_aten.threshold_backward(dy, x, 0),),
        lambda function: type(function) is nn.ReLU or function is F.relu or function is torch.relu,
    ),
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
    "silu": Activation(
        F.silu,
        lambda x, dy: (_aten.silu_backward(dy, x),),
        lambda function: (
            type(function) is nn.SiLU or function is F.silu or _is_of_transformers(function, "SiLUActivation")
        ),
    ),
    # silu(gate) * up
    "swiglu": Activation(
        lambda gate, up: F.silu(gate) * up,
        lambda gate, up, dy: (_aten.silu_backward(dy * up, gate), dy * F.silu(gate)),
        inputs=2,
    ),
}


def activate(x: Tensor, activation: str) -> Tensor:
    """``activation(x)``, half as wide if x is gate and up side by side; x itself for ``"none"``."""
    if activation == "none":
        return x
    known = ACTIVATIONS[activation]
    return known.value(*x.chunk(known.inputs, dim=-1))


def activation_gradient(x: Tensor, dy: Tensor, activation: str) -> Tensor:
    """The gradient of x, given the gradient ``dy`` of ``activation(x)``."""
    known = ACTIVATIONS[activation]
    return torch.cat(known.gradients(*x.chunk(known.inputs, dim=-1), dy), dim=-1)
