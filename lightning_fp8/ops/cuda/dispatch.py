"""The operators on a CUDA device: our kernels where available, else torch's operators. Nothing synchronises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, empty_strided

from kernels_cuda import block_casts, casts, scales
from kernels_cuda.launch import Kernel
from lightning_fp8.ops import blocks
from lightning_fp8.ops.activations import activate, activation_gradient, gated, gated_gradients
from lightning_fp8.ops.amaxes import as_asked, max_abs
from lightning_fp8.ops.backward import gradients_by
from lightning_fp8.ops.counting import count, is_counting
from lightning_fp8.ops.cuda import plain
from lightning_fp8.ops.cuda.gemm import scaled_mm
from lightning_fp8.ops.cuda.kernels import block_cast_kernel, cast_kernel, update_kernel, weights_kernel
from lightning_fp8.ops.cuda.layouts import multiplies_as_mx, needs_transposed_payload
from lightning_fp8.ops.library import on_gpu
from lightning_fp8.ops.operand import (
    ALIGNMENT,
    CurrentScale,
    Fp8Operand,
    Groups,
    ScaleFrom,
    Slot,
    WeightSlot,
    columns_shape,
    new_payloads,
    nothing,
)
from lightning_fp8.runtime.device import is_capturing

# a gradient's payloads by rows and by columns, the scale_inv of each, and column sums
Cast = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
# the layout of a transposed tensor's payloads
_TRANSPOSED = {"rows": "columns", "columns": "rows"}


def cast(x: Tensor, slot: Slot, activation: str, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::cast``."""
    kernel = cast_kernel(x.device, x.dtype, slot.format, activation, False) if x.numel() else None
    if kernel is None:
        return plain.cast(x, slot, activation, layout)
    y, y_t, scale_inv, _ = _launch(kernel, x, slot, layout, activation)
    return y, y_t, scale_inv


def cast_weight(weight: Tensor, slot: WeightSlot, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::cast_weight``."""
    operand = _cast_one_weight(weight, slot, layout)
    return plain.cast_weight(weight, slot, layout) if operand is None else operand[:3]


def cast_weight_blocks(weight: Tensor, slot: WeightSlot, layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::cast_weight_blocks``."""
    operand = _cast_one_weight(weight, slot, layout)
    if operand is None:
        return blocks.cast_weight(weight, slot, layout)
    none = nothing(weight, torch.float32)
    if not slot.current.in_e8m0:
        return operand.by_rows, operand.by_columns, operand.scale_inv.contiguous(), none
    return (
        *operand[:2],
        operand.scale_inv if layout != "columns" else none,
        operand.columns_scale_inv if layout != "rows" else none,
    )


def _cast_one_weight(weight: Tensor, slot: WeightSlot, layout: str) -> Fp8Operand | None:
    castable = weight.numel() and weight.dtype in casts.INPUTS and slot.format == "e4m3"
    kernel = kernel_for_weights(weight.device, slot.current) if castable else None
    if kernel is None:
        return None
    return _cast_weights(kernel, [weight], [slot], [new_payloads(weight, weight.shape, layout)])[0]


def kernel_for_weights(device: torch.device, current: CurrentScale) -> Kernel | None:
    """The kernel that casts weights that are scaled like this, or None."""
    return weights_kernel(device, current.squares, current.in_e8m0)


def cast_blocks(x: Tensor, slot: Slot, activation: str, layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::cast_blocks``."""
    return _cast_blocks(x, None, activation, slot, layout, False)[:4]


def _cast_blocks(x: Tensor, dy: Tensor | None, activation: str, slot: Slot, layout: str, sums: bool) -> Cast:
    """The same, or with ``dy`` that of the gradient of x; with ``sums`` the column sums ``[columns] float32``."""
    kernel = _kernel_in_blocks(x, slot, activation, dy is not None)
    is_gated = activation == "swiglu"
    # blocks must not lie in both halves of a gradient
    fits = dy is None or (dy.dtype == x.dtype and not (is_gated and x.shape[1] % (2 * block_casts.BLOCK)))
    if kernel is None and activation == "none":
        return blocks.cast_gradient(x, None, "none", slot, layout, sums)
    if kernel is None or not fits:
        values = activate(x, activation) if dy is None else activation_gradient(x, dy, activation)
        return _cast_blocks(values, None, "none", slot, layout, sums)
    x = x if x.stride(1) == 1 else x.contiguous()
    dy = dy if dy is None or dy.stride(1) == 1 else dy.contiguous()
    width = x.shape[1] // 2 if is_gated and dy is None else x.shape[1]
    tensors, result = _new_blocks(slot, (len(x), width), layout, sums)
    block_casts.cast(kernel, x, result, dy, is_gated, slot.current.blocks == "power of 2")
    if is_counting(slot):
        values = activate(x, activation) if dy is None else activation_gradient(x, dy, activation)
        blocks.count_if_asked(values, *tensors[2:], slot, layout)
    return *tensors, _total(result.column_sums, x)


def _kernel_in_blocks(x: Tensor, slot: Slot, activation: str, gradient: bool) -> Kernel | None:
    if not x.numel() or slot.format != "e4m3":
        return None
    return block_cast_kernel(x.device, x.dtype, slot.current.in_e8m0, activation, gradient)


def _new_blocks(
    slot: Slot, shape: tuple[int, int], layout: str, sums: bool
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], block_casts.Result]:
    """Memory for the cast of a tensor of this shape, and what a kernel writes to."""
    y, y_t, scale_inv, scale_inv_t = tensors = blocks.new_cast(slot.scale, shape, slot.current, layout)
    amax, _ = slot.open()
    result = block_casts.Result(
        None if amax is None else (slot.index, amax),
        None if layout == "columns" else (y, scale_inv),
        None if layout == "rows" else (y_t, scale_inv_t),
        slot.scale.new_empty(casts.column_sum_tiles(shape[0]), shape[1]) if sums else None,
    )
    return tensors, result


def cast_weights(
    kernel: Kernel,
    weights: Sequence[Tensor],
    slots: Sequence[WeightSlot],
    out: Sequence[Fp8Operand | None],
    keep: bool,
) -> list[Fp8Operand]:
    """See :func:`lightning_fp8.ops.basic.cast_weights`; in blocks by one launch, else by two. No weight is empty."""
    in_blocks, payloads, views = bool(slots[0].current.blocks), [], []
    new_weights = [weight for weight, target in zip(weights, out, strict=True) if target is None]
    new = _payloads_by_stack(new_weights, in_blocks, keep)
    for weight, target in zip(weights, out, strict=True):
        is_view = not needs_transposed_payload(weight.device, weight.shape, in_blocks)
        memory = next(new) if target is None else target[:2]
        # a view that compiled code reads stays the same object
        views.append((memory[0].t() if target is None else memory[1]) if is_view else None)
        payloads.append((memory[0], nothing(weight, torch.uint8)) if is_view else memory)
    operands = _cast_weights(kernel, weights, slots, payloads)
    if slots[0].current.blocks == "power of 2":
        operands = [*map(as_multiplied, operands)]
    pairs = zip(operands, views, strict=True)
    return [operand if view is None else operand._replace(by_columns=view) for operand, view in pairs]


def _payloads_by_stack(weights: Sequence[Tensor], in_blocks: bool, keep: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Memory for payloads; that for matrices of one parameter lies side by side, in their order."""
    stacks: dict[tuple[int, torch.Size], list[int]] = {}
    for at, weight in enumerate(weights):
        stacks.setdefault((weight.untyped_storage().data_ptr(), weight.shape), []).append(at)
    payloads: dict[int, tuple[Tensor, Tensor]] = {}
    for places in stacks.values():
        weight = weights[places[0]]
        is_separate = keep and needs_transposed_payload(weight.device, weight.shape, in_blocks)
        if len(places) == 1:
            payloads[places[0]] = new_payloads(weight, weight.shape, "both" if is_separate else "rows")
            continue
        shapes = weight.shape, columns_shape(*weight.shape) if is_separate else (0,)
        rows, columns = (weight.new_empty(len(places), *shape, dtype=torch.uint8) for shape in shapes)
        payloads.update(zip(places, zip(rows, columns, strict=True), strict=True))
    return (payloads[at] for at in range(len(weights)))


def _cast_weights(
    kernel: Kernel, weights: Sequence[Tensor], slots: Sequence[WeightSlot], payloads: Sequence[tuple[Tensor, Tensor]]
) -> list[Fp8Operand]:
    if len(weights) > 1 and is_capturing(weights[0].is_cuda):
        # a table is copied from the host, whose memory the graph would read again whenever it is replayed
        each = zip(weights, slots, payloads, strict=True)
        return [_cast_weights(kernel, [weight], [slot], [made])[0] for weight, slot, made in each]
    current, state = slots[0].current, slots[0].state
    jobs, operands, of_transpose = [], [], []
    for weight, slot, pair in zip(weights, slots, payloads, strict=True):
        x, is_transposed = _by_rows(weight)
        jobs.append(casts.Weight(x, slot.index, *(pair[::-1] if is_transposed else pair)))
        of_transpose.append(is_transposed)
    table = casts.weight_table(jobs, current.squares, current.in_e8m0)
    scale, amax = (None, None) if state is None else (state.scale, state.amax)
    casts.cast_weights(kernel, table, scale, amax, current.blocks == "power of 2")
    inverses = zip(table.scale_inv, table.scale_inv_t, strict=True)
    for weight, slot, pair, both, is_transposed in zip(weights, slots, payloads, inverses, of_transpose):
        operand = Fp8Operand(*pair, *(both[::-1] if is_transposed else both), slot.format)
        operands.append(operand)
        if current.blocks:
            of_both = operand.scale_inv, operand.columns_scale_inv
            blocks.count_if_asked(weight, *of_both, slot, "both" if current.in_e8m0 else "rows")
        elif scale is not None and is_counting(slot):
            count(weight, scale.index_select(0, slot.index)[0], slot)
    return operands


def in_blocks(cast: Sequence[Tensor], slot: Slot) -> Fp8Operand:
    """A cast in blocks as an operand of products."""
    operand = Fp8Operand(cast[0], cast[1], cast[2], cast[3], slot.format)
    return as_multiplied(operand) if slot.current.blocks == "power of 2" else operand


def as_multiplied(operand: Fp8Operand) -> Fp8Operand:
    """An operand whose blocks have powers of two, with the scales that products take here: those of MX, or its own."""
    if not multiplies_as_mx(operand.by_rows.device):
        return operand
    # one of the payloads may be empty
    rows, columns = (
        blocks.in_tiles(scale, payload) if payload.dim() == 2 else scale
        for payload, scale in zip(operand[:2], operand[2:4], strict=True)
    )
    return operand._replace(scale_inv=rows, columns_scale_inv=columns)


def measure_weights(weights: Sequence[Tensor]) -> Tensor:
    """``max|w|`` of many weights on one device, ``[count] float32``; in one launch if there is a kernel for it."""
    kernel = weights_kernel(weights[0].device, False) if on_gpu(weights[0]) else None
    if kernel is None or not all(weight.numel() for weight in weights):
        return torch.stack([max_abs(weight) for weight in weights])
    table = casts.weight_table([casts.Weight(weight) for weight in weights])
    casts.measure_weights(kernel, table)
    return table.current_amax


def cast_gradient(dy: Tensor, h: Tensor | None, activation: str, slot: Slot, layout: str, bias: bool) -> Cast:
    """See :func:`lightning_fp8.ops.cuda.plain.cast_gradient`; in blocks where the slot is."""
    if slot.current.blocks:
        x, gradient, of = (dy, None, "none") if h is None else (h, dy, activation)
        return _multiplied(_cast_blocks(x, gradient, of, slot, layout, bias), slot)
    if layout != "rows" and not needs_transposed_payload(dy.device, (dy if h is None else h).shape):
        return _with_view(cast_gradient(dy, h, activation, slot, "rows", bias))
    kernel = cast_kernel(dy.device, dy.dtype, slot.format, activation, h is not None) if dy.numel() else None
    if kernel is None or (h is not None and h.dtype != dy.dtype):
        return plain.cast_gradient(dy, h, activation, slot, layout, bias)
    if h is None:
        y, y_t, scale_inv, sums = _launch(kernel, dy, slot, layout, sums=bias)
    else:
        dy = dy if dy.stride(1) == 1 else dy.contiguous()
        y, y_t, scale_inv, sums = _launch(kernel, h.contiguous(), slot, layout, activation, dy, bias)
    return y, y_t, scale_inv, scale_inv, _total(sums, dy)


linear_backward = gradients_by(cast_gradient, scaled_mm)


def _multiplied(cast: Cast, slot: Slot) -> Cast:
    """A gradient's cast in blocks, with the scales that products take."""
    return *in_blocks(cast, slot)[:4], cast[4]  # type: ignore[return-value]


def cast_gated(gate: Tensor, up: Tensor, slot: Slot, keep: bool) -> Fp8Operand:
    """The cast of ``silu(gate) * up`` for the GEMMs; by columns too if backward needs that (``keep``)."""
    if slot.current.blocks:
        return in_blocks(_cast_gated_blocks(gate, up, slot, "both" if keep else "rows"), slot)
    is_separate = needs_transposed_payload(gate.device, gate.shape)
    rows, columns, scale_inv = _cast_gated(gate, up, slot, "both" if keep and is_separate else "rows")
    return Fp8Operand(rows, columns if is_separate else rows.t(), scale_inv, scale_inv, slot.format)


def _cast_gated_blocks(gate: Tensor, up: Tensor, slot: Slot, layout: str) -> Sequence[Tensor]:
    kernel = _kernel_in_blocks(gate, slot, "swiglu", False)
    if kernel is None:
        return _cast_blocks(gated(gate, up), None, "none", slot, layout, False)
    tensors, result = _new_blocks(slot, (len(gate), gate.shape[1]), layout, False)
    of_two = slot.current.blocks == "power of 2"
    block_casts.cast_gated(kernel, gate.contiguous(), up.contiguous(), result, power_of_two=of_two)
    if is_counting(slot):
        blocks.count_if_asked(gated(gate, up), *tensors[2:], slot, layout)
    return tensors


def _cast_gated(gate: Tensor, up: Tensor, slot: Slot, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    kernel = cast_kernel(gate.device, gate.dtype, slot.format, "swiglu", False) if gate.numel() else None
    if kernel is None:
        return plain.cast(gated(gate, up), slot, "none", layout)
    result = new_result(slot, len(gate), gate.shape[1], layout, False)
    casts.cast_gated(kernel, gate.contiguous(), up.contiguous(), result)
    if is_counting(slot):
        count(gated(gate, up), _used(result), slot)
    return result.y, result.y_t, result.scale_inv


def cast_gated_gradients(
    gate: Tensor, up: Tensor, dy: Tensor, slots: tuple[Slot, Slot], layout: str, biases: Sequence[bool]
) -> list[Cast]:
    """The casts of the gradients of gate and up, each with its own slot; see :func:`cast_gradient`."""
    if slots[0].current.blocks:
        gradient_casts = _cast_gated_blocks_gradients(gate, up, dy, slots, layout, biases)
        return [_multiplied(cast, slot) for cast, slot in zip(gradient_casts, slots, strict=True)]
    if layout != "rows" and not needs_transposed_payload(dy.device, dy.shape):
        return [*map(_with_view, cast_gated_gradients(gate, up, dy, slots, "rows", biases))]
    kernel = cast_kernel(dy.device, dy.dtype, slots[0].format, "swiglu", True) if dy.numel() else None
    if kernel is None or gate.dtype != dy.dtype:
        parts = zip(gated_gradients(gate, up, dy), slots, biases, strict=True)
        return [plain.cast_gradient(grad, None, "none", slot, layout, bias) for grad, slot, bias in parts]
    # the kernel sums both or neither
    results = [new_result(slot, len(gate), gate.shape[1], layout, any(biases)) for slot in slots]
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    casts.cast_gated(kernel, gate.contiguous(), up.contiguous(), results[0], dy, results[1])
    if any(map(is_counting, slots)):
        for gradient, result, slot in zip(gated_gradients(gate, up, dy), results, slots, strict=True):
            if is_counting(slot):
                count(gradient, _used(result), slot)
    return [
        (out.y, out.y_t, out.scale_inv, out.scale_inv, _total(out.column_sums if bias else None, dy))
        for out, bias in zip(results, biases, strict=True)
    ]


def _cast_gated_blocks_gradients(
    gate: Tensor, up: Tensor, dy: Tensor, slots: tuple[Slot, Slot], layout: str, biases: Sequence[bool]
) -> list[Cast]:
    kernel = _kernel_in_blocks(gate, slots[0], "swiglu", True) if gate.dtype == dy.dtype else None
    if kernel is None:
        parts = zip(gated_gradients(gate, up, dy), slots, biases, strict=True)
        return [_cast_blocks(grad, None, "none", slot, layout, bias) for grad, slot, bias in parts]
    # the kernel sums both or neither
    shape = len(gate), gate.shape[1]
    (cast_gate, result), (cast_up, of_up) = (_new_blocks(slot, shape, layout, any(biases)) for slot in slots)
    dy, of_two = dy if dy.stride(1) == 1 else dy.contiguous(), slots[0].current.blocks == "power of 2"
    block_casts.cast_gated(kernel, gate.contiguous(), up.contiguous(), result, dy, of_up, of_two)
    both = (cast_gate, result), (cast_up, of_up)
    if any(map(is_counting, slots)):
        for gradient, (cast, _), slot in zip(gated_gradients(gate, up, dy), both, slots, strict=True):
            blocks.count_if_asked(gradient, *cast[2:], slot, layout)
    return [
        (*cast, _total(out.column_sums if bias else None, dy)) for (cast, out), bias in zip(both, biases, strict=True)
    ]


def update_scales(
    amax: Tensor,
    amax_history: Tensor,
    scale: Tensor,
    fp8_max: Tensor,
    nonfinite_steps: Tensor,
    most_recent: bool,
    margin_factor: float,
) -> None:
    """See the operator ``lightning_fp8::update_scales``."""
    kernel = update_kernel(amax.device)
    if kernel is None:
        plain.update_scales(amax, amax_history, scale, fp8_max, nonfinite_steps, most_recent, margin_factor)
    elif amax.numel():
        scales.update_scales(kernel, amax, amax_history, scale, fp8_max, nonfinite_steps, most_recent, margin_factor)


def _with_view(cast: Cast) -> Cast:
    """A cast by rows, with the payload by columns as a view of it."""
    return cast[0], cast[0].t(), *cast[2:]


def _used(result: casts.Result) -> Tensor:
    """The scale used by a cast; exact if it came from the state."""
    own = result.scale_inv.reciprocal()
    if result.scale_from != ScaleFrom.HISTORY:
        return own
    delayed = result.scale.index_select(0, result.index)[0]
    if result.current_amax is None:
        return delayed
    return torch.where(result.newest[0].index_select(0, result.index)[0] > 0, delayed, own)


def _by_rows(x: Tensor) -> tuple[Tensor, bool]:
    """x with elements of a row side by side; or its transpose and True, whose payloads are those of x, swapped."""
    if x.stride(1) != 1 and x.stride(0) == 1 and not (x.shape[0] | x.shape[1]) % ALIGNMENT:
        return x.t(), True
    return x if x.stride(1) == 1 else x.contiguous(), False


def _launch(
    kernel: Kernel,
    x: Tensor,
    slot: Slot,
    layout: str,
    activation: str = "none",
    dy: Tensor | None = None,
    sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Allocate and launch: payload and transposed payload, each empty unless requested, scale_inv, and with ``sums``
    the column sums of each tile."""
    is_transposed, is_gated = False, activation == "swiglu"
    if not x.is_contiguous() and x.stride(1) != 1:
        x, is_transposed = (x.contiguous(), False) if sums or activation != "none" else _by_rows(x)
        layout = _TRANSPOSED.get(layout, layout) if is_transposed else layout
    rows, columns = x.shape
    result = new_result(slot, rows, columns // 2 if is_gated and dy is None else columns, layout, sums)
    casts.cast_transpose(kernel, x, result, dy, is_gated)
    if is_counting(slot):
        count(activate(x, activation) if dy is None else activation_gradient(x, dy, activation), _used(result), slot)
    by_rows, by_columns = (result.y_t, result.y) if is_transposed else (result.y, result.y_t)
    return by_rows, by_columns, result.scale_inv, result.column_sums


def new_result(
    slot: Slot, rows: int, columns: int, layout: str, sums: bool, groups: Groups | None = None
) -> casts.Result:
    """What a kernel reads of the state, and memory for what it writes about a tensor ``[rows, columns]``; empty
    payloads where none is requested. Of groups, each has a scale; 1 where it has no row."""
    amax, is_there = slot.open()
    scale, newest, index = slot[:3]
    device, current, after = scale.device, None, None
    if not is_there:
        one_each = () if groups is None else index.shape
        current, after = torch.zeros(one_each, dtype=torch.float32, device=device), _after_measuring(slot)
    # of torch's ways to allocate, the one that takes the least host time
    if layout == "columns":
        y = nothing(scale, torch.uint8)
    else:
        y = empty_strided((rows, columns), (columns, 1), dtype=torch.uint8, device=device)
    if layout == "rows":
        y_t = nothing(scale, torch.uint8)
    else:
        shape = columns_shape(rows, columns)
        y_t = empty_strided(shape, (shape[1], 1), dtype=torch.uint8, device=device)
    partial = None
    if sums:
        shape = casts.column_sum_tiles(rows), columns
        partial = empty_strided(shape, (columns, 1), dtype=torch.float32, device=device)
    if groups is None:
        scale_inv, of_tile = empty_strided((), (), dtype=torch.float32, device=device), None
    else:
        scale_inv, of_tile = torch.ones(index.shape, dtype=torch.float32, device=device), groups.of_tile
    scale_from = int(slot.current.scale_from)
    return casts.Result(scale, newest, index, amax, scale_inv, y, y_t, partial, current, after, of_tile, scale_from)


def _after_measuring(slot: Slot) -> Callable[[Tensor], object] | None:
    return (lambda amax: amax.copy_(as_asked(amax, slot.current))) if slot.current.adjusts_amax else None


def _total(partial: Tensor | None, like: Tensor) -> Tensor:
    """Column sums of all tiles from those of each; empty without."""
    if partial is None:
        return nothing(like, torch.float32)
    return partial.sum(dim=0) if partial.shape[0] > 1 else partial[0]
