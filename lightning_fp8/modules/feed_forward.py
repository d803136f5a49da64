"""Linear - activation - linear as one: the output of the activation is cast to FP8 directly, as is its gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from lightning_fp8 import ops
from lightning_fp8.modules.class_swap import exchange_class, own_class
from lightning_fp8.modules.functional import (
    cast_input,
    cast_weight,
    check_bias,
    check_input,
    output_dtype,
    rounded_bias,
)
from lightning_fp8.modules.linear import Fp8Linear
from lightning_fp8.ops.operand import Layer

_FUNCTIONS = {F.relu: "relu", torch.relu: "relu", F.gelu: "gelu", F.silu: "silu"}


def fp8_feed_forward(first: Fp8Linear, activation: str, second: Fp8Linear, x: Tensor) -> Tensor:
    """``second(activation(first(x)))``, with the same numbers: x ``[*, K]`` -> ``[*, K']``.

    Between the two GEMMs, the only pass over memory is the cast; in backward it is the one that casts the gradient and
    sums it for the bias. Where our own GEMMs run, in the steady state of 16-bit training, they write the results of
    these passes themselves. Backward keeps both inputs in FP8 and the activation's input.

    Args:
        first: converted layer.
        activation: one of ``lightning_fp8.ops.activations.ACTIVATIONS``; ``swiglu`` halves the width.
        second: converted layer of the same model.
        x: fp32, bf16 or fp16.
    """
    check_input(first, "input", x, first.weight)
    rows, rows_2, record = first.fp8[""], second.fp8[""], first.records
    check_bias(rows, first.bias, first.weight.shape[0])
    check_bias(rows_2, second.bias, second.weight.shape[0])
    w1, w2 = cast_weight(rows, first.weight, record), cast_weight(rows_2, second.weight, record)
    with_gradients, dtype = torch.is_grad_enabled(), output_dtype(x)
    y, *_ = ops.mlp(
        x,
        Layer(first.weight, first.bias, rounded_bias(rows, first.bias, dtype, w1.is_kept), w1.operand),  # type: ignore[arg-type]
        Layer(second.weight, second.bias, rounded_bias(rows_2, second.bias, dtype, w2.is_kept), w2.operand),  # type: ignore[arg-type]
        cast_input(rows, x, record, with_gradients and first.weight.requires_grad),
        rows_2.slot("input", record),
        rows.slot("grad_output", record),
        rows_2.slot("grad_output", record),
        activation,
        with_gradients and second.weight.requires_grad,
        with_gradients,
        dtype,
    )
    return y  # type: ignore[no-any-return]


def activation_name(activation: Any) -> str | None:
    """The operators' name for an activation function or module; None for one that they do not support."""
    if type(activation) is nn.GELU:
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    if isinstance(activation, nn.Module):
        return {nn.ReLU: "relu", nn.SiLU: "silu"}.get(type(activation))  # type: ignore[call-overload]
    return _FUNCTIONS.get(activation)


class Fp8FeedForward(nn.Module):
    """A transformer layer of torch whose feed-forward block runs as one where that changes no number.

    Never constructed: conversion changes the class of a layer whose ``linear1`` and ``linear2`` it has converted. A
    block with dropout between the two (in training), an activation other than relu, gelu and silu, or hooks on its
    parts runs part by part, as before.
    """

    plain_class: type[nn.Module]

    def _ff_block(self, x: Tensor) -> Tensor:
        activation = _fused_activation(self)
        if activation is None:
            return super()._ff_block(x)  # type: ignore[misc]
        y = fp8_feed_forward(cast(Fp8Linear, self.linear1), activation, cast(Fp8Linear, self.linear2), x)
        return self._last_dropout(y)

    def _last_dropout(self, y: Tensor) -> Tensor:
        raise NotImplementedError


class Fp8TransformerEncoderLayer(Fp8FeedForward, nn.TransformerEncoderLayer):
    """``nn.TransformerEncoderLayer`` with its feed-forward block as one; see :class:`Fp8FeedForward`."""

    plain_class = nn.TransformerEncoderLayer

    def _last_dropout(self, y: Tensor) -> Tensor:
        return self.dropout2(y)


class Fp8TransformerDecoderLayer(Fp8FeedForward, nn.TransformerDecoderLayer):
    """``nn.TransformerDecoderLayer`` with its feed-forward block as one; see :class:`Fp8FeedForward`."""

    plain_class = nn.TransformerDecoderLayer

    def _last_dropout(self, y: Tensor) -> Tensor:
        return self.dropout3(y)


def fuse_feed_forward(layers: Iterable[nn.Module]) -> None:
    """Give each transformer layer the fused class if its linear layers are converted, else the plain one."""
    fused: dict[type[nn.Module], type[nn.Module]] = {
        kind.plain_class: kind for kind in (Fp8TransformerEncoderLayer, Fp8TransformerDecoderLayer)
    }
    for layer in layers:
        plain = layer.plain_class if isinstance(layer, Fp8FeedForward) else own_class(layer)
        if plain in fused:
            converted = own_class(layer.linear1) is Fp8Linear and own_class(layer.linear2) is Fp8Linear
            exchange_class(layer, fused[plain] if converted else plain)


def _fused_activation(layer: nn.Module) -> str | None:
    """The activation of a block that runs as one; None if it has to run part by part."""
    first, dropout, second, activation = layer.linear1, layer.dropout, layer.linear2, layer.activation
    if type(first) is not Fp8Linear or type(second) is not Fp8Linear or not (first.in_fp8 and second.in_fp8):
        return None
    if type(dropout) is not nn.Dropout or (dropout.training and dropout.p > 0):
        return None
    # weights may have been replaced since: part by part, the layer whose input does not fit raises the error
    if first.weight.shape[0] != second.weight.shape[1]:
        return None
    # hooks and replaced forwards of the parts must see their calls
    parts = (first, dropout, second, activation)
    if any(isinstance(part, nn.Module) and _is_watched(part) for part in parts) or torch_module._has_any_global_hook():
        return None
    if first.scaling_state is not second.scaling_state or first.training != second.training:
        return None
    return activation_name(activation)


def _is_watched(part: nn.Module) -> bool:
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    return any(hooks) or "forward" in vars(part)
