"""The product of two operands, of one kind of scaling or of two; and the casts of a tensor for its two products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_fp8.ops.amaxes import BLOCK
from lightning_fp8.ops.cuda import gemm
from lightning_fp8.ops.library import on_gpu
from lightning_fp8.ops.operand import Groups
from lightning_fp8.scalings import emulation
from lightning_fp8.scalings.base import Scaling
from lightning_fp8.scalings.group_kernels import taken
from lightning_fp8.scalings.operand import Cast, Computed, Operand, Slot, Source, Want


def multiply(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, fast: bool) -> Tensor:
    """``a @ b^T + bias``, see :meth:`Scaling.multiply`.

    Operands of two kinds, as where a weight came with scales of its own, are multiplied in blocks of 128 where a GPU
    can, else by their values. A gradient that is not cast is multiplied with the exact values of a weight.
    """
    if type(a.scaling) is type(b.scaling):
        return a.scaling.multiply(a, b, bias, dtype, fast)
    if not a.scaling.is_fp8:
        exact = b._replace(codes=b.scaling.exact_values(b, a.codes.dtype), scaling=a.scaling)
        return a.scaling.multiply(a, exact, bias, dtype, fast)
    if not on_gpu(a.codes):
        return emulation.product_of_values(a, b, bias, dtype)
    k, out = min(a.codes.shape[1], b.codes.shape[1]), None
    first, second = (side.scaling.with_128_blocks(side, k, rows) for side, rows in ((a, 1), (b, BLOCK)))
    if first is not None and second is not None:
        out = gemm.mixed(taken(first), taken(second), bias, dtype)
    return emulation.product_of_rounded_values(a, b, bias, dtype) if out is None else out


def cast(x: Source, slot: Slot, want: Want) -> Cast:
    """Cast x ``[M, K]`` for one or two products, each with the scaling that its slot has for it: in one pass where they
    are equal."""
    if isinstance(x, Computed) and slot.rows != slot.columns and want.rows and want.columns:
        # computed once for both
        x = x.value
    return _for_each(slot, want, lambda scaling, want: scaling.cast(x, slot, want))


def _for_each(slot: Slot, want: Want, make: Callable[[Scaling, Want], Cast]) -> Cast:
    rows, columns = slot.rows, slot.columns
    if not (want.rows and want.columns) or rows is columns or rows == columns:
        return as_multiplied(make(rows if want.rows else columns, want))
    # the first one records, and counts
    first = make(columns, want._replace(rows=False, sums=False))
    second = make(rows, want._replace(columns=False))
    return as_multiplied(second._replace(columns=first.columns))


def cast_pair(pair: Computed, slots: Sequence[Slot], want: Want, sums: Sequence[bool]) -> list[Cast]:
    """The casts of the gradients of gate and up: in one launch where there is a kernel that does both."""
    scalings = {scaling for slot in slots for scaling in (slot.rows, slot.columns)}
    if len(scalings) == 1:
        return [*map(as_multiplied, scalings.pop().cast_pair(pair, slots, want, sums))]
    each = zip((0, 1), slots, sums, strict=True)
    return [cast(pair._replace(of=number), slot, want._replace(sums=summed)) for number, slot, summed in each]


def cast_weight(w: Tensor, slot: Slot, want: Want) -> Cast:
    """The cast of a weight ``[N, K]`` by what it holds now, for fprop and dgrad."""
    return _for_each(slot, want, lambda scaling, want: scaling.cast_weight(w, slot, want))


def sides_of_weight(w: Tensor, kept: Cast | None, slot: Slot, want: Want) -> Cast:
    """The operands of a weight ``[N, K]``: those in FP8 are of its kept cast, the others are made of it now."""
    sides = []
    for side, scaling, is_wanted, turned in (
        (kept and kept.rows, slot.rows, want.rows, False),
        (kept and kept.columns, slot.columns, want.columns, True),
    ):
        if is_wanted and not scaling.is_fp8:
            made = scaling.cast_weight(w, slot, Want(not turned, turned, dtype=want.dtype))
            side = made.columns if turned else made.rows
        sides.append(side if is_wanted else None)
    return Cast(sides[0], sides[1])


def cast_groups(x: Tensor, slot: Slot, groups: Groups, want: Want) -> Cast:
    """The same of groups of rows: x ``[T, K]``."""
    return _for_each(slot, want, lambda scaling, want: scaling.cast_groups(x, slot, groups, want))


def as_multiplied(cast: Cast) -> Cast:
    """A cast with operands as products take them on its device."""
    rows, columns, sums = cast
    new_rows = None if rows is None else rows.scaling.as_multiplied(rows)
    new_columns = None if columns is None else columns.scaling.as_multiplied(columns)
    return cast if new_rows is rows and new_columns is columns else Cast(new_rows, new_columns, sums)


def as_results(cast: Cast, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A cast of x as the results of an operator, which share no memory: codes and scale_inv by rows, and by columns."""
    codes, turned, scale_inv, turned_inv = (x.new_empty(0, dtype=torch.uint8) for _ in range(4))
    if cast.rows is not None:
        codes, scale_inv = cast.rows[:2]
    if cast.columns is not None:
        scaling = cast.columns.scaling
        is_view = scaling.is_view(x.device, x.shape)
        if is_view and cast.rows is None:
            codes = cast.columns.codes.t()
        elif not is_view:
            turned = cast.columns.codes
        if not scaling.layouts_share_scales:
            turned_inv = cast.columns.scale_inv
        elif cast.rows is None:
            scale_inv = scaling.transposed_scales(cast.columns.scale_inv)
    return codes, turned, scale_inv, turned_inv


def of_results(results: Sequence[Tensor], scaling: Scaling, x: Tensor, want: Want) -> Cast:
    """The cast of these results."""
    codes, turned, scale_inv, turned_inv = results
    by_columns, scaling = None, scaling.multiplied_as(x.device)
    if want.columns:
        turned = codes.t() if scaling.is_view(x.device, x.shape) else turned
        turned_inv = scaling.transposed_scales(scale_inv) if scaling.layouts_share_scales else turned_inv
        by_columns = Operand(turned, turned_inv, scaling)
    return Cast(Operand(codes, scale_inv, scaling) if want.rows else None, by_columns)
