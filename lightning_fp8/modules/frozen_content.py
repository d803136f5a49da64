"""The FP8 cast that replaces the master of a frozen weight, and conversions to and from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.ops.amaxes import max_abs
from lightning_fp8.ops.formats import E4M3
from lightning_fp8.ops.operand import WeightSlot
from lightning_fp8.runtime.choice import check_choice

FrozenWeights = Literal["master", "fp8"]
FROZEN_WEIGHTS: tuple[FrozenWeights, ...] = get_args(FrozenWeights)


def check_frozen_weights(frozen_weights: object) -> None:
    """Raise a ValueError for a value that is neither None nor one of ``FROZEN_WEIGHTS``."""
    if frozen_weights is not None:
        check_choice("`frozen_weights`", frozen_weights, FROZEN_WEIGHTS)


@dataclass(eq=False)
class Content:
    """What a weight and its aliases (``weight.data``, ``weight.detach()``) share.

    Attributes:
        name: the layer's name, for messages.
        dtype: the dtype of the master.
        k_by_n: whether the layer stores its weight as ``[K, N]``.
        payload: ``[N, K] uint8``.
        scale_inv: ``[] float32``.
        largest: ``[] float32``, amax of the values that were rounded. The largest codes are dequantized to it, so
            that a cast of the dequantized values has the same scale.
        payload_t: the payload by columns, where a GPU's GEMMs have needed it; else None.
        changed: values in the shape of the weight, after a change in place to values that FP8 would round; then the
            payload is empty. Else None.
        error: relative RMS error of the rounding.
    """

    name: str
    dtype: torch.dtype
    k_by_n: bool
    payload: Tensor
    scale_inv: Tensor
    largest: Tensor
    payload_t: Tensor | None = None
    changed: Tensor | None = None
    error: float = 0.0

    def dequantized(self) -> Tensor:
        """The values, in the shape of the weight and in its dtype."""
        if self.changed is not None:
            return self.changed
        values = dequantized(self.payload, self.scale_inv, self.largest, self.dtype)
        return values.t() if self.k_by_n else values

    def take(self, values: Tensor, rounds: bool) -> None:
        """Hold other values: as payload if that is lossless, or if ``rounds`` and they are finite; else as they are."""
        payload, scale_inv, amax = quantized(values.t() if self.k_by_n else values)
        rounded = dequantized(payload, scale_inv, amax, self.dtype)
        rounded = rounded.t() if self.k_by_n else rounded
        is_same = torch.equal(rounded, values)
        if not (is_same or (rounds and bool(amax.isfinite()))):
            self.changed = values
            self.payload, self.payload_t = self.payload.new_empty(0, 0), None
            return
        if rounds or self.changed is not None:
            difference = (rounded.float() - values.float()).norm() / values.float().norm()
            self.error = 0.0 if is_same else float(difference)
        self.payload, self.scale_inv, self.largest = payload, scale_inv, amax
        self.payload_t = self.changed = None

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Content:
        """A copy with ``function`` applied to each tensor, for example to move it to another device."""
        tensors: dict[str, Any] = {
            field: function(held) for field, held in vars(self).items() if isinstance(held, Tensor)
        }
        return replace(self, **tensors)


def quantized(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A weight ``[N, K]`` -> payload ``[N, K] uint8``, its inverse scale and its amax, both ``[] float32``."""
    with torch.inference_mode(False), torch.no_grad():
        weight = weight.detach().contiguous()
        index = torch.zeros(1, dtype=torch.int64, device=weight.device)
        payload, _, scale_inv = ops.cast_weight(weight, WeightSlot(index, E4M3.name, None, False), "rows")
        return payload, scale_inv, max_abs(weight)


def dequantized(payload: Tensor, scale_inv: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Values whose cast gives the same payload and scale, if ``dtype`` represents ``amax``."""
    codes = payload.view(E4M3.dtype).float()
    return torch.where(codes.abs() == E4M3.max, codes.sign() * amax, codes * scale_inv).to(dtype)
