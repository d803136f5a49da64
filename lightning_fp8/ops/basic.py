"""Casts, the GEMM and the update of the scales: the building blocks of the layers' operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.ops import amaxes, blocks, library, reference
from lightning_fp8.ops.activations import activated_width
from lightning_fp8.ops.cuda import dispatch as cuda
from lightning_fp8.ops.cuda import gemm
from lightning_fp8.ops.cuda.layouts import needs_transposed_payload
from lightning_fp8.ops.library import define, implement, is_watched, on_gpu
from lightning_fp8.ops.operand import Fp8Operand, Fp8Tensor, Slot, WeightSlot, new_payloads

# cast: x [M, K] fp32, bf16 or fp16 -> (payload [M, K] uint8, payload_t [K, M'] uint8, scale_inv [] float32)
#   v = activation(x) in the dtype of x; payload = sat(v * scale[index]) in fp32, rounded to nearest even. Where
#   amax_history[0, index] is 0 (no history yet), the scale is FP8_MAX / max|v| instead. `layout`, "rows", "columns" or
#   "both", selects the payloads to make; the other is empty. M' is M rounded up to a multiple of 16; codes beyond M are
#   zeros. If the slot records, the state's amax[index] becomes max(amax[index], max|v|).
_CAST = define("cast(Tensor x, Slot slot, str activation, str layout) -> (Tensor, Tensor, Tensor)")
# cast_weight: weight [N, K] -> the results of `cast`, with current scaling, FP8_MAX / max|weight|. Amax and scale are
#   stored in the state.
_CAST_WEIGHT = define("cast_weight(Tensor weight, WeightSlot slot, str layout) -> (Tensor, Tensor, Tensor)")
# cast_blocks: x [M, K] -> (payload [M, K] uint8, payload_t [K, M'] uint8, scale_inv [M, ceil(K/128)] float32 of
#   payload, scale_inv [K, ceil(M/128)] float32 of payload_t), of activation(x) as for `cast`. Every 128 elements of a
#   row of a payload, fewer at its end, have their own scale, FP8_MAX / amax or the power of two below it; 1 where amax
#   is not finite. Scales in E8M0 are for 32 elements, flat tiles of uint8, see ops/e8m0.py. `layout`, M' and recording
#   are as for `cast`.
_CAST_BLOCKS = define(
    "cast_blocks(Tensor x, Slot slot, str activation, str layout) -> (Tensor, Tensor, Tensor, Tensor)"
)
# cast_weight_blocks: weight [N, K] -> (payload, payload_t, scale_inv [ceil(N/128), ceil(K/128)] float32, empty). The
#   same for squares of 128 x 128; payload_t has the transposed scales. With scales in E8M0, for 1 x 32 or squares of
#   32 x 32, the results have the shapes of those of cast_blocks. The state gets the largest amax and its scale.
_CAST_WEIGHT_BLOCKS = define(
    "cast_weight_blocks(Tensor weight, WeightSlot slot, str layout) -> (Tensor, Tensor, Tensor, Tensor)"
)
# scaled_mm: a [M, K] uint8, b [N, K] uint8, bias [N] or None -> [M, N] in out_dtype. K is the shorter of the operands',
#   as one by columns has zeros at the end of its rows. The bias is rounded to out_dtype,
#   as autocast rounds it, then added in fp32 to the scaled sum, which is rounded once. Without `fast_accumulation`
#   partial sums are added up in fp32 at least every 128 along K. The shape of a scale_inv says what each scale is for,
#   see Fp8Tensor; ops/cuda/rule.py what computes the product. If both
#   operands are in blocks, partial sums of 128 along K are multiplied by their scales. With other scales than [] in
#   one or both, blocks are made of them where that is possible and there is such a product; else values are used.
_SCALED_MM = define(
    "scaled_mm(Fp8Tensor a, Fp8Tensor b, Tensor? bias, ScalarType out_dtype, bool fast_accumulation) -> Tensor",
    ("a", "b", "a_scale_inv", "b_scale_inv", "bias", "a_format", "b_format", "out_dtype", "fast_accumulation"),
)
# update_scales: the end of an optimizer step for all R tensors. amax, scale, fp8_max [R] float32, amax_history [H, D]
#   float32, newest first, nonfinite_steps [R] int64. For the first D: where amax is finite and > 0 it is pushed into
#   the history, and scale = FP8_MAX / (m * margin_factor) with m the newest or the largest entry; amax is zeroed. For
#   all R: where amax is not finite, nonfinite_steps goes up.
_UPDATE_SCALES = define(
    "update_scales(Tensor(a!) amax, Tensor(b!) amax_history, Tensor(c!) scale, Tensor fp8_max, "
    "Tensor(d!) nonfinite_steps, bool most_recent, float margin_factor) -> ()"
)


def _cast_fake(x: Tensor, slot: Slot, activation: str, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    columns = activated_width(x.shape[1], activation)
    return *new_payloads(x, (x.shape[0], columns), layout), x.new_empty((), dtype=torch.float32)


def _cast_weight_fake(weight: Tensor, slot: WeightSlot, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    return *new_payloads(weight, weight.shape, layout), weight.new_empty((), dtype=torch.float32)


def _cast_blocks_fake(x: Tensor, slot: Slot, activation: str, layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return blocks.new_cast(x, (x.shape[0], activated_width(x.shape[1], activation)), slot.current, layout)


def _cast_weight_blocks_fake(weight: Tensor, slot: WeightSlot, layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return blocks.new_weight_cast(weight, slot.current, layout)


def _scaled_mm_fake(
    a: Fp8Tensor,
    b: Fp8Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    return a.payload.new_empty((a.payload.shape[0], b.payload.shape[0]), dtype=out_dtype)


def _in_place_fake(*_: Any, **__: Any) -> None:
    pass


cast = implement(_CAST, reference.cast, cuda.cast, _cast_fake)
cast_weight = implement(_CAST_WEIGHT, reference.cast_weight, cuda.cast_weight, _cast_weight_fake)
cast_blocks = implement(_CAST_BLOCKS, blocks.cast, cuda.cast_blocks, _cast_blocks_fake)
cast_weight_blocks = implement(
    _CAST_WEIGHT_BLOCKS, blocks.cast_weight, cuda.cast_weight_blocks, _cast_weight_blocks_fake
)
scaled_mm = implement(_SCALED_MM, reference.scaled_mm, gemm.scaled_mm, _scaled_mm_fake)
update_scales = implement(_UPDATE_SCALES, amaxes.update_scales, cuda.update_scales, _in_place_fake)
measure_weights = cuda.measure_weights


def cast_operand(
    x: Tensor, slot: Slot, activation: str, keep: bool, by_rows: bool = True, watched: bool = True
) -> Fp8Operand:
    """:func:`cast` for the GEMMs on the device of ``x``; by columns too if backward needs that (``keep``).

    Without ``by_rows``, forward does not run in FP8 and the payload by rows may be empty. ``watched`` is False if the
    caller knows that nothing watches operators.
    """
    layout = "rows" if not keep else "both" if by_rows else "columns"
    if slot.current.blocks:
        tensors = cast_blocks(x, slot, activation, layout)
        return cuda.in_blocks(tensors, slot)
    is_on_gpu = x.is_cuda or library.cuda_on_cpu
    run = cast if watched else cast.cuda if is_on_gpu else cast.cpu
    if is_on_gpu and needs_transposed_payload(x.device, (x.shape[0], activated_width(x.shape[1], activation))):
        rows, columns, scale_inv = run(x, slot, activation, layout)
        return Fp8Operand(rows, columns, scale_inv, scale_inv, slot.format)
    rows, _, scale_inv = run(x, slot, activation, "rows")
    return Fp8Operand(rows, rows.t(), scale_inv, scale_inv, slot.format)


def cast_weight_operand(weight: Tensor, slot: WeightSlot, keep: bool) -> Fp8Operand:
    """The same for a weight, by :func:`cast_weight`."""
    current = slot.current
    is_separate = current.in_e8m0 or needs_transposed_payload(weight.device, weight.shape, bool(current.blocks))
    layout = "both" if keep and is_separate else "rows"
    if not slot.current.blocks:
        rows, columns, scale_inv = cast_weight(weight, slot, layout)
        columns_scale_inv = scale_inv
    else:
        rows, columns, scale_inv, columns_scale_inv = cast_weight_blocks(weight, slot, layout)
        columns_scale_inv = columns_scale_inv if slot.current.in_e8m0 else scale_inv.t()
    operand = Fp8Operand(rows, columns if is_separate else rows.t(), scale_inv, columns_scale_inv, slot.format)
    return cuda.as_multiplied(operand) if slot.current.blocks == "power of 2" else operand


def fprop(x: Fp8Operand, w: Fp8Operand, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``x @ w^T + bias`` inside an operator: x ``[M, K]``, w ``[N, K]`` -> ``[M, N]``."""
    operands = Fp8Tensor(x.by_rows, x.scale_inv, x.format), Fp8Tensor(w.by_rows, w.scale_inv, w.format)
    return scaled_mm.run(*operands, bias, out_dtype, True)  # type: ignore[no-any-return]


def cast_weights(
    weights: Sequence[Tensor], slots: Sequence[WeightSlot], out: Sequence[Fp8Operand | None], keep: bool = True
) -> list[Fp8Operand]:
    """The casts of many weights, each scaled by its own values: together if the device has a kernel for that.

    Args:
        weights: ``[N, K]`` each, all on one device.
        slots: of one state, with the same format and scaling.
        out: for each weight, an operand whose payloads a kernel writes; None for new ones. Without a kernel, all
            operands are new.
        keep: whether backward needs the new payloads by columns.
    """
    kernel = None
    if on_gpu(weights[0]) and not is_watched(weights[0]):
        kernel = cuda.kernel_for_weights(weights[0].device, slots[0].current)
    if kernel is None:
        return [cast_weight_operand(weight, slot, keep) for weight, slot in zip(weights, slots, strict=True)]
    return cuda.cast_weights(kernel, weights, slots, out, keep)
