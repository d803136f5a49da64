"""Layers that take a known time in forward and in backward."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

FORWARD, BACKWARD = 0.1, 0.25


class ToldClock:
    """Replaces :mod:`time`: time passes in a sleep, and by a microsecond at each reading of the clock."""

    def __init__(self) -> None:
        self._now = self._looks = 0

    def sleep(self, seconds: float) -> None:
        self._now += round(seconds * 1e9)

    def perf_counter_ns(self) -> int:
        self._looks += 1
        self._now += 1000 * self._looks
        return self._now


class Sleep(torch.autograd.Function):
    """The identity, which sleeps in forward and in backward."""

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
    """A layer that is listed but, as a subclass, not converted; it sleeps before and after its product."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Sleep.apply(x, FORWARD / 2, BACKWARD / 2)) + Sleep.apply(
            x.new_zeros(1, requires_grad=True), FORWARD / 2, BACKWARD / 2
        )
