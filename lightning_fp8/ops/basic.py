"""Casts, the GEMM and the update of the scales: what the layers' operators are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8.ops import cuda, gemm, plain, reference
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
# record_amax: scale_inv [] float32 -> a copy of it; amax [] float32, known already, is recorded as `cast` would. The
#   copy is what goes on with, or a compiled graph would leave the recording out.
_RECORD_AMAX = define("record_amax(Tensor scale_inv, Tensor amax, Tensor index, int state, bool record) -> Tensor")
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
# update_scales: the end of an optimizer step for all R tensors. amax, scale, fp8_max [R] float32, amax_history [H, R]
#   float32, newest first, nonfinite_steps [R] int64. Where amax is finite and > 0 it is pushed into the history, and
#   scale = FP8_MAX / (m * margin_factor) with m the newest or the largest entry; where it is not finite,
#   nonfinite_steps goes up. amax is zeroed.
_UPDATE_SCALES = define(
    "update_scales(Tensor(a!) amax, Tensor(b!) amax_history, Tensor(c!) scale, Tensor fp8_max, "
    "Tensor(d!) nonfinite_steps, bool most_recent, float margin_factor) -> ()"
)

cast = implement("cast", reference.cast, cuda.cast)
scaled_mm = implement("scaled_mm", reference.scaled_mm, gemm.scaled_mm)
scaled_mm_add_ = implement("scaled_mm_add_", reference.scaled_mm_add_, gemm.scaled_mm_add_)
update_scales = implement("update_scales", reference.update_scales, cuda.update_scales)
cast_weights = cuda.cast_weights


def _record_amax(scale_inv: Tensor, amax: Tensor, index: Tensor, state: int, record: bool) -> Tensor:
    plain.record_amax(amax, index, state, record)
    return scale_inv.clone()


LIBRARY.impl("record_amax", _record_amax, "CompositeExplicitAutograd")
record_amax = torch.ops.lightning_fp8.record_amax.default


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
    k_major = x.device.type in K_MAJOR_DEVICES
    layout = "both" if keep and k_major else "rows"
    payload, payload_t, scale_inv = cast(x, scale, amax_history, index, format, activation, layout, state, record)
    return payload, payload_t if k_major else payload.t(), scale_inv


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
    rows, columns = x.shape[0], activated_width(x.shape[1], activation)
    payload = x.new_empty((rows, columns) if layout != "columns" else 0, dtype=torch.uint8)
    payload_t = x.new_empty((columns, rows) if layout != "rows" else 0, dtype=torch.uint8)
    return payload, payload_t, x.new_empty((), dtype=torch.float32)


@torch.library.register_fake(_RECORD_AMAX, lib=LIBRARY)
def _record_amax_fake(scale_inv: Tensor, amax: Tensor, index: Tensor, state: int, record: bool) -> Tensor:
    return torch.empty_like(scale_inv)


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
