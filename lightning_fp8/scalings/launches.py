"""What launches casts on a GPU: the memory that kernels write, and their arguments. Nothing here synchronises.

Each function takes what a kind of scaling asks for, and returns None where there is no kernel for the device and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, empty_strided

from kernels_cuda import block_casts, casts
from kernels_cuda.launch import Kernel
from lightning_fp8.ops.amaxes import max_abs
from lightning_fp8.ops.cuda.kernels import block_cast_kernel, cast_kernel, weights_kernel
from lightning_fp8.ops.library import on_gpu
from lightning_fp8.ops.operand import ALIGNMENT, Groups, columns_shape
from lightning_fp8.runtime.device import is_capturing
from lightning_fp8.scalings.operand import Cast, Computed, Opened, Slot, Source, Want


class Memory(NamedTuple):
    """What a kernel has written of a tensor; None for what was not asked for.

    Attributes:
        rows: codes ``[M, K]``.
        columns: codes ``[K, M']``.
        scale_inv: of the former; with one scale, of both.
        columns_scale_inv: of the latter.
        sums: column sums ``[K] float32``.
    """

    rows: Tensor | None
    columns: Tensor | None
    scale_inv: Tensor | None
    columns_scale_inv: Tensor | None
    sums: Tensor | None


class _Read(NamedTuple):
    """What a kernel reads: x; or the inputs of the activation that it computes, and the gradient of its value."""

    x: Tensor
    up: Tensor | None
    dy: Tensor | None
    activation: str
    # gate and up are the halves of x
    is_packed: bool = False

    @property
    def is_backward(self) -> bool:
        return self.dy is not None


def _read(x: Source, block: int) -> _Read | None:
    """None for what no kernel reads. ``block``: a multiple of the columns of the halves of a packed gradient."""
    if isinstance(x, Tensor):
        return _Read(x, None, None, "none")
    (first, *up), dy, is_packed = x.inputs, x.gradient, x.is_packed
    if dy is not None:
        if dy.dtype != first.dtype or up or (is_packed and first.shape[1] % (2 * block)):
            # of gate and up there is one launch for both gradients, see `pair`
            return None
        dy = _rows_apart(dy)
    return _Read(first.contiguous(), up[0].contiguous() if up else None, dy, x.activation, is_packed)


def layout_of(want: Want) -> str:
    """``"rows"``, ``"columns"`` or ``"both"``."""
    if not want.columns:
        return "rows"
    return "both" if want.rows else "columns"


# Casts with one scale


def one_scale(
    x: Source,
    format: str,
    slot: Slot,
    opened: Opened,
    layout: str,
    sums: bool,
    adjust: Callable[[Tensor], object] | None,
) -> Memory | None:
    """A cast with one scale for the tensor.

    Args:
        x: the tensor, not empty.
        format: of the codes.
        slot: of the tensor.
        opened: what the cast reads and writes of the state.
        layout: ``"rows"``, ``"columns"`` or ``"both"``.
        sums: whether columns are added up.
        adjust: changes the measured amax in place before the scale is computed from it.
    """
    read = _read(x, 1)
    kernel = (
        None if read is None else cast_kernel(read.x.device, read.x.dtype, format, read.activation, read.is_backward)
    )
    if read is None or kernel is None:
        return None
    source, is_transposed = read.x, False
    if read.activation == "none" and source.stride(1) != 1:
        source, is_transposed = (source.contiguous(), False) if sums else by_rows(source)
        layout = _TRANSPOSED[layout] if is_transposed else layout
    shape = source.shape if isinstance(x, Tensor) else x.shape
    result = new_result(slot, opened, source.device, shape, layout, sums, adjust)
    if read.up is None:
        casts.cast_transpose(kernel, source, result, read.dy, read.is_packed)
    else:
        casts.cast_gated(kernel, source, read.up, result)
    memory = of_result(result)
    return memory._replace(rows=memory.columns, columns=memory.rows) if is_transposed else memory


# the layout of a transposed tensor's codes
_TRANSPOSED = {"rows": "columns", "columns": "rows", "both": "both"}


def one_scale_of_groups(
    x: Tensor, format: str, slot: Slot, opened: Opened, layout: str, sums: bool, groups: Groups
) -> Memory | None:
    """The same of groups of rows, x ``[P, K]`` in their places: ``scale_inv [E]``, sums ``[E, K]``."""
    kernel = cast_kernel(x.device, x.dtype, format, "none", False)
    if kernel is None:
        return None
    result = new_result(slot, opened, x.device, x.shape, layout, sums, None, groups)
    casts.cast_transpose(kernel, x, result)
    memory = of_result(result, total=False)
    if memory.sums is None:
        return memory
    # those of tiles that belong to no group come after all others
    tiles = torch.div(groups.edges, casts.TILE_ROWS, rounding_mode="floor").long()
    of_groups = torch.segment_reduce(memory.sums, "sum", offsets=tiles, axis=0, unsafe=True, initial=0.0)
    return memory._replace(sums=of_groups.view(len(slot.index), -1))


def one_scale_of_pair(
    pair: Computed,
    format: str,
    slots: Sequence[Slot],
    opened: Sequence[Opened],
    layout: str,
    sums: bool,
    adjust: Callable[[Tensor], object] | None,
) -> list[Memory] | None:
    """The gradients of gate and up, each a tensor of its own, in one launch."""
    (gate, up), dy = pair.inputs, pair.gradient
    kernel = None if dy is None else cast_kernel(dy.device, dy.dtype, format, pair.activation, True)
    if dy is None or kernel is None or gate.dtype != dy.dtype:
        return None
    places = zip(slots, opened, strict=True)
    first, second = (new_result(*place, gate.device, gate.shape, layout, sums, adjust) for place in places)
    casts.cast_gated(kernel, gate.contiguous(), up.contiguous(), first, _rows_apart(dy), second)
    return [of_result(first), of_result(second)]


def new_result(
    slot: Slot,
    opened: Opened,
    device: torch.device,
    shape: Sequence[int],
    layout: str,
    sums: bool,
    adjust: Callable[[Tensor], object] | None,
    groups: Groups | None = None,
) -> casts.Result:
    """What a kernel reads of the state, and memory for what it writes about a tensor of this shape. Of groups, each has
    a scale; 1 where it has no row."""
    rows, columns = shape
    scale_from, index, current = int(slot.casting), slot.index, None
    if opened.history is not None:
        scale, newest = opened.history.scale, opened.history.amax_history
    else:
        # nothing of a history is read; where nothing is recorded either, the tensor need not have a row
        scale_from = max(scale_from, 1)
        state = slot.live_state
        if state is None:
            scale = newest = torch.zeros(index.shape, device=device)
            index = torch.zeros_like(index)
        else:
            scale, newest = state.scale, state.amax_history
    if not opened.is_known:
        current = torch.zeros(() if groups is None else index.shape, dtype=torch.float32, device=device)
    # of torch's ways to allocate, the one that takes the least host time
    y = new_codes(device, rows if layout != "columns" else 0, columns if layout != "columns" else 0)
    y_t = new_codes(device, *(columns_shape(rows, columns) if layout != "rows" else (0, 0)))
    partial = _new_sums(device, shape, sums)
    if groups is None:
        scale_inv, of_tile = empty_strided((), (), dtype=torch.float32, device=device), None
    else:
        scale_inv, of_tile = torch.ones(index.shape, dtype=torch.float32, device=device), groups.of_tile
    outputs = scale_inv, y, y_t, partial, current, None if current is None else adjust
    return casts.Result(scale, newest, index, opened.amax, *outputs, of_tile, scale_from)


def of_result(result: casts.Result, total: bool = True) -> Memory:
    """The outputs; with ``total`` the sums of all tiles."""
    sums = _total(result.column_sums) if total else result.column_sums
    return Memory(_if_any(result.y), _if_any(result.y_t), result.scale_inv, result.scale_inv, sums)


def _if_any(codes: Tensor) -> Tensor | None:
    return codes if codes.numel() else None


# Casts in blocks


def in_blocks(
    x: Source, slot: Slot, opened: Opened, layout: str, sums: bool, new_scales: NewScales, mx: bool, power_of_2: bool
) -> Memory | None:
    """A cast with scales for blocks along a row of each layout, of their own values, all in E4M3, in one launch.

    Args:
        x: the tensor, not empty.
        slot: of the tensor.
        opened: what the cast writes of the state.
        layout: ``"rows"``, ``"columns"`` or ``"both"``.
        sums: whether columns are added up.
        new_scales: makes memory for the scales of codes of this shape.
        mx: whether these are in E8M0.
        power_of_2: whether those in fp32 are rounded down to powers of two.
    """
    read = _read(x, block_casts.BLOCK)
    kernel = _kernel_in_blocks(read, mx)
    if read is None or kernel is None:
        return None
    source = _rows_apart(read.x)
    shape = source.shape if isinstance(x, Tensor) else x.shape
    memory, result = _new_blocks(slot, opened, source.device, shape, layout, sums, new_scales)
    if read.up is None:
        block_casts.cast(kernel, source, result, read.dy, read.is_packed, power_of_2)
    else:
        block_casts.cast_gated(kernel, source, read.up, result, power_of_two=power_of_2)
    return memory._replace(sums=_total(result.column_sums))


NewScales = Callable[[torch.device, int, int], Tensor]


def pair_in_blocks(
    pair: Computed,
    slots: Sequence[Slot],
    opened: Sequence[Opened],
    layout: str,
    sums: bool,
    new_scales: NewScales,
    mx: bool,
    power_of_2: bool,
) -> list[Memory] | None:
    """The gradients of gate and up in one launch."""
    (gate, up), dy = pair.inputs, pair.gradient
    kernel = _kernel_in_blocks(_Read(gate, up, dy, pair.activation), mx)
    if dy is None or kernel is None or gate.dtype != dy.dtype:
        return None
    (memory, result), (of_up, second) = (
        _new_blocks(*place, gate.device, gate.shape, layout, sums, new_scales)
        for place in zip(slots, opened, strict=True)
    )
    block_casts.cast_gated(kernel, gate.contiguous(), up.contiguous(), result, _rows_apart(dy), second, power_of_2)
    made = (memory, result), (of_up, second)
    return [memory._replace(sums=_total(result.column_sums)) for memory, result in made]


def _kernel_in_blocks(read: _Read | None, mx: bool) -> Kernel | None:
    if read is None:
        return None
    return block_cast_kernel(read.x.device, read.x.dtype, mx, read.activation, read.is_backward)


def _new_blocks(
    slot: Slot,
    opened: Opened,
    device: torch.device,
    shape: Sequence[int],
    layout: str,
    sums: bool,
    new_scales: NewScales,
) -> tuple[Memory, block_casts.Result]:
    rows, columns = shape
    by_rows = by_columns = None
    if layout != "columns":
        by_rows = new_codes(device, rows, columns), new_scales(device, rows, columns)
    if layout != "rows":
        by_columns = new_codes(device, *columns_shape(rows, columns)), new_scales(device, columns, rows)
    recorded = None if opened.amax is None else (slot.index, opened.amax)
    partial = _new_sums(device, shape, sums)
    (codes, scale_inv), (turned, turned_inv) = by_rows or (None, None), by_columns or (None, None)
    memory = Memory(codes, turned, scale_inv, turned_inv, None)
    return memory, block_casts.Result(recorded, by_rows, by_columns, partial)


def measure_weights(of: Sequence[Tensor]) -> Tensor:
    """``max|w|`` of many weights on one device, ``[count] float32``; in one launch if there is a kernel for it."""
    kernel = weights_kernel(of[0].device, False) if on_gpu(of[0]) else None
    if kernel is None or not all(weight.numel() for weight in of):
        return torch.stack([max_abs(weight) for weight in of])
    table = casts.weight_table([casts.Weight(weight) for weight in of])
    casts.measure_weights(kernel, table)
    return table.current_amax


# Memory


def new_codes(device: torch.device, rows: int, columns: int) -> Tensor:
    """Uninitialised codes ``[rows, columns]``."""
    return empty_strided((rows, columns), (columns, 1), dtype=torch.uint8, device=device)


def by_rows(x: Tensor) -> tuple[Tensor, bool]:
    """x with elements of a row side by side; or its transpose and True, whose codes are those of x, swapped."""
    if x.stride(1) != 1 and x.stride(0) == 1 and not (x.shape[0] | x.shape[1]) % ALIGNMENT:
        return x.t(), True
    return _rows_apart(x), False


def _rows_apart(x: Tensor) -> Tensor:
    """x with the elements of a row side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


def _new_sums(device: torch.device, shape: Sequence[int], sums: bool) -> Tensor | None:
    """Column sums of each tile of rows."""
    if not sums:
        return None
    rows, columns = shape
    return empty_strided((casts.column_sum_tiles(rows), columns), (columns, 1), dtype=torch.float32, device=device)


def _total(partial: Tensor | None) -> Tensor | None:
    if partial is None:
        return None
    return partial.sum(dim=0) if partial.shape[0] > 1 else partial[0]


# Weights


class WeightScales(NamedTuple):
    """The scales that ``cast_weights`` writes, as its variants are called."""

    squares: bool = False
    mx: bool = False
    power_of_2: bool = False

    @property
    def in_blocks(self) -> bool:
        """Whether blocks of a weight have scales."""
        return self.squares or self.mx


def weights(
    of: Sequence[Tensor],
    slots: Sequence[Slot],
    out: Sequence[Cast | None],
    scales: WeightScales,
    columns: bool,
    is_view: IsView,
) -> list[Memory] | None:
    """Casts of weights by their own values, all in E4M3; in blocks by one launch, else by two. No weight is empty.

    Args:
        of: ``[N, K]`` each.
        slots: theirs.
        out: for each a cast whose codes are written; None for new memory.
        scales: what has a scale.
        columns: whether new casts are also made by columns.
        is_view: whether the codes by columns are a view of those by rows.
    """
    kernel = weights_kernel(of[0].device, scales.squares, scales.mx)
    if kernel is None or any(weight.dtype not in casts.INPUTS for weight in of):
        return None
    new = _memory_by_stack([weight for weight, target in zip(of, out, strict=True) if target is None], columns, is_view)
    memory = [next(new) if target is None else _codes_of(target, is_view(weight)) for weight, target in zip(of, out)]
    return _launch_weights(kernel, of, slots, memory, scales)


IsView = Callable[[Tensor], bool]
_Codes = tuple[Tensor | None, Tensor | None]


def _codes_of(cast: Cast, is_view: bool) -> _Codes:
    rows, columns = (None if side is None else side.codes for side in cast[:2])
    return rows, None if is_view else columns


def _memory_by_stack(of: Sequence[Tensor], columns: bool, is_view: IsView) -> Iterator[_Codes]:
    """Memory for codes; that for matrices of one parameter lies side by side, in their order."""
    stacks: dict[tuple[int, torch.Size], list[int]] = {}
    for at, weight in enumerate(of):
        stacks.setdefault((weight.untyped_storage().data_ptr(), weight.shape), []).append(at)
    memory: dict[int, _Codes] = {}
    for places in stacks.values():
        weight = of[places[0]]
        shapes = weight.shape, columns_shape(*weight.shape) if columns and not is_view(weight) else None
        made = (
            [None] * len(places) if shape is None else weight.new_empty(len(places), *shape, dtype=torch.uint8)
            for shape in shapes
        )
        memory.update(zip(places, zip(*made, strict=True), strict=True))
    return (memory[at] for at in range(len(of)))


def _launch_weights(
    kernel: Kernel, of: Sequence[Tensor], slots: Sequence[Slot], codes: Sequence[_Codes], scales: WeightScales
) -> list[Memory]:
    if len(of) > 1 and is_capturing(of[0].is_cuda):
        # a table is copied from the host, whose memory the graph would read again whenever it is replayed
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
    return [
        Memory(*pair, *(both[::-1] if is_transposed else both), None)
        for pair, both, is_transposed in zip(codes, inverses, turned)
    ]
