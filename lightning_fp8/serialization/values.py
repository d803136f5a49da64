"""Codes and their scales: values, the scales of parts of a weight, and the largest codes.

Shapes ``[E, N, K]`` also cover a weight ``[N, K]``, which has no E. A scale is ``[E, rows, columns]``, see
:func:`~lightning_fp8.serialization.layouts.base.grid_of`: multipliers of codes in ``float32``, or in E8M0 ``uint8``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.ops import e8m0
from lightning_fp8.ops.amaxes import by_element, power_of_2, scale_of_current
from lightning_fp8.ops.formats import E4M3
from lightning_fp8.serialization.layouts.base import SIDES, Kind, grid_of
from lightning_fp8.serialization.names import Index, Piece, Shape

# from this scale on, the smallest code is a normal number in bf16
_NORMAL = 2.0**-117
# the bits of a code without its sign
_MAGNITUDE = 0x7F
NAN_CODE = 0x7F


class Scale(NamedTuple):
    """The scale of a weight in a file."""

    kind: Kind
    values: Tensor

    @staticmethod
    def of(kind: Kind, weight: Shape, stored: Tensor) -> Scale:
        """A scale in the form that a file has, for a weight of this shape."""
        return Scale(kind, (stored if kind == "group" else stored.to(torch.float32)).reshape(grid_of(kind, weight)))

    @property
    def numbers(self) -> Tensor:
        """The multipliers of codes, ``float32``."""
        return e8m0.values_of(self.values) if self.kind == "group" else self.values

    @property
    def is_power_of_2(self) -> bool:
        """Whether all numbers are powers of two."""
        return bool((self.numbers.frexp().mantissa == 0.5).all())

    def dequantized(self, codes: Tensor, amax: Tensor | None = None) -> Tensor:
        """``code * scale`` in fp32. If an amax is given, it replaces the value of the largest code."""
        numbers = codes.float()
        values = numbers * by_element(self.values, codes)
        return values if amax is None else torch.where(numbers.abs() == E4M3.max, numbers.sign() * amax, values)

    def is_kept_in(self, dtype: torch.dtype) -> bool:
        """Whether values of all codes in this dtype become the same codes again when divided by the scale."""
        return dtype != torch.float16 and bool((self.numbers >= _NORMAL).all())

    def keeps(self, codes: Tensor, values: Tensor) -> bool:
        """Whether these values are finite, and become these codes when divided by the scale."""
        again = self.codes(values)
        return bool(values.isfinite().all()) and torch.equal(again.view(torch.uint8), codes.view(torch.uint8))

    def codes(self, values: Tensor) -> Tensor:
        """Values of any dtype divided by the scale and rounded to ``float8_e4m3fn``."""
        return (values.float() / by_element(self.values, values)).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype)

    def largest_codes(self, codes: Tensor) -> Tensor:
        """The largest code, ``uint8`` without sign, for each number of the scale; :data:`NAN_CODE` if any is NaN."""
        return largest_in(self.kind, codes.view(torch.uint8) & _MAGNITUDE)


def largest_in(kind: Kind, values: Tensor) -> Tensor:
    """The largest nonnegative value in ``[E, N, K]`` for each number of a scale, ``[E, rows, columns]``."""
    for dim, side in zip((-2, -1), SIDES[kind]):
        if side is None:
            values = values.amax(dim, keepdim=True)
        elif side > 1:
            if rest := -values.shape[dim] % side:
                values = F.pad(values, (0, 0, 0, rest) if dim == -2 else (0, rest))
            values = values.unflatten(dim, (-1, side)).amax(dim)
    return values


def scale_of_pieces(
    pieces: Sequence[Piece], scales: Sequence[Scale], shapes: Sequence[Shape], target: Shape
) -> Scale | None:
    """The scale of a weight that consists of parts of files' weights; None if there is none with the same values.

    Args:
        pieces: all parts of the weight.
        scales: for each part, the scale of the file's weight.
        shapes: for each part, the shape of the file's weight.
        target: the shape of the weight.
    """
    kind = scales[0].kind
    if any(scale.kind != kind for scale in scales):
        return None
    free = e8m0.NAN if kind == "group" else float("nan")
    values = torch.full(grid_of(kind, target), free, dtype=scales[0].values.dtype)
    for piece, scale, shape in zip(pieces, scales, shapes):
        of, at = (in_grid(index, kind, size) for index, size in ((piece.of, shape), (piece.at, target)))
        if of is None or at is None:
            return None
        there, part = values[at], scale.values[of]
        # parts of a matrix with one scale need the same scale, and so do parts of rows
        is_free = there == e8m0.NAN if kind == "group" else there.isnan()
        if not torch.equal(there, part) and not bool(is_free.all()):
            return None
        values[at] = part
    return Scale(kind, values)


def in_grid(index: Index, kind: Kind, shape: Shape) -> Index | None:
    """The part of a scale that belongs to a part of a weight; None if it splits a block."""
    within: list[slice] = []
    for part, size, side in zip(index[-2:], shape[-2:], SIDES[kind]):
        if not isinstance(part, slice):
            return None
        if side is None:
            within.append(slice(0, 1))
        elif part.start % side or (part.stop % side and part.stop != size):
            return None
        else:
            within.append(slice(part.start // side, -(-part.stop // side)))
    return (*index[:-2], *within)


def rounded(values: Tensor, former: Scale, dtype: torch.dtype) -> tuple[Tensor, Scale]:
    """Codes of values ``[E, N, K] float32``, and their new scales, which the file has in ``dtype``.

    The new scales are of the same kind as the former ones, and powers of two if those are.
    """
    kind, amax = former.kind, largest_in(former.kind, values.abs())
    if kind == "group":
        scale = Scale(kind, e8m0.codes_of(amax, E4M3))
        return scale.codes(values), scale
    numbers = power_of_2(scale_of_current(amax, E4M3)).reciprocal() if former.is_power_of_2 else amax / E4M3.max
    # the scale as the file will have it; for zeros, any scale works
    scale = Scale(kind, torch.where(amax > 0, numbers, 1.0).to(dtype).float())
    return scale.codes(values), scale
