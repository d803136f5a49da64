"""Small models that train under Lightning's own bf16 plugins: with parameters in bare operations."""

from __future__ import annotations

import math

import torch
from bf16_models import LENGTH, WIDTH, Model, images, mlp, series, tokens
from torch import Tensor, nn
from torch.nn import functional as F


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)


# Bare operations


class BareProduct(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.weight, self.bias = nn.Linear(8, WIDTH), weight(WIDTH, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).tanh() @ self.weight + self.bias


class BareProductOfScaledInput(BareProduct):
    """A buffer of ones meets the activations before the product."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, self.net(x).tanh() * self.gain, self.weight)


class LoraByHand(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.a, self.b = mlp(), weight(2, 8), nn.Parameter(torch.zeros(4, 2))
        self.net.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + 2 * (x @ self.a.t() @ self.b.t())


class LoraWithScalingBuffer(LoraByHand):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scaling", torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + F.linear(F.linear(x, self.a) * self.scaling, self.b)


class LoraMerged(LoraWithScalingBuffer):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.net[1](self.net[0](x)), self.net[2].weight + self.scaling * (self.b @ self.a.repeat(1, 2)))


class ExpertsByBmm(Model):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.inputs, self.outputs = nn.Linear(8, 3), weight(3, 8, WIDTH), weight(3, WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.bmm(torch.bmm(x.expand(3, -1, -1), self.inputs).relu(), self.outputs)
        return (self.router(x).softmax(-1).t()[..., None] * y).sum(0)


class ExpertsWithBiasBuffer(ExpertsByBmm):
    """A router whose balance is a buffer that training writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("balance", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        gates = (self.router(x) + self.balance).softmax(-1)
        if self.training:
            self.balance -= 0.01 * (gates.detach().mean(0) - 1 / 3).sign()
        hidden = torch.einsum("be,bi,eio->beo", gates, x, self.inputs).relu()
        return torch.einsum("beo,eoy->by", hidden, self.outputs)


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


class FunctionalLinear(Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bias = weight(WIDTH, 8), weight(4, WIDTH), nn.Parameter(torch.zeros(4))
        self.register_buffer("offset", torch.full((8,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x + self.offset, self.first).tanh(), self.second, self.bias)


class FunctionalConv1d(Model):
    data = staticmethod(series)

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.bias = weight(8, 8, 3), nn.Parameter(torch.zeros(8))
        self.register_buffer("taper", torch.tensor([0.5, 1.0, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x.mT, self.kernel * self.taper, self.bias, padding=1).mT


class FunctionalConv2d(Model):
    data = staticmethod(images)

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.head = weight(8, 2, 3, 3), nn.Linear(8 * 16, 4)
        self.register_buffer("mask", torch.tensor([[0.0, 1, 0], [1, 1, 1], [0, 1, 0]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.conv2d(x, self.kernel * self.mask, stride=2, padding=1).relu().flatten(1))


class FunctionalLayerNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.gain, self.bias = mlp(), nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.register_buffer("offset", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(F.layer_norm(x + self.offset, (8,), self.gain, self.bias))


class FunctionalGroupNorm(FunctionalLayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(F.group_norm(x + self.offset, 2, self.gain, self.bias))


class FunctionalRmsNorm(FunctionalLayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = F.rms_norm(x + self.offset, (8,), self.gain)
        return self.net(x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x) + self.bias)


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


class CausalConvolution(Model):
    data = staticmethod(series)

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.gain = nn.Conv1d(8, 8, 4), nn.Parameter(torch.ones(8))
        self.register_buffer("past", torch.full((1, 8, 3), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(torch.cat([self.past.expand(len(x), -1, -1), x.mT], -1)).mT * self.gain


class StateSpace(Model):
    """A diagonal state space layer: decay rates and step sizes are parameters, the initial state is a buffer."""

    data = staticmethod(series)

    def __init__(self) -> None:
        super().__init__()
        self.log_rate, self.step = nn.Parameter(torch.linspace(-1, 1, WIDTH)), nn.Parameter(torch.tensor(0.3))
        self.into, self.out, self.skip = weight(WIDTH, 8), weight(8, WIDTH), nn.Parameter(torch.ones(8))
        self.register_buffer("start", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        decay, h, outputs = torch.exp(-self.step * self.log_rate.exp()), self.start, []
        for u in x.unbind(1):
            h = decay * h + F.linear(u, self.into)
            outputs.append(F.linear(h, self.out) + self.skip * u)
        return torch.stack(outputs, 1)


class BayesianLinear(Model):
    """Weights drawn from normal distributions; the prior is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.mu, self.rho = mlp(8, WIDTH), weight(4, WIDTH), nn.Parameter(torch.full((4, WIDTH), -3.0))
        self.register_buffer("prior", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        sigma = F.softplus(self.rho)
        drawn = self.mu + sigma * torch.randn(4, WIDTH, dtype=torch.float32).to(sigma) if self.training else self.mu
        self.divergence = ((sigma**2 + self.mu**2) / self.prior**2 - 1 - 2 * (sigma / self.prior).log()).mean() / 2
        return F.linear(self.net(x), drawn)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(output, y) + 1e-2 * self.divergence


class MixtureDensity(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8, 36)
        self.register_buffer("log_floor", torch.tensor(-4.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        logits, means, log_std = output.unflatten(-1, (3, 3, 4)).unbind(1)
        log_std = torch.maximum(log_std, self.log_floor)
        nll = 0.5 * ((y[:, None] - means) / log_std.exp()) ** 2 + log_std + 0.5 * math.log(2 * math.pi)
        return -(logits.mean(-1).log_softmax(-1) - nll.sum(-1)).logsumexp(-1).mean() / 4


class FourierLayer(Model):
    """Fourier neural operator: complex weights from pairs of real ones."""

    data = staticmethod(series)

    def __init__(self) -> None:
        super().__init__()
        self.modes, self.skip = weight(4, 8, 8, 2), nn.Linear(8, 8)
        self.register_buffer("grid", torch.linspace(0, 1, LENGTH)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft((x + self.grid).float(), dim=1)[:, :4]
        mixed = torch.einsum("bki,kio->bko", spectrum, torch.view_as_complex(self.modes.float()))
        return self.skip(x) + torch.fft.irfft(mixed, n=LENGTH, dim=1).to(x)


class ListOfParameters(Model):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([weight(8, WIDTH), weight(WIDTH, WIDTH), weight(WIDTH, 4)])
        self.register_buffer("share", torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        first, middle, last = self.weights
        h = (x @ first).tanh()
        return (h + self.share * (h @ middle).tanh()) @ last


class DictOfParameters(Model):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({"in": weight(8, WIDTH), "out": weight(WIDTH, 4)})
        self.register_buffer("signs", torch.tensor([1.0, -1.0]).repeat(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(torch.mm(x * self.signs, self.weights["in"]).relu(), self.weights["out"])


class FrozenParameter(Model):
    """Random features: a parameter without gradients, and a trained one, in bare products."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.weight = weight(8, WIDTH).requires_grad_(False), weight(WIDTH, 4)
        self.register_buffer("phase", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.features + self.phase).cos() @ self.weight


class LayerScale(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.block, self.head = nn.Linear(8, WIDTH), mlp(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.gamma, self.prelu = nn.Parameter(torch.full((WIDTH,), 0.1)), nn.Parameter(torch.tensor([0.25]))
        self.register_buffer("survival", torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        return self.head(F.prelu(x + self.survival * self.gamma * self.block(x), self.prelu))


class LearnedTemperature(Model):
    """Contrastive loss with a learned temperature and a buffer that limits it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_scale = mlp(8, 4), nn.Parameter(torch.tensor(1.0))
        self.register_buffer("limit", torch.tensor(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        scale = torch.minimum(self.log_scale, self.limit).exp()
        logits = scale * F.normalize(output, dim=-1) @ F.normalize(y, dim=-1).t()
        return F.cross_entropy(logits, torch.arange(len(y)))


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


class NeuralEquation(Model):
    """Euler's method over a grid of times that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.head = mlp(9, 8), nn.Linear(8, 4)
        self.register_buffer("times", torch.linspace(0, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        for t, after in zip(self.times[:-1], self.times[1:]):
            x = x + (after - t) * self.field(torch.cat([x, t.expand(len(x), 1)], 1))
        return self.head(x)
