"""Linear layers that each multiply their own group of rows, such as the experts of a mixture, on one page.

If a GPU has kernels for groups of rows, each product is one launch. Otherwise groups run one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8.core.linear import Kept, refuse_double_backward
from lightning_fp8.core.operators import (
    Differentiable,
    define,
    direct_apply,
    implement,
    implement_differentiable,
    nothing,
)
from lightning_fp8.ops.library import on_gpu
from lightning_fp8.ops.operand import GROUP_ROWS, Groups, columns_shape
from lightning_fp8.scalings import products
from lightning_fp8.scalings.operand import Cast, Operand, Slot, Want

# cast_groups: x [T, K], rows of groups as `groups` says -> codes [P, K] in their places, codes [K, P], scale_inv [E].
#   Each group has its own row in the state, index [E]. Zeros follow a group's rows up to the next multiple of 128;
#   values after the last group are arbitrary. scale_inv is 1 for a group without rows. Results are empty if they are
#   not requested, or are views.
_CAST = define("cast_groups(Tensor x, Slot slot, Groups groups, bool rows, bool columns) -> (Tensor, Tensor, Tensor)")
# linear_groups: fprop of each group, differentiable in x [T, K], weight [E, N, K], or [E, K, N] with `k_by_n`, and
#   bias [E, N] -> y [T, N]. The weight's operands have codes [E, N, K] and [E, K, N], and scale_inv [E].
_LINEAR = define(
    "linear_groups(Tensor x, Tensor weight, Tensor? bias, Operand x_rows, Operand? x_columns, Operand w_rows, "
    "Operand? w_columns, Groups groups, Slot dy, ScalarType out_dtype, bool k_by_n) -> Tensor"
)
# linear_groups_backward: dy [T, N] -> (dx [T, K], dw like the weight, db [E, N] float32). What is not needed is empty.
_BACKWARD = define(
    "linear_groups_backward(Tensor dy, Operand? x, Operand? w, Groups groups, Slot slot, ScalarType dx_dtype, "
    "ScalarType dw_dtype, bool bias, bool k_by_n) -> (Tensor, Tensor, Tensor)"
)


def groups_of(group_of_row: Tensor, count: int) -> Groups:
    """The places of rows that are sorted by their group.

    Args:
        group_of_row: ``[T] int64``, ascending.
        count: E. Any other group number stops the program; on a GPU, when the device reaches the check.
    """
    rows, device = len(group_of_row), group_of_row.device
    numbers = torch.arange(count + 1, dtype=group_of_row.dtype, device=device)
    begins = torch.searchsorted(group_of_row, numbers)
    torch._assert_async(
        (begins[0] == 0) & (begins[-1] == rows), f"`top_k_index` names an expert that does not exist: there are {count}"
    )
    tiles = (begins.diff() + (GROUP_ROWS - 1)) // GROUP_ROWS
    edges = torch.cat([begins[:1], tiles.cumsum(0) * GROUP_ROWS])
    position = torch.arange(rows, device=device) + (edges - begins).index_select(0, group_of_row)
    # at most 127 zeros follow the rows of a group, and none without rows
    most = (rows + (GROUP_ROWS - 1) * min(count, rows)) // GROUP_ROWS
    tile = torch.arange(most, device=device) * GROUP_ROWS
    of_tile = torch.searchsorted(edges[1:], tile, right=True)
    of_tile = torch.where(of_tile < count, of_tile, -1)
    return Groups(position, of_tile.int(), edges.int())


def cast_groups(x: Tensor, slot: Slot, groups: Groups, want: Want) -> Cast:
    """x ``[T, K]`` for the products of groups."""
    codes, turned, scale_inv = _cast_op(x, slot, groups, want.rows, want.columns)
    columns = None
    if want.columns:
        columns = Operand(turned if on_gpu(x) else codes.t(), scale_inv, slot.columns)
    return Cast(Operand(codes, scale_inv, slot.rows) if want.rows else None, columns)


def _cast(x: Tensor, slot: Slot, groups: Groups, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    cast, none = products.cast_groups(x, slot, groups, Want(rows, columns)), nothing(x, torch.uint8)
    scale_inv = (cast.rows or cast.columns).scale_inv  # type: ignore[union-attr]
    codes = none if cast.rows is None else cast.rows.codes
    if cast.columns is None or (not on_gpu(x) and rows):
        return codes, none, scale_inv
    return (codes, cast.columns.codes, scale_inv) if on_gpu(x) else (cast.columns.codes.t(), none, scale_inv)


def _cast_fake(x: Tensor, slot: Slot, groups: Groups, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape, separate = (groups.padded_rows, x.shape[1]), on_gpu(x)
    codes = x.new_empty(shape if rows or not separate else 0, dtype=torch.uint8)
    turned = x.new_empty(columns_shape(*shape) if columns and separate else 0, dtype=torch.uint8)
    return codes, turned, x.new_empty(len(slot.index), dtype=torch.float32)


def _linear(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_rows: Operand,
    x_columns: Operand | None,
    w_rows: Operand,
    w_columns: Operand | None,
    groups: Groups,
    dy: Slot,
    dtype: torch.dtype,
    k_by_n: bool,
) -> Tensor:
    """``ctx`` is None inside the operator, which saves tensors for backward itself."""
    if ctx is not None:
        ctx.set_materialize_grads(False)
        ctx.needs = ctx.needs_input_grad
        _save(ctx, None, x, weight, bias, x_rows, x_columns, w_rows, w_columns, groups, dy, dtype, k_by_n)
    return x_rows.scaling.multiply_groups(x_rows, w_rows, bias, groups, dtype, fast=True)


def _save(ctx: Any, output: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> None:
    needs_x, needs_weight = ctx.needs[:2]
    _, x_columns, _, w_columns, groups, dy, _, k_by_n = rest
    tensors, scalings = Kept(x_columns if needs_weight else None, w_columns if needs_x else None).parts()
    ctx.save_for_backward(*tensors, *groups)
    ctx.rest = dy, scalings, x.dtype, weight.dtype, None if bias is None else bias.dtype, k_by_n


def _gradients(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias, and None for the other arguments of :func:`_linear`."""
    if dy is None:
        return (None,) * 11
    if torch.is_grad_enabled():
        refuse_double_backward()
    saved = ctx.saved_tensors
    slot, scalings, x_dtype, weight_dtype, bias_dtype, k_by_n = ctx.rest
    needs_x, needs_weight, needs_bias = ctx.needs[:3]
    rest = Groups(*saved[4:]), slot, x_dtype, weight_dtype, needs_bias, k_by_n
    dx, dw, db = linear_groups_backward(dy, *Kept.of(saved[:4], scalings), *rest)
    return (
        dx if needs_x else None,
        dw if needs_weight else None,
        db.to(bias_dtype) if needs_bias else None,
        *(None,) * 8,
    )


def _backward(
    dy: Tensor,
    x: Operand | None,
    w: Operand | None,
    groups: Groups,
    slot: Slot,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    bias: bool,
    k_by_n: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    want = Want(w is not None or x is None, x is not None, bias)
    rows, columns, db = products.cast_groups(dy, slot, groups, want)
    dx, dw = nothing(dy, dx_dtype), nothing(dy, dw_dtype)
    if w is not None and rows is not None:
        dx = rows.scaling.multiply_groups(rows, w, None, groups, dx_dtype, fast=False)
    # free this large tensor, so that the next one can reuse its memory
    del rows
    if x is not None and columns is not None:
        a, b = (x, columns) if k_by_n else (columns, x)
        dw = a.scaling.multiply_depths(a, b, groups, dw_dtype)
    return dx, dw, dy.new_empty(0, dy.shape[1], dtype=torch.float32) if db is None else db


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *_, dtype, k_by_n = rest
    # `len` would fix the number of rows in a compiled graph
    return x.new_empty(x.shape[0], weight.shape[2 if k_by_n else 1], dtype=dtype)


def _backward_fake(
    dy: Tensor, x: Operand | None, w: Operand | None, groups: Groups, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    (t, n), (_, dx_dtype, dw_dtype, bias, k_by_n) = dy.shape, rest
    count = len(groups.edges) - 1
    dx = nothing(dy, dx_dtype) if w is None else dy.new_empty(t, w.codes.shape[1], dtype=dx_dtype)
    dw = nothing(dy, dw_dtype)
    if x is not None:
        k = x.codes.shape[0]
        dw = dy.new_empty(count, *((k, n) if k_by_n else (n, k)), dtype=dw_dtype)
    return dx, dw, dy.new_empty(count if bias else 0, n, dtype=torch.float32)


class _LinearGroups(Differentiable):
    """The operator, run directly if nothing watches operators."""

    forward = staticmethod(_linear)
    backward = staticmethod(_gradients)


_cast_op = implement(_CAST, _cast, _cast_fake)
linear_groups_backward = implement(_BACKWARD, _backward, _backward_fake)
linear_groups = implement_differentiable(
    _LINEAR,
    direct_apply(_LinearGroups),
    lambda *arguments: _linear(None, *arguments),
    _save,
    _gradients,
    _fake,
)
