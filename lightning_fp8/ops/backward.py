"""The backward of one linear layer, from the casts and the products of any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops.operand import Columns, Fp8Tensor, Slot, nothing

# (dy, h, activation, slot, layout, bias) -> payloads by rows and by columns, the scale_inv of each, column sums
Cast = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]


class Backward(NamedTuple):
    """The arguments of the operator ``lightning_fp8::linear_backward``.

    Attributes:
        dy: ``[M, N]``, the gradient of the output; with ``h``, that of ``activation(h)``.
        h: ``[M, N]`` or, for swiglu, ``[M, 2 N]``: its gradient is used in place of dy. None without an activation.
        activation: one of ``lightning_fp8.ops.activations.ACTIVATIONS``.
        x: the input, for wgrad; without a payload there is none.
        w: the weight, for dgrad; the same.
        slot: of the gradient that is cast.
        dx_dtype: of the input's gradient.
        dw_dtype: of the weight's gradient.
        bias: whether the bias gradient is requested.
    """

    dy: Tensor
    h: Tensor | None
    activation: str
    x: Columns
    w: Columns
    slot: Slot
    dx_dtype: torch.dtype
    dw_dtype: torch.dtype
    bias: bool


def gradients(cast: Cast, product: Callable[..., Tensor], *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``lightning_fp8::linear_backward`` by these functions: one cast, of which each product takes a part.

    Args:
        cast: of the gradient.
        product: ``scaled_mm`` of a device.
        arguments: those of :class:`Backward`.
    """
    dy, h, activation, x, w, slot, dx_dtype, dw_dtype, bias = Backward(*arguments)
    rows, columns, scale_inv, columns_scale_inv, db = cast(dy, h, activation, slot, gradient_layout(x, w), bias)
    fmt, gemm = slot.format, slot.gemm
    if w.payload is None:
        dx = nothing(dy, dx_dtype)
    else:
        weight = Fp8Tensor(w.payload, w.scale_inv, w.format)
        dx = product(Fp8Tensor(rows, scale_inv, fmt), weight, None, dx_dtype, False, gemm)
    # a large tensor, whose memory may be reused for the next one
    del rows
    if x.payload is None:
        dw = dy.new_empty((dy if h is None else h).shape[1], 0, dtype=dw_dtype)
    else:
        values = Fp8Tensor(x.payload, x.scale_inv, x.format)
        dw = product(Fp8Tensor(columns, columns_scale_inv, fmt), values, None, dw_dtype, False, gemm)
    return dx, dw, db


def gradient_layout(x: Columns, w: Columns) -> str:
    """The layout in which the gradient of the output is cast: dgrad takes it by rows, wgrad by columns."""
    return "rows" if x.payload is None else "columns" if w.payload is None else "both"
