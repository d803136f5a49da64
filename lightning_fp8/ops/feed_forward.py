"""The operators of linear - activation - linear: the only extra passes over the hidden tensor are casts, if any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.ops.activations import activated_width
from lightning_fp8.ops.basic import cast_operand, fprop
from lightning_fp8.ops.library import define, differentiable_in_layers, implement, is_k_major
from lightning_fp8.ops.linear_layer import in_rows, in_shape_of, linear_backward, refuse_double_backward
from lightning_fp8.ops.operand import Columns, Fp8Operand, Layer, Slot, columns_shape, nothing

# mlp: linear - activation - linear. x [*, K], weights [N', K] and [K', N]
#   -> (y [*, K'] and, for backward: h [M, N'], the first linear's output; a_fp8_t, the second's input by columns; its
#   scale_inv). N' is N, or 2 N for swiglu. The slots are those of a and of the gradients of h and y. Without `keep_a`
#   backward does not need a_fp8_t, which may then be empty; without `keep_h` it does not need h, which is then empty.
_MLP = define(
    "mlp(Tensor x, Layer first, Layer second, Fp8Operand x_fp8, Slot a, Slot dh, Slot dy, str activation, bool keep_a, "
    "bool keep_h, ScalarType out_dtype) -> (Tensor, Tensor, Tensor, Tensor)"
)
# mlp_backward: dy [M, K'] -> (dx [M, K], dw_1 [N', K], db_1 [N'] float32, dw_2 [K', N], db_2 [K'] float32),
#   both dw in the same dtype. As in linear_backward, what is not needed is empty: dx without the payload of w1, dw_1
#   without that of x, dw_2 without that of a, and each db that `biases` does not request.
_MLP_BACKWARD = define(
    "mlp_backward(Tensor dy, Tensor h, str activation, Columns x_fp8_t, Columns w1_fp8_t, Columns a_fp8_t, "
    "Columns w2_fp8_t, Slot dh_slot, Slot dy_slot, ScalarType dx_dtype, ScalarType dw_dtype, bool[] biases) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _mlp(
    x: Tensor,
    first: Layer,
    second: Layer,
    x_fp8: Fp8Operand,
    a: Slot,
    dh: Slot,
    dy: Slot,
    activation: str,
    keep_a: bool,
    keep_h: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = fprop(x_fp8, first.operand, first.bias_value, out_dtype, a.gemm)
    a_fp8 = cast_operand(h, a, activation, keep_a)
    # its memory may be reused for the output
    h = h if keep_h else nothing(h, out_dtype)
    y = fprop(a_fp8, second.operand, second.bias_value, out_dtype, a.gemm)
    return in_shape_of(x, y), h, a_fp8.columns, a_fp8.columns_scale_inv


def _mlp_fake(
    x: Tensor,
    first: Layer,
    second: Layer,
    x_fp8: Fp8Operand,
    a: Slot,
    dh: Slot,
    dy: Slot,
    activation: str,
    keep_a: bool,
    keep_h: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, m = first.weight.shape[0], math.prod(x.shape[:-1])
    h = x.new_empty((m, n) if keep_h else 0, dtype=out_dtype)
    a_fp8_t = columns_fake(x, activated_width(n, activation), keep_a)
    y = x.new_empty(*x.shape[:-1], second.weight.shape[0], dtype=out_dtype)
    return y, h, a_fp8_t, x.new_empty((), dtype=torch.float32)


def columns_fake(x: Tensor, width: int, keep: bool) -> Tensor:
    """A fake of the payload by columns kept from the second linear's input ``[M, width]``, for an x ``[*, K]``."""
    m = math.prod(x.shape[:-1])
    if not is_k_major(x):
        return x.new_empty(m, width, dtype=torch.uint8).t()
    return x.new_empty(columns_shape(m, width) if keep else 0, dtype=torch.uint8)


def _mlp_gradients(
    dy: Tensor,
    h: Tensor,
    activation: str,
    x: Columns,
    w1: Columns,
    a: Columns,
    w2: Columns,
    dh_slot: Slot,
    dy_slot: Slot,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    biases: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    da, dw_2, db_2 = linear_backward.run(dy, None, "none", a, w2, dy_slot, h.dtype, dw_dtype, biases[1])
    return *linear_backward.run(da, h, activation, x, w1, dh_slot, dx_dtype, dw_dtype, biases[0]), dw_2, db_2


def _mlp_gradients_fake(
    dy: Tensor,
    h: Tensor,
    activation: str,
    x: Columns,
    w1: Columns,
    a: Columns,
    w2: Columns,
    dh_slot: Slot,
    dy_slot: Slot,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    biases: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (m, n_1), n_2 = h.shape, dy.shape[1]
    dx = nothing(dy, dx_dtype) if w1.payload is None else dy.new_empty(m, w1.payload.shape[0], dtype=dx_dtype)
    dw_1 = dy.new_empty(n_1, 0 if x.payload is None else x.payload.shape[0], dtype=dw_dtype)
    dw_2 = dy.new_empty(n_2, 0 if a.payload is None else a.payload.shape[0], dtype=dw_dtype)
    db_1, db_2 = (dy.new_empty(n if bias else 0, dtype=torch.float32) for n, bias in zip((n_1, n_2), biases))
    return dx, dw_1, db_1, dw_2, db_2


mlp_backward = implement(_MLP_BACKWARD, _mlp_gradients, _mlp_gradients, _mlp_gradients_fake)


def _save_mlp_for_backward(
    ctx: Any,
    output: tuple[Tensor, Tensor, Tensor, Tensor],
    x: Tensor,
    first: Layer,
    second: Layer,
    x_fp8: Fp8Operand,
    a: Slot,
    dh: Slot,
    dy: Slot,
    activation: str,
    *_: Any,
) -> None:
    h, a_fp8_t, a_scale_inv = output[1:]
    needs_x, needs_1, needs_bias_1, needs_2, _ = ctx.needs
    needs_h = needs_x or needs_1 or needs_bias_1
    w1, w2 = first.operand, second.operand
    # The activation's gradient needs h, which is kept in 16 bits; all other operands are kept in FP8.
    ctx.save_for_backward(
        h if needs_h else None,
        *(x_fp8.columns if needs_1 else None, x_fp8.columns_scale_inv),
        *(w1.columns if needs_x else None, w1.columns_scale_inv),
        *(a_fp8_t if needs_2 else None, a_scale_inv),
        *(w2.columns if needs_h else None, w2.columns_scale_inv),
    )
    ctx.mark_non_differentiable(h, a_fp8_t, a_scale_inv)
    ctx.slots, ctx.formats = (dh, dy), (x_fp8.format, w1.format, a.format, w2.format)
    ctx.activation, ctx.shape, ctx.dtypes = activation, x.shape, dtypes_of(x, first, second)


def dtypes_of(x: Tensor, *layers: Layer) -> list[torch.dtype | None]:
    """The dtypes of x and of each weight and bias, which are also those of their gradients."""
    tensors = [x, *(one for layer in layers for one in layer[:2])]
    return [None if tensor is None else tensor.dtype for tensor in tensors]


def _mlp_backward(ctx: Any, dy: Tensor, *_: Any) -> list[Tensor | None]:
    if torch.is_grad_enabled():
        refuse_double_backward()
    h, *saved = ctx.saved_tensors
    x, w1, a, w2 = map(Columns, saved[::2], saved[1::2], ctx.formats)
    dtype, dtype_1, _, dtype_2, _ = ctx.dtypes
    biases = [ctx.needs[2], ctx.needs[4]]
    if h is None:
        dy_slot = ctx.slots[1]
        _, dw_2, db_2 = linear_backward(in_rows(dy), None, "none", a, w2, dy_slot, dtype, dtype_2, biases[1])
        return as_needed(ctx, None, None, None, dw_2, db_2)
    # the wider of the weights' two dtypes, so that a gradient in the narrower one is rounded only once
    dtypes = (dtype, torch.promote_types(dtype_1, dtype_2))
    operands = (x, w1, a, w2)
    return as_needed(ctx, *mlp_backward(in_rows(dy), h, ctx.activation, *operands, *ctx.slots, *dtypes, biases))


def as_needed(ctx: Any, dx: Tensor | None, *of_layers: Tensor | None) -> list[Tensor | None]:
    """The gradients that are asked for, in the shapes and dtypes that autograd expects."""
    if dx is not None and ctx.needs[0]:
        dx = dx.view(ctx.shape)
    found = zip((dx, *of_layers), ctx.needs, ctx.dtypes, strict=True)
    return [gradient.to(dtype) if needed and gradient is not None else None for gradient, needed, dtype in found]


mlp = differentiable_in_layers(_MLP, _mlp, _save_mlp_for_backward, _mlp_backward, _mlp_fake)
