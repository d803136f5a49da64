"""The cast kernels from the host's side: variants, argument structs, grids. Shapes and maths: ``cast_tile.cuh``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels_cuda.launch import Kernel, address

THREADS = 256
TILE_ROWS, TILE_COLUMNS = 128, 64
INPUTS = {torch.float32: "Fp32", torch.bfloat16: "Bf16", torch.float16: "Fp16"}
FORMATS = {"e4m3": "E4M3", "e5m2": "E5M2"}
ACTIVATIONS = {
    "none": "ACTIVATION=Identity",
    "relu": "ACTIVATION=Relu",
    "gelu": "ACTIVATION=Gelu",
    "gelu_tanh": "ACTIVATION=GeluTanh",
    "silu": "ACTIVATION=Silu",
    "swiglu": "GATED=1",
}
_LOADS, _ROWS, _COLUMNS = 1, 2, 4
# struct Tensors, and struct Arguments of either family
_TENSORS = "PPPPPqqiii4x"
CAST_TRANSPOSE_LAYOUT = f"{_TENSORS}PPPPPPi"
CAST_WEIGHTS_LAYOUT = "PPPPPii"
_WEIGHT_WORDS = 13


def variant(input: torch.dtype, format: str, activation: str = "none", backward: bool = False) -> tuple[str, ...]:
    """The definitions that make ``cast_transpose.cu`` one kernel."""
    return (f"INPUT={INPUTS[input]}", f"FORMAT={FORMATS[format]}", ACTIVATIONS[activation], f"BACKWARD={int(backward)}")


class Row(NamedTuple):
    """One tensor's place in the scaling state.

    Attributes:
        scale: ``[R] float32``.
        newest: ``[R] float32``, the newest row of the history (or a longer tensor that begins with it).
        index: ``[1] int64``, which of the R.
        amax: ``[R] float32`` to record in, or None.
        current_amax: ``[] float32``, what a tensor without a history is scaled by; None where there is no such tensor.
    """

    scale: Tensor
    newest: Tensor
    index: Tensor  # type: ignore[assignment]
    amax: Tensor | None = None
    current_amax: Tensor | None = None


def column_sum_tiles(rows: int) -> int:
    """Rows of ``column_sums``."""
    return -(-rows // TILE_ROWS)


def cast_transpose(
    kernel: Kernel,
    x: Tensor,
    row: Row,
    scale_inv: Tensor,
    y: Tensor | None = None,
    y_t: Tensor | None = None,
    column_sums: Tensor | None = None,
    dy: Tensor | None = None,
    gated: bool = False,
) -> None:
    """Launch one variant over x ``[rows, columns]`` (gated: ``[rows, 2 * columns]``), elements of a row side by side.

    Args:
        kernel: of family ``cast_transpose``.
        x: fp32, bf16 or fp16, as the variant says; any distance between rows.
        row: which scale, and where to record. With ``current_amax`` a first launch measures it where it is needed.
        scale_inv: ``[] float32``, written.
        y: ``[rows, width] uint8``, written; ``width`` is ``columns``, or the width of x in a gated backward.
        y_t: ``[width, rows] uint8``, written.
        column_sums: ``[column_sum_tiles(rows), width] float32``, written.
        dy: ``[rows, columns]`` like x, for variants with ``backward``.
        gated: whether the variant is swiglu.
    """
    rows, columns = x.shape[0], x.shape[1] // (2 if gated else 1)
    grid = _tiles(rows, columns)
    inputs = (x.data_ptr(), address(dy))
    strides = (x.stride(0), 0 if dy is None else dy.stride(0), rows, columns)
    state = (row.scale.data_ptr(), row.newest.data_ptr(), row.index.data_ptr(), address(row.current_amax))
    aligned = _loads(x, columns if gated else 0) & (_LOADS if dy is None else _loads(dy, 0))
    if row.current_amax is not None:
        kernel(grid, *inputs, 0, 0, 0, *strides, aligned, *state, row.current_amax.data_ptr(), 0, 1)
    aligned |= _stores(y, y_t, rows, columns)
    kernel(
        grid, *inputs, address(y), address(y_t), address(column_sums), *strides, aligned,
        *state, address(row.amax), scale_inv.data_ptr(), 0,
    )  # fmt: skip


class Weight(NamedTuple):
    """One weight of :func:`cast_weights`: x ``[rows, columns]``, elements of a row side by side, and its results."""

    x: Tensor
    index: int  # type: ignore[assignment]
    y: Tensor
    y_t: Tensor


def weight_table(weights: Sequence[Weight], scale_inv: Tensor, current_amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """The kernel's table of weights and the running number of tiles, both on the CPU.

    Args:
        weights: all on one device, none of them empty.
        scale_inv: ``[len(weights)] float32``, on the device, written by the kernel.
        current_amax: ``[len(weights)] float32``, zeros on the device, or None where every weight has a history.
    """
    table, first_tile = [], [0]
    for number, (x, index, y, y_t) in enumerate(weights):
        rows, columns = x.shape
        # two 32-bit fields a word, the first in the lower half
        sizes = (rows | columns << 32, _loads(x, 0) | _stores(y, y_t, rows, columns))
        offset = 4 * number
        table += [x.data_ptr(), 0, y.data_ptr(), y_t.data_ptr(), 0, x.stride(0), 0, *sizes, index]
        table += [0 if current_amax is None else current_amax.data_ptr() + offset, scale_inv.data_ptr() + offset]
        table += [list(INPUTS).index(x.dtype)]
        first_tile.append(first_tile[-1] + _tiles(rows, columns))
    return torch.tensor(table, dtype=torch.int64).view(-1, _WEIGHT_WORDS), torch.tensor(first_tile, dtype=torch.int32)


def cast_weights(
    kernel: Kernel,
    table: Tensor,
    first_tile: Tensor,
    tiles: int,
    row: tuple[Tensor, Tensor, Tensor | None],
    measure: bool,
) -> None:
    """Launch over a table on the device; ``row`` is scale, newest and amax, each ``[R] float32``, amax or None.

    Args:
        kernel: of family ``cast_weights``.
        table: of :func:`weight_table`.
        first_tile: of :func:`weight_table`.
        tiles: its last element.
        row: which scales, and where to record.
        measure: whether some weight may lack a history: a first launch measures those.
    """
    scale, newest, amax = row
    pointers = (table.data_ptr(), first_tile.data_ptr(), scale.data_ptr(), newest.data_ptr(), address(amax))
    if measure:
        kernel(tiles, *pointers, len(table), 1)
    kernel(tiles, *pointers, len(table), 0)


def _tiles(rows: int, columns: int) -> int:
    return column_sum_tiles(rows) * -(-columns // TILE_COLUMNS)


def _stores(y: Tensor | None, y_t: Tensor | None, rows: int, columns: int) -> int:
    by_rows = y is not None and columns % 8 == 0 and y.data_ptr() % 8 == 0
    by_columns = y_t is not None and rows % 16 == 0 and y_t.data_ptr() % 16 == 0
    return (_ROWS if by_rows else 0) | (_COLUMNS if by_columns else 0)


def _loads(x: Tensor, offset: int) -> int:
    size = x.element_size()
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * size % 16 == 0 and offset * size % 16 == 0
    return _LOADS if aligned else 0
