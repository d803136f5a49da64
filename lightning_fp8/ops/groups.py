"""Linear layers that each multiply with rows of their own, the experts of a mixture, in one launch a product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8.ops import reference
from lightning_fp8.ops.backward import gradient_layout
from lightning_fp8.ops.cuda import groups as cuda
from lightning_fp8.ops.library import Differentiable, define, direct_apply, implement, implement_differentiable, on_gpu
from lightning_fp8.ops.linear_layer import refuse_double_backward
from lightning_fp8.ops.operand import GROUP_ROWS, Columns, Fp8Operand, Fp8Tensor, Groups, Slot, new_payloads, nothing

# cast_groups: x [T, K], rows of groups as `groups` says -> the results of `cast` for these rows in their places:
#   payload [P, K], payload_t [K, P], scale_inv [E] float32. Each group is a tensor in a row of its own of the state,
#   index [E]. Behind a group's rows are zeros up to the next multiple of 128, behind the last group any values.
#   scale_inv is 1 for a group without rows.
_CAST = define("cast_groups(Tensor x, Slot slot, Groups groups, str layout) -> (Tensor, Tensor, Tensor)")
# linear_groups: fprop of each group, differentiable in x [T, K], weight [E, N, K], or [E, K, N] with `k_by_n`, and
#   bias [E, N] -> y [T, N]. x_fp8 is the result of cast_groups, w_fp8 has payloads [E, N, K] and [E, K, N], and
#   scale_inv [E]. dy is the slot of the gradient of y.
_LINEAR = define(
    "linear_groups(Tensor x, Tensor weight, Tensor? bias, Fp8Operand x_fp8, Fp8Operand w_fp8, Groups groups, Slot dy, "
    "ScalarType out_dtype, bool k_by_n) -> Tensor"
)
# linear_groups_backward: dy [T, N] -> (dx [T, K] from dgrad, dw like the weight from wgrad, db [E, N] float32). What
#   has no payload or is not requested is empty, as for linear_backward.
_BACKWARD = define(
    "linear_groups_backward(Tensor dy, Columns x_fp8_t, Columns w_fp8_t, Groups groups, Slot slot, "
    "ScalarType dx_dtype, ScalarType dw_dtype, bool bias, bool k_by_n) -> (Tensor, Tensor, Tensor)"
)


def groups_of(group_of_row: Tensor, count: int) -> Groups:
    """The places of rows that are sorted by their group.

    Args:
        group_of_row: ``[T] int64``, ascending.
        count: E. Another group stops the program, on a GPU when it gets there.
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
    # each group that has a row ends with at most 127 zeros
    most = (rows + (GROUP_ROWS - 1) * min(count, rows)) // GROUP_ROWS
    tile = torch.arange(most, device=device) * GROUP_ROWS
    of_tile = torch.searchsorted(edges[1:], tile, right=True)
    of_tile = torch.where(of_tile < count, of_tile, -1)
    return Groups(position, of_tile.int(), edges.int())


def cast_groups_operand(x: Tensor, slot: Slot, groups: Groups, keep: bool) -> Fp8Operand:
    """x ``[T, K]`` for the products of groups; by columns too if backward needs that (``keep``)."""
    rows, columns, scale_inv = cast_groups(x, slot, groups, "both" if keep else "rows")
    return Fp8Operand(rows, columns, scale_inv, scale_inv, slot.format)


# The reference: one group after the other


def _each(groups: Groups) -> list[slice]:
    """The rows of each group, without the zeros behind them: as many as a layer of its own multiplies."""
    edges = groups.edges.to(groups.position.dtype)
    sizes = torch.searchsorted(groups.position, edges).diff()
    return [slice(begin, begin + size) for begin, size in zip(edges.tolist(), sizes.tolist(), strict=False)]


def _cast_one_by_one(
    x: Tensor, slot: Slot, groups: Groups, layout: str, sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    placed, count = cuda.placed(x, groups), len(slot.index)
    rows, columns = (payload.zero_() for payload in new_payloads(x, placed.shape, layout))
    scale_inv = x.new_ones(count, dtype=torch.float32)
    of_groups = x.new_zeros(count if sums else 0, x.shape[1], dtype=torch.float32)
    for group, part in enumerate(_each(groups)):
        if part.start == part.stop:
            continue
        of_group = slot._replace(index=slot.index[group : group + 1])
        cast = reference.cast(placed[part], of_group, "none", layout)
        if layout != "columns":
            rows[part] = cast[0]
        if layout != "rows":
            columns[:, part] = cast[1][:, : part.stop - part.start]
        scale_inv[group] = cast[2]
        if sums:
            of_groups[group] = placed[part].sum(0, dtype=torch.float32)
    return rows, columns, scale_inv, of_groups


def _by_rows_one_by_one(
    a: Fp8Tensor, b: Fp8Tensor, bias: Tensor | None, groups: Groups, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    out = a.payload.new_zeros(len(a.payload), b.payload.shape[1], dtype=out_dtype)
    for group, part in enumerate(_each(groups)):
        if part.start < part.stop:
            of_a, of_b = a.scale_inv[group], b.scale_inv[group]
            operands = Fp8Tensor(a.payload[part], of_a, a.format), Fp8Tensor(b.payload[group], of_b, b.format)
            of_bias = None if bias is None else bias[group]
            out[part] = reference.scaled_mm(*operands, of_bias, out_dtype, fast)
    return out


def _by_depth_one_by_one(a: Fp8Tensor, b: Fp8Tensor, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    out = a.payload.new_zeros(len(a.scale_inv), len(a.payload), len(b.payload), dtype=out_dtype)
    for group, part in enumerate(_each(groups)):
        if part.start < part.stop:
            of_a, of_b = (Fp8Tensor(mat.payload[:, part], mat.scale_inv[group], mat.format) for mat in (a, b))
            out[group] = reference.scaled_mm(of_a, of_b, None, out_dtype, False)
    return out


_ONE_BY_ONE = cuda.Products(_cast_one_by_one, _by_rows_one_by_one, _by_depth_one_by_one)


def _cast_fake(x: Tensor, slot: Slot, groups: Groups, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    payloads = new_payloads(x, (groups.padded_rows, x.shape[1]), layout)
    return *payloads, x.new_empty(len(slot.index), dtype=torch.float32)


def _products(x: Tensor) -> cuda.Products:
    return cuda.PRODUCTS if on_gpu(x) else _ONE_BY_ONE


def _cast(x: Tensor, slot: Slot, groups: Groups, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    return _products(x).cast(x, slot, groups, layout, False)[:3]


cast_groups = implement(_CAST, _cast, _cast, _cast_fake)


def _linear(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_fp8: Fp8Operand,
    w_fp8: Fp8Operand,
    groups: Groups,
    dy: Slot,
    out_dtype: torch.dtype,
    k_by_n: bool,
) -> Tensor:
    """Without ``ctx`` inside the operator, which saves tensors for backward by itself."""
    if ctx is not None:
        ctx.set_materialize_grads(False)
        _save(ctx, None, x, weight, bias, x_fp8, w_fp8, groups, dy, out_dtype, k_by_n)
    a = Fp8Tensor(x_fp8.by_rows, x_fp8.scale_inv, x_fp8.format)
    b = Fp8Tensor(w_fp8.by_rows, w_fp8.scale_inv, w_fp8.format)
    return _products(x).by_rows(a, b, bias, groups, out_dtype, True).index_select(0, groups.position)


def _save(ctx: Any, output: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> None:
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    x_fp8, w_fp8, groups, dy, _, k_by_n = rest
    ctx.save_for_backward(
        x_fp8.by_columns if needs_weight else None,
        x_fp8.columns_scale_inv,
        w_fp8.by_columns if needs_x else None,
        w_fp8.columns_scale_inv,
        *groups,
    )
    ctx.rest = dy, x_fp8.format, w_fp8.format, x.dtype, weight.dtype, None if bias is None else bias.dtype, k_by_n


def _gradients(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias, and None for the other arguments of :func:`_linear`."""
    if dy is None:
        return (None,) * 9
    if torch.is_grad_enabled():
        refuse_double_backward()
    x_t, x_scale_inv, w_t, w_scale_inv, *groups = ctx.saved_tensors
    slot, x_format, w_format, x_dtype, weight_dtype, bias_dtype, k_by_n = ctx.rest
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    x, w = Columns(x_t, x_scale_inv, x_format), Columns(w_t, w_scale_inv, w_format)
    rest = Groups(*groups), slot, x_dtype, weight_dtype, needs_bias, k_by_n
    dx, dw, db = linear_groups_backward(dy, x, w, *rest)
    return (
        dx if needs_x else None,
        dw if needs_weight else None,
        db.to(bias_dtype) if needs_bias else None,
        *(None,) * 6,
    )


def _backward(
    dy: Tensor,
    x_fp8_t: Columns,
    w_fp8_t: Columns,
    groups: Groups,
    slot: Slot,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    bias: bool,
    k_by_n: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    products = _products(dy)
    rows, columns, scale_inv, db = products.cast(dy, slot, groups, gradient_layout(x_fp8_t, w_fp8_t), bias)
    dx, dw = nothing(dy, dx_dtype), nothing(dy, dw_dtype)
    if w_fp8_t.payload is not None:
        a, b = Fp8Tensor(rows, scale_inv, slot.format), Fp8Tensor(w_fp8_t.payload, w_fp8_t.scale_inv, w_fp8_t.format)
        dx = products.by_rows(a, b, None, groups, dx_dtype, False).index_select(0, groups.position)
    # a large tensor, whose memory may be reused for the next one
    del rows
    if x_fp8_t.payload is not None:
        of_dy, of_x = (
            Fp8Tensor(columns, scale_inv, slot.format),
            Fp8Tensor(x_fp8_t.payload, x_fp8_t.scale_inv, x_fp8_t.format),
        )
        dw = products.by_depth(*((of_x, of_dy) if k_by_n else (of_dy, of_x)), groups, dw_dtype)
    return dx, dw, db


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *_, out_dtype, k_by_n = rest
    # `len` would be a number, and a compiled graph one for this number of rows
    return x.new_empty(x.shape[0], weight.shape[2 if k_by_n else 1], dtype=out_dtype)


def _backward_fake(dy: Tensor, x: Columns, w: Columns, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    (t, n), (groups, _, dx_dtype, dw_dtype, bias, k_by_n) = dy.shape, rest
    count = len(groups.edges) - 1
    dx = nothing(dy, dx_dtype) if w.payload is None else dy.new_empty(t, w.payload.shape[1], dtype=dx_dtype)
    dw = nothing(dy, dw_dtype)
    if x.payload is not None:
        k = len(x.payload)
        dw = dy.new_empty(count, *((k, n) if k_by_n else (n, k)), dtype=dw_dtype)
    return dx, dw, dy.new_empty(count if bias else 0, n, dtype=torch.float32)


linear_groups_backward = implement(_BACKWARD, _backward, _backward, _backward_fake)


class _LinearGroups(Differentiable):
    """The operator where nothing watches operators."""

    forward = staticmethod(_linear)
    backward = staticmethod(_gradients)


linear_groups = implement_differentiable(
    _LINEAR,
    (0, 1, 2),
    direct_apply(_LinearGroups),
    lambda *arguments: _linear(None, *arguments),
    _save,
    _gradients,
    _linear_fake,
)
