"""Models with a problem for the watchdog, and limits that are never exceeded."""

from __future__ import annotations

from typing import Any

import torch
from lit import Regression
from torch import Tensor

NEVER: dict[str, Any] = dict.fromkeys(("stale_steps", "nonfinite_steps", "saturated_above", "underflowed_above"))


class Vanishing(Regression):
    """Most of its input is 2**-30 of the largest value."""

    def forward(self, x: Tensor) -> Tensor:
        tiny = torch.full_like(x, 2.0**-30)
        tiny[:, 0] = 1.0
        return super().forward(tiny)


class Growing(Regression):
    """Its input grows fourfold from step to step, so that a scale from past steps always clips."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 4.0 ** min(self.trainer.global_step, 20) if self.training else x)

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().step(batch) * 1e-20
