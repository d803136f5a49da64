"""Small models that train under Lightning's own bf16 plugins: with parameters in bare operations."""

from __future__ import annotations

import torch
from bf16_models import LENGTH, WIDTH, Model, images, mlp, series, tokens
from torch import Tensor, nn
from torch.nn import functional as F


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)


# Bare operations


class BareProductOfScaledInput(Model):
    """A buffer meets the activations before the product."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.weight, self.bias = nn.Linear(8, WIDTH), weight(WIDTH, 4), nn.Parameter(torch.zeros(4))
        self.register_buffer("gain", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, self.net(x).tanh() * self.gain, self.weight)


class LoraWithScalingBuffer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.a, self.b = mlp(), weight(2, 8), nn.Parameter(torch.zeros(4, 2))
        self.net.requires_grad_(False)
        self.register_buffer("scaling", torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + F.linear(F.linear(x, self.a) * self.scaling, self.b)


class ExpertsByBmm(Model):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.inputs, self.outputs = nn.Linear(8, 3), weight(3, 8, WIDTH), weight(3, WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.bmm(torch.bmm(x.expand(3, -1, -1), self.inputs).relu(), self.outputs)
        return (self.router(x).softmax(-1).t()[..., None] * y).sum(0)


class EinsumAttention(Model):
    data = staticmethod(series)

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = weight(3, 2, 4, 8), weight(2, 8, 4)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("btd,nhed->nbhte", x, self.qkv)
        scores = torch.einsum("bhqe,bhke->bhqk", q, k) * self.scale
        return torch.einsum("bhqk,bhke,hde->bqd", scores.softmax(-1), v, self.out)


class LearnedQueries(Model):
    """Attention pooling, as in Perceiver: the queries are a parameter."""

    data = staticmethod(tokens)

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.queries = nn.Embedding(32, WIDTH), weight(LENGTH, WIDTH)
        self.attention, self.head = nn.MultiheadAttention(WIDTH, 2, batch_first=True), weight(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        return F.linear(self.attention(self.queries.expand(len(x), -1, -1) + x, x, x)[0], self.head)


class ClassToken(Model):
    data = staticmethod(images)

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(2, WIDTH, 4, 4), weight(1, 1, WIDTH)
        self.positions, self.head = weight(1, 5, WIDTH), nn.Linear(WIDTH, 4)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.block(x)[:, 0])


class FunctionalLayerNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.gain, self.bias = mlp(), nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.register_buffer("offset", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(F.layer_norm(x + self.offset, (8,), self.gain, self.bias))


class FunctionalEmbedding(Model):
    data = staticmethod(tokens)

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = weight(32, WIDTH), weight(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(WIDTH**0.5))
        self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        # the output layer shares the table
        return F.linear(F.embedding(x, self.table) * self.scale @ self.mix + self.positions, self.table[:8])


class UncertaintyWeights(Model):
    """Two losses, weighted by learned variances and by fixed shares."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_variance = mlp(), nn.Parameter(torch.zeros(2))
        self.register_buffer("shares", torch.tensor([1.0, 0.3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        losses = torch.stack([F.mse_loss(output, y), F.smooth_l1_loss(output, y)])
        return torch.dot(self.shares, losses * (-self.log_variance).exp()) + self.log_variance.sum() * 0.1
