"""The cast kernels from the host's side: variants, argument structs, grids. Shapes and maths: ``cast_tile.cuh``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels_cuda.launch import Kernel, address

THREADS = 256
TILE_ROWS, TILE_COLUMNS = 128, 64
# bytes of the scales in E8M0 of 128 x 128 elements
SCALE_TILE = 512
INPUTS = {torch.float32: "Fp32", torch.bfloat16: "Bf16", torch.float16: "Fp16"}
FORMATS = {"e4m3": "E4M3", "e5m2": "E5M2"}
_LOADS, _ROWS, _COLUMNS = 1, 2, 4
# struct Tensors, and struct Arguments of each family
TENSORS = "PPPPPqqiii4x"
_CAST_TRANSPOSE_LAYOUT = f"{TENSORS}PPPPPPPii"
_GATED_LAYOUT = f"{_CAST_TRANSPOSE_LAYOUT}PPPPi4xPPPPPPP"
_WEIGHT_WORDS = 14
CAST_WEIGHTS_LAYOUT = f"PPPPiii4x{_WEIGHT_WORDS}q"


def activation_of(name: str) -> str:
    """The definition that selects an activation of ``activations.cuh``: ``gelu_tanh`` is its ``GeluTanh``."""
    if name == "swiglu":
        return "GATED=1"
    return f"ACTIVATION={'Identity' if name == 'none' else name.title().replace('_', '')}"


def variant(input: torch.dtype, format: str, activation: str = "none", backward: bool = False) -> tuple[str, ...]:
    """The definitions that make ``cast_transpose.cu`` one kernel."""
    return (
        f"INPUT={INPUTS[input]}",
        f"FORMAT={FORMATS[format]}",
        activation_of(activation),
        f"BACKWARD={int(backward)}",
    )


def layout(definitions: tuple[str, ...]) -> str:
    """The layout of a variant's argument struct."""
    return _GATED_LAYOUT if "GATED=1" in definitions else _CAST_TRANSPOSE_LAYOUT


def column_sum_tiles(rows: int) -> int:
    """The number of rows of ``column_sums`` for a tensor with this many rows."""
    return -(-rows // TILE_ROWS)


class Result(NamedTuple):
    """A cast of one tensor ``[rows, columns]``: its place in the scaling state, and its outputs.

    With ``group_of_tile`` each of E groups of rows has a place of its own: ``index`` is ``[E]``, ``scale_inv`` and
    ``current_amax`` are ``[E]`` and contiguous.

    Attributes:
        scale: ``[R] float32``.
        newest: ``[D] float32``, the newest row of the history (or a longer tensor that begins with it).
        index: ``[1] int64``, which of the R.
        amax: ``[R] float32`` to record in, or None.
        scale_inv: ``[] float32``, written.
        y: ``[rows, columns] uint8``, written; row-contiguous. None if not requested.
        y_t: ``[columns, rows rounded up to 16] uint8``, contiguous, written; zeros beyond ``rows``. None likewise.
        column_sums: ``[column_sum_tiles(rows), columns] float32``, written; None for the output of an activation.
        current_amax: ``[] float32``, initially zero; receives the amax of a tensor that is scaled by its own values;
            a first launch measures it if needed. None for a tensor that is scaled by its history.
        after_measuring: changes ``current_amax`` in place between the launch that measures it and the one that uses it.
        group_of_tile: ``[ceil(rows / 128)] int32``, the group of each 128 rows, or -1: nothing is written for these.
            The tiles of a group follow each other; ``scale_inv`` of a group without any is not written. None where the
            tensor has one place. Only for :func:`cast_transpose`, and not for gated variants.
        scale_from: what the scale follows from, an ``enum ScaleFrom`` of ``scales.cuh``.
    """

    scale: Tensor
    newest: Tensor
    index: Tensor  # type: ignore[assignment]
    amax: Tensor | None
    scale_inv: Tensor
    y: Tensor | None
    y_t: Tensor | None
    column_sums: Tensor | None = None
    current_amax: Tensor | None = None
    after_measuring: Callable[[Tensor], object] | None = None
    group_of_tile: Tensor | None = None
    scale_from: int = 0

    def half(self, which: int) -> Result:
        """The first or the second half of the columns of all outputs."""
        y, y_t = (
            payload if payload is None else payload.chunk(2, dim=dim)[which]
            for payload, dim in ((self.y, 1), (self.y_t, 0))
        )
        sums = None if self.column_sums is None else self.column_sums.chunk(2, dim=1)[which]
        return self._replace(y=y, y_t=y_t, column_sums=sums)


def cast_transpose(kernel: Kernel, x: Tensor, result: Result, dy: Tensor | None = None, gated: bool = False) -> None:
    """Launch one variant over x ``[rows, columns]``, row-contiguous.

    Args:
        kernel: of family ``cast_transpose``.
        x: fp32, bf16 or fp16, as the variant says; any distance between rows. For swiglu ``[gate | up]``, so twice as
            wide as the outputs in a forward, and as wide as them in a backward.
        result: the outputs. With ``current_amax``, a first launch measures it if needed.
        dy: like the output of the activation, for variants with ``backward``.
        gated: whether the variant is swiglu.
    """
    if gated:
        gate, up = x.chunk(2, dim=1)
        return cast_gated(kernel, gate, up, *((result,) if dy is None else (result.half(0), dy, result.half(1))))
    (rows, columns), (stride, _), x_at, size = x.shape, x.stride(), x.data_ptr(), x.element_size()
    grid = -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)
    dy_at = dy_stride = current_at = 0
    if dy is not None:
        dy_at, dy_stride = dy.data_ptr(), dy.stride(0)
    scale, newest, index, amax, scale_inv, y, y_t, column_sums, current_amax, adjust, groups, scale_from = result
    y_at = 0 if y is None else y.data_ptr()
    y_t_at = 0 if y_t is None else y_t.data_ptr()
    flags = aligned(x_at | dy_at, (stride | dy_stride) * size, y_at, y_t_at, columns)
    if current_amax is not None:
        current_at, strides = current_amax.data_ptr(), (stride, dy_stride)
        measuring = *_measuring(result), 1, scale_from
        kernel(grid, x_at, dy_at, 0, 0, 0, *strides, rows, columns, flags & _LOADS, *measuring)
        if adjust is not None:
            adjust(current_amax)
    kernel(
        grid,
        x_at,
        dy_at,
        y_at,
        y_t_at,
        0 if column_sums is None else column_sums.data_ptr(),
        stride,
        dy_stride,
        rows,
        columns,
        flags,
        scale.data_ptr(),
        newest.data_ptr(),
        index.data_ptr(),
        current_at,
        0 if amax is None else amax.data_ptr(),
        scale_inv.data_ptr(),
        0 if groups is None else groups.data_ptr(),
        0,
        scale_from,
    )


def cast_gated(
    kernel: Kernel, gate: Tensor, up: Tensor, result: Result, dy: Tensor | None = None, of_up: Result | None = None
) -> None:
    """Launch a gated variant over gate and up ``[rows, columns]``, with the same stride, such as halves of one tensor.

    Args:
        kernel: of family ``cast_transpose``, gated.
        gate: fp32, bf16 or fp16, as the variant says; any distance between rows.
        up: like the gate.
        result: for ``silu(gate) * up``; with ``dy``, for the gradient of the gate. Its ``scale_from`` is that of both.
        dy: ``[rows, columns]`` like the gate, for variants with ``backward``.
        of_up: with ``dy``, for the gradient of up, with rows as far apart as those of ``result``.
    """
    (rows, columns), stride, size = gate.shape, gate.stride(0), gate.element_size()
    results = (result,) if of_up is None else (result, of_up)
    second = results[-1]
    grid = -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)
    x_at, up_at, dy_at, dy_stride = gate.data_ptr(), up.data_ptr(), address(dy), 0 if dy is None else dy.stride(0)
    widths = {tensor.stride(0) for tensor in (result.y, result.column_sums) if tensor is not None}
    (width,) = widths or {columns}
    shape = (stride, dy_stride, rows, columns)
    outputs, up_outputs = ([address(out.y), address(out.y_t), address(out.column_sums)] for out in (result, second))
    row_bytes, payloads = (stride | dy_stride) * size, (outputs[0] | up_outputs[0], outputs[1] | up_outputs[1])
    flags = aligned(x_at | up_at | dy_at, row_bytes, *payloads, width)
    if any(out.current_amax is not None for out in (result, second)):
        loads, measuring, of_up_measuring = flags & _LOADS, _measuring(result), _measuring(second)
        measure = 1, result.scale_from, up_at, 0, 0, 0, width
        kernel(grid, x_at, dy_at, 0, 0, 0, *shape, loads, *measuring, *measure, *of_up_measuring)
        for out in results:
            if out.current_amax is not None and out.after_measuring is not None:
                out.after_measuring(out.current_amax)
    casting, of_up_casting = (*_casting(result), 0, result.scale_from), _casting(second)
    kernel(grid, x_at, dy_at, *outputs, *shape, flags, *casting, up_at, *up_outputs, width, *of_up_casting)


def _measuring(result: Result) -> tuple[int, ...]:
    current, groups = address(result.current_amax), address(result.group_of_tile)
    return result.scale.data_ptr(), result.newest.data_ptr(), result.index.data_ptr(), current, current, 0, groups


def _casting(result: Result) -> tuple[int, ...]:
    at = result.scale.data_ptr(), result.newest.data_ptr(), result.index.data_ptr()
    recorded, scale_inv = address(result.amax), result.scale_inv.data_ptr()
    return *at, address(result.current_amax), recorded, scale_inv, address(result.group_of_tile)


def weights_variant(squares: bool = False, mx: bool = False) -> tuple[str, ...]:
    """The definitions that make ``cast_weights.cu`` one kernel.

    One scale a weight; with ``squares`` one for each 128 x 128 of it; with ``mx`` one in E8M0 for each 1 x 32, and with
    both for each 32 x 32.
    """
    return (*(["SQUARES=1"] if squares else []), *(["MX=1"] if mx else []))


class Weight(NamedTuple):
    """One weight of :func:`cast_weights`: x ``[rows, columns]``, elements of a row side by side, and its results.

    Attributes:
        x: fp32, bf16 or fp16; any distance between rows.
        index: ``[1] int64``, its place where amax and scale are noted; or None.
        y: as for :func:`cast_transpose`.
        y_t: the same.
    """

    x: Tensor
    index: Tensor | None = None  # type: ignore[assignment]
    y: Tensor | None = None
    y_t: Tensor | None = None


class WeightTable(NamedTuple):
    """What the kernel reads about weights.

    Attributes:
        weights: ``[count, 14] int64``, ``struct Weight`` of each; None for a single weight.
        first_tile: ``[count + 1] int32``, running sum of tiles; None for a single weight.
        tiles: the last of them, on the host.
        one: ``struct Weight`` of a single weight, else zeros.
        current_amax: ``[count] float32``, zeros, for the kernel to measure into.
        scale_inv: for each weight ``[] float32``, or ``[ceil(rows/128), ceil(columns/128)]``, or tiles of scales in
            E8M0, ``[*] uint8``, for the kernel to write.
        scale_inv_t: those of ``y_t``: the same one, transposed, or other tiles, which are written too.
        in_blocks: whether blocks of a weight have scales, and a single launch casts.
    """

    weights: Tensor | None
    first_tile: Tensor | None
    tiles: int
    one: Sequence[int]
    current_amax: Tensor
    scale_inv: Sequence[Tensor]
    scale_inv_t: Sequence[Tensor]
    in_blocks: bool


def weight_table(weights: Sequence[Weight], squares: bool = False, mx: bool = False) -> WeightTable:
    """The table of nonempty weights that are all on one device: one copy to the device, no launch.

    For ``squares`` and ``mx`` see :func:`weights_variant`.
    A single weight is passed with the launch: a CUDA graph, which casts each by itself, has no memory on the host.
    """
    count, device = len(weights), weights[0].x.device
    words, tiles = [], [0]
    # 64 bits a weight at the end, for its amax and the number of its tiles that are done
    if count == 1:
        memory = torch.zeros(1, dtype=torch.int64, device=device)
    else:
        memory = torch.empty(count * _WEIGHT_WORDS + count // 2 + 1 + count, dtype=torch.int64, device=device)
    current_amax, in_blocks = memory[-count:].view(torch.float32)[:count], squares or mx
    inverses = _new_mx_scales(weights) if mx else _new_scales(weights, squares)
    for number, ((x, index, y, y_t), *inverse) in enumerate(zip(weights, *inverses, strict=True)):
        (rows, columns), x_at, y_at, y_t_at = x.shape, x.data_ptr(), address(y), address(y_t)
        flags = aligned(x_at, x.stride(0) * x.element_size(), y_at, y_t_at, columns)
        # two 32-bit fields a word, the first in the lower half
        words += [x_at, 0, y_at, y_t_at, 0, x.stride(0), 0, rows | columns << 32, flags, address(index)]
        words += [current_amax.data_ptr() + 4 * number, *(scales.data_ptr() for scales in inverse)]
        words.append(list(INPUTS).index(x.dtype))
        tiles.append(tiles[-1] + column_sum_tiles(rows) * -(-columns // (TILE_ROWS if in_blocks else TILE_COLUMNS)))
    if count == 1:
        return WeightTable(None, None, tiles[1], words, current_amax, *inverses, in_blocks)
    on_host = torch.zeros(len(memory), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    on_host[: len(words)] = torch.tensor(words, device="cpu")
    on_host[len(words) :].view(torch.int32)[: count + 1] = torch.tensor(tiles, dtype=torch.int32, device="cpu")
    # torch does not reuse pinned memory until the copy is done, so nothing has to wait
    memory.copy_(on_host, non_blocking=True)
    table = memory[: len(words)].view(count, _WEIGHT_WORDS)
    first_tile = memory[len(words) :].view(torch.int32)[: count + 1]
    return WeightTable(table, first_tile, tiles[-1], (0,) * _WEIGHT_WORDS, current_amax, *inverses, in_blocks)


def _new_scales(weights: Sequence[Weight], squares: bool) -> tuple[list[Tensor], list[Tensor]]:
    shapes = [[-(-size // TILE_ROWS) for size in weight.x.shape] if squares else [] for weight in weights]
    parts = torch.empty(sum(map(math.prod, shapes)), dtype=torch.float32, device=weights[0].x.device)
    scales = [part.view(shape) for part, shape in zip(parts.split([*map(math.prod, shapes)]), shapes, strict=True)]
    return scales, [scale.t() for scale in scales] if squares else scales


def _new_mx_scales(weights: Sequence[Weight]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    # a weight's transpose has as many tiles; apart, as what one operator returns shares no memory
    sizes = [math.prod(-(-size // TILE_ROWS) for size in weight.x.shape) * SCALE_TILE for weight in weights]
    buffers = (torch.empty(sum(sizes), dtype=torch.uint8, device=weights[0].x.device) for _ in range(2))
    first, second = (parts.split(sizes) for parts in buffers)
    return first, second


def measure_weights(kernel: Kernel, table: WeightTable) -> None:
    """Launch the kernel of family ``cast_weights`` to find ``table.current_amax``, for weights not measured yet."""
    _over_weights(kernel, table, None, None, measure=True)


def cast_weights(
    kernel: Kernel, table: WeightTable, scale: Tensor | None, amax: Tensor | None, power_of_two: bool = False
) -> None:
    """Cast into each weight's ``y`` and ``y_t``; writes the table's scales. One launch for blocks, else two.

    Args:
        kernel: of family ``cast_weights``.
        table: the weights, which have not been measured yet.
        scale: ``[R] float32``, receives what each weight was scaled by, for blocks as a whole, at its index; or None.
        amax: ``[R] float32``, likewise.
        power_of_two: for squares of 128 x 128, whether scales are rounded down to powers of two.
    """
    if not table.in_blocks:
        measure_weights(kernel, table)
    _over_weights(kernel, table, scale, amax, False, power_of_two)


def _over_weights(
    kernel: Kernel,
    table: WeightTable,
    scale: Tensor | None,
    amax: Tensor | None,
    measure: bool,
    power_of_two: bool = False,
) -> None:
    pointers = (address(table.weights), address(table.first_tile), address(scale), address(amax))
    kernel(table.tiles, *pointers, len(table.scale_inv), int(measure), int(power_of_two), *table.one)


def aligned(x: int, row_bytes: int, y: int, y_t: int, columns: int) -> int:
    """Whether a tensor, by its address, can be read in words of 16 bytes, and which payloads stored in whole words."""
    # a power of two divides all of the numbers if it divides their bitwise or
    loads = 0 if (x | row_bytes) & 15 else _LOADS
    by_rows = _ROWS if y and not (y | columns) & 7 else 0
    return loads | by_rows | (_COLUMNS if y_t and not y_t & 15 else 0)
