"""The operator of linear - activation - linear, with no pass over the hidden tensor but the casts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8.ops.activations import activated_width
from lightning_fp8.ops.basic import cast_operand, scaled_mm
from lightning_fp8.ops.library import K_MAJOR_DEVICES, LIBRARY, define
from lightning_fp8.ops.linear_layer import linear_backward, refuse_double_backward

# mlp: linear - activation - linear. x [M, K], weight_1 [N', K], bias_1, weight_2 [K', N], bias_2
#   -> (y [M, K'] and, for backward, h [M, N'] the first linear's output, a_fp8_t [N, M] the second's input, its
#   scale_inv). N' is N, or 2 N for swiglu. `a_index`, `dh_index` and `dy_index` say which tensors a and the gradients
#   of h and y are; without `keep` there is no backward, and a_fp8_t may be empty.
_MLP = define(
    "mlp(Tensor x, Tensor weight_1, Tensor? bias_1, Tensor weight_2, Tensor? bias_2, Tensor x_fp8, Tensor x_fp8_t, "
    "Tensor x_scale_inv, Tensor w1_fp8, Tensor w1_fp8_t, Tensor w1_scale_inv, Tensor w2_fp8, Tensor w2_fp8_t, "
    "Tensor w2_scale_inv, Tensor scale, Tensor amax_history, Tensor a_index, Tensor dh_index, Tensor dy_index, "
    "str activation, str a_format, str format, int state, bool record, bool keep, ScalarType out_dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
mlp = torch.ops.lightning_fp8.mlp.default


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
    keep: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = scaled_mm(x_fp8, w1_fp8, x_scale_inv, w1_scale_inv, bias_1, "e4m3", "e4m3", out_dtype, True)
    a_fp8, a_fp8_t, a_scale_inv = cast_operand(
        h, scale, amax_history, a_index, a_format, activation, state, record, keep
    )
    y = scaled_mm(a_fp8, w2_fp8, a_scale_inv, w2_scale_inv, bias_2, "e4m3", "e4m3", out_dtype, True)
    return y, h, a_fp8_t, a_scale_inv


LIBRARY.impl("mlp", _mlp, "CompositeExplicitAutograd")


@torch.library.register_fake(_MLP, lib=LIBRARY)
def _mlp_fake(
    x: Tensor, weight_1: Tensor, bias_1: Tensor | None, weight_2: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    activation, keep, out_dtype = rest[-7], rest[-2], rest[-1]
    h = x.new_empty(x.shape[0], weight_1.shape[0], dtype=out_dtype)
    a_fp8_t = x.new_empty(0, dtype=torch.uint8)
    if x.device.type not in K_MAJOR_DEVICES:
        a_fp8_t = x.new_empty(x.shape[0], weight_2.shape[1], dtype=torch.uint8).t()
    elif keep:
        a_fp8_t = x.new_empty(activated_width(h.shape[1], activation), x.shape[0], dtype=torch.uint8)
    y = x.new_empty(x.shape[0], weight_2.shape[0], dtype=out_dtype)
    return y, h, a_fp8_t, x.new_empty((), dtype=torch.float32)


def _save_mlp_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight_1, bias_1, weight_2, bias_2, _, x_fp8_t, x_scale_inv, _, w1_fp8_t, w1_scale_inv = inputs[:11]
    w2_fp8_t, w2_scale_inv = inputs[12:14]
    _, h, a_fp8_t, a_scale_inv = output
    needs_x, needs_1, _, needs_2 = ctx.needs_input_grad[:4]
    # The activation's gradient is taken at h, in 16 bits; all other operands are kept in FP8.
    ctx.save_for_backward(
        h,
        x_fp8_t if needs_1 else None,
        x_scale_inv,
        w1_fp8_t if needs_x else None,
        w1_scale_inv,
        a_fp8_t if needs_2 else None,
        a_scale_inv,
        w2_fp8_t,
        w2_scale_inv,
    )
    ctx.mark_non_differentiable(h, a_fp8_t, a_scale_inv)
    ctx.scale, ctx.amax_history, _, ctx.dh_index, ctx.dy_index, ctx.activation, _, *ctx.casting = inputs[14:24]
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, weight_1, bias_1, weight_2, bias_2)]


def _mlp_backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    refuse_double_backward()
    h, x_fp8_t, x_scale_inv, w1_fp8_t, w1_scale_inv, *second = ctx.saved_tensors
    needs = ctx.needs_input_grad[:5]
    x_dtype, dtype_1, bias_dtype_1, dtype_2, bias_dtype_2 = ctx.dtypes
    state = (ctx.scale, ctx.amax_history)
    da, dw_2, db_2 = linear_backward(
        dy, None, "none", *second, *state, ctx.dy_index, *ctx.casting, h.dtype, dtype_2, needs[4]
    )  # fmt: skip
    dx, dw_1, db_1 = linear_backward(
        da, h, ctx.activation, x_fp8_t, x_scale_inv, w1_fp8_t, w1_scale_inv, *state, ctx.dh_index, *ctx.casting,
        x_dtype, dtype_1, needs[2],
    )  # fmt: skip
    db_1, db_2 = (
        db.to(dtype) if needed else None
        for db, dtype, needed in ((db_1, bias_dtype_1, needs[2]), (db_2, bias_dtype_2, needs[4]))
    )
    gradients = (dx, dw_1, db_1, dw_2, db_2)
    return (*(gradient if needed else None for gradient, needed in zip(gradients, needs)), *(None,) * 21)


torch.library.register_autograd(_MLP, _mlp_backward, setup_context=_save_mlp_for_backward, lib=LIBRARY)
