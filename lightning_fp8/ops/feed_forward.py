"""The operators of linear - activation - linear: no pass over the hidden tensor but the casts, or not even those."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.ops import chained
from lightning_fp8.ops.activations import activated_width
from lightning_fp8.ops.basic import cast_operand, scaled_mm
from lightning_fp8.ops.library import K_MAJOR_DEVICES, LIBRARY, Operator, define, differentiable
from lightning_fp8.ops.linear_layer import in_rows, linear_backward, refuse_double_backward
from lightning_fp8.scaling import gemm_of

# mlp: linear - activation - linear. x [*, K], weight_1 [N', K], bias_1, weight_2 [K', N], bias_2
#   -> (y [*, K'] and, for backward, h [M, N'] the first linear's output, a_fp8_t [N, M] the second's input, its
#   scale_inv). N' is N, or 2 N for swiglu. `a_index`, `dh_index` and `dy_index` say which tensors a and the gradients
#   of h and y are. Without `keep_a` backward needs no a_fp8_t, which may be empty then; without `keep_h` there is no
#   backward, and h is empty.
_MLP = define(
    "mlp(Tensor x, Tensor weight_1, Tensor? bias_1, Tensor weight_2, Tensor? bias_2, Tensor x_fp8, Tensor x_fp8_t, "
    "Tensor x_scale_inv, Tensor w1_fp8, Tensor w1_fp8_t, Tensor w1_scale_inv, Tensor w2_fp8, Tensor w2_fp8_t, "
    "Tensor w2_scale_inv, Tensor scale, Tensor amax_history, Tensor a_index, Tensor dh_index, Tensor dy_index, "
    "str activation, str a_format, str format, int state, bool record, bool keep_a, bool keep_h, ScalarType out_dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
# mlp_backward: dy [M, K'] -> (dx [M, K], dw_1 [N', K], db_1 [N'] float32, dw_2 [K', N], db_2 [K'] float32). As of
#   linear_backward: without w1_fp8_t no dx, without x_fp8_t no dw_1, without a_fp8_t no dw_2, without `bias_1` and
#   `bias_2` no sums: empty tensors in their places. w2_fp8_t is for the gradient of h, and None where none of the first
#   three is asked for.
_MLP_BACKWARD = define(
    "mlp_backward(Tensor dy, Tensor h, str activation, Tensor? x_fp8_t, Tensor x_scale_inv, Tensor? w1_fp8_t, "
    "Tensor w1_scale_inv, Tensor? a_fp8_t, Tensor a_scale_inv, Tensor? w2_fp8_t, Tensor w2_scale_inv, Tensor scale, "
    "Tensor amax_history, Tensor dh_index, Tensor dy_index, str format, int state, bool record, ScalarType dx_dtype, "
    "ScalarType dw_1_dtype, ScalarType dw_2_dtype, bool bias_1, bool bias_2) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _mlp(
    x: Tensor,
    weight_1: Tensor,
    bias_1: Tensor | None,
    weight_2: Tensor,
    bias_2: Tensor | None,
    x_fp8: Tensor,
    x_fp8_t: Tensor,
    x_scale_inv: Tensor,
    w1_fp8: Tensor,
    w1_fp8_t: Tensor,
    w1_scale_inv: Tensor,
    w2_fp8: Tensor,
    w2_fp8_t: Tensor,
    w2_scale_inv: Tensor,
    scale: Tensor,
    amax_history: Tensor,
    a_index: Tensor,
    dh_index: Tensor,
    dy_index: Tensor,
    activation: str,
    a_format: str,
    format: str,
    state: int,
    record: bool,
    keep_a: bool,
    keep_h: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gemm = gemm_of(state)
    operands = (x_fp8, w1_fp8, x_scale_inv, w1_scale_inv, bias_1)
    arenas = (scale, amax_history)
    chain = None
    if x_fp8.device.type in K_MAJOR_DEVICES:
        chain = chained.find(
            x_fp8, w1_fp8, "e4m3", out_dtype, False, activation, *arenas, a_index, a_format, state, record
        )  # fmt: skip
    if chain is not None:
        h, a_fp8, a_fp8_t, a_scale_inv = chained.hidden(chain, *operands, keep_a, keep_h, out_dtype)
    else:
        h = scaled_mm.run(*operands, "e4m3", "e4m3", out_dtype, True, gemm)
        a_fp8, a_fp8_t, a_scale_inv = cast_operand(h, *arenas, a_index, a_format, activation, state, record, keep_a)
        # its memory may serve the output
        h = h if keep_h else h.new_empty(0)
    y = scaled_mm.run(a_fp8, w2_fp8, a_scale_inv, w2_scale_inv, bias_2, "e4m3", "e4m3", out_dtype, True, gemm)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], len(weight_2)), h, a_fp8_t, a_scale_inv


def _mlp_gradients(
    dy: Tensor,
    h: Tensor,
    activation: str,
    x_fp8_t: Tensor | None,
    x_scale_inv: Tensor,
    w1_fp8_t: Tensor | None,
    w1_scale_inv: Tensor,
    a_fp8_t: Tensor | None,
    a_scale_inv: Tensor,
    w2_fp8_t: Tensor | None,
    w2_scale_inv: Tensor,
    scale: Tensor,
    amax_history: Tensor,
    dh_index: Tensor,
    dy_index: Tensor,
    format: str,
    state: int,
    record: bool,
    dx_dtype: torch.dtype,
    dw_1_dtype: torch.dtype,
    dw_2_dtype: torch.dtype,
    bias_1: bool,
    bias_2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    first = (x_fp8_t, x_scale_inv, w1_fp8_t, w1_scale_inv)
    arenas = (scale, amax_history)
    if w2_fp8_t is None:
        _, dw_2, db_2 = linear_backward.run(
            dy, None, "none", a_fp8_t, a_scale_inv, None, w2_scale_inv, *arenas, dy_index, format, state, record,
            h.dtype, dw_2_dtype, bias_2,
        )  # fmt: skip
        dx, dw_1 = dy.new_empty(0, dtype=dx_dtype), dy.new_empty(h.shape[1], 0, dtype=dw_1_dtype)
        return dx, dw_1, dy.new_empty(0, dtype=torch.float32), dw_2, db_2
    second = (a_fp8_t, a_scale_inv, w2_fp8_t, w2_scale_inv)
    chain = None
    if dy.device.type in K_MAJOR_DEVICES:
        chain = chained.find(
            dy, w2_fp8_t, format, h.dtype, True, activation, *arenas, dh_index, format, state, record
        )  # fmt: skip
    if chain is not None:
        return chained.gradients(
            chain, dy, h, *first, *second, *arenas, dy_index, format, state, record,
            dx_dtype, dw_1_dtype, dw_2_dtype, bias_1, bias_2,
        )  # fmt: skip
    da, dw_2, db_2 = linear_backward.run(
        dy, None, "none", *second, *arenas, dy_index, format, state, record, h.dtype, dw_2_dtype, bias_2
    )  # fmt: skip
    dx, dw_1, db_1 = linear_backward.run(
        da, h, activation, *first, *arenas, dh_index, format, state, record, dx_dtype, dw_1_dtype, bias_1
    )  # fmt: skip
    return dx, dw_1, db_1, dw_2, db_2


LIBRARY.impl("mlp_backward", _mlp_gradients, "CompositeExplicitAutograd")
mlp_backward = Operator(torch.ops.lightning_fp8.mlp_backward.default, _mlp_gradients, _mlp_gradients)


@torch.library.register_fake(_MLP, lib=LIBRARY)
def _mlp_fake(
    x: Tensor, weight_1: Tensor, bias_1: Tensor | None, weight_2: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    activation, keep_a, keep_h, out_dtype = rest[-8], *rest[-3:]
    width = activated_width(weight_1.shape[0], activation)
    m = math.prod(x.shape[:-1])
    h = x.new_empty((m, weight_1.shape[0]) if keep_h else 0, dtype=out_dtype)
    a_fp8_t = x.new_empty(0, dtype=torch.uint8)
    if x.device.type not in K_MAJOR_DEVICES:
        a_fp8_t = x.new_empty(m, weight_2.shape[1], dtype=torch.uint8).t()
    elif keep_a:
        a_fp8_t = x.new_empty(width, m, dtype=torch.uint8)
    y = x.new_empty(*x.shape[:-1], weight_2.shape[0], dtype=out_dtype)
    return y, h, a_fp8_t, x.new_empty((), dtype=torch.float32)


@torch.library.register_fake(_MLP_BACKWARD, lib=LIBRARY)
def _mlp_gradients_fake(
    dy: Tensor,
    h: Tensor,
    activation: str,
    x_fp8_t: Tensor | None,
    x_scale_inv: Tensor,
    w1_fp8_t: Tensor | None,
    w1_scale_inv: Tensor,
    a_fp8_t: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx_dtype, dw_1_dtype, dw_2_dtype, bias_1, bias_2 = rest[-5:]
    (m, n_1), n_2 = h.shape, dy.shape[1]
    dx = dy.new_empty(0, dtype=dx_dtype) if w1_fp8_t is None else dy.new_empty(m, w1_fp8_t.shape[0], dtype=dx_dtype)
    dw_1 = dy.new_empty(n_1, 0 if x_fp8_t is None else x_fp8_t.shape[0], dtype=dw_1_dtype)
    dw_2 = dy.new_empty(n_2, 0 if a_fp8_t is None else a_fp8_t.shape[0], dtype=dw_2_dtype)
    db_1, db_2 = (dy.new_empty(n if bias else 0, dtype=torch.float32) for n, bias in ((n_1, bias_1), (n_2, bias_2)))
    return dx, dw_1, db_1, dw_2, db_2


def _save_mlp_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight_1, bias_1, weight_2, bias_2, _, x_fp8_t, x_scale_inv, _, w1_fp8_t, w1_scale_inv = inputs[:11]
    w2_fp8_t, w2_scale_inv = inputs[12:14]
    _, h, a_fp8_t, a_scale_inv = output
    needs_x, needs_1, needs_bias_1, needs_2 = ctx.needs_input_grad[:4]
    # The activation's gradient is taken at h, in 16 bits; all other operands are kept in FP8.
    ctx.save_for_backward(
        h,
        x_fp8_t if needs_1 else None,
        x_scale_inv,
        w1_fp8_t if needs_x else None,
        w1_scale_inv,
        a_fp8_t if needs_2 else None,
        a_scale_inv,
        w2_fp8_t if needs_x or needs_1 or needs_bias_1 else None,
        w2_scale_inv,
    )
    ctx.mark_non_differentiable(h, a_fp8_t, a_scale_inv)
    ctx.scale, ctx.amax_history, _, ctx.dh_index, ctx.dy_index, ctx.activation, _, *ctx.casting = inputs[14:24]
    ctx.shape = x.shape
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, weight_1, bias_1, weight_2, bias_2)]


def _mlp_backward(ctx: Any, dy: Tensor, *_: Any) -> list[Tensor | None]:
    refuse_double_backward()
    h, *operands = ctx.saved_tensors
    needs = ctx.needs_input_grad[:5]
    x_dtype, dtype_1, bias_dtype_1, dtype_2, bias_dtype_2 = ctx.dtypes
    dx, dw_1, db_1, dw_2, db_2 = mlp_backward(
        in_rows(dy), h, ctx.activation, *operands, ctx.scale, ctx.amax_history, ctx.dh_index, ctx.dy_index,
        *ctx.casting, x_dtype, dtype_1, dtype_2, needs[2], needs[4],
    )  # fmt: skip
    db_1, db_2 = (
        db.to(dtype) if needed else None
        for db, dtype, needed in ((db_1, bias_dtype_1, needs[2]), (db_2, bias_dtype_2, needs[4]))
    )
    gradients = (dx.view(ctx.shape) if needs[0] else None, dw_1, db_1, dw_2, db_2)
    return [gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)]


mlp = differentiable("mlp", 5, _mlp, _save_mlp_for_backward, _mlp_backward)
