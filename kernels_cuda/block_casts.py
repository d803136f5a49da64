"""The casts in blocks from the host's side: variants, the argument struct, grids. Maths: ``cast_blocks.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_cuda.casts import INPUTS, TENSORS, TILE_ROWS, aligned
from kernels_cuda.launch import Kernel, address

# elements along a row that share a scale
BLOCK = 128
THREADS = 512
LAYOUT = f"{TENSORS}PPPPi4x"


def variant(input: torch.dtype) -> tuple[str, ...]:
    """The definitions that make ``cast_blocks.cu`` one kernel."""
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
    """Launch the kernel over x ``[rows, columns]``, elements of a row side by side.

    Args:
        kernel: of family ``cast_blocks``.
        x: fp32, bf16 or fp16, as the variant says; any distance between rows.
        recorded: index ``[1] int64`` and amaxes ``[R] float32``, of which that one is raised to the maximum; or None.
        power_of_two: whether scales are rounded down to powers of two.
        by_rows: payload ``[rows, columns] uint8``, contiguous, and scale_inv ``[rows, ceil(columns/128)] float32``,
            strides ``(1, rows)``; both written.
        by_columns: payload ``[columns, rows rounded up to 16] uint8``, contiguous, zeros beyond ``rows``, and scale_inv
            ``[columns, ceil(rows/128)] float32``, strides ``(1, columns)``; both written.
        column_sums: ``[column_sum_tiles(rows), columns] float32``, written.
    """
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
        int(power_of_two),
    )
