"""Launches casts on a GPU: allocates the memory that kernels write, and passes their arguments. Never synchronises.

Functions return None if there is no kernel for the device and dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, empty_strided

from kernels_cuda import block_casts, casts
from kernels_cuda.launch import Kernel
from lightning_fp8.ops.amaxes import max_abs
from lightning_fp8.ops.cuda.kernels import block_cast_kernel, cast_kernel, weights_kernel
from lightning_fp8.ops.library import on_gpu
from lightning_fp8.ops.operand import ALIGNMENT, Groups, columns_shape
from lightning_fp8.runtime.device import is_capturing
from lightning_fp8.scalings.operand import Cast, Computed, Opened, Operand, Slot, Source, Want

if TYPE_CHECKING:
    from lightning_fp8.scalings.base import Scaling
    from lightning_fp8.scalings.in_blocks import InBlocks


# what a kernel reads: x, or the input of the activation that it computes, its second input, the gradient of its value;
# and whether gate and up are the halves of the first
_Read = tuple[Tensor, Tensor | None, Tensor | None, bool]


def _read(x: Computed, block: int) -> _Read | None:
    """What a kernel reads to compute x; None if no kernel can. ``block`` must divide each half of a packed gradient."""
    (first, *up), dy, is_packed = x.inputs, x.gradient, x.is_packed
    if dy is not None:
        if dy.dtype != first.dtype or up or (is_packed and first.shape[1] % (2 * block)):
            # one launch makes both gradients, of gate and up: see `cast_pair`
            return None
        dy = _rows_apart(dy)
    return first.contiguous(), up[0].contiguous() if up else None, dy, is_packed


# allocates uninitialised codes, by shape and strides; this torch function takes the least host time
_new_codes = functools.partial(empty_strided, dtype=torch.uint8)

# Casts with one scale


def one_scale(x: Source, scaling: Scaling, slot: Slot, opened: Opened, want: Want, adjust: Adjust) -> Cast | None:
    """A cast with one scale for the tensor.

    Args:
        x: the tensor, not empty.
        scaling: its scaling.
        slot: of the tensor.
        opened: what the cast reads and writes of the state.
        want: what is asked for.
        adjust: changes the measured amax in place before the scale is computed from it; or None.
    """
    up = dy = None
    if isinstance(x, Tensor):
        source, activation, is_packed = x, "none", False
    else:
        read = _read(x, 1)
        if read is None:
            return None
        activation, (source, up, dy, is_packed) = x.activation, read
    shape, device = x.shape, source.device
    kernel = cast_kernel(device, source.dtype, scaling.format, activation, dy is not None)
    if kernel is None:
        return None
    # codes by columns may be a view of those by rows
    is_view = scaling.is_view(device, shape)
    rows, columns, is_transposed = want.rows or is_view, want.columns and not is_view, False
    if activation == "none" and source.stride(1) != 1:
        source, is_transposed = (source.contiguous(), False) if want.sums else by_rows(source)
    if is_transposed:
        shape, rows, columns = source.shape, columns, rows
    result = new_result(slot, opened, device, shape, rows, columns, want.sums, adjust)
    if up is None:
        casts.cast_transpose(kernel, source, result, dy, is_packed)
    else:
        casts.cast_gated(kernel, source, up, result)
    return _cast_of(result, scaling, want, is_view, is_transposed)


# changes an amax in place, or None
Adjust = Callable[[Tensor], object] | None


def _cast_of(
    result: casts.Result, scaling: Scaling, want: Want, is_view: bool = False, is_transposed: bool = False
) -> Cast:
    """What a kernel has written, as a cast."""
    codes, turned, scale_inv = result.y, result.y_t, result.scale_inv
    if is_transposed:
        codes, turned = turned, codes
    if is_view and codes is not None:
        turned = codes.t() if want.columns else None
        codes = codes if want.rows else None
    return Cast(
        None if codes is None else Operand(codes, scale_inv, scaling),
        None if turned is None else Operand(turned, scale_inv, scaling),
        None if result.column_sums is None else _total(result.column_sums),
    )


def one_scale_of_groups(
    x: Tensor, scaling: Scaling, slot: Slot, opened: Opened, want: Want, groups: Groups
) -> Cast | None:
    """The same for groups of rows, x ``[P, K]`` in their places: ``scale_inv [E]``, sums ``[E, K]``."""
    kernel = cast_kernel(x.device, x.dtype, scaling.format, "none", False)
    if kernel is None:
        return None
    result = new_result(slot, opened, x.device, x.shape, want.rows, want.columns, want.sums, None, groups)
    casts.cast_transpose(kernel, x, result)
    sums, cast = result.column_sums, _cast_of(result._replace(column_sums=None), scaling, want)
    if sums is None:
        return cast
    # the sums of tiles without a group come last
    tiles = torch.div(groups.edges, casts.TILE_ROWS, rounding_mode="floor").long()
    of_groups = torch.segment_reduce(sums, "sum", offsets=tiles, axis=0, unsafe=True, initial=0.0)
    return cast._replace(sums=of_groups.view(len(slot.index), -1))


def one_scale_of_pair(
    pair: Computed, scaling: Scaling, slots: Sequence[Slot], opened: Sequence[Opened], want: Want, adjust: Adjust
) -> list[Cast] | None:
    """The gradients of gate and up, each a tensor of its own, in one launch."""
    (gate, up), dy = pair.inputs, pair.gradient
    kernel = None if dy is None else cast_kernel(dy.device, dy.dtype, scaling.format, pair.activation, True)
    if dy is None or kernel is None or gate.dtype != dy.dtype:
        return None
    is_view = scaling.is_view(gate.device, gate.shape)
    layouts = want.rows or is_view, want.columns and not is_view
    first, second = (
        new_result(*place, gate.device, gate.shape, *layouts, want.sums, adjust)
        for place in zip(slots, opened, strict=True)
    )
    casts.cast_gated(kernel, gate.contiguous(), up.contiguous(), first, _rows_apart(dy), second)
    return [_cast_of(result, scaling, want, is_view) for result in (first, second)]


def new_result(
    slot: Slot,
    opened: Opened,
    device: torch.device,
    shape: Sequence[int],
    by_rows: bool,
    by_columns: bool,
    sums: bool,
    adjust: Adjust,
    groups: Groups | None = None,
) -> casts.Result:
    """What a kernel reads of the state, and memory for what it writes, for a tensor of this shape in these layouts.
    Each group has a scale, which is 1 if the group has no row."""
    rows, columns = shape
    scale_from, index, current = int(slot.casting), slot.index, None
    if opened.history is not None:
        scale, newest = opened.history.scale, opened.history.amax_history
    else:
        # no history is read; if nothing is recorded either, the tensor needs no row
        scale_from = max(scale_from, 1)
        state = slot.live_state
        if state is None:
            scale = newest = torch.zeros(index.shape, device=device)
            index = torch.zeros_like(index)
        else:
            scale, newest = state.scale, state.amax_history
    if not opened.is_known:
        current = torch.zeros(() if groups is None else index.shape, dtype=torch.float32, device=device)
    padded = -(-rows // ALIGNMENT) * ALIGNMENT
    y = _new_codes((rows, columns), (columns, 1), device=device) if by_rows else None
    y_t = _new_codes((columns, padded), (padded, 1), device=device) if by_columns else None
    partial = _new_sums(device, rows, columns) if sums else None
    if groups is None:
        scale_inv, of_tile = empty_strided((), (), dtype=torch.float32, device=device), None
    else:
        scale_inv, of_tile = torch.ones(index.shape, dtype=torch.float32, device=device), groups.of_tile
    adjust = None if current is None else adjust
    return casts.Result(
        scale, newest, index, opened.amax, scale_inv, y, y_t, partial, current, adjust, of_tile, scale_from
    )


# Casts in blocks


def in_blocks(x: Source, scaling: InBlocks, slot: Slot, opened: Opened, want: Want) -> Cast | None:
    """A cast with scales for blocks along a row of each layout, of their own values, all in E4M3, in one launch.

    Args:
        x: the tensor, not empty.
        scaling: its scaling.
        slot: of the tensor.
        opened: what the cast writes of the state.
        want: what is asked for.
    """
    read = (x, None, None, False) if isinstance(x, Tensor) else _read(x, block_casts.BLOCK)
    if read is None:
        return None
    source, up, dy, is_packed = read
    activation = "none" if isinstance(x, Tensor) else x.activation
    kernel = block_cast_kernel(source.device, source.dtype, scaling.in_e8m0, activation, dy is not None)
    if kernel is None:
        return None
    source = _rows_apart(source)
    cast, result = _new_blocks(scaling, slot, opened, source.device, x.shape, want)
    if up is None:
        block_casts.cast(kernel, source, result, dy, is_packed, scaling.rounds_down)
    else:
        block_casts.cast_gated(kernel, source, up, result, power_of_two=scaling.rounds_down)
    return cast if result.column_sums is None else cast._replace(sums=_total(result.column_sums))


def pair_in_blocks(
    pair: Computed, scaling: InBlocks, slots: Sequence[Slot], opened: Sequence[Opened], want: Want
) -> list[Cast] | None:
    """The gradients of gate and up in one launch."""
    (gate, up), dy = pair.inputs, pair.gradient
    kernel = block_cast_kernel(gate.device, gate.dtype, scaling.in_e8m0, pair.activation, dy is not None)
    if dy is None or kernel is None or gate.dtype != dy.dtype:
        return None
    made = [_new_blocks(scaling, *place, gate.device, gate.shape, want) for place in zip(slots, opened, strict=True)]
    (_, first), (_, second) = made
    gate, up, dy = gate.contiguous(), up.contiguous(), _rows_apart(dy)
    block_casts.cast_gated(kernel, gate, up, first, dy, second, scaling.rounds_down)
    return [
        cast if result.column_sums is None else cast._replace(sums=_total(result.column_sums)) for cast, result in made
    ]


def _new_blocks(
    scaling: InBlocks, slot: Slot, opened: Opened, device: torch.device, shape: Sequence[int], want: Want
) -> tuple[Cast, block_casts.Result]:
    rows, columns = shape

    def new(codes: tuple[int, int], *scales: int) -> Operand:
        return Operand(_new_codes(codes, (codes[1], 1), device=device), scaling.new_scales(device, *scales), scaling)

    by_rows = new((rows, columns), rows, columns) if want.rows else None
    by_columns = new(columns_shape(rows, columns), columns, rows) if want.columns else None
    first, second = (None if operand is None else operand[:2] for operand in (by_rows, by_columns))
    recorded = None if opened.amax is None else (slot.index, opened.amax)
    sums = _new_sums(device, rows, columns) if want.sums else None
    return Cast(by_rows, by_columns), block_casts.Result(recorded, first, second, sums)


def measure_weights(of: Sequence[Tensor]) -> Tensor:
    """``max|w|`` of many weights on one device, ``[count] float32``; in one launch if there is a kernel for it."""
    kernel = weights_kernel(of[0].device, False) if on_gpu(of[0]) else None
    if kernel is None or not all(weight.numel() for weight in of):
        return torch.stack([max_abs(weight) for weight in of])
    table = casts.weight_table([casts.Weight(weight) for weight in of])
    casts.measure_weights(kernel, table)
    return table.current_amax


# Memory


def by_rows(x: Tensor) -> tuple[Tensor, bool]:
    """x with the elements of a row side by side; or its transpose, and True: its rows and columns are then swapped."""
    if x.stride(1) != 1 and x.stride(0) == 1 and not (x.shape[0] | x.shape[1]) % ALIGNMENT:
        return x.t(), True
    return _rows_apart(x), False


def _rows_apart(x: Tensor) -> Tensor:
    """x with the elements of a row side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


def _new_sums(device: torch.device, rows: int, columns: int) -> Tensor:
    """Column sums of each tile of rows."""
    return empty_strided((casts.column_sum_tiles(rows), columns), (columns, 1), dtype=torch.float32, device=device)


def _total(partial: Tensor) -> Tensor:
    return partial.sum(dim=0) if partial.shape[0] > 1 else partial.view(-1)


# Weights


class WeightScales(NamedTuple):
    """The scales that ``cast_weights`` writes, as its variants are called."""

    squares: bool = False
    mx: bool = False
    power_of_2: bool = False


def weights(
    of: Sequence[Tensor],
    scaling: Scaling,
    slots: Sequence[Slot],
    out: Sequence[Cast | None],
    scales: WeightScales,
    want: Want,
) -> list[Cast] | None:
    """Casts of weights by their own values, all in E4M3; in blocks by one launch, else by two. No weight is empty.

    Args:
        of: ``[N, K]`` each.
        scaling: the scaling of all weights.
        slots: the weights' slots.
        out: for each weight, a cast to overwrite, or None for new memory.
        scales: what has a scale.
        want: of new casts, which are always made by rows.
    """
    kernel = weights_kernel(of[0].device, scales.squares, scales.mx)
    if kernel is None or any(weight.dtype not in casts.INPUTS for weight in of):
        return None
    views = [scaling.is_view(weight.device, weight.shape) for weight in of]
    news = [
        (weight, want.columns and not is_view)
        for weight, target, is_view in zip(of, out, views, strict=True)
        if target is None
    ]
    new = _memory_by_stack(news)
    codes = [
        next(new) if target is None else _codes_of(target, is_view) for target, is_view in zip(out, views, strict=True)
    ]
    inverses = _launch_weights(kernel, of, slots, codes, scales)
    return [_cast_of_weight(scaling, *parts, want) for parts in zip(codes, inverses, views, out, strict=True)]


_Codes = tuple[Tensor | None, Tensor | None]
_Inverses = tuple[Tensor, Tensor]


def _codes_of(cast: Cast, is_view: bool) -> _Codes:
    rows, columns = (None if side is None else side.codes for side in cast[:2])
    return rows, None if is_view else columns


def _cast_of_weight(
    scaling: Scaling, codes: _Codes, inverses: _Inverses, is_view: bool, target: Cast | None, want: Want
) -> Cast:
    by_rows, turned = codes
    if is_view and by_rows is not None and want.columns:
        # a view that compiled code reads stays the same object
        turned = by_rows.t() if target is None or target.columns is None else target.columns.codes
    rows, columns = (
        None if made is None else Operand(made, inverse, scaling)
        for made, inverse in zip((by_rows, turned), inverses, strict=True)
    )
    return Cast(rows, columns)


def _memory_by_stack(of: Sequence[tuple[Tensor, bool]]) -> Iterator[_Codes]:
    """Memory for codes of weights, by rows and, if requested, by columns. The matrices of one parameter are adjacent,
    in order."""
    stacks: dict[tuple[int, torch.Size], list[int]] = {}
    for at, (weight, _) in enumerate(of):
        stacks.setdefault((weight.untyped_storage().data_ptr(), weight.shape), []).append(at)
    memory: dict[int, _Codes] = {}
    for places in stacks.values():
        weight, columns = of[places[0]]
        shapes = weight.shape, columns_shape(*weight.shape) if columns else None
        made = (
            [None] * len(places) if shape is None else weight.new_empty(len(places), *shape, dtype=torch.uint8)
            for shape in shapes
        )
        memory.update(zip(places, zip(*made, strict=True), strict=True))
    return (memory[at] for at in range(len(of)))


def _launch_weights(
    kernel: Kernel, of: Sequence[Tensor], slots: Sequence[Slot], codes: Sequence[_Codes], scales: WeightScales
) -> list[_Inverses]:
    if len(of) > 1 and is_capturing(of[0].is_cuda):
        # a table would come from the host: each replay of the graph would read that host memory again
        each = zip(of, slots, codes, strict=True)
        return [_launch_weights(kernel, [weight], [slot], [made], scales)[0] for weight, slot, made in each]
    state, jobs, turned = slots[0].state, [], []
    for weight, slot, pair in zip(of, slots, codes, strict=True):
        x, is_transposed = by_rows(weight)
        jobs.append(casts.Weight(x, slot.index, *(pair[::-1] if is_transposed else pair)))
        turned.append(is_transposed)
    table = casts.weight_table(jobs, scales.squares, scales.mx)
    scale, amax = (None, None) if state is None else (state.scale, state.amax)
    casts.cast_weights(kernel, table, scale, amax, scales.power_of_2)
    inverses = zip(table.scale_inv, table.scale_inv_t, strict=True)
    return [both[::-1] if is_transposed else both for both, is_transposed in zip(inverses, turned, strict=True)]
