"""The operators of an FP8 linear layer, as ``torch.ops.lightning_fp8.*``: schema, fake, autograd, dispatch.

The three GEMMs, each with both operands K-major (``scaled_mm(a, b) = a @ b^T``):

    fprop  y [M, N]  = scaled_mm(x_fp8    [M, K], w_fp8   [N, K])
    dgrad  dx [M, K] = scaled_mm(dy_fp8   [M, N], w_fp8^T [K, N])
    wgrad  dw [N, K] = scaled_mm(dy_fp8^T [N, M], x_fp8^T [K, M])

An FP8 tensor travels as its ``uint8`` payload with the name of its format beside it: float8 inputs have no CPU kernels
behind torch's own operator checks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8.ops import cuda, reference

_LIBRARY = torch.library.Library("lightning_fp8", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def _define(schema: str) -> str:
    name = _LIBRARY.define(schema, tags=_TAGS)
    return f"lightning_fp8::{name.split('::')[-1].split('(')[0]}"


# cast: x [M, K] fp32, bf16 or fp16 -> (payload [M, K] uint8, scale_inv [] float32)
#   payload = sat(x * scale[index]) in fp32, rounded to nearest even; where amax_history[0, index] is 0 (no history yet)
#   with FP8_MAX / max|x| instead. `index` is [1] int64. `record_to` is the handle of the state whose amax[index]
#   becomes max(amax[index], max|x|), 0 for none.
_CAST = _define(
    "cast(Tensor x, Tensor scale, Tensor amax_history, Tensor index, str format, int record_to) -> (Tensor, Tensor)"
)
# scaled_mm: a [M, K] uint8, b [N, K] uint8, bias [N] or None -> [M, N] in out_dtype
_SCALED_MM = _define(
    "scaled_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, str a_format, str b_format, "
    "ScalarType out_dtype, bool fast_accumulation) -> Tensor"
)
# linear: fprop with the gradients of x [M, K], weight [N, K] and bias [N]. These three give the graph its edges and the
#   gradients their dtypes; what is computed with, and kept for backward, are their FP8 casts.
#   scale, amax_history, index, format, record_to: how backward casts the gradient of y, and where it records its amax.
_LINEAR = _define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor x_fp8, Tensor x_scale_inv, Tensor w_fp8, Tensor w_scale_inv, "
    "Tensor scale, Tensor amax_history, Tensor index, str format, int record_to, ScalarType out_dtype) "
    "-> Tensor"
)

# linear_backward: dy [M, N] -> (dx [M, K] from dgrad, dw [N, K] from wgrad, db [N] float32, the column sum of dy).
#   Without w_fp8 there is no dgrad, without x_fp8 no wgrad, without `bias` no sum: empty tensors in their places.
_LINEAR_BACKWARD = _define(
    "linear_backward(Tensor dy, Tensor? x_fp8, Tensor x_scale_inv, Tensor? w_fp8, Tensor w_scale_inv, Tensor scale, "
    "Tensor amax_history, Tensor index, str format, int record_to, ScalarType dx_dtype, ScalarType dw_dtype, "
    "bool bias) -> (Tensor, Tensor, Tensor)"
)

for _key, _implementation in (("CPU", reference), ("CUDA", cuda)):
    _LIBRARY.impl("cast", _implementation.cast, _key)
    _LIBRARY.impl("scaled_mm", _implementation.scaled_mm, _key)
    _LIBRARY.impl("linear_backward", _implementation.linear_backward, _key)

cast = torch.ops.lightning_fp8.cast.default
scaled_mm = torch.ops.lightning_fp8.scaled_mm.default
linear = torch.ops.lightning_fp8.linear.default
linear_backward = torch.ops.lightning_fp8.linear_backward.default


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_fp8: Tensor,
    x_scale_inv: Tensor,
    w_fp8: Tensor,
    w_scale_inv: Tensor,
    scale: Tensor,
    amax_history: Tensor,
    index: Tensor,
    format: str,
    record_to: int,
    out_dtype: torch.dtype,
) -> Tensor:
    return scaled_mm(x_fp8, w_fp8, x_scale_inv, w_scale_inv, bias, "e4m3", "e4m3", out_dtype, True)


_LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")


@torch.library.register_fake(_CAST, lib=_LIBRARY)
def _cast_fake(
    x: Tensor, scale: Tensor, amax_history: Tensor, index: Tensor, format: str, record_to: int
) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=torch.uint8, device=x.device), x.new_empty((), dtype=torch.float32)


@torch.library.register_fake(_SCALED_MM, lib=_LIBRARY)
def _scaled_mm_fake(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    a_format: str,
    b_format: str,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


@torch.library.register_fake(_LINEAR_BACKWARD, lib=_LIBRARY)
def _linear_backward_fake(
    dy: Tensor,
    x_fp8: Tensor | None,
    x_scale_inv: Tensor,
    w_fp8: Tensor | None,
    w_scale_inv: Tensor,
    scale: Tensor,
    amax_history: Tensor,
    index: Tensor,
    format: str,
    record_to: int,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    m, n = dy.shape
    dx = dy.new_empty(0) if w_fp8 is None else dy.new_empty(m, w_fp8.shape[1], dtype=dx_dtype)
    dw = dy.new_empty(n, 0 if x_fp8 is None else x_fp8.shape[1], dtype=dw_dtype)
    return dx, dw, dy.new_empty(n if bias else 0, dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, x_fp8, x_scale_inv, w_fp8, w_scale_inv = inputs[:7]
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    # One byte an element, and only what a gradient will be taken with.
    ctx.save_for_backward(x_fp8 if needs_weight else None, x_scale_inv, w_fp8 if needs_x else None, w_scale_inv)
    # The state's tensors change in place by design, which saved tensors may not: backward reads them as they are then.
    ctx.scale, ctx.amax_history, ctx.index, ctx.format, ctx.record_to = inputs[7:12]
    ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)


def _linear_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "lightning_fp8: gradients of gradients (`create_graph=True`) are not defined through an FP8 linear layer."
            " Leave the layers that need them in bf16 with `ignore_modules`."
        )
    x_fp8, x_scale_inv, w_fp8, w_scale_inv = ctx.saved_tensors
    x_dtype, weight_dtype, bias_dtype = ctx.dtypes
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    dx, dw, db = linear_backward(
        dy, x_fp8, x_scale_inv, w_fp8, w_scale_inv, ctx.scale, ctx.amax_history, ctx.index, ctx.format, ctx.record_to,
        x_dtype, weight_dtype, needs_bias,
    )  # fmt: skip
    return (
        dx if needs_x else None,
        dw if needs_weight else None,
        db.to(bias_dtype) if needs_bias else None,
        *(None,) * 10,
    )


torch.library.register_autograd(_LINEAR, _linear_backward, setup_context=_save_for_backward, lib=_LIBRARY)
