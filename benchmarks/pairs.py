"""A small network on pairs, as those that predict structures, with the kinds of linear layers of OpenFold and boltz.

It gets some of the distances between points, and learns to predict the others, which follow from triangles.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

POINTS, WIDTH, SEEN, BINS = 16, 64, 32, 16


class Linear(nn.Linear):
    """Overrides nothing but ``__init__``: initialised by what it is for, as OpenFold's layers are."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, init: str = "default") -> None:
        super().__init__(inputs, outputs, bias)
        if init in ("gating", "final"):
            nn.init.zeros_(self.weight)
        else:
            # variance 1 / inputs, or twice that before a ReLU, without tails
            nn.init.trunc_normal_(self.weight, std=((2 if init == "relu" else 1) / inputs) ** 0.5)
        if bias:
            nn.init.constant_(self.bias, 1.0 if init == "gating" else 0.0)


class Triangle(nn.Module):
    """The gated triangle multiplication: a pair learns from the two other sides of each triangle that it is part of."""

    def __init__(self, bias: bool, sides: str) -> None:
        super().__init__()
        self.sides = sides
        self.enter_norm, self.leave_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.enter, self.enter_gate = Linear(WIDTH, 2 * WIDTH, bias), Linear(WIDTH, 2 * WIDTH, bias, "gating")
        self.leave, self.leave_gate = Linear(WIDTH, WIDTH, bias, "final"), Linear(WIDTH, WIDTH, bias, "gating")

    def forward(self, z: Tensor) -> Tensor:
        """What is to be added to the pairs."""
        z = self.enter_norm(z)
        first, second = (self.enter(z) * self.enter_gate(z).sigmoid()).chunk(2, -1)
        update = self.leave_norm(torch.einsum(self.sides, first, second))
        return self.leave(update) * self.leave_gate(z).sigmoid()


class Block(nn.Module):
    """Both triangle multiplications, along rows and along columns, and a transition."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.outgoing, self.incoming = Triangle(bias, "bikc,bjkc->bijc"), Triangle(bias, "bkic,bkjc->bijc")
        wider, narrower = Linear(WIDTH, 4 * WIDTH, bias, "relu"), Linear(4 * WIDTH, WIDTH, bias, "final")
        self.transition = nn.Sequential(nn.LayerNorm(WIDTH), wider, nn.ReLU(), narrower)

    def forward(self, z: Tensor) -> Tensor:
        """Pairs after all three, each with a residual connection."""
        for part in (self.outgoing, self.incoming, self.transition):
            z = z + part(z)
        return z


def pairs() -> nn.Module:
    """The network: a block with biases, as OpenFold's, and one without, as boltz's."""
    ends = nn.LayerNorm(WIDTH), Linear(WIDTH, BINS)
    return nn.Sequential(Linear(SEEN, WIDTH), Block(bias=True), Block(bias=False), *ends)


def distances(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Distances of random points as the network sees them, [4, n, n, 32], their bins, and which are hidden."""
    random = torch.Generator().manual_seed(number)
    points = torch.randn(4, POINTS, 3, generator=random)
    apart = (points[:, :, None] - points[:, None]).norm(dim=-1)
    hidden = torch.rand(4, POINTS, POINTS, generator=random).triu(1)
    is_hidden = (hidden + hidden.mT) > 0.5
    near = torch.exp(-((apart[..., None] - torch.linspace(0, 6, SEEN)) ** 2) * 8)
    return near * ~is_hidden[..., None], (apart * 3).long().clamp(max=BINS - 1), is_hidden
