"""The operators on a CUDA device: our kernels where available, else torch's operators. Nothing synchronises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, empty_strided

from kernels_cuda import block_casts, casts, scales
from kernels_cuda.launch import Kernel
from lightning_fp8.ops import blocks
from lightning_fp8.ops.activations import activate, activation_gradient, gated, gated_gradients
from lightning_fp8.ops.amaxes import as_asked, max_abs
from lightning_fp8.ops.counting import count, is_counting
from lightning_fp8.ops.cuda import plain
from lightning_fp8.ops.cuda.gemm import scaled_mm
from lightning_fp8.ops.cuda.kernels import block_cast_kernel, cast_kernel, update_kernel, weights_kernel
from lightning_fp8.ops.library import is_k_major
from lightning_fp8.ops.operand import (
    ALIGNMENT,
    Columns,
    Fp8Operand,
    Fp8Tensor,
    Slot,
    WeightSlot,
    columns_shape,
    gradient_layout,
    new_payloads,
    nothing,
)


def cast(x: Tensor, slot: Slot, activation: str, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::cast``."""
    kernel = cast_kernel(x.device, x.dtype, slot.format, activation, False) if x.numel() else None
    if kernel is None:
        return plain.cast(x, slot, activation, layout)
    row = _row(slot)
    y, y_t, scale_inv, _ = _launch(kernel, x, row, layout, activation)
    if is_counting(slot):
        count(activate(x, activation), _used(row, scale_inv), slot)
    return y, y_t, scale_inv


def cast_weight(weight: Tensor, slot: WeightSlot, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """See the operators ``lightning_fp8::cast_weight`` and, for a weight in blocks, ``cast_weight_blocks``."""
    squares, castable = bool(slot.own.blocks), weight.numel() and weight.dtype in casts.INPUTS
    kernel = weights_kernel(weight.device, squares) if castable and slot.format == "e4m3" else None
    if kernel is None:
        return (blocks if squares else plain).cast_weight(weight, slot, layout)
    (made,) = _cast_weights(kernel, [weight], [slot], [new_payloads(weight, weight.shape, layout)])
    return made.rows, made.columns, made.scale_inv.contiguous()


def cast_blocks(x: Tensor, slot: Slot, layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::cast_blocks``."""
    return _cast_blocks(x, slot, layout, False)[:4]


def _cast_blocks(x: Tensor, slot: Slot, layout: str, sums: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same, and with ``sums`` the column sums ``[columns] float32``."""
    kernel = block_cast_kernel(x.device, x.dtype) if x.numel() and slot.format == "e4m3" else None
    if kernel is None:
        db = x.sum(dim=0, dtype=torch.float32) if sums else nothing(x, torch.float32)
        return *blocks.cast(x, slot, layout), db
    x = x if x.stride(1) == 1 else x.contiguous()
    y, y_t, scale_inv, scale_inv_t = blocks.new_cast(x, layout)
    partial = x.new_empty(casts.column_sum_tiles(len(x)), x.shape[1], dtype=torch.float32) if sums else None
    amax, _, _ = slot.open()
    recorded = None if amax is None else (slot.index, amax)
    block_casts.cast_blocks(kernel, x, recorded, slot.own.blocks != "float32", y, scale_inv, y_t, scale_inv_t, partial)
    blocks.count_if_asked(x, scale_inv, scale_inv_t, slot, layout)
    return y, y_t, scale_inv, scale_inv_t, nothing(x, torch.float32) if partial is None else _total(partial)


def cast_weights(
    weights: Sequence[Tensor], slots: Sequence[WeightSlot], out: Sequence[Fp8Operand | None]
) -> list[Fp8Operand]:
    """Both payloads of many weights, each scaled by its own values: in blocks by one launch, else by two.

    Args:
        weights: ``[N, K]`` each, none empty, all on one device.
        slots: of one state, with the same format and scaling.
        out: for each weight, an operand whose payloads are written; None for new ones.

    Raises:
        RuntimeError: if the device has no kernel that casts weights together.
    """
    device = weights[0].device
    kernel = weights_kernel(device, bool(slots[0].own.blocks))
    if kernel is None:
        raise RuntimeError(f"There is no kernel on {device} that casts weights together.")
    payloads = [
        new_payloads(weight, weight.shape, "both") if kept is None else kept[:2]
        for weight, kept in zip(weights, out, strict=True)
    ]
    return _cast_weights(kernel, weights, slots, payloads)


def _cast_weights(
    kernel: Kernel, weights: Sequence[Tensor], slots: Sequence[WeightSlot], payloads: Sequence[tuple[Tensor, Tensor]]
) -> list[Fp8Operand]:
    own, state = slots[0].own, slots[0].state
    jobs, operands, of_transpose = [], [], []
    for weight, slot, made in zip(weights, slots, payloads, strict=True):
        x, is_transposed = _by_rows(weight)
        jobs.append(casts.Weight(x, slot.index, *(made[::-1] if is_transposed else made)))
        of_transpose.append(is_transposed)
    table = casts.weight_table(jobs, bool(own.blocks))
    scale, amax = (None, None) if state is None else (state.scale, state.amax)
    casts.cast_weights(kernel, table, scale, amax, own.blocks == "power of 2")
    for weight, slot, made, inverse, is_transposed in zip(weights, slots, payloads, table.scale_inv, of_transpose):
        scales = (inverse, inverse.t() if own.blocks else inverse)
        operand = Fp8Operand(*made, *(scales[::-1] if is_transposed else scales), slot.format)
        operands.append(operand)
        if scale is not None and is_counting(slot):
            whole = scale.index_select(0, slot.index)[0]
            count(weight, blocks.scale_to_count(operand.scale_inv.reciprocal(), weight) if own.blocks else whole, slot)
    return operands


def measure_weights(weights: Sequence[Tensor]) -> Tensor:
    """``max|w|`` of many weights on one device, ``[count] float32``; in one launch if there is a kernel for it."""
    kernel = weights_kernel(weights[0].device, False) if is_k_major(weights[0]) else None
    if kernel is None or not all(weight.numel() for weight in weights):
        return torch.stack([max_abs(weight) for weight in weights])
    table = casts.weight_table([casts.Weight(weight) for weight in weights])
    casts.measure_weights(kernel, table)
    return table.current_amax


def linear_backward(
    dy: Tensor,
    h: Tensor | None,
    activation: str,
    x: Columns,
    w: Columns,
    slot: Slot,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::linear_backward``."""
    layout = gradient_layout(x, w)
    if slot.own.blocks:
        values = dy if h is None else activation_gradient(h, dy, activation)
        dy_fp8, dy_fp8_t, scale_inv, scale_inv_t, db = _cast_blocks(values, slot, layout, bias)
    else:
        dy_fp8, dy_fp8_t, scale_inv, db = cast_gradient(dy, h, activation, slot, layout, bias)
        scale_inv_t = scale_inv
    fmt, gemm = slot.format, slot.gemm
    if w.payload is None:
        dx = nothing(dy, dx_dtype)
    else:
        operands = Fp8Tensor(dy_fp8, scale_inv, fmt), Fp8Tensor(w.payload, w.scale_inv, w.format)
        dx = scaled_mm(*operands, None, dx_dtype, False, gemm)
        del operands
    # a large tensor, whose memory may be reused for the next one
    del dy_fp8
    if x.payload is None:
        dw = dy.new_empty((dy if h is None else h).shape[1], 0, dtype=dw_dtype)
    else:
        operands = Fp8Tensor(dy_fp8_t, scale_inv_t, fmt), Fp8Tensor(x.payload, x.scale_inv, x.format)
        dw = scaled_mm(*operands, None, dw_dtype, False, gemm)
    return dx, dw, db


def cast_gradient(
    dy: Tensor, h: Tensor | None, activation: str, slot: Slot, layout: str, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`lightning_fp8.ops.cuda.plain.cast_gradient`."""
    kernel = cast_kernel(dy.device, dy.dtype, slot.format, activation, h is not None) if dy.numel() else None
    if kernel is None or (h is not None and h.dtype != dy.dtype):
        return plain.cast_gradient(dy, h, activation, slot, layout, bias)
    row = _row(slot)
    if h is None:
        y, y_t, scale_inv, sums = _launch(kernel, dy, row, layout, sums=bias)
    else:
        dy = dy if dy.stride(1) == 1 else dy.contiguous()
        y, y_t, scale_inv, sums = _launch(kernel, h.contiguous(), row, layout, activation, dy, bias)
    if is_counting(slot):
        gradient = dy if h is None else activation_gradient(h, dy, activation)
        count(gradient, _used(row, scale_inv), slot)
    return y, y_t, scale_inv, nothing(dy, torch.float32) if sums is None else sums


def cast_gated(gate: Tensor, up: Tensor, slot: Slot, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """The cast of ``silu(gate) * up``: payload, transposed payload, scale_inv."""
    kernel = cast_kernel(gate.device, gate.dtype, slot.format, "swiglu", False) if gate.numel() else None
    if kernel is None:
        return plain.cast(gated(gate, up), slot, "none", layout)
    result = _result(gate, _row(slot), layout, sums=False)
    casts.cast_gated(kernel, gate.contiguous(), up.contiguous(), result)
    if is_counting(slot):
        count(gated(gate, up), _used(result.row, result.scale_inv), slot)
    return _payloads(result, gate)


def cast_gated_gradients(
    gate: Tensor, up: Tensor, dy: Tensor, slots: tuple[Slot, Slot], layout: str, biases: Sequence[bool]
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The casts of the gradients of gate and up, each with its own slot; see :func:`cast_gradient`."""
    kernel = cast_kernel(dy.device, dy.dtype, slots[0].format, "swiglu", True) if dy.numel() else None
    if kernel is None or gate.dtype != dy.dtype:
        gradients = gated_gradients(gate, up, dy)
        return [
            plain.cast_gradient(gradient, None, "none", slot, layout, bias)
            for gradient, slot, bias in zip(gradients, slots, biases, strict=True)
        ]
    # the kernel sums both or neither
    of_gate, of_up = (_result(gate, _row(slot), layout, sums=any(biases)) for slot in slots)
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    casts.cast_gated(kernel, gate.contiguous(), up.contiguous(), of_gate, dy, of_up)
    if any(map(is_counting, slots)):
        for gradient, result, slot in zip(gated_gradients(gate, up, dy), (of_gate, of_up), slots, strict=True):
            if is_counting(slot):
                count(gradient, _used(result.row, result.scale_inv), slot)
    sums = [None if one.column_sums is None else one.column_sums.sum(dim=0) for one in (of_gate, of_up)]
    return [
        (*_payloads(result, dy), nothing(dy, torch.float32) if total is None or not bias else total)
        for result, total, bias in zip((of_gate, of_up), sums, biases, strict=True)
    ]


def _result(like: Tensor, row: casts.Row, layout: str, sums: bool) -> casts.Result:
    """Memory for the outputs of a gated cast for one tensor ``[rows, columns]``."""
    rows, columns = like.shape
    return casts.Result(
        row,
        like.new_empty((), dtype=torch.float32),
        like.new_empty(rows, columns, dtype=torch.uint8) if layout != "columns" else None,
        like.new_empty(columns_shape(rows, columns), dtype=torch.uint8) if layout != "rows" else None,
        like.new_empty(casts.column_sum_tiles(rows), columns, dtype=torch.float32) if sums else None,
    )


def _payloads(result: casts.Result, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, y_t = (nothing(like, torch.uint8) if one is None else one for one in (result.y, result.y_t))
    return y, y_t, result.scale_inv


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


def _row(slot: Slot) -> casts.Row:
    amax, goes_with_weights, is_there = slot.open()
    if is_there:
        return casts.Row(slot.scale, slot.amax_history, slot.index, amax)
    current = torch.zeros((), dtype=torch.float32, device=slot.scale.device)
    newest = slot.amax_history if goes_with_weights else torch.zeros_like(slot.amax_history[:1])
    return casts.Row(slot.scale, newest, slot.index, amax, current, _after_measuring(slot))


def _after_measuring(slot: Slot) -> Callable[[Tensor], object] | None:
    return (lambda amax: amax.copy_(as_asked(amax, slot.own))) if slot.own.adjusts_amax else None


def _used(row: casts.Row, scale_inv: Tensor) -> Tensor:
    """The scale used by a cast; exact if it came from the state."""
    delayed = row.scale.index_select(0, row.index)[0]
    if row.current_amax is None:
        return delayed
    return torch.where(row.newest[0].index_select(0, row.index)[0] > 0, delayed, scale_inv.reciprocal())


def _by_rows(x: Tensor) -> tuple[Tensor, bool]:
    """x with elements of a row side by side; or its transpose and True, whose payloads are those of x, swapped."""
    if x.stride(1) != 1 and x.stride(0) == 1 and not (x.shape[0] | x.shape[1]) % ALIGNMENT:
        return x.t(), True
    return x if x.stride(1) == 1 else x.contiguous(), False


def _launch(
    kernel: Kernel,
    x: Tensor,
    row: casts.Row,
    layout: str,
    activation: str = "none",
    dy: Tensor | None = None,
    sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Allocate and launch: payload and transposed payload (empty unless requested), scale_inv and column sums."""
    if x.stride(1) != 1:
        x, is_transposed = (x.contiguous(), False) if sums or activation != "none" else _by_rows(x)
        if is_transposed:
            other = {"rows": "columns", "columns": "rows"}.get(layout, layout)
            by_columns, by_rows, scale_inv, _ = _launch(kernel, x, row, other)
            return by_rows, by_columns, scale_inv, None
    (rows, width), device, gated = x.shape, x.device, activation == "swiglu"
    if gated and dy is None:
        width //= 2
    # of torch's ways to allocate, the one that takes the least host time
    y = empty_strided((rows, width), (width, 1), dtype=torch.uint8, device=device) if layout != "columns" else None
    shape = columns_shape(rows, width)
    y_t = empty_strided(shape, (shape[1], 1), dtype=torch.uint8, device=device) if layout != "rows" else None
    scale_inv = empty_strided((), (), dtype=torch.float32, device=device)
    partial = None
    if sums:
        shape = casts.column_sum_tiles(rows), width
        partial = empty_strided(shape, (width, 1), dtype=torch.float32, device=device)
    casts.cast_transpose(kernel, x, row, scale_inv, y, y_t, partial, dy, gated)
    payload = nothing(x, torch.uint8) if y is None else y
    payload_t = nothing(x, torch.uint8) if y_t is None else y_t
    return payload, payload_t, scale_inv, None if partial is None else _total(partial)


def _total(partial: Tensor) -> Tensor:
    """Column sums of all tiles from those of each."""
    return partial.sum(dim=0) if len(partial) > 1 else partial[0]
