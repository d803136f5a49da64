"""Casts in blocks, each scaled by its own values, in torch's own operations on any device.

A block is 128 or 32 elements along a row of its payload, or a square of a weight; at the edges it is smaller. So the
payloads by rows and by columns of an input or gradient are two casts with different scales, while a weight in squares
is cast once, and its scales by columns are the transpose of those by rows. Nothing here waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.ops import e8m0, reference
from lightning_fp8.ops.activations import activate, activation_gradient
from lightning_fp8.ops.amaxes import BLOCK, by_element, per_block, per_row, power_of_2, record_amax, scale_of_current
from lightning_fp8.ops.backward import gradients_by
from lightning_fp8.ops.counting import count, is_counting, note_exponents
from lightning_fp8.ops.formats import FORMATS, Fp8Format
from lightning_fp8.ops.operand import (
    BLOCKS,
    CurrentScale,
    Slot,
    WeightSlot,
    columns_shape,
    in_layout,
    new_payloads,
    nothing,
)
from lightning_fp8.ops.reference import row_chunks


def cast(x: Tensor, slot: Slot, activation: str, layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::cast_blocks``."""
    x = activate(x, activation)
    *tensors, largest = _both(x, FORMATS[slot.format], slot.current, layout)
    rows, columns, scale_inv, columns_scale_inv = tensors
    amax, _ = slot.open()
    if amax is not None:
        record_amax(amax, slot.index, largest)
    count_if_asked(x, scale_inv, columns_scale_inv, slot, layout)
    return rows, columns, scale_inv, columns_scale_inv


def _both(
    x: Tensor, fmt: Fp8Format, current: CurrentScale, layout: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The payloads of a layout, each a cast of its own, the scale_inv of each, and ``max|x|``."""
    rows, scale_inv, largest = _cast(x, fmt, current, x.shape[1]) if layout != "columns" else _no_cast(x)
    columns, columns_scale_inv, of_columns = (
        _cast(x.t(), fmt, current, columns_shape(*x.shape)[1]) if layout != "rows" else _no_cast(x)
    )
    return rows, columns, scale_inv, columns_scale_inv, largest if layout != "columns" else of_columns


def count_if_asked(
    x: Tensor, scale_inv: Tensor, columns_scale_inv: Tensor, slot: Slot | WeightSlot, layout: str
) -> None:
    """Count what this cast loses, if requested, in the payload by rows if both are made; note the scales of both."""
    if is_counting(slot):
        by_rows, by_columns = (scale_inv, x), (columns_scale_inv, x.t())
        pairs = {"rows": [by_rows], "columns": [by_columns], "both": [by_rows, by_columns]}[layout]
        inverse, counted = pairs[0]
        count(counted, scale_to_count(inverse, counted), slot)
        for inverse, counted in pairs:
            note_exponents(per_block(inverse, counted), slot)


def cast_weight(weight: Tensor, slot: WeightSlot, layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::cast_weight_blocks``."""
    fmt, block = FORMATS[slot.format], BLOCKS[slot.current.blocks]
    if block.squares:
        amax = square_amaxes(weight, block.size)
        scale, scale_inv = block_scale(amax, fmt, slot.current)
        largest = _largest(amax)
        scale = scale if len(scale) == len(weight) else scale.repeat_interleave(block.size, 0)[: len(weight)]
        by_rows = _payload(weight, scale, fmt, block.size, weight.shape[1])
        rows, columns = in_layout(by_rows, layout)
        columns_scale_inv = nothing(weight, torch.float32)
        if slot.current.in_e8m0:
            codes, none = scale_inv, columns_scale_inv
            scale_inv = e8m0.squares_to_tiles(codes) if layout != "columns" else none
            columns_scale_inv = e8m0.squares_to_tiles(codes.t()) if layout != "rows" else none
    else:
        rows, columns, scale_inv, columns_scale_inv, largest = _both(weight, fmt, slot.current, layout)
    if slot.state is not None:
        slot.state.record_weight(slot.index, largest, block_scale(largest, fmt, slot.current)[0])
    # squares with scales in fp32 have the same ones in both payloads
    count_if_asked(weight, scale_inv, columns_scale_inv, slot, layout if slot.current.in_e8m0 else "rows")
    return rows, columns, scale_inv, columns_scale_inv


def cast_gradient(
    dy: Tensor, h: Tensor | None, activation: str, slot: Slot, layout: str, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The cast of dy, or of the gradient of h from it, and with ``bias`` its column sums, ``[N] float32``.

    It is in blocks if the slot's is; the weight may be in blocks or rows in any case.
    """
    dy = dy if h is None else activation_gradient(h, dy, activation)
    if slot.current.blocks:
        tensors = cast(dy, slot, "none", layout)
    else:
        rows, columns, scale_inv = reference.cast(dy, slot, "none", layout)
        tensors = rows, columns, scale_inv, scale_inv
    return *tensors, dy.sum(dim=0, dtype=torch.float32) if bias else nothing(dy, torch.float32)


linear_backward = gradients_by(cast_gradient, reference.scaled_mm)


def square_amaxes(weight: Tensor, size: int = BLOCK) -> Tensor:
    """``max|w|`` of each square of a weight, ``[ceil(N/size), ceil(K/size)] float32``."""
    amax = _block_amax(weight, size)
    return F.pad(amax, (0, 0, 0, -len(amax) % size)).unflatten(0, (-1, size)).amax(1)


def block_scale(amax: Tensor, fmt: Fp8Format, current: CurrentScale) -> tuple[Tensor, Tensor]:
    """``FP8_MAX / amax`` of each block, or a power of two of at most that, ``float32``; and scale_inv, or its codes.

    Where ``amax`` is not finite, a scale in fp32 is 1 and one in E8M0 NaN.
    """
    if current.in_e8m0:
        codes = e8m0.codes_of(amax, fmt)
        return e8m0.multipliers_of(codes), codes
    scale = scale_of_current(amax, fmt)
    scale = scale if current.blocks == "float32" else power_of_2(scale)
    return scale, scale.reciprocal()


def new_cast(
    like: Tensor, shape: Sequence[int], current: CurrentScale, layout: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised results of the operator ``lightning_fp8::cast_blocks`` for a tensor of this shape."""
    rows, columns = shape
    scale_inv = columns_scale_inv = nothing(like, torch.float32)
    if layout != "columns":
        scale_inv = _new_scales(like, rows, columns, current)
    if layout != "rows":
        columns_scale_inv = _new_scales(like, columns, rows, current)
    return *new_payloads(like, shape, layout), scale_inv, columns_scale_inv


def new_weight_cast(weight: Tensor, current: CurrentScale, layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised results of the operator ``lightning_fp8::cast_weight_blocks``."""
    if current.in_e8m0:
        return new_cast(weight, weight.shape, current, layout)
    squares = [-(-size // BLOCK) for size in weight.shape]
    scale_inv = weight.new_empty(squares, dtype=torch.float32)
    return *new_payloads(weight, weight.shape, layout), scale_inv, nothing(weight, torch.float32)


def _new_scales(like: Tensor, rows: int, columns: int, current: CurrentScale) -> Tensor:
    """``[rows, blocks of a row]``, strides ``(1, rows)``: fastest to read for our GEMM, and what torch's takes.

    Tiles, if they are in E8M0.
    """
    if current.in_e8m0:
        return like.new_empty(e8m0.size_of_tiles(rows, columns), dtype=torch.uint8)
    return like.new_empty(-(-columns // BLOCK), rows, dtype=torch.float32).t()


def _cast(x: Tensor, fmt: Fp8Format, current: CurrentScale, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The payload by rows, zeros up to ``width``, its scale_inv, see :func:`_new_scales`, and ``max|x|``."""
    size = BLOCKS[current.blocks].size
    amax = _block_amax(x, size)
    scale, scale_inv = block_scale(amax, fmt, current)
    stored = (
        e8m0.to_tiles(scale_inv) if current.in_e8m0 else _new_scales(x, len(x), x.shape[1], current).copy_(scale_inv)
    )
    return _payload(x, scale, fmt, size, width), stored, _largest(amax)


def _no_cast(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return nothing(x, torch.uint8), nothing(x, torch.float32), nothing(x, torch.float32)


def _largest(amax: Tensor) -> Tensor:
    return amax.amax() if amax.numel() else amax.new_zeros(())


def _block_amax(x: Tensor, size: int) -> Tensor:
    """``max|x|`` of each block of a row, ``[rows, ceil(columns/size)] float32``; NaN if any of its elements is NaN."""
    # in fp32 before autocast sees them: it joins no numbers in fp16 and bf16
    return torch.cat([_blocks(x[rows], size).abs().amax(-1).float() for rows in _chunks(x)])


def _payload(x: Tensor, scale: Tensor, fmt: Fp8Format, size: int, width: int) -> Tensor:
    """``x`` times the scale of its block in fp32, saturated and rounded to nearest even, ``[rows, width] uint8``.

    Codes beyond ``x`` are zeros, also where the scale is NaN.
    """
    payload, columns = torch.empty(len(x), width, dtype=fmt.dtype, device=x.device), x.shape[1]
    for rows in _chunks(x):
        values = (_blocks(x[rows], size).float() * scale[rows, :, None]).clamp_(-fmt.max, fmt.max)
        payload[rows, :columns] = values.flatten(1)[:, :columns]
    codes = payload.view(torch.uint8)
    if width > columns:
        codes[:, columns:] = 0
    return codes


def _chunks(x: Tensor) -> list[slice]:
    """Slices of the rows that keep temporaries small on the CPU; one slice on a GPU, or if there are no rows."""
    return [slice(len(x))] if x.is_cuda or not len(x) else row_chunks(*x.shape)


def _blocks(x: Tensor, size: int) -> Tensor:
    """``[rows, columns]`` -> ``[rows, ceil(columns/size), size]``, the last block of a row padded with zeros."""
    blocks = -(-x.shape[1] // size)
    return F.pad(x, (0, blocks * size - x.shape[1])).unflatten(1, (blocks, size))


def in_tiles(scale_inv: Tensor, payload: Tensor) -> Tensor:
    """Scales of blocks of 128, powers of two in fp32, as those of blocks of 32 in E8M0: the same scale of each element.

    scale_inv ``[M or ceil(M/128), ceil(K/128)]`` -> ``[*] uint8``, in the order of
    :func:`lightning_fp8.ops.e8m0.to_tiles`. Every power of two that such a cast may choose has a code.
    """
    codes = e8m0.codes_of_powers(per_row(scale_inv, payload.shape[0]))
    return e8m0.to_tiles(codes.repeat_interleave(BLOCK // e8m0.BLOCK, 1))


def scale_to_count(scale_inv: Tensor, x: Tensor) -> Tensor:
    """The scale of each element, reduced a little: a block's largest value is scaled to the format's maximum or, by
    rounding, just above it, and must not count as clipped.
    """
    return by_element(scale_inv, x).reciprocal() * (1 - 2**-20)
