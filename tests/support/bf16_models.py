"""Small models that train under Lightning's own bf16 plugins: with positions and masks.

The other files ``bf16_*_models`` add theirs to the list. Each kind of product beside a kind of buffer is there once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import lightning.pytorch as pl
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

WIDTH = 16
LENGTH = 12
MODELS: dict[str, type[Model]] = {}


def vectors(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 8, generator=g)
    return x, torch.sin(2 * x[:, :4])


def classes(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 8, generator=g)
    return x, x[:, :4].argmax(1)


def labels(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 8, generator=g)
    return x, (x[:, :4] > 0.5).float()


def tokens(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randint(32, (rows // 4, LENGTH), generator=g)
    return x, (x + torch.arange(LENGTH)) % 8


def series(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows // 4, LENGTH, 8, generator=g)
    return x, x.roll(1, dims=1).tanh()


def images(rows: int, g: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows // 2, 2, 8, 8, generator=g)
    return x, F.avg_pool2d(x[:, 0], 4).flatten(1).argmax(1)


class Model(pl.LightningModule):
    """Fits ``data`` by SGD; each subclass is one of ``MODELS``."""

    data: Callable[[int, Generator], tuple[Tensor, Tensor]] = staticmethod(vectors)
    lr = 0.1

    def __init_subclass__(cls) -> None:
        MODELS[cls.__name__] = cls

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(output, y) if y.is_floating_point() else F.cross_entropy(output.flatten(0, -2), y.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Tensor:
        return self.loss(self(batch[0]), batch[1])

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], self.lr)


def mlp(inputs: int = 8, outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs))


def waves(length: int = LENGTH, width: int = WIDTH) -> Tensor:
    angles = torch.arange(length)[:, None] / 100 ** (torch.arange(0, width, 2) / width)
    return torch.cat([angles.sin(), angles.cos()], 1)


def inverse_frequencies(width: int = WIDTH) -> Tensor:
    return 1 / 100 ** (torch.arange(0, width, 2) / width)


# Positions


class OfTokens(nn.Module):
    """The parts of a language model, around positions in any form."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 8)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(self.embedding(x)).unflatten(-1, (6, 8)).transpose(1, 2).chunk(3, 1)
        return q, k, v

    def logits(self, scores: Tensor, v: Tensor) -> Tensor:
        return self.head((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class SinusoidalAdded(Model):
    data = staticmethod(tokens)

    def __init__(self) -> None:
        super().__init__()
        self.net = OfTokens()
        self.register_buffer("positions", waves())

    def forward(self, x: Tensor) -> Tensor:
        return self.net.head(self.net.embedding(x) + self.positions)


class SinusoidalIntoBareProduct(SinusoidalAdded):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.net.head((self.net.embedding(x) + self.positions) @ self.mix)


class RotaryFromFrequencies(Model):
    data = staticmethod(tokens)

    def __init__(self) -> None:
        super().__init__()
        self.net = OfTokens()
        self.register_buffer("inv_freq", inverse_frequencies(8))

    def angles(self) -> Tensor:
        return torch.outer(torch.arange(LENGTH, dtype=self.inv_freq.dtype), self.inv_freq).repeat(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.net.heads(x)
        cos, sin = self.angles().cos(), self.angles().sin()
        q, k = (t * cos + torch.cat([-t[..., 4:], t[..., :4]], -1) * sin for t in (q, k))
        return self.net.logits(q @ k.mT / 8**0.5, v)


class RotaryCache(RotaryFromFrequencies):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", super().angles().cos(), persistent=False)
        self.register_buffer("sin", super().angles().sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.net.heads(x)
        q, k = (t * self.cos + torch.cat([-t[..., 4:], t[..., :4]], -1) * self.sin for t in (q, k))
        return self.net.logits(torch.einsum("bhqd,bhkd->bhqk", q, k) / 8**0.5, v)


class RotaryComplex(RotaryFromFrequencies):
    def __init__(self) -> None:
        super().__init__()
        angles = super().angles()[:, :4]
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def turned(self, t: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(t.float().unflatten(-1, (4, 2))) * self.turns).flatten(3).to(t)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.net.heads(x)
        return self.net.logits(self.turned(q) @ self.turned(k).mT / 8**0.5, v)


class Rotary(nn.Module):
    """A module without parameters; given activations, its tables have their dtype."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(8), persistent=False)
        self.register_buffer("positions", torch.arange(3000.0, 3000 + LENGTH) if whole else None)

    def tables(self) -> tuple[Tensor, Tensor]:
        at = torch.arange(LENGTH, dtype=self.inv_freq.dtype) if self.positions is None else self.positions
        angles = torch.outer(at, self.inv_freq).repeat(1, 2)
        return angles.cos(), angles.sin()

    def forward(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        cos, sin = self.tables()
        return (cos, sin) if x is None else (cos.to(x), sin.to(x))


class RotaryModule(RotaryCache):
    def __init__(self, rotary: Rotary | None = None) -> None:
        super().__init__()
        self.rotary = rotary or Rotary()

    def forward(self, x: Tensor) -> Tensor:
        self.cos, self.sin = self.rotary(self.net.embedding(x))
        return super().forward(x)


class RotaryModuleOfFarPositions(RotaryModule):
    def __init__(self) -> None:
        super().__init__(Rotary(whole=True))


class RotaryModuleWithoutInput(RotaryModule):
    def forward(self, x: Tensor) -> Tensor:
        self.cos, self.sin = self.rotary()
        return RotaryCache.forward(self, x)


class RotaryModuleByMethod(RotaryModule):
    """Calls another method than the module's forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.cos, self.sin = self.rotary.tables()
        return RotaryCache.forward(self, x)


class RelativeBiasTable(Model):
    """Whole-number buckets, and a mask of attention that follows from a parameter."""

    data = staticmethod(tokens)

    def __init__(self) -> None:
        super().__init__()
        self.net, self.bias = OfTokens(), nn.Parameter(0.1 * torch.randn(8, 2))
        self.register_buffer("buckets", (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).clamp(-4, 3) + 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.net.heads(x)
        bias = self.bias[self.buckets].permute(2, 0, 1)
        return self.net.head(F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None]).transpose(1, 2).flatten(2))


class AdditiveMask(Model):
    data = staticmethod(tokens)

    def __init__(self) -> None:
        super().__init__()
        self.net = OfTokens()
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.net.heads(x)
        return self.net.logits(q @ k.mT / 8**0.5 + self.mask, v)


class AdditiveMaskInAttention(AdditiveMask):
    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(*self.net.heads(x), attn_mask=self.mask)
        return self.net.head(y.transpose(1, 2).flatten(2))


class AdditiveMaskOfEncoder(AdditiveMask):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net.head(self.encoder(self.net.embedding(x), src_mask=self.mask))
