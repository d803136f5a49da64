"""A copy of a tensor that gets no gradient, which is not a gradient of zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class NoGradient(torch.autograd.Function):
    """Gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        return None
