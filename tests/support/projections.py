"""A model whose projections share an input, and the same one with names that hide it, with a short training of both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_fp8 import scaling_state

WIDTH, ROWS = 16, 12
MEMBERS = ("q", "k", "v")


class Shared(nn.Module):
    """Three projections of one tensor, and a layer after them."""

    def __init__(self) -> None:
        super().__init__()
        for name in (*MEMBERS, "out"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        self.between: Callable[[], object] = list

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        self.between()
        k, v = self.k(x), self.v(x)
        return self.out(q.sigmoid() * k + v)


class Separate(Shared):
    """The same, with names that hide it."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x, x
        q = self.q(x)
        self.between()
        k, v = self.k(first), self.v(second)
        return self.out(q.sigmoid() * k + v)


class Nested(nn.Module):
    """A stack of blocks whose input the model computes, each called through ``around``."""

    def __init__(self, kind: type[Shared], blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(blocks))
        self.around: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.around(block, x * 1.5)
        return x


def train(
    model: nn.Module, call: Callable[[Tensor], Tensor] | None = None, steps: int = 3, seed: int = 1
) -> list[Tensor]:
    """Outputs, gradients, and the state after each of ``steps`` steps of two micro-batches."""
    generator, seen, call = torch.Generator("cpu").manual_seed(seed), [], model if call is None else call
    optimizer, state = torch.optim.SGD(model.parameters(), lr=0.1), scaling_state(model)
    for step in range(steps):
        for micro in range(2):
            x = torch.randn(ROWS, WIDTH, generator=generator, device="cpu").to(state.device) * (1 + step + micro)
            x.requires_grad_()
            with torch.autocast(state.device.type, torch.bfloat16):
                y = call(x)
            y.float().square().mean().backward()
            seen += [y.detach(), x.grad]
        seen += [p.grad for p in model.parameters() if p.grad is not None]
        state.update()
        seen += [getattr(state, name).clone() for name in ("amax", "amax_history", "scale", "nonfinite_steps")]
        optimizer.step()
        optimizer.zero_grad()
    return seen
