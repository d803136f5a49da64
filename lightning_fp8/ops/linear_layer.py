"""The operator of a linear layer: fprop, with dgrad, wgrad and the bias gradient behind it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.ops import cuda, reference
from lightning_fp8.ops.basic import scaled_mm
from lightning_fp8.ops.library import LIBRARY, define, differentiable, implement
from lightning_fp8.scaling import gemm_of

# linear: fprop with the gradients of x [*, K], weight [N, K] and bias [N] -> y [*, N]. These three give the graph its
#   edges and the gradients their shapes and dtypes; what is computed with, and kept for backward, are their FP8 casts,
#   x_fp8 [M, K] and so on.
#   bias_value is what the bias adds: itself, or rounded to out_dtype.
#   scale, amax_history, index, format, state, record: how backward casts the gradient of y, and where it records.
_LINEAR = define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? bias_value, Tensor x_fp8, Tensor x_fp8_t, "
    "Tensor x_scale_inv, Tensor w_fp8, Tensor w_fp8_t, Tensor w_scale_inv, Tensor scale, Tensor amax_history, "
    "Tensor index, str format, int state, bool record, ScalarType out_dtype) -> Tensor"
)
# linear_backward: dy [M, N] -> (dx [M, K] from dgrad, dw [N, K] from wgrad, db [N] float32, the column sum of dy).
#   Without w_fp8_t there is no dgrad, without x_fp8_t no wgrad, without `bias` no sum: empty tensors in their places.
#   With h [M, N], dy is the gradient of activation(h), and that of h takes its place.
_LINEAR_BACKWARD = define(
    "linear_backward(Tensor dy, Tensor? h, str activation, Tensor? x_fp8_t, Tensor x_scale_inv, Tensor? w_fp8_t, "
    "Tensor w_scale_inv, Tensor scale, Tensor amax_history, Tensor index, str format, int state, bool record, "
    "ScalarType dx_dtype, ScalarType dw_dtype, bool bias) -> (Tensor, Tensor, Tensor)"
)
linear_backward = implement("linear_backward", reference.linear_backward, cuda.linear_backward)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bias_value: Tensor | None,
    x_fp8: Tensor,
    x_fp8_t: Tensor,
    x_scale_inv: Tensor,
    w_fp8: Tensor,
    w_fp8_t: Tensor,
    w_scale_inv: Tensor,
    scale: Tensor,
    amax_history: Tensor,
    index: Tensor,
    format: str,
    state: int,
    record: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    y = scaled_mm.run(
        x_fp8, w_fp8, x_scale_inv, w_scale_inv, bias_value, "e4m3", "e4m3", out_dtype, True, gemm_of(state)
    )
    return y if x.dim() == 2 else y.view(*x.shape[:-1], len(weight))


@torch.library.register_fake(_LINEAR, lib=LIBRARY)
def _linear_fake(x: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=arguments[-1])


@torch.library.register_fake(_LINEAR_BACKWARD, lib=LIBRARY)
def _linear_backward_fake(
    dy: Tensor,
    h: Tensor | None,
    activation: str,
    x_fp8_t: Tensor | None,
    x_scale_inv: Tensor,
    w_fp8_t: Tensor | None,
    w_scale_inv: Tensor,
    scale: Tensor,
    amax_history: Tensor,
    index: Tensor,
    format: str,
    state: int,
    record: bool,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    m, n = dy.shape if h is None else h.shape
    dx = dy.new_empty(0, dtype=dx_dtype) if w_fp8_t is None else dy.new_empty(m, w_fp8_t.shape[0], dtype=dx_dtype)
    dw = dy.new_empty(n, 0 if x_fp8_t is None else x_fp8_t.shape[0], dtype=dw_dtype)
    return dx, dw, dy.new_empty(n if bias else 0, dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, _, _, x_fp8_t, x_scale_inv, _, w_fp8_t, w_scale_inv = inputs[:10]
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    # One byte an element, and only what a gradient will be taken with.
    ctx.save_for_backward(x_fp8_t if needs_weight else None, x_scale_inv, w_fp8_t if needs_x else None, w_scale_inv)
    # The state's tensors change in place by design, which saved tensors may not: backward reads them as they are then.
    ctx.scale, ctx.amax_history, *ctx.casting = inputs[10:16]
    ctx.shape = x.shape
    ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)


def _linear_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    refuse_double_backward()
    x_dtype, weight_dtype, bias_dtype = ctx.dtypes
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    dx, dw, db = linear_backward(
        in_rows(dy), None, "none", *ctx.saved_tensors, ctx.scale, ctx.amax_history, *ctx.casting, x_dtype, weight_dtype,
        needs_bias,
    )  # fmt: skip
    return (
        dx.view(ctx.shape) if needs_x else None,
        dw if needs_weight else None,
        db.to(bias_dtype) if needs_bias else None,
    )


def in_rows(x: Tensor) -> Tensor:
    """x ``[*, K]`` -> ``[M, K]``."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def refuse_double_backward() -> None:
    """Raise inside a backward that is itself to be differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "lightning_fp8: gradients of gradients (`create_graph=True`) are not defined through an FP8 linear layer."
            " Leave the layers that need them in bf16 with `ignore_modules`."
        )


linear = differentiable("linear", 3, _linear, _save_for_backward, _linear_backward)
