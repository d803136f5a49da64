"""The operators of linear - activation - linear: casts are the only passes over the hidden tensor, if any."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.ops.activations import activated_width
from lightning_fp8.ops.basic import cast_operand, fprop
from lightning_fp8.ops.cuda import chained
from lightning_fp8.ops.library import define, differentiable, implement, is_k_major
from lightning_fp8.ops.linear_layer import in_rows, linear_backward, refuse_double_backward
from lightning_fp8.ops.operand import Columns, Fp8Operand, Slot, nothing

# mlp: linear - activation - linear. x [*, K], weight_1 [N', K], bias_1, weight_2 [K', N], bias_2
#   -> (y [*, K'] and, for backward, h [M, N'] the first linear's output, a_fp8_t [N, M] the second's input, its
#   scale_inv). N' is N, or 2 N for swiglu. bias_value_1 and bias_value_2 are what the biases add. The slots are those
#   of a and of the gradients of h and y. Without `keep_a` backward needs no a_fp8_t, which may be empty then; without
#   `keep_h` there is no backward, and h is empty.
_MLP = define(
    "mlp(Tensor x, Tensor weight_1, Tensor? bias_1, Tensor weight_2, Tensor? bias_2, Tensor? bias_value_1, "
    "Tensor? bias_value_2, Fp8Operand x_fp8, Fp8Operand w1_fp8, Fp8Operand w2_fp8, Slot a, Slot dh, Slot dy, "
    "str activation, bool keep_a, bool keep_h, ScalarType out_dtype) -> (Tensor, Tensor, Tensor, Tensor)"
)
# mlp_backward: dy [M, K'] -> (dx [M, K], dw_1 [N', K], db_1 [N'] float32, dw_2 [K', N], db_2 [K'] float32). As of
#   linear_backward: without the payload of w1 no dx, of x no dw_1, of a no dw_2, without `bias_1` and `bias_2` no sums:
#   empty tensors in their places. That of w2 is for the gradient of h, and None where none of the first three is asked
#   for.
_MLP_BACKWARD = define(
    "mlp_backward(Tensor dy, Tensor h, str activation, Columns x_fp8_t, Columns w1_fp8_t, Columns a_fp8_t, "
    "Columns w2_fp8_t, Slot dh_slot, Slot dy_slot, ScalarType dx_dtype, ScalarType dw_1_dtype, ScalarType dw_2_dtype, "
    "bool bias_1, bool bias_2) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _mlp(
    x: Tensor,
    weight_1: Tensor,
    bias_1: Tensor | None,
    weight_2: Tensor,
    bias_2: Tensor | None,
    bias_value_1: Tensor | None,
    bias_value_2: Tensor | None,
    x_fp8: Fp8Operand,
    w1_fp8: Fp8Operand,
    w2_fp8: Fp8Operand,
    a: Slot,
    dh: Slot,
    dy: Slot,
    activation: str,
    keep_a: bool,
    keep_h: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chain = None
    if is_k_major(x_fp8.rows):
        chain = chained.find(x_fp8.rows, w1_fp8.rows, x_fp8.format, out_dtype, False, activation, a)
    if chain is not None:
        h, a_fp8 = chained.hidden(chain, x_fp8, w1_fp8, bias_value_1, keep_a, keep_h, out_dtype)
    else:
        h = fprop(x_fp8, w1_fp8, bias_value_1, out_dtype, a.gemm)
        a_fp8 = cast_operand(h, a, activation, keep_a)
        # its memory may be reused for the output
        h = h if keep_h else nothing(h, out_dtype)
    y = fprop(a_fp8, w2_fp8, bias_value_2, out_dtype, a.gemm)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], len(weight_2)), h, a_fp8.columns, a_fp8.scale_inv


def _mlp_fake(
    x: Tensor,
    weight_1: Tensor,
    bias_1: Tensor | None,
    weight_2: Tensor,
    bias_2: Tensor | None,
    bias_value_1: Tensor | None,
    bias_value_2: Tensor | None,
    x_fp8: Fp8Operand,
    w1_fp8: Fp8Operand,
    w2_fp8: Fp8Operand,
    a: Slot,
    dh: Slot,
    dy: Slot,
    activation: str,
    keep_a: bool,
    keep_h: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width = activated_width(weight_1.shape[0], activation)
    m = math.prod(x.shape[:-1])
    h = x.new_empty((m, weight_1.shape[0]) if keep_h else 0, dtype=out_dtype)
    a_fp8_t = nothing(x, torch.uint8)
    if not is_k_major(x):
        a_fp8_t = x.new_empty(m, weight_2.shape[1], dtype=torch.uint8).t()
    elif keep_a:
        a_fp8_t = x.new_empty(width, m, dtype=torch.uint8)
    y = x.new_empty(*x.shape[:-1], weight_2.shape[0], dtype=out_dtype)
    return y, h, a_fp8_t, x.new_empty((), dtype=torch.float32)


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
    dw_1_dtype: torch.dtype,
    dw_2_dtype: torch.dtype,
    bias_1: bool,
    bias_2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if w2.payload is not None and is_k_major(dy):
        chain = chained.find(dy, w2.payload, dy_slot.format, h.dtype, True, activation, dh_slot)
        if chain is not None:
            dtypes = (dx_dtype, dw_1_dtype, dw_2_dtype)
            return chained.gradients(chain, dy, h, x, w1, a, w2, dy_slot, dtypes, bias_1, bias_2)
    da, dw_2, db_2 = linear_backward.run(dy, None, "none", a, w2, dy_slot, h.dtype, dw_2_dtype, bias_2)
    if w2.payload is not None:
        return *linear_backward.run(da, h, activation, x, w1, dh_slot, dx_dtype, dw_1_dtype, bias_1), dw_2, db_2
    dw_1 = dy.new_empty(h.shape[1], 0, dtype=dw_1_dtype)
    return nothing(dy, dx_dtype), dw_1, nothing(dy, torch.float32), dw_2, db_2


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
    dw_1_dtype: torch.dtype,
    dw_2_dtype: torch.dtype,
    bias_1: bool,
    bias_2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (m, n_1), n_2 = h.shape, dy.shape[1]
    dx = nothing(dy, dx_dtype) if w1.payload is None else dy.new_empty(m, w1.payload.shape[0], dtype=dx_dtype)
    dw_1 = dy.new_empty(n_1, 0 if x.payload is None else x.payload.shape[0], dtype=dw_1_dtype)
    dw_2 = dy.new_empty(n_2, 0 if a.payload is None else a.payload.shape[0], dtype=dw_2_dtype)
    db_1, db_2 = (dy.new_empty(n if bias else 0, dtype=torch.float32) for n, bias in ((n_1, bias_1), (n_2, bias_2)))
    return dx, dw_1, db_1, dw_2, db_2


mlp_backward = implement(_MLP_BACKWARD, _mlp_gradients, _mlp_gradients, _mlp_gradients_fake)


def _save_mlp_for_backward(
    ctx: Any,
    output: tuple[Tensor, Tensor, Tensor, Tensor],
    x: Tensor,
    weight_1: Tensor,
    bias_1: Tensor | None,
    weight_2: Tensor,
    bias_2: Tensor | None,
    bias_value_1: Tensor | None,
    bias_value_2: Tensor | None,
    x_fp8: Fp8Operand,
    w1_fp8: Fp8Operand,
    w2_fp8: Fp8Operand,
    a: Slot,
    dh: Slot,
    dy: Slot,
    activation: str,
    *_: Any,
) -> None:
    h, a_fp8_t, a_scale_inv = output[1:]
    needs_x, needs_1, needs_bias_1, needs_2 = ctx.needs_input_grad[:4]
    # The activation's gradient is taken at h, in 16 bits; all other operands are kept in FP8.
    ctx.save_for_backward(
        h,
        *(x_fp8.columns if needs_1 else None, x_fp8.scale_inv),
        *(w1_fp8.columns if needs_x else None, w1_fp8.scale_inv),
        *(a_fp8_t if needs_2 else None, a_scale_inv),
        *(w2_fp8.columns if needs_x or needs_1 or needs_bias_1 else None, w2_fp8.scale_inv),
    )
    ctx.mark_non_differentiable(h, a_fp8_t, a_scale_inv)
    ctx.slots, ctx.formats = (dh, dy), (x_fp8.format, w1_fp8.format, a.format, w2_fp8.format)
    ctx.activation, ctx.shape = activation, x.shape
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, weight_1, bias_1, weight_2, bias_2)]


def _mlp_backward(ctx: Any, dy: Tensor, *_: Any) -> list[Tensor | None]:
    refuse_double_backward()
    h, *saved = ctx.saved_tensors
    needs = ctx.needs_input_grad[:5]
    x_dtype, dtype_1, bias_dtype_1, dtype_2, bias_dtype_2 = ctx.dtypes
    operands = map(Columns, saved[::2], saved[1::2], ctx.formats)
    dx, dw_1, db_1, dw_2, db_2 = mlp_backward(
        in_rows(dy), h, ctx.activation, *operands, *ctx.slots, x_dtype, dtype_1, dtype_2, needs[2], needs[4]
    )
    db_1, db_2 = (
        db.to(dtype) if needed else None
        for db, dtype, needed in ((db_1, bias_dtype_1, needs[2]), (db_2, bias_dtype_2, needs[4]))
    )
    gradients = (dx.view(ctx.shape) if needs[0] else None, dw_1, db_1, dw_2, db_2)
    return [gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)]


mlp = differentiable(_MLP, 5, _mlp, _save_mlp_for_backward, _mlp_backward, _mlp_fake)
