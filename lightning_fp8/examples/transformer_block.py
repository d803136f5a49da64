"""The block of the GPT and the vision transformer, and the initialization of their weights."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fp8 import feed_forward


class Block(nn.Module):
    """Pre-norm transformer block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``; x ``[batch, time, width]``.

    Args:
        width: size of the residual stream, a multiple of ``heads``.
        heads: attention heads.
        causal: whether a position sees only itself and those before it.
    """

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self._projected(x))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + feed_forward(self.up, F.gelu, self.down, self.norm_mlp(x))

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(self.norm_attention(x)).chunk(3, dim=-1)


def check_heads(model: str, width: int, heads: int) -> None:
    """Raise ``ValueError`` in the name of ``model`` where the width cannot be split into heads."""
    if width % heads:
        raise ValueError(f"{model}: `width` must be a multiple of `heads`, got width={width} and heads={heads}.")


def initialize(model: nn.Module) -> None:
    """GPT-2's initialization: weights have standard deviation 0.02, output projections ``0.02 / sqrt(2 * blocks)``."""
    model.apply(_initialize)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        nn.init.normal_(block.out.weight, std=0.02 / math.sqrt(2 * len(blocks)))
        nn.init.normal_(block.down.weight, std=0.02 / math.sqrt(2 * len(blocks)))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
