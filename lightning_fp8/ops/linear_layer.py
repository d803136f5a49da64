"""The operator of a linear layer: fprop, with dgrad, wgrad and the bias gradient in its backward."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.ops import blocks, library, reference
from lightning_fp8.ops.backward import gradients_in_part
from lightning_fp8.ops.basic import scaled_mm
from lightning_fp8.ops.cuda import dispatch as cuda
from lightning_fp8.ops.library import Differentiable, define, direct_apply, implement, implement_differentiable
from lightning_fp8.ops.operand import Columns, Fp8Operand, Fp8Tensor, Slot, nothing

# linear: fprop, differentiable in x [*, K], weight [N, K] and bias [N] -> y [*, N]. These three define the edges of the
#   graph, and the shapes and dtypes of the gradients; the GEMMs use their FP8 casts, which are kept for backward, or
#   the tensors that replace payloads, see Fp8Operand. bias_value is the bias itself, or the bias rounded to out_dtype.
#   dy is the slot of the gradient of y.
_LINEAR = define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? bias_value, Fp8Operand x_fp8, Fp8Operand w_fp8, Slot dy, "
    "ScalarType out_dtype) -> Tensor"
)
# linear_backward: dy [M, N] -> (dx [M, K] from dgrad, dw [N, K] from wgrad, db [N] float32, the column sum of dy).
#   Without the payload of w there is no dgrad, without that of x no wgrad, without `bias` no sum: their results are
#   empty. If h [M, N] is given, dy is the gradient of activation(h), and the gradient of h is used in its place. Where
#   w has scales in E8M0 along K alone, dgrad multiplies dy, which is not cast for it, by the values of w in its dtype.
_LINEAR_BACKWARD = define(
    "linear_backward(Tensor dy, Tensor? h, str activation, Columns x_fp8_t, Columns w_fp8_t, Slot slot, "
    "ScalarType dx_dtype, ScalarType dw_dtype, bool bias) -> (Tensor, Tensor, Tensor)"
)


def _linear(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bias_value: Tensor | None,
    x_fp8: Fp8Operand,
    w_fp8: Fp8Operand,
    dy: Slot,
    out_dtype: torch.dtype,
) -> Tensor:
    """Without ``ctx`` inside the operator, which saves tensors for backward by itself."""
    if ctx is not None:
        ctx.set_materialize_grads(False)
        _save_for_backward(ctx, None, x, weight, bias, bias_value, x_fp8, w_fp8, dy, out_dtype)
    if x_fp8.by_rows.dtype != torch.uint8:
        bias_value = None if bias_value is None else bias_value.to(out_dtype)
        # in the shape of x, as the order of summation may depend on it
        return F.linear(x_fp8.by_rows.view(x.shape), w_fp8.by_rows, bias_value)
    a = Fp8Tensor(x_fp8.by_rows, x_fp8.scale_inv, x_fp8.format)
    b = Fp8Tensor(w_fp8.by_rows, w_fp8.scale_inv, w_fp8.format)
    multiply = scaled_mm.cuda if x.is_cuda or library.cuda_on_cpu else scaled_mm.cpu
    y: Tensor = multiply(a, b, bias_value, out_dtype, True)
    return y if x.dim() == 2 else in_shape_of(x, y)


def _linear_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bias_value: Tensor | None,
    x_fp8: Fp8Operand,
    w_fp8: Fp8Operand,
    dy: Slot,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=out_dtype)


def _linear_backward_fake(
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
    (m, n), x, w = dy.shape if h is None else h.shape, x_fp8_t.payload, w_fp8_t.payload
    dx = nothing(dy, dx_dtype) if w is None else dy.new_empty(m, w.shape[0], dtype=dx_dtype)
    dw = dy.new_empty(n, 0 if x is None else x.shape[0], dtype=dw_dtype)
    return dx, dw, dy.new_empty(n if bias else 0, dtype=torch.float32)


def _linear_backward_on_cpu(
    dy: Tensor, h: Tensor | None, activation: str, x: Columns, w: Columns, slot: Slot, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    implementation = blocks if slot.current.blocks or w.scale_inv.dim() else reference
    return implementation.linear_backward(dy, h, activation, x, w, slot, *rest)


linear_backward = implement(_LINEAR_BACKWARD, _linear_backward_on_cpu, cuda.linear_backward, _linear_backward_fake)


def _save_for_backward(
    ctx: Any,
    output: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bias_value: Tensor | None,
    x_fp8: Fp8Operand,
    w_fp8: Fp8Operand,
    dy: Slot,
    out_dtype: torch.dtype,
) -> None:
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    # one byte per element where the product is in FP8, and only what the gradients need
    ctx.save_for_backward(
        x_fp8.by_columns if needs_weight else None,
        x_fp8.columns_scale_inv,
        w_fp8.by_columns if needs_x else None,
        w_fp8.columns_scale_inv,
    )
    # The state's tensors change in place by design, which saved tensors must not: backward reads their current values.
    dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    ctx.rest = dy, x_fp8.format, w_fp8.format, x.shape, dtypes


def _linear_backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias, and None for the other arguments of :func:`_linear`."""
    if dy is None:
        return (None,) * 8
    if torch.is_grad_enabled():
        refuse_double_backward()
    x_t, x_scale_inv, w_t, w_scale_inv = ctx.saved_tensors
    slot, x_format, w_format, shape, (x_dtype, weight_dtype, bias_dtype) = ctx.rest
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    is_fp8 = (x_t is None or x_t.dtype == torch.uint8) and (w_t is None or w_t.dtype == torch.uint8)
    x, w = Columns(x_t, x_scale_inv, x_format), Columns(w_t, w_scale_inv, w_format)
    dy, rest = dy if dy.dim() == 2 else in_rows(dy), (x, w, slot, x_dtype, weight_dtype, needs_bias)
    dx, dw, db = linear_backward(dy, None, "none", *rest) if is_fp8 else gradients_in_part(linear_backward, dy, *rest)
    return (
        (dx if len(shape) == 2 else dx.view(shape)) if needs_x else None,
        dw if needs_weight else None,
        (db if db.dtype == bias_dtype else db.to(bias_dtype)) if needs_bias else None,
        None,
        None,
        None,
        None,
        None,
    )


def in_rows(x: Tensor) -> Tensor:
    """x ``[*, K]`` -> ``[M, K]``."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def in_shape_of(x: Tensor, y: Tensor) -> Tensor:
    """y ``[M, N]`` for an x ``[*, K]`` -> ``[*, N]``."""
    # no view, so that the result may be changed in place
    return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1]))  # type: ignore[no-any-return]


def refuse_double_backward() -> None:
    """For a backward that is itself differentiated.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "lightning_fp8: gradients of gradients (`create_graph=True`) are not defined through an FP8 linear layer."
        " Leave the layers that need them in bf16 with `ignore_modules`."
    )


class _Linear(Differentiable):
    """The operator where nothing watches operators."""

    forward = staticmethod(_linear)
    backward = staticmethod(_linear_backward)


linear = implement_differentiable(
    _LINEAR,
    (0, 1, 2),
    direct_apply(_Linear),
    functools.partial(_linear, None),
    _save_for_backward,
    _linear_backward,
    _linear_fake,
)
