"""The operators on a CUDA device: our kernels where they are to be had, plain torch where not. Nothing here waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels_cuda import casts, scales
from kernels_cuda.launch import Kernel
from lightning_fp8.formats import CASTABLE_DTYPES, FORMATS
from lightning_fp8.ops import plain
from lightning_fp8.ops.activations import activate, activated_width, activation_gradient
from lightning_fp8.ops.counting import count, is_counting
from lightning_fp8.ops.gemm import scaled_mm
from lightning_fp8.ops.kernels import cast_kernel, update_kernel, weights_kernel
from lightning_fp8.ops.library import K_MAJOR_DEVICES
from lightning_fp8.ops.reference import max_abs
from lightning_fp8.scaling import ScalingState, gemm_of, state_of


def cast(
    x: Tensor,
    scale: Tensor,
    amax_history: Tensor,
    index: Tensor,
    format: str,
    activation: str,
    layout: str,
    state: int,
    record: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::cast``."""
    kernel = _kernel_for(x, format, activation, backward=False)
    if kernel is None:
        return plain.cast(x, scale, amax_history, index, format, activation, layout, state, record)
    row = _row(scale, amax_history, index, state, record)
    y, y_t, scale_inv = _cast(kernel, x, row, layout, activation)
    if is_counting(state, record):
        count(activate(x, activation), _used(row, scale_inv), index, FORMATS[format], state)
    return y, y_t, scale_inv


def cast_weight(
    weight: Tensor, index: Tensor, format: str, layout: str, state: int, record: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::cast_weight``."""
    kernel, known = _kernel_for(weight, format, "none", backward=False), state_of(state)
    if kernel is None or known is None:
        return plain.cast_weight(weight, index, format, layout, state, record)
    current = torch.zeros((), dtype=torch.float32, device=weight.device)
    y, y_t, scale_inv = _cast(kernel, weight, casts.Row(known.scale, None, index, known.amax, current), layout)
    if is_counting(state, record):
        count(weight, known.scale.index_select(0, index)[0], index, FORMATS[format], state)
    return y, y_t, scale_inv


def _cast(
    kernel: Kernel, x: Tensor, row: casts.Row, layout: str, activation: str = "none"
) -> tuple[Tensor, Tensor, Tensor]:
    if activation == "none" and x.stride(1) != 1 and x.stride(0) == 1:
        # laid out by columns: the transposed cast of what it is a transpose of
        y_t, y, scale_inv, _ = _launch(kernel, x.t(), row, layout != "rows", layout != "columns")
    else:
        x = x if x.stride(1) == 1 else x.contiguous()
        y, y_t, scale_inv, _ = _launch(kernel, x, row, layout != "columns", layout != "rows", activation)
    return y, y_t, scale_inv


def cast_weights(
    state: ScalingState, weights: Sequence[Tensor], indices: Sequence[int]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Both payloads and scale_inv of many weights, each with the scale of what it holds: measured in one launch, cast
    in another. On a device with a kernel for it.

    Args:
        state: the scaling state.
        weights: ``[rows, columns]`` each, none empty, elements of a row side by side, on the state's device.
        indices: which tensor of the state each of them is.

    Raises:
        RuntimeError: where the device has no kernel for it.
    """
    kernel = weights_kernel(state.device)
    if kernel is None:
        raise RuntimeError(f"There is no kernel on {state.device} that casts weights together.")
    for dtype in {weight.dtype for weight in weights}:
        # a CUDA graph casts each weight by itself, with a kernel that its capture could not load
        cast_kernel(state.device, dtype, state.recipe.format_of("weight").name, "none", False)
    jobs = [
        casts.Weight(
            weight,
            index,
            torch.empty(weight.shape, dtype=torch.uint8, device=state.device),
            torch.empty(weight.shape[::-1], dtype=torch.uint8, device=state.device),
        )
        for weight, index in zip(weights, indices, strict=True)
    ]
    table = casts.weight_table(jobs)
    casts.cast_weights(kernel, table, state.scale, state.amax)
    if state.counts is not None:
        fmt, places = state.recipe.format_of("weight"), torch.arange(len(state.names), device=state.device)
        for weight, index in zip(weights, indices, strict=True):
            count(weight, state.scale[index], places[index : index + 1], fmt, state.handle)
    return [(job.y, job.y_t, inverse) for job, inverse in zip(jobs, table.scale_inv.unbind(), strict=True)]  # type: ignore[misc]


def measure_weights(weights: Sequence[Tensor]) -> Tensor:
    """``max|w|`` of many weights on one device, ``[count] float32``: in one launch where there is a kernel for it."""
    kernel = weights_kernel(weights[0].device) if weights[0].device.type in K_MAJOR_DEVICES else None
    if kernel is None or not all(weight.numel() for weight in weights):
        return torch.stack([max_abs(weight) for weight in weights])
    table = casts.weight_table([casts.Weight(weight, 0) for weight in weights])
    casts.measure_weights(kernel, table)
    return table.current_amax


def linear_backward(
    dy: Tensor,
    h: Tensor | None,
    activation: str,
    x_fp8_t: Tensor | None,
    x_scale_inv: Tensor,
    w_fp8_t: Tensor | None,
    w_scale_inv: Tensor,
    scale: Tensor,
    amax_history: Tensor,
    index: Tensor,
    format: str,
    state: int,
    record: bool,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::linear_backward``."""
    layout = "rows" if x_fp8_t is None else "columns" if w_fp8_t is None else "both"
    dy_fp8, dy_fp8_t, dy_scale_inv, db = cast_gradient(
        dy, h, activation, scale, amax_history, index, format, layout, state, record, bias
    )
    gemm = gemm_of(state)
    if w_fp8_t is None:
        dx = dy.new_empty(0, dtype=dx_dtype)
    else:
        dx = scaled_mm(dy_fp8, w_fp8_t, dy_scale_inv, w_scale_inv, None, format, "e4m3", dx_dtype, False, gemm)
    # a large tensor: its memory may serve the next one
    del dy_fp8
    if x_fp8_t is None:
        dw = dy.new_empty((dy if h is None else h).shape[1], 0, dtype=dw_dtype)
    else:
        dw = scaled_mm(dy_fp8_t, x_fp8_t, dy_scale_inv, x_scale_inv, None, format, "e4m3", dw_dtype, False, gemm)
    return dx, dw, db


def cast_gradient(
    dy: Tensor,
    h: Tensor | None,
    activation: str,
    scale: Tensor,
    amax_history: Tensor,
    index: Tensor,
    format: str,
    layout: str,
    state: int,
    record: bool,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`lightning_fp8.ops.plain.cast_gradient`."""
    kernel = _kernel_for(dy, format, activation, backward=h is not None)
    if kernel is None or (h is not None and h.dtype != dy.dtype):
        return plain.cast_gradient(
            dy, h, activation, scale, amax_history, index, format, layout, state, record, bias
        )  # fmt: skip
    row = _row(scale, amax_history, index, state, record)
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    y, y_t, scale_inv, sums = _launch(
        kernel, dy if h is None else h.contiguous(), row, layout != "columns", layout != "rows",
        activation, dy=None if h is None else dy, sums=bias,
    )  # fmt: skip
    if is_counting(state, record):
        gradient = dy if h is None else activation_gradient(h, dy, activation)
        count(gradient, _used(row, scale_inv), index, FORMATS[format], state)
    return y, y_t, scale_inv, dy.new_empty(0, dtype=torch.float32) if sums is None else sums


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
        scales.update_scales(
            kernel, amax, amax_history, scale, fp8_max, nonfinite_steps, most_recent, margin_factor
        )  # fmt: skip


def _kernel_for(x: Tensor, format: str, activation: str, backward: bool) -> Kernel | None:
    if x.numel() == 0 or x.dtype not in CASTABLE_DTYPES:
        return None
    return cast_kernel(x.device, x.dtype, format, activation, backward)


def _row(scale: Tensor, amax_history: Tensor, index: Tensor, state: int, record: bool) -> casts.Row:
    known = state_of(state)
    amax = None if known is None else known.amax_of_cast(record)
    uses_histories = known is None or known.uses_histories(record)
    if known is not None and known.every_tensor_has_history and uses_histories:
        return casts.Row(scale, amax_history, index, amax)
    current = torch.zeros((), dtype=torch.float32, device=scale.device)
    newest = amax_history if uses_histories else torch.zeros_like(amax_history[:1])
    return casts.Row(scale, newest, index, amax, current)


def _used(row: casts.Row, scale_inv: Tensor) -> Tensor:
    """The scale that a cast has used: exactly, where it came from the state."""
    delayed = row.scale.index_select(0, row.index)[0]
    if row.current_amax is None or row.newest is None:
        return delayed
    return torch.where(row.newest[0].index_select(0, row.index)[0] > 0, delayed, scale_inv.reciprocal())


def _launch(
    kernel: Kernel,
    x: Tensor,
    row: casts.Row,
    by_rows: bool,
    by_columns: bool,
    activation: str = "none",
    dy: Tensor | None = None,
    sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Allocate and launch: payload, transposed payload, both empty where not asked for, scale_inv and column sums."""
    rows, width = x.shape
    width = width if dy is not None else activated_width(width, activation)
    y = x.new_empty((rows, width) if by_rows else 0, dtype=torch.uint8)
    y_t = x.new_empty((width, rows) if by_columns else 0, dtype=torch.uint8)
    scale_inv = x.new_empty((), dtype=torch.float32)
    tiles = casts.column_sum_tiles(rows)
    partial = x.new_empty((tiles, width) if tiles > 1 else width, dtype=torch.float32) if sums else None
    casts.cast_transpose(
        kernel, x, row, scale_inv, y if by_rows else None, y_t if by_columns else None,
        partial, dy, gated=activation == "swiglu",
    )  # fmt: skip
    return y, y_t, scale_inv, partial if partial is None or tiles == 1 else partial.sum(dim=0)
