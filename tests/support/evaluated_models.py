"""Small models of each family of layers, a batch for them, and their training: for what evaluation gives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from experts import TOKENS, experts, routing
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_fp8 import scaling_state

WIDTH = 32


class OfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x.reshape(-1, WIDTH)[:TOKENS], *routing())


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, 48), nn.LayerNorm(48), nn.Linear(48, WIDTH)),
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True),
    "fused block": lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)),
    "conv1d": lambda: nn.Sequential(Conv1D(48, WIDTH), nn.Tanh(), Conv1D(WIDTH, 48)),
    "experts": OfExperts,
}


def batch(seed: int = 5, factor: float = 3.0) -> Tensor:
    """Larger than what the models were trained with, so that a history would clip it."""
    return factor * torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(seed))


def predict(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(batch())


def steps(model: nn.Module, count: int) -> None:
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], 1e-2)
    for seed in range(count):
        model(batch(seed, 0.5)).tanh().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scaling_state(model).update()
