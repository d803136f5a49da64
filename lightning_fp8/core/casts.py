"""Casts, products and the update of the scales, as functions, and as operators for compilers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.core.operators import define, implement
from lightning_fp8.ops import amaxes
from lightning_fp8.ops.cuda import updates
from lightning_fp8.ops.library import is_watched, on_gpu
from lightning_fp8.scalings import products
from lightning_fp8.scalings.operand import Cast, Operand, Slot, Want

# cast: x [M, K] fp32, bf16 or fp16 -> codes by rows [M, K], codes by columns [K, M'], scale_inv of each. M' is M
#   rounded up to a multiple of 16, with zeros beyond M. Results are empty if they are not requested, are views, or
#   follow from another result: see `products.as_results`. If the slot records, the state's amax[index] becomes
#   max(amax[index], max|x|).
_CAST = define("cast(Tensor x, Slot slot, bool rows, bool columns) -> (Tensor, Tensor, Tensor, Tensor)")
# cast_weight: w [N, K] -> the same, scaled by its current values. The state stores its amax and scale.
_CAST_WEIGHT = define("cast_weight(Tensor w, Slot slot, bool rows, bool columns) -> (Tensor, Tensor, Tensor, Tensor)")
# scaled_mm: a [M, K], b [N, K], bias [N] or None -> [M, N] in out_dtype. K is the smaller K of both operands.
_SCALED_MM = define("scaled_mm(Operand a, Operand b, Tensor? bias, ScalarType out_dtype, bool fast) -> Tensor")
# update_scales: the end of an optimizer step for all R tensors. amax, scale, fp8_max [R] float32, amax_history [H, D]
#   float32, newest first, nonfinite_steps [R] int64. For the first D: where amax is finite and > 0 it is pushed into
#   the history, and scale = FP8_MAX / (m * margin_factor) with m the newest or the largest entry; amax is zeroed. For
#   all R: where amax is not finite, nonfinite_steps goes up.
_UPDATE_SCALES = define(
    "update_scales(Tensor(a!) amax, Tensor(b!) amax_history, Tensor(c!) scale, Tensor fp8_max, "
    "Tensor(d!) nonfinite_steps, bool most_recent, float margin_factor) -> ()"
)


def _cast(x: Tensor, slot: Slot, rows: bool, columns: bool) -> tuple[Tensor, ...]:
    return products.as_results(products.cast(x, slot, Want(rows, columns)), x)


def _cast_weight(w: Tensor, slot: Slot, rows: bool, columns: bool) -> tuple[Tensor, ...]:
    return products.as_results(products.cast_weight(w, slot, Want(rows, columns)), w)


def _cast_fake(x: Tensor, slot: Slot, rows: bool, columns: bool) -> tuple[Tensor, ...]:
    return products.as_results(products.fake_cast(x, x.shape, slot, Want(rows, columns)), x)


def _scaled_mm_fake(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, fast: bool) -> Tensor:
    return a.codes.new_empty((a.codes.shape[0], b.codes.shape[0]), dtype=dtype)


def _update_scales(amax: Tensor, *rest: Any) -> None:
    (updates.update_scales if on_gpu(amax) else amaxes.update_scales)(amax, *rest)


def _in_place_fake(*_: Any, **__: Any) -> None:
    pass


_cast_op = implement(_CAST, _cast, _cast_fake)
_cast_weight_op = implement(_CAST_WEIGHT, _cast_weight, _cast_fake)
scaled_mm = implement(_SCALED_MM, products.multiply, _scaled_mm_fake)
update_scales = implement(_UPDATE_SCALES, _update_scales, _in_place_fake)


def cast(x: Tensor, slot: Slot, want: Want, watched: bool = True) -> Cast:
    """The cast of x ``[M, K]`` for its products; ``watched`` is False if nothing watches operators."""
    if not (watched and is_watched(x)):
        return products.cast(x, slot, want)
    return _by_operators(_cast_op, x, slot, want)


def cast_weight(w: Tensor, slot: Slot, want: Want) -> Cast:
    """The cast of a weight ``[N, K]``, scaled by its current values."""
    if not is_watched(w):
        return products.cast_weight(w, slot, want)
    return _by_operators(_cast_weight_op, w, slot, want)


def _by_operators(operator: Any, x: Tensor, slot: Slot, want: Want) -> Cast:
    """One operator call for both layouts if they share a scaling, else one for each."""
    scaling = slot.scaling_of(want)
    if scaling is None:
        rows = _by_operators(operator, x, slot, want._replace(columns=False))
        columns = _by_operators(operator, x, slot, want._replace(rows=False))
        return Cast(rows.rows, columns.columns)
    return scaling.cast_by(operator.watched, x, slot, want)


def cast_weights(
    weights: Sequence[Tensor], slots: Sequence[Slot], out: Sequence[Cast | None], want: Want
) -> list[Cast]:
    """The casts of many weights, each scaled by its own values: together if the device has a kernel for that.

    Args:
        weights: ``[N, K]`` each, all on one device.
        slots: of one state, with the same scaling for both products.
        out: for each weight, a cast for a kernel to overwrite, or None for a new one. Without a kernel, all are new.
        want: the layouts of new casts.
    """
    if is_watched(weights[0]):
        return [cast_weight(weight, slot, want) for weight, slot in zip(weights, slots, strict=True)]
    return products.cast_weights(weights, slots, out, want)
