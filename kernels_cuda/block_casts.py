"""The casts in blocks from the host's side: variants, argument structs, grids.

Maths: ``cast_blocks.cu`` and ``cast_mx.cu``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_cuda.casts import INPUTS, TENSORS, TILE_ROWS, aligned
from kernels_cuda.launch import Kernel, address

# side length of a tile
BLOCK = 128
THREADS = 512
MX_LAYOUT = f"{TENSORS}PPPP"
LAYOUT = f"{MX_LAYOUT}i4x"


def variant(input: torch.dtype) -> tuple[str, ...]:
    """The definitions that make ``cast_blocks.cu`` or ``cast_mx.cu`` one kernel."""
    return (f"INPUT={INPUTS[input]}",)


def cast_blocks(
    kernel: Kernel,
    x: Tensor,
    recorded: tuple[Tensor, Tensor] | None,
    power_of_two: bool = False,
    by_rows: tuple[Tensor, Tensor] | None = None,
    by_columns: tuple[Tensor, Tensor] | None = None,
    column_sums: Tensor | None = None,
) -> None:
    """Launch ``cast_blocks`` over x ``[rows, columns]``, elements of a row side by side.

    Args:
        kernel: of that family.
        x: fp32, bf16 or fp16, as the variant says; any distance between rows.
        recorded: index ``[1] int64`` and amaxes ``[R] float32``, of which that one is raised to the maximum; or None.
        power_of_two: whether scales are rounded down to powers of two.
        by_rows: payload ``[rows, columns] uint8``, contiguous, and scale_inv ``[rows, ceil(columns/128)] float32``,
            strides ``(1, rows)``; both written.
        by_columns: payload ``[columns, rows rounded up to 16] uint8``, contiguous, zeros beyond ``rows``, and scale_inv
            ``[columns, ceil(rows/128)] float32``, strides ``(1, columns)``; both written.
        column_sums: ``[column_sum_tiles(rows), columns] float32``, written.
    """
    _launch(kernel, x, recorded, by_rows, by_columns, column_sums, int(power_of_two))


def cast_mx(
    kernel: Kernel,
    x: Tensor,
    recorded: tuple[Tensor, Tensor] | None,
    by_rows: tuple[Tensor, Tensor] | None = None,
    by_columns: tuple[Tensor, Tensor] | None = None,
    column_sums: Tensor | None = None,
) -> None:
    """Launch ``cast_mx``; as :func:`cast_blocks`, but for scales in E8M0 for each 1 x 32.

    Those of a payload are ``[*] uint8``, contiguous: 512 bytes for each 128 x 128 of it, also where it has fewer rows
    or columns, in the order that ``mx_tile.cuh`` describes.
    """
    _launch(kernel, x, recorded, by_rows, by_columns, column_sums)


def _launch(
    kernel: Kernel,
    x: Tensor,
    recorded: tuple[Tensor, Tensor] | None,
    by_rows: tuple[Tensor, Tensor] | None,
    by_columns: tuple[Tensor, Tensor] | None,
    column_sums: Tensor | None,
    *rest: int,
) -> None:
    (rows, columns), x_at, stride = x.shape, x.data_ptr(), x.stride(0)
    (y, scale_inv), (y_t, scale_inv_t) = by_rows or (None, None), by_columns or (None, None)
    y_at, y_t_at = address(y), address(y_t)
    flags = aligned(x_at, stride * x.element_size(), y_at, y_t_at, columns)
    kernel(
        -(-rows // TILE_ROWS) * -(-columns // BLOCK),
        x_at,
        0,
        y_at,
        y_t_at,
        address(column_sums),
        stride,
        0,
        rows,
        columns,
        flags,
        address(scale_inv),
        address(scale_inv_t),
        *(address(one) for one in recorded or (None, None)),
        *rest,
    )
