"""Small models that train under Lightning's own bf16 plugins: with parameters in bare operations."""

from __future__ import annotations

import torch
from bf16_models import WIDTH, Model, images, mlp, series
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
