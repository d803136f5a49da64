"""A hand-written model with adapters on a frozen base of all kinds of converted layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from lightning_fp8 import convert
from lightning_fp8.modules.fp8_parameter import Fp8Parameter

ADAPTERS = ("*lora_*",)
BASE = ("attention.in_proj_weight", "attention.out_proj.weight", "mlp.0.weight", "mlp.2.weight", "conv.weight")
BASE = (*BASE, "query.base.weight")
# in layers whose weight is frozen: attention 32 x 96 and 32 x 32, up and down 32 x 64, conv 32 x 32, query 32 x 32
FROZEN = 32 * 96 + 32 * 32 + 2 * 32 * 64 + 2 * 32 * 32


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


class OnFrozenBase(nn.Module):
    """x ``[B, L, 32]`` -> ``[B, L, 16]``. Gradients of ``first`` and of x pass through all frozen layers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.conv = Conv1D(32, 32)
        self.query = Lora(nn.Linear(32, 32))
        self.head = nn.Linear(32, 16)
        for frozen in (self.attention, self.mlp, self.conv, self.query.base):
            frozen.to(dtype).requires_grad_(False)
        self.around: Callable[..., Any] = _call

    def block(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.mlp(x)
        return x + torch.tanh(self.conv(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.query(self.around(self.block, self.first(x))))


def _call(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


def on_frozen_base(dtype: torch.dtype = torch.float32, seed: int = 0) -> OnFrozenBase:
    torch.manual_seed(seed)
    return OnFrozenBase(dtype)


def converted(how: str, dtype: torch.dtype = torch.float32) -> OnFrozenBase:
    return convert(on_frozen_base(dtype), ignore_modules=ADAPTERS, frozen_weights=how)


def frozen_weights(model: nn.Module) -> dict[str, Fp8Parameter]:
    return {name: p for name, p in model.named_parameters() if isinstance(p, Fp8Parameter)}


def payloads(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (w.payload.clone(), w.scale_inv.clone()) for name, w in frozen_weights(model).items()}


def same(first: Any, second: Any) -> bool:
    first_leaves, second_leaves = tree_leaves(first), tree_leaves(second)
    return len(first_leaves) == len(second_leaves) > 0 and all(map(torch.equal, first_leaves, second_leaves))
