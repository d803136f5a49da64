"""A model of stacked blocks, and the precision of its layers' products."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.ops.formats import PRODUCTS


class Blocks(nn.Module):
    """Four blocks, each with a list of five experts; and a list of two layers."""

    def __init__(self, blocks: int = 4, others: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.others = nn.ModuleList(nn.Linear(32, 32) for _ in range(others))
        self.head = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.others):
            x = x + block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()) + sum(expert(x) for expert in self.experts)


def products(model: nn.Module) -> dict[str, str]:
    """For each layer with products in bf16, the initials of these products; for a plain layer ``"fdw"``."""
    initials = {}
    for path, layer in model.named_modules():
        in_bf16 = layer.in_bf16 if isinstance(layer, Fp8Module) else PRODUCTS
        if isinstance(layer, nn.Linear) and in_bf16:
            initials[path] = "".join(product[0] for product in in_bf16)
    return initials


def experts_of(*blocks: int) -> dict[str, str]:
    return {f"blocks.{block}.experts.{at}": "fdw" for block in blocks for at in range(5)}
