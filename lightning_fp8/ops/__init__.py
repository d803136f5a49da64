"""The operators of an FP8 linear layer, as ``torch.ops.lightning_fp8.*``: schema, fake, autograd, dispatch.

The three GEMMs, each with both operands K-major (``scaled_mm(a, b) = a @ b^T``):

    fprop  y [M, N]  = scaled_mm(x_fp8    [M, K], w_fp8   [N, K])
    dgrad  dx [M, K] = scaled_mm(dy_fp8   [M, N], w_fp8_t [K, N])
    wgrad  dw [N, K] = scaled_mm(dy_fp8_t [N, M], x_fp8_t [K, M])

A transposed payload is one of its own on a GPU, whose FP8 GEMMs want both operands K-major, and a view on the CPU.
An FP8 tensor travels as its ``uint8`` payload with the name of its format beside it: float8 inputs have no CPU kernels
behind torch's own operator checks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8.ops import cuda, reference
from lightning_fp8.ops.activations import activated_width

_LIBRARY = torch.library.Library("lightning_fp8", "DEF")
# where FP8 GEMMs take K-major operands only, so that a transpose has to be a tensor of its own
_K_MAJOR_DEVICES = {"cuda"}
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def _define(schema: str) -> str:
    name = _LIBRARY.define(schema, tags=_TAGS)
    return f"lightning_fp8::{name.split('::')[-1].split('(')[0]}"


# cast: x [M, K] fp32, bf16 or fp16 -> (payload [M, K] uint8, payload_t [K, M] uint8, scale_inv [] float32)
#   v = activation(x) in the dtype of x; payload = sat(v * scale[index]) in fp32, rounded to nearest even; where
#   amax_history[0, index] is 0 (no history yet) with FP8_MAX / max|v| instead. `index` is [1] int64. `layout` is "rows",
#   "columns" or "both": which of the payloads are made, the other is empty. `state` is the handle of the scaling state;
#   with `record` its amax[index] becomes max(amax[index], max|v|).
_CAST = _define(
    "cast(Tensor x, Tensor scale, Tensor amax_history, Tensor index, str format, str activation, str layout, int state, "
    "bool record) -> (Tensor, Tensor, Tensor)"
)
# scaled_mm: a [M, K] uint8, b [N, K] uint8, bias [N] or None -> [M, N] in out_dtype
_SCALED_MM = _define(
    "scaled_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, str a_format, str b_format, "
    "ScalarType out_dtype, bool fast_accumulation) -> Tensor"
)
# linear: fprop with the gradients of x [M, K], weight [N, K] and bias [N]. These three give the graph its edges and the
#   gradients their dtypes; what is computed with, and kept for backward, are their FP8 casts.
#   scale, amax_history, index, format, state, record: how backward casts the gradient of y, and where it records.
_LINEAR = _define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor x_fp8, Tensor x_fp8_t, Tensor x_scale_inv, Tensor w_fp8, "
    "Tensor w_fp8_t, Tensor w_scale_inv, Tensor scale, Tensor amax_history, Tensor index, str format, int state, "
    "bool record, ScalarType out_dtype) -> Tensor"
)
# mlp: linear - activation - linear. x [M, K], weight_1 [N', K], bias_1, weight_2 [K', N], bias_2
#   -> (y [M, K'], h [M, N'] the first linear's output, a_fp8_t [N, M] the second's input and its scale_inv, for backward).
#   N' is N, or 2 N for swiglu. `a_index`, `dh_index` and `dy_index` are the tensors that a and the gradients of h and y
#   are; without `keep` there is no backward, and a_fp8_t may be empty.
_MLP = _define(
    "mlp(Tensor x, Tensor weight_1, Tensor? bias_1, Tensor weight_2, Tensor? bias_2, Tensor x_fp8, Tensor x_fp8_t, "
    "Tensor x_scale_inv, Tensor w1_fp8, Tensor w1_fp8_t, Tensor w1_scale_inv, Tensor w2_fp8, Tensor w2_fp8_t, "
    "Tensor w2_scale_inv, Tensor scale, Tensor amax_history, Tensor a_index, Tensor dh_index, Tensor dy_index, "
    "str activation, str a_format, str format, int state, bool record, bool keep, ScalarType out_dtype) -> (Tensor, Tensor, Tensor, Tensor)"
)
# linear_backward: dy [M, N] -> (dx [M, K] from dgrad, dw [N, K] from wgrad, db [N] float32, the column sum of dy).
#   Without w_fp8_t there is no dgrad, without x_fp8_t no wgrad, without `bias` no sum: empty tensors in their places.
#   With h [M, N], dy is the gradient of activation(h), and that of h takes its place.
_LINEAR_BACKWARD = _define(
    "linear_backward(Tensor dy, Tensor? h, str activation, Tensor? x_fp8_t, Tensor x_scale_inv, Tensor? w_fp8_t, "
    "Tensor w_scale_inv, Tensor scale, Tensor amax_history, Tensor index, str format, int state, bool record, "
    "ScalarType dx_dtype, ScalarType dw_dtype, bool bias) -> (Tensor, Tensor, Tensor)"
)
# update_scales: the end of an optimizer step for all R tensors. amax, scale, fp8_max [R] float32, amax_history [H, R]
#   float32, newest first, nonfinite_steps [R] int64. Where amax is finite and > 0 it is pushed into the history, and
#   scale = FP8_MAX / (m * margin_factor) with m the newest or the largest entry; where it is not finite,
#   nonfinite_steps goes up. amax is zeroed.
_UPDATE_SCALES = _define(
    "update_scales(Tensor(a!) amax, Tensor(b!) amax_history, Tensor(c!) scale, Tensor fp8_max, "
    "Tensor(d!) nonfinite_steps, bool most_recent, float margin_factor) -> ()"
)

for _key, _implementation in (("CPU", reference), ("CUDA", cuda)):
    _LIBRARY.impl("cast", _implementation.cast, _key)
    _LIBRARY.impl("scaled_mm", _implementation.scaled_mm, _key)
    _LIBRARY.impl("linear_backward", _implementation.linear_backward, _key)
    _LIBRARY.impl("update_scales", _implementation.update_scales, _key)

cast = torch.ops.lightning_fp8.cast.default
scaled_mm = torch.ops.lightning_fp8.scaled_mm.default
linear = torch.ops.lightning_fp8.linear.default
mlp = torch.ops.lightning_fp8.mlp.default
update_scales = torch.ops.lightning_fp8.update_scales.default
linear_backward = torch.ops.lightning_fp8.linear_backward.default


def cast_operand(
    x: Tensor,
    scale: Tensor,
    amax_history: Tensor,
    index: Tensor,
    format: str,
    activation: str,
    state: int,
    record: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`cast` for the GEMMs of the device x is on; by columns too if backward is to ``keep`` something of it."""
    k_major = x.device.type in _K_MAJOR_DEVICES
    layout = "both" if keep and k_major else "rows"
    payload, payload_t, scale_inv = cast(x, scale, amax_history, index, format, activation, layout, state, record)
    return payload, payload_t if k_major else payload.t(), scale_inv


def casts_weights_together(device: torch.device) -> bool:
    """Whether :func:`cast_weights` serves this device."""
    return device.type in _K_MAJOR_DEVICES and cuda.weights_kernel(device) is not None


cast_weights = cuda.cast_weights


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
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
    return scaled_mm(x_fp8, w_fp8, x_scale_inv, w_scale_inv, bias, "e4m3", "e4m3", out_dtype, True)


_LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")


@torch.library.register_fake(_CAST, lib=_LIBRARY)
def _cast_fake(
    x: Tensor,
    scale: Tensor,
    amax_history: Tensor,
    index: Tensor,
    format: str,
    activation: str,
    layout: str,
    state: int,
    record: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape[0], activated_width(x.shape[1], activation)
    payload = x.new_empty((rows, columns) if layout != "columns" else 0, dtype=torch.uint8)
    payload_t = x.new_empty((columns, rows) if layout != "rows" else 0, dtype=torch.uint8)
    return payload, payload_t, x.new_empty((), dtype=torch.float32)


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
    x, weight, bias, _, x_fp8_t, x_scale_inv, _, w_fp8_t, w_scale_inv = inputs[:9]
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    # One byte an element, and only what a gradient will be taken with.
    ctx.save_for_backward(x_fp8_t if needs_weight else None, x_scale_inv, w_fp8_t if needs_x else None, w_scale_inv)
    # The state's tensors change in place by design, which saved tensors may not: backward reads them as they are then.
    ctx.scale, ctx.amax_history, *ctx.casting = inputs[9:15]
    ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)


def _linear_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    _refuse_double_backward()
    x_dtype, weight_dtype, bias_dtype = ctx.dtypes
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    dx, dw, db = linear_backward(
        dy, None, "none", *ctx.saved_tensors, ctx.scale, ctx.amax_history, *ctx.casting, x_dtype, weight_dtype, needs_bias
    )  # fmt: skip
    return (
        dx if needs_x else None,
        dw if needs_weight else None,
        db.to(bias_dtype) if needs_bias else None,
        *(None,) * 13,
    )


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "lightning_fp8: gradients of gradients (`create_graph=True`) are not defined through an FP8 linear layer."
            " Leave the layers that need them in bf16 with `ignore_modules`."
        )


torch.library.register_autograd(_LINEAR, _linear_backward, setup_context=_save_for_backward, lib=_LIBRARY)


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


_LIBRARY.impl("mlp", _mlp, "CompositeExplicitAutograd")


@torch.library.register_fake(_MLP, lib=_LIBRARY)
def _mlp_fake(
    x: Tensor, weight_1: Tensor, bias_1: Tensor | None, weight_2: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    activation, keep, out_dtype = rest[-7], rest[-2], rest[-1]
    h = x.new_empty(x.shape[0], weight_1.shape[0], dtype=out_dtype)
    a_fp8_t = x.new_empty(0, dtype=torch.uint8)
    if x.device.type not in _K_MAJOR_DEVICES:
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
    _refuse_double_backward()
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
    gradients = (dx, dw_1, db_1.to(bias_dtype_1) if needs[2] else None, dw_2, db_2.to(bias_dtype_2) if needs[4] else None)
    return (*(gradient if needed else None for gradient, needed in zip(gradients, needs)), *(None,) * 21)


torch.library.register_autograd(_MLP, _mlp_backward, setup_context=_save_mlp_for_backward, lib=_LIBRARY)
