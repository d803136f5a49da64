"""Layers that take a known time, forward and backward."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

FORWARD, BACKWARD = 0.1, 0.25


class Sleep(torch.autograd.Function):
    """The identity, which takes its time on both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward)
        return dy.clone(), None, None


class Slow(nn.Linear):
    """A layer that is listed and, as a subclass, not converted; sleeps before and behind its product."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Sleep.apply(x, FORWARD / 2, BACKWARD / 2)) + Sleep.apply(
            x.new_zeros(1, requires_grad=True), FORWARD / 2, BACKWARD / 2
        )
