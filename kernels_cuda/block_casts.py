"""The casts in blocks from the host's side: variants, the argument struct, grids. Maths: ``cast_blocks.cu``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels_cuda.casts import INPUTS, TENSORS, TILE_ROWS, aligned_loads, aligned_stores
from kernels_cuda.launch import Kernel, address

# elements along a row that share a scale; with `square`, over as many rows
BLOCK = 128
THREADS = 512
LAYOUT = f"{TENSORS}PPPPPPi4x"


def variant(input: torch.dtype, square: bool) -> tuple[str, ...]:
    """The definitions that make ``cast_blocks.cu`` one kernel: blocks of 1 x 128, or squares of 128 x 128."""
    return f"INPUT={INPUTS[input]}", f"SQUARE={int(square)}"


class Recorded(NamedTuple):
    """Where a cast records.

    Attributes:
        index: ``[1] int64``, which tensor of the state.
        amax: ``[R] float32``, raised to the maximum; for squares, set to the weight's amax.
        scale: ``[R] float32``, for squares only: set to what the whole weight's scale would be.
    """

    index: Tensor  # type: ignore[assignment]
    amax: Tensor
    scale: Tensor | None = None


def cast_blocks(
    kernel: Kernel,
    x: Tensor,
    recorded: Recorded | None,
    power_of_two: bool = False,
    y: Tensor | None = None,
    scale_inv: Tensor | None = None,
    y_t: Tensor | None = None,
    scale_inv_t: Tensor | None = None,
    column_sums: Tensor | None = None,
) -> None:
    """Launch the variant of 1 x 128 over x ``[rows, columns]``, elements of a row side by side.

    Args:
        kernel: of family ``cast_blocks``.
        x: fp32, bf16 or fp16, as the variant says; any distance between rows.
        recorded: where the amax goes, or None.
        power_of_two: whether scales are rounded down to powers of two.
        y: ``[rows, columns] uint8``, contiguous, written.
        scale_inv: ``[rows, ceil(columns/128)] float32``, strides ``(1, rows)``, written; needed with ``y``.
        y_t: ``[columns, rows rounded up to 16] uint8``, contiguous, written; zeros beyond ``rows``.
        scale_inv_t: ``[columns, ceil(rows/128)] float32``, strides ``(1, columns)``, written; needed with ``y_t``.
        column_sums: ``[column_sum_tiles(rows), columns] float32``, written.
    """
    _launch(kernel, x, (y, y_t, column_sums), (scale_inv, scale_inv_t), recorded, None, power_of_two)


def cast_squares(
    kernel: Kernel,
    weight: Tensor,
    recorded: Recorded | None,
    scale_inv: Tensor,
    power_of_two: bool = False,
    y: Tensor | None = None,
    y_t: Tensor | None = None,
) -> None:
    """Launch the variant of 128 x 128, which differs from :func:`cast_blocks` in the scales.

    Args:
        kernel: of family ``cast_blocks``, square.
        weight: ``[rows, columns]`` fp32, bf16 or fp16, as the variant says.
        recorded: where amax and scale of the whole weight go, or None.
        scale_inv: ``[ceil(rows/128), ceil(columns/128)] float32``, contiguous, written: the scales of ``y``, and
            transposed those of ``y_t``.
        power_of_two: whether scales are rounded down to powers of two.
        y: ``[rows, columns] uint8``, contiguous, written.
        y_t: ``[columns, rows rounded up to 16] uint8``, contiguous, written; zeros beyond ``rows``.
    """
    whole = None if recorded is None else torch.zeros(2, dtype=torch.int32, device=weight.device)
    _launch(kernel, weight, (y, y_t, None), (scale_inv, None), recorded, whole, power_of_two)


def _launch(
    kernel: Kernel,
    x: Tensor,
    outputs: tuple[Tensor | None, ...],
    scales: tuple[Tensor | None, ...],
    recorded: Recorded | None,
    whole: Tensor | None,
    power_of_two: bool,
) -> None:
    (rows, columns), x_at, stride = x.shape, x.data_ptr(), x.stride(0)
    outputs_at = [address(one) for one in outputs]
    aligned = aligned_loads(x_at, stride * x.element_size()) | aligned_stores(outputs_at[0], outputs_at[1], columns)
    recorded_at = [0, 0, 0] if recorded is None else [address(one) for one in recorded]
    kernel(
        -(-rows // TILE_ROWS) * -(-columns // BLOCK),
        x_at,
        0,
        *outputs_at,
        stride,
        0,
        rows,
        columns,
        aligned,
        *(address(one) for one in scales),
        *recorded_at,
        address(whole),
        int(power_of_two),
    )
