"""Models of plain torch layers."""

from __future__ import annotations

from torch import nn


def small_mlp(width: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, 16))
