"""One scale for each row, for weights from checkpoints with such scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_fp8.ops import arithmetic
from lightning_fp8.ops.amaxes import BLOCK, scale_of_current
from lightning_fp8.scalings import emulation
from lightning_fp8.scalings.base import Scaling
from lightning_fp8.scalings.operand import Operand


@dataclass(frozen=True)
class PerRow(Scaling):
    """``scale = FP8_MAX / amax`` of each row. ``scale_inv [M, 1] float32``, for a weight by columns ``[1, K]``."""

    kind: ClassVar[str] = "per_row"
    file_kind: ClassVar[str | None] = "row"

    @override
    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows, 1

    @override
    def scale(self, amax: Tensor) -> Tensor:
        return scale_of_current(amax, self.fp8)

    @override
    def quantize(self, x: Tensor, width: int) -> tuple[Operand, Tensor]:
        amaxes = arithmetic.block_amaxes(x, max(1, x.shape[1]))
        scale = self.scale(amaxes)
        codes = arithmetic.saturated_blocks(x, scale, self.fp8, max(1, x.shape[1]), width)
        return Operand(codes, scale.reciprocal(), self), arithmetic.largest(amaxes)

    @override
    def part(self, operand: Operand, rows: slice, count: int, by_columns: bool) -> Operand | None:
        codes, scales = operand[:2]
        if by_columns:
            return operand._replace(codes=codes[:, rows], scale_inv=scales[:, rows])
        return operand._replace(codes=codes[rows], scale_inv=scales[rows])

    @override
    def with_128_blocks(self, operand: Operand, k: int, rows: int) -> Operand | None:
        scales, blocks = operand.scale_inv, -(-k // BLOCK)
        return operand._replace(scale_inv=scales.expand(-1, blocks)) if scales.shape[1] in (1, blocks) else None

    @override
    def emulated_product(self, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return emulation.product_of_values(a, b, bias, dtype)
