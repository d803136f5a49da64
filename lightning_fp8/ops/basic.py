"""Casts, the GEMM and the update of the scales: what the layers' operators are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8.ops import cuda, gemm, reference
from lightning_fp8.ops.activations import activated_width
from lightning_fp8.ops.library import K_MAJOR_DEVICES, LIBRARY, define, implement

# cast: x [M, K] fp32, bf16 or fp16 -> (payload [M, K] uint8, payload_t [K, M] uint8, scale_inv [] float32)
#   v = activation(x) in the dtype of x; payload = sat(v * scale[index]) in fp32, rounded to nearest even; where
#   amax_history[0, index] is 0 (no history yet) with FP8_MAX / max|v| instead. `index` is [1] int64. `layout` is
#   "rows", "columns" or "both" for the payloads that are made; the other is empty. `state` is the handle of the scaling
#   state, whose amax[index] becomes max(amax[index], max|v|) with `record`.
_CAST = define(
    "cast(Tensor x, Tensor scale, Tensor amax_history, Tensor index, str format, str activation, str layout, "
    "int state, bool record) -> (Tensor, Tensor, Tensor)"
)
# cast_weight: weight [N, K] -> as of `cast`, with the scale of what it holds, FP8_MAX / max|weight|. Amax and scale are
#   left in the state at `index`; `record` says whether what is lost counts, where somebody counts.
_CAST_WEIGHT = define(
    "cast_weight(Tensor weight, Tensor index, str format, str layout, int state, bool record) "
    "-> (Tensor, Tensor, Tensor)"
)
# scaled_mm: a [M, K] uint8, b [N, K] uint8, bias [N] or None -> [M, N] in out_dtype. The bias is rounded to out_dtype,
#   as autocast rounds it, then added in fp32 to the scaled sum, which is rounded once. Without `fast_accumulation`
#   partial sums are added up in fp32 at least every 128 along K. `gemm` says what may run it, see ops/gemm_choice.py.
_SCALED_MM = define(
    "scaled_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, str a_format, str b_format, "
    'ScalarType out_dtype, bool fast_accumulation, str gemm="auto") -> Tensor'
)
# scaled_mm_add_: out [M, N] += scaled_mm(a, b), added in fp32 and rounded once: gradients of several micro-batches
_SCALED_MM_ADD = define(
    "scaled_mm_add_(Tensor(a!) out, Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, str a_format, "
    'str b_format, bool fast_accumulation, str gemm="auto") -> ()'
)
# update_scales: the end of an optimizer step for all R tensors. amax, scale, fp8_max [R] float32, amax_history [H, D]
#   float32, newest first, nonfinite_steps [R] int64. Of the first D: where amax is finite and > 0 it is pushed into the
#   history, and scale = FP8_MAX / (m * margin_factor) with m the newest or the largest entry; amax is zeroed. Of all:
#   where amax is not finite, nonfinite_steps goes up.
_UPDATE_SCALES = define(
    "update_scales(Tensor(a!) amax, Tensor(b!) amax_history, Tensor(c!) scale, Tensor fp8_max, "
    "Tensor(d!) nonfinite_steps, bool most_recent, float margin_factor) -> ()"
)

cast = implement("cast", reference.cast, cuda.cast)
cast_weight = implement("cast_weight", reference.cast_weight, cuda.cast_weight)
scaled_mm = implement("scaled_mm", reference.scaled_mm, gemm.scaled_mm)
scaled_mm_add_ = implement("scaled_mm_add_", reference.scaled_mm_add_, gemm.scaled_mm_add_)
update_scales = implement("update_scales", reference.update_scales, cuda.update_scales)
cast_weights = cuda.cast_weights
measure_weights = cuda.measure_weights


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
    layout = _layout(x.device, keep)
    return _with_transposed(*cast(x, scale, amax_history, index, format, activation, layout, state, record))


def cast_weight_operand(
    weight: Tensor, index: Tensor, format: str, state: int, record: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`cast_weight` likewise."""
    return _with_transposed(*cast_weight(weight, index, format, _layout(weight.device, keep), state, record))


def _layout(device: torch.device, keep: bool) -> str:
    return "both" if keep and device.type in K_MAJOR_DEVICES else "rows"


def _with_transposed(payload: Tensor, payload_t: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return payload, payload_t if payload.device.type in K_MAJOR_DEVICES else payload.t(), scale_inv


def casts_weights_together(device: torch.device) -> bool:
    """Whether :func:`cast_weights` serves this device."""
    return device.type in K_MAJOR_DEVICES and cuda.weights_kernel(device) is not None


@torch.library.register_fake(_CAST, lib=LIBRARY)
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
    return _payloads_fake(x, activated_width(x.shape[1], activation), layout)


@torch.library.register_fake(_CAST_WEIGHT, lib=LIBRARY)
def _cast_weight_fake(
    weight: Tensor, index: Tensor, format: str, layout: str, state: int, record: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _payloads_fake(weight, weight.shape[1], layout)


def _payloads_fake(x: Tensor, columns: int, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    payload = x.new_empty((rows, columns) if layout != "columns" else 0, dtype=torch.uint8)
    payload_t = x.new_empty((columns, rows) if layout != "rows" else 0, dtype=torch.uint8)
    return payload, payload_t, x.new_empty((), dtype=torch.float32)


@torch.library.register_fake(_SCALED_MM, lib=LIBRARY)
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
    gemm: str = "auto",
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


@torch.library.register_fake(_SCALED_MM_ADD, lib=LIBRARY)
def _scaled_mm_add_fake(out: Tensor, *_: Any, **__: Any) -> None:
    pass
