"""The product of two operands, whose kinds of scaling may differ; and the casts of a tensor for its two products."""

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
from lightning_fp8.scalings.operand import Cast, Computed, Operand, Slot, Source, Want, value_of

_BOTH = Want(True, True)


def multiply(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, fast: bool) -> Tensor:
    """``a @ b^T + bias``: a ``[M, K]``, b ``[N, K]``, bias ``[N]`` -> ``[M, N]`` in ``dtype``.

    The bias is rounded to ``dtype``, then added in fp32 to the scaled sum, which is rounded once. Without ``fast``,
    partial sums are added up in fp32 at least every 128 along K.

    Operands of different kinds, as with a weight that came with its own scales, are multiplied in blocks of 128 if the
    GPU supports it, else as dequantized values. A gradient that is not cast is multiplied with a weight's exact values.
    """
    scaling, is_on_gpu = a.scaling, on_gpu(a.codes)
    if type(scaling) is type(b.scaling):
        # the one place where a product chooses its device
        if is_on_gpu:
            return scaling.gpu_product(a, b, bias, dtype, fast)
        return scaling.emulated_product(a, b, bias, dtype)
    if not scaling.is_fp8:
        exact = b._replace(codes=b.scaling.exact_values(b, a.codes.dtype), scaling=scaling)
        return scaling.emulated_product(a, exact, bias, dtype)
    if not is_on_gpu:
        return emulation.product_of_values(a, b, bias, dtype)
    k, out = min(a.codes.shape[1], b.codes.shape[1]), None
    first, second = (side.scaling.with_128_blocks(side, k, rows) for side, rows in ((a, 1), (b, BLOCK)))
    if first is not None and second is not None:
        out = gemm.mixed(first, second, bias, dtype)
    return emulation.product_of_rounded_values(a, b, bias, dtype) if out is None else out


def cast(x: Source, slot: Slot, want: Want) -> Cast:
    """Cast x ``[M, K]`` for one or two products, each with the scaling that the slot has for it. If both scalings are
    equal, this takes one pass."""
    scaling = slot.rows if slot.rows is slot.columns else slot.scaling_of(want)
    if scaling is not None:
        return scaling.as_multiplied(scaling.cast(x, slot, want))
    # computed once for both
    value = value_of(x)
    return _cast_apart(slot, want, lambda scaling, want: scaling.cast(value, slot, want))


def _cast_apart(slot: Slot, want: Want, make: Callable[[Scaling, Want], Cast]) -> Cast:
    """Cast each layout with its own scaling. Only the first cast records and counts."""
    columns = slot.columns.as_multiplied(make(slot.columns, want._replace(rows=False, sums=False)))
    rows = slot.rows.as_multiplied(make(slot.rows, want._replace(columns=False)))
    return rows._replace(columns=columns.columns)


def cast_pair(pair: Computed, slots: Sequence[Slot], want: Want, sums: Sequence[bool]) -> list[Cast]:
    """The casts of the gradients of gate and up; in one launch if a kernel makes both."""
    scaling, other = (slot.scaling_of(_BOTH) for slot in slots)
    if scaling is not None and scaling == other:
        return [*map(scaling.as_multiplied, scaling.cast_pair(pair, slots, want, sums))]
    each = zip((0, 1), slots, sums, strict=True)
    return [cast(pair._replace(of=number), slot, want._replace(sums=summed)) for number, slot, summed in each]


def cast_weight(w: Tensor, slot: Slot, want: Want) -> Cast:
    """The cast of a weight ``[N, K]`` for fprop and dgrad, scaled by its current values."""
    scaling = slot.scaling_of(want)
    if scaling is not None:
        return scaling.as_multiplied(scaling.cast_weight(w, slot, want))
    return _cast_apart(slot, want, lambda scaling, want: scaling.cast_weight(w, slot, want))


def cast_weights(
    weights: Sequence[Tensor], slots: Sequence[Slot], out: Sequence[Cast | None], want: Want
) -> list[Cast]:
    """The same for many weights whose slots have the same scalings; together if both layouts share a scaling."""
    scaling = slots[0].scaling_of(_BOTH)
    if scaling is None:
        return [cast_weight(weight, slot, want) for weight, slot in zip(weights, slots, strict=True)]
    return [*map(scaling.as_multiplied, scaling.cast_weights(weights, slots, out, want))]


def sides_of_weight(w: Tensor, kept: Cast | None, slot: Slot, want: Want) -> Cast:
    """The operands of a weight ``[N, K]``: FP8 operands come from its kept cast, the others are made now."""
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
    """The same for groups of rows: x ``[T, K]``."""
    scaling = slot.scaling_of(want)
    if scaling is not None:
        return scaling.cast_groups(x, slot, groups, want)
    return _cast_apart(slot, want, lambda scaling, want: scaling.cast_groups(x, slot, groups, want))


def fake_cast(like: Tensor, shape: Sequence[int], slot: Slot, want: Want) -> Cast:
    """An uninitialised cast of a tensor of this shape."""
    scaling = slot.rows if want.rows else slot.columns
    return scaling.as_multiplied(scaling.empty(like, shape, want))


def as_results(cast: Cast, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A cast of x as the results of an operator, which share no memory: codes and scale_inv by rows, and by columns.

    The inverse of :meth:`Scaling.cast_by`.
    """
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
