"""The casts in blocks from the host's side: variants, argument structs, grids.

Maths: ``cast_blocks.cu``, ``cast_mx.cu`` and ``block_cast.cuh``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels_cuda.casts import INPUTS, SCALE_TILE, TENSORS, TILE_ROWS, activation_of, aligned
from kernels_cuda.launch import Kernel, address

# side length of a tile
BLOCK = 128
THREADS = 512
_LAYOUT = f"{TENSORS}PPPPq"
_GATED_LAYOUT = f"{_LAYOUT}PPPPi4xPPPP"


def variant(input: torch.dtype, activation: str = "none", backward: bool = False) -> tuple[str, ...]:
    """The definitions that make ``cast_blocks.cu`` or ``cast_mx.cu`` one kernel."""
    return (f"INPUT={INPUTS[input]}", activation_of(activation), f"BACKWARD={int(backward)}")


def layout(definitions: tuple[str, ...]) -> str:
    """The layout of a variant's argument struct."""
    return _GATED_LAYOUT if "GATED=1" in definitions else _LAYOUT


class Result(NamedTuple):
    """A cast of one tensor ``[rows, columns]``: where its amax is recorded, and its outputs, all written.

    Attributes:
        recorded: index ``[1] int64`` and amaxes ``[R] float32``, of which that one is raised to the maximum; or None.
        by_rows: payload ``[rows, columns] uint8``, row-contiguous, and scale_inv ``[rows, ceil(columns/128)] float32``,
            strides ``(1, rows)``; None if not requested.
        by_columns: payload ``[columns, rows rounded up to 16] uint8``, contiguous, zeros beyond ``rows``, and scale_inv
            ``[columns, ceil(rows/128)] float32``, strides ``(1, columns)``; or None.
        column_sums: ``[column_sum_tiles(rows), columns] float32``; or None.
        width: of the tensor of which this is a part, with outputs that are parts of its own; 0 for a whole tensor.

    Scales in E8M0 for each 1 x 32 are instead ``[*] uint8``, contiguous: 512 bytes for each 128 x 128 of the payload,
    also where it has fewer rows or columns, in the order that ``mx_tile.cuh`` describes.
    """

    recorded: tuple[Tensor, Tensor] | None
    by_rows: tuple[Tensor, Tensor] | None = None
    by_columns: tuple[Tensor, Tensor] | None = None
    column_sums: Tensor | None = None
    width: int = 0

    def half(self, which: int, width: int) -> Result:
        """The first or the second half of the columns of a tensor of this width, a multiple of 256."""
        by_rows, by_columns = self.by_rows, self.by_columns
        if by_rows is not None:
            payload, scales = by_rows
            # tiles are by rows, so those of a half are not side by side
            tiles = scales[which * width // 2 // BLOCK * SCALE_TILE :]
            by_rows = payload.chunk(2, 1)[which], scales.chunk(2, 1)[which] if scales.dim() == 2 else tiles
        if by_columns is not None:
            payload, scales = by_columns
            by_columns = payload.chunk(2)[which], scales.chunk(2)[which]
        sums = None if self.column_sums is None else self.column_sums.chunk(2, dim=1)[which]
        return Result(self.recorded, by_rows, by_columns, sums, width)


def cast(
    kernel: Kernel,
    x: Tensor,
    result: Result,
    dy: Tensor | None = None,
    gated: bool = False,
    power_of_two: bool = False,
) -> None:
    """Launch a variant of ``cast_blocks`` or ``cast_mx`` over x ``[rows, columns]``, elements of a row side by side.

    Args:
        kernel: of one of these families.
        x: fp32, bf16 or fp16, as the variant says; any distance between rows. For swiglu ``[gate | up]``, twice as wide
            as the outputs of a forward. A backward's gradients of both are one tensor, of a multiple of 256 columns.
        result: the outputs.
        dy: like the output of the activation, for variants with ``backward``.
        gated: whether the variant is swiglu.
        power_of_two: whether scales in fp32 are rounded down to powers of two.
    """
    if gated:
        gate, up = x.chunk(2, dim=1)
        width = x.shape[1]
        first, second = (result, None) if dy is None else (result.half(0, width), result.half(1, width))
        return cast_gated(kernel, gate, up, first, dy, second, power_of_two)
    kernel(_grid(x), *_tensors(x, dy, result), *_scales(result), int(power_of_two))


def cast_gated(
    kernel: Kernel,
    gate: Tensor,
    up: Tensor,
    result: Result,
    dy: Tensor | None = None,
    of_up: Result | None = None,
    power_of_two: bool = False,
) -> None:
    """Launch a gated variant over gate and up ``[rows, columns]``, with the same stride, such as halves of one tensor.

    Args:
        kernel: of one of these families, gated.
        gate: fp32, bf16 or fp16, as the variant says; any distance between rows.
        up: like the gate.
        result: for ``silu(gate) * up``; with ``dy``, for the gradient of the gate.
        dy: ``[rows, columns]`` like the gate, for variants with ``backward``.
        of_up: with ``dy``, for the gradient of up, with outputs like those of ``result``.
        power_of_two: as for :func:`cast`.
    """
    second = result if of_up is None else of_up
    more = up.data_ptr(), *_outputs(second), result.width or gate.shape[1], *_scales(second)
    kernel(_grid(gate), *_tensors(gate, dy, result, (up, second)), *_scales(result), int(power_of_two), *more)


def _grid(x: Tensor) -> int:
    return -(-x.shape[0] // TILE_ROWS) * -(-x.shape[1] // BLOCK)


def _tensors(
    x: Tensor, dy: Tensor | None, result: Result, other: tuple[Tensor, Result] | None = None
) -> tuple[int, ...]:
    """``struct Tensors``, aligned as all tensors of a launch are."""
    (rows, columns), x_at, stride = x.shape, x.data_ptr(), x.stride(0)
    dy_at, dy_stride = address(dy), 0 if dy is None else dy.stride(0)
    outputs = _outputs(result)
    all_at, payloads = x_at | dy_at, (outputs[0], outputs[1])
    if other is not None:
        all_at, of_up = all_at | other[0].data_ptr(), _outputs(other[1])
        payloads = payloads[0] | of_up[0], payloads[1] | of_up[1]
    flags = aligned(all_at, (stride | dy_stride) * x.element_size(), *payloads, result.width or columns)
    return x_at, dy_at, *outputs, stride, dy_stride, rows, columns, flags


def _outputs(result: Result) -> tuple[int, ...]:
    """``struct Outputs``."""
    payloads = (None if pair is None else pair[0] for pair in (result.by_rows, result.by_columns))
    return *map(address, payloads), address(result.column_sums)


def _scales(result: Result) -> tuple[int, ...]:
    """``struct Scales``."""
    scales = (None if pair is None else pair[1] for pair in (result.by_rows, result.by_columns))
    return *map(address, scales), *map(address, result.recorded or (None, None))
