"""Casts in blocks, each scaled by its own values, in torch's own operations on any device.

A block is 128 elements along a row of its payload, or a square of 128 x 128 of a weight; at the edges it is smaller. So
the payloads by rows and by columns of an input or gradient are two casts with different scales, while a weight is cast
once, and its scales by columns are the transpose of those by rows. Nothing here waits for a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.ops import reference
from lightning_fp8.ops.activations import activation_gradient
from lightning_fp8.ops.amaxes import BLOCK, by_element, per_row, power_of_2, record_amax, scale_of_current
from lightning_fp8.ops.backward import gradients_by
from lightning_fp8.ops.counting import count, is_counting
from lightning_fp8.ops.formats import FORMATS, Fp8Format
from lightning_fp8.ops.operand import (
    CurrentScale,
    Slot,
    WeightSlot,
    columns_shape,
    in_layout,
    new_payloads,
    nothing,
)
from lightning_fp8.ops.reference import row_chunks


def cast(x: Tensor, slot: Slot, layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::cast_blocks``."""
    fmt = FORMATS[slot.format]
    rows, scale_inv, largest = _cast(x, fmt, slot.current, x.shape[1]) if layout != "columns" else _no_cast(x)
    columns, columns_scale_inv, of_columns = (
        _cast(x.t(), fmt, slot.current, columns_shape(*x.shape)[1]) if layout != "rows" else _no_cast(x)
    )
    amax, _, _ = slot.open()
    if amax is not None:
        record_amax(amax, slot.index, largest if layout != "columns" else of_columns)
    count_if_asked(x, scale_inv, columns_scale_inv, slot, layout)
    return rows, columns, scale_inv, columns_scale_inv


def count_if_asked(x: Tensor, scale_inv: Tensor, columns_scale_inv: Tensor, slot: Slot, layout: str) -> None:
    """Count what this cast loses, if requested; in the payload by rows if both are made."""
    if is_counting(slot):
        inverse, x = (scale_inv, x) if layout != "columns" else (columns_scale_inv, x.t())
        count(x, scale_to_count(inverse.reciprocal(), x), slot)


def cast_weight(weight: Tensor, slot: WeightSlot, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::cast_weight_blocks``."""
    fmt, amax = FORMATS[slot.format], square_amaxes(weight)
    scale = block_scale(amax, fmt, slot.current)
    if slot.state is not None:
        largest = _largest(amax)
        slot.state.record_weight(slot.index, largest, block_scale(largest, fmt, slot.current))
    if is_counting(slot):
        count(weight, scale_to_count(scale, weight), slot)
    return (*in_layout(_payload(weight, per_row(scale, len(weight)), fmt, weight.shape[1]), layout), scale.reciprocal())


def cast_gradient(
    dy: Tensor, h: Tensor | None, activation: str, slot: Slot, layout: str, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The cast of dy, or of the gradient of h from it, and with ``bias`` its column sums, ``[N] float32``.

    It is in blocks if the slot's is; the weight may be in blocks or rows in any case.
    """
    dy = dy if h is None else activation_gradient(h, dy, activation)
    if slot.current.blocks:
        made = cast(dy, slot, layout)
    else:
        rows, columns, scale_inv = reference.cast(dy, slot, "none", layout)
        made = rows, columns, scale_inv, scale_inv
    return *made, dy.sum(dim=0, dtype=torch.float32) if bias else nothing(dy, torch.float32)


linear_backward = gradients_by(cast_gradient, reference.scaled_mm)


def square_amaxes(weight: Tensor) -> Tensor:
    """``max|w|`` of each 128 x 128 of a weight, ``[ceil(N/128), ceil(K/128)] float32``."""
    amax = _block_amax(weight)
    return F.pad(amax, (0, 0, 0, -len(amax) % BLOCK)).unflatten(0, (-1, BLOCK)).amax(1)


def block_scale(amax: Tensor, fmt: Fp8Format, current: CurrentScale) -> Tensor:
    """``FP8_MAX / amax`` of each block, or the power of two below it; 1 where ``amax`` is not finite."""
    scale = scale_of_current(amax, fmt)
    return scale if current.blocks == "float32" else power_of_2(scale)


def new_cast(x: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised results of the operator ``lightning_fp8::cast_blocks``."""
    scale_inv = _new_scales(x) if layout != "columns" else nothing(x, torch.float32)
    columns_scale_inv = _new_scales(x.t()) if layout != "rows" else nothing(x, torch.float32)
    return *new_payloads(x, x.shape, layout), scale_inv, columns_scale_inv


def new_weight_cast(weight: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised results of the operator ``lightning_fp8::cast_weight_blocks``."""
    squares = [-(-size // BLOCK) for size in weight.shape]
    return *new_payloads(weight, weight.shape, layout), weight.new_empty(squares, dtype=torch.float32)


def _new_scales(x: Tensor) -> Tensor:
    """``[rows, ceil(columns/128)]``, strides ``(1, rows)``: fastest to read for our GEMM, and what torch's takes."""
    rows, columns = x.shape
    return x.new_empty(-(-columns // BLOCK), rows, dtype=torch.float32).t()


def _cast(x: Tensor, fmt: Fp8Format, current: CurrentScale, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The payload by rows, zeros up to ``width``, its scale_inv ``[rows, ceil(columns/128)]``, and ``max|x|``."""
    amax = _block_amax(x)
    scale = block_scale(amax, fmt, current)
    return _payload(x, scale, fmt, width), torch.reciprocal(scale, out=_new_scales(x)), _largest(amax)


def _no_cast(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return nothing(x, torch.uint8), nothing(x, torch.float32), nothing(x, torch.float32)


def _largest(amax: Tensor) -> Tensor:
    return amax.amax() if amax.numel() else amax.new_zeros(())


def _block_amax(x: Tensor) -> Tensor:
    """``max|x|`` of each 128 elements of a row, ``[rows, ceil(columns/128)] float32``; NaN if any of them is NaN."""
    return torch.cat([_blocks(x[rows]).abs().amax(-1) for rows in _chunks(x)]).float()


def _payload(x: Tensor, scale: Tensor, fmt: Fp8Format, width: int) -> Tensor:
    """``x`` times the scale of its block in fp32, saturated and rounded to nearest even, ``[rows, width] uint8``."""
    payload = torch.empty(len(x), width, dtype=fmt.dtype, device=x.device)
    for rows in _chunks(x):
        values = (_blocks(x[rows]).float() * scale[rows, :, None]).clamp_(-fmt.max, fmt.max)
        payload[rows] = values.flatten(1)[:, :width]
    return payload.view(torch.uint8)


def _chunks(x: Tensor) -> list[slice]:
    """Slices of the rows that keep temporaries small on the CPU; one slice on a GPU, or if there are no rows."""
    return [slice(len(x))] if x.is_cuda or not len(x) else row_chunks(*x.shape)


def _blocks(x: Tensor) -> Tensor:
    """``[rows, columns]`` -> ``[rows, ceil(columns/128), 128]``, the last block of a row padded with zeros."""
    blocks = -(-x.shape[1] // BLOCK)
    return F.pad(x, (0, blocks * BLOCK - x.shape[1])).unflatten(1, (blocks, BLOCK))


def scale_to_count(scale: Tensor, x: Tensor) -> Tensor:
    """The scale of each element, reduced a little: a block's largest value is scaled to the format's maximum or, by
    rounding, just above it, and must not count as clipped.
    """
    return by_element(scale * (1 - 2**-20), x)
