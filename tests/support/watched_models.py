"""Models with a problem that `Fp8Monitor` finds, and thresholds for one condition alone."""

from __future__ import annotations

from typing import Any

import torch
from lit import Regression
from torch import Tensor, nn

from lightning_fp8.callbacks.health import CONDITIONS


def only(**thresholds: float) -> dict[str, float | None]:
    """Thresholds with which nothing else is looked for."""
    return {**dict.fromkeys(CONDITIONS), **thresholds}


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


class EvalLayer(Regression):
    """Its last layer trains in eval mode."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[2].eval()


class NormalisedEvalLayer(EvalLayer):
    """The same with a weight that is computed: its parameters have the gradient that shows the layer in use."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.net[2])


class Poisoned(Regression):
    """From step 6 on its first layer's input has a NaN, while the gradients of its parameters stay finite."""

    def forward(self, x: Tensor) -> Tensor:
        if self.trainer.global_step >= 6 and self.training:
            x = x.clone()
            x[0, 0] = float("nan")
        return super().forward(x).nan_to_num()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
