"""The backward of one linear layer, from the casts and the products of any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
        layout = gradient_layout(x_fp8_t, w_fp8_t)
        rows, columns, scale_inv, columns_scale_inv, db = cast(dy, h, activation, slot, layout, bias)
        fmt, gemm = slot.format, slot.gemm
        if w_fp8_t.payload is None:
            dx = nothing(dy, dx_dtype)
        else:
            dx = product(Fp8Tensor(rows, scale_inv, fmt), w_fp8_t, None, dx_dtype, False, gemm)
        # a large tensor, whose memory may be reused for the next one
        del rows
        if x_fp8_t.payload is None:
            dw = dy.new_empty((dy if h is None else h).shape[1], 0, dtype=dw_dtype)
        else:
            dw = product(Fp8Tensor(columns, columns_scale_inv, fmt), x_fp8_t, None, dw_dtype, False, gemm)
        return dx, dw, db

    return linear_backward


def gradient_layout(x: Columns, w: Columns) -> str:
    """The layout in which the gradient of the output is cast: dgrad takes it by rows, wgrad by columns."""
    return "rows" if x.payload is None else "columns" if w.payload is None else "both"
