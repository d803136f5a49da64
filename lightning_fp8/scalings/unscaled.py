"""No FP8: a product in the dtype of the layer's output, bf16 under autocast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_fp8.scalings.base import CastOperator, column_sums
from lightning_fp8.scalings.one_scale import OneScale
from lightning_fp8.scalings.operand import Cast, Operand, Slot, Source, Want, value_of


@dataclass(frozen=True)
class Unscaled(OneScale):
    """The values themselves, rounded to the dtype of the output. Nothing is recorded, as there are no scales."""

    kind: ClassVar[str] = "unscaled"
    is_fp8: ClassVar[bool] = False

    @override
    def is_view(self, device: torch.device, shape: object) -> bool:
        return True

    @override
    def scale(self, amax: Tensor) -> Tensor:
        return torch.ones_like(amax)

    @override
    def quantize(self, x: Tensor, width: int) -> tuple[Operand, Tensor]:
        return Operand(x, torch.ones((), device=x.device), self), x.new_zeros((), dtype=torch.float32)

    @override
    def cast(self, x: Source, slot: Slot, want: Want) -> Cast:
        x = value_of(x)
        operand, _ = self.quantize(x.to(want.dtype or x.dtype), x.shape[1])
        cast = self.both(operand, want)
        return cast._replace(sums=column_sums(x)) if want.sums else cast

    @override
    def cast_weight(self, w: Tensor, slot: Slot, want: Want) -> Cast:
        return self.cast(w, slot, want)

    @override
    def cast_by(self, operator: CastOperator, x: Tensor, slot: Slot, want: Want) -> Cast:
        # compilers see it as what it is
        return self.cast(x, slot, want)

    @override
    def no_codes(self, x: Tensor, want: Want) -> Tensor:
        return torch.zeros(x.shape, dtype=want.dtype or x.dtype, device=x.device)

    @override
    def values(self, operand: Operand) -> Tensor:
        return operand.codes.float()

    @override
    def emulated_product(self, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        if bias is None:
            return torch.mm(a.codes, b.codes.t()).to(dtype)
        return F.linear(a.codes, b.codes, bias.to(a.codes.dtype)).to(dtype)
