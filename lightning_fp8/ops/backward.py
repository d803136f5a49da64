"""The backward of one linear layer, from the casts and the products of any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_fp8.ops import e8m0
from lightning_fp8.ops.activations import activation_gradient
from lightning_fp8.ops.dequantize import exact_values
from lightning_fp8.ops.operand import Columns, Fp8Tensor, Slot, nothing

# (dy, h, activation, slot, layout, bias) -> payloads by rows and by columns, the scale_inv of each, column sums
Cast = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]
Gradients = Callable[..., tuple[Tensor, Tensor, Tensor]]


def gradients_by(cast: Cast, product: Callable[..., Tensor]) -> Gradients:
    """``lightning_fp8::linear_backward`` by a cast of the gradient, and by a device's ``scaled_mm``."""

    def linear_backward(
        dy: Tensor,
        h: Tensor | None,
        activation: str,
        x_fp8_t: Columns,
        w_fp8_t: Columns,
        slot: Slot,
        dx_dtype: torch.dtype,
        dw_dtype: torch.dtype,
        bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One cast, of which each product takes a part."""
        w = w_fp8_t.payload
        if w is not None and not e8m0.are_along_rows(w_fp8_t.scale_inv, w):
            dy = dy if h is None else activation_gradient(h, dy, activation)
            # made here, so that they exist for this product only
            values = exact_values(w.t(), w_fp8_t.scale_inv.t(), w_fp8_t.format, dy.dtype).t()
            rest = x_fp8_t, w_fp8_t._replace(payload=values), slot, dx_dtype, dw_dtype, bias
            return gradients_in_part(linear_backward, dy, *rest)
        layout = gradient_layout(x_fp8_t, w_fp8_t)
        rows, columns, scale_inv, columns_scale_inv, db = cast(dy, h, activation, slot, layout, bias)
        fmt = slot.format
        if w_fp8_t.payload is None:
            dx = nothing(dy, dx_dtype)
        else:
            dx = product(Fp8Tensor(rows, scale_inv, fmt), w_fp8_t, None, dx_dtype, False)
        # a large tensor, whose memory may be reused for the next one
        del rows
        if x_fp8_t.payload is None:
            dw = dy.new_empty((dy if h is None else h).shape[1], 0, dtype=dw_dtype)
        else:
            dw = product(Fp8Tensor(columns, columns_scale_inv, fmt), x_fp8_t, None, dw_dtype, False)
        return dx, dw, db

    return linear_backward


def gradients_in_part(
    linear_backward: Gradients,
    dy: Tensor,
    x: Columns,
    w: Columns,
    slot: Slot,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of ``linear_backward`` where one or both of the products are not in FP8."""
    in_fp8 = [mat if mat.payload is not None and mat.payload.dtype == torch.uint8 else None for mat in (x, w)]
    if any(in_fp8):
        of_x, of_w = (mat or other._replace(payload=None) for mat, other in zip(in_fp8, (x, w), strict=True))
        dx, dw, db = linear_backward(dy, None, "none", of_x, of_w, slot, dx_dtype, dw_dtype, bias)
    else:
        # dy is not cast then, and no amax is recorded
        dx, dw = nothing(dy, dx_dtype), dy.new_empty(dy.shape[1], 0, dtype=dw_dtype)
        db = dy.sum(dim=0, dtype=torch.float32) if bias else nothing(dy, torch.float32)
    if w.payload is not None and in_fp8[1] is None:
        dx = torch.mm(dy, w.payload.t()).to(dx_dtype)
    if x.payload is not None and in_fp8[0] is None:
        dw = torch.mm(dy.t(), x.payload.t()).to(dw_dtype)
    return dx, dw, db


def gradient_layout(x: Columns, w: Columns) -> str:
    """The layout in which the gradient of the output is cast: dgrad takes it by rows, wgrad by columns."""
    return "rows" if x.payload is None else "columns" if w.payload is None else "both"
