"""Small models that train under Lightning's own bf16 plugins: with statistics, tables, filters and unusual buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from bf16_models import LENGTH, WIDTH, Model, classes, images, inverse_frequencies, mlp, series
from torch import Tensor, nn
from torch.nn import functional as F

# Running statistics


class RunningBatchNorm(Model):
    data = staticmethod(images)

    def __init__(self, norm: Callable[[], nn.Module] = lambda: nn.BatchNorm2d(WIDTH)) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, WIDTH, 3), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(WIDTH * 36, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class RunningBatchNormWithoutAffine(RunningBatchNorm):
    def __init__(self) -> None:
        super().__init__(lambda: nn.BatchNorm2d(WIDTH, affine=False))


class RunningFunctionalBatchNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))
        self.gain, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(self.inputs(x), self.mean, self.variance, self.gain, self.bias, self.training)
        return self.head(x.tanh())


class DataDependentStart(Model):
    """ActNorm: the first batch sets parameters, and a flag in a buffer says so."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.shift, self.scale = mlp(), nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))
        self.register_buffer("started", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.started:
            self.shift.data, self.scale.data = -x.mean(0), 1 / x.std(0)
            self.started.fill_(True)
        return self.net((x + self.shift) * self.scale)


# Buffers that training writes


class VectorQuantisation(Model):
    """A codebook that follows its vectors by exponential averages."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(8, 4))
        self.register_buffer("sizes", torch.ones(8))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        distances = z.square().sum(1, keepdim=True) - 2 * z @ self.codes.t() + self.codes.square().sum(1)
        chosen = F.one_hot(distances.argmin(1), 8).type(z.dtype)
        if self.training:
            with torch.no_grad():
                self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(chosen.t() @ z, alpha=0.1)
                self.codes.copy_(self.sums / (self.sizes + 1e-2)[:, None])
        q = chosen @ self.codes
        self.commitment = F.mse_loss(z, q.detach())
        return self.decoder(z + (q - z).detach())

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(output, y) + 0.25 * self.commitment


class AverageOfWeights(Model):
    """Evaluates with the exponential average of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(4, 8))
        self.register_buffer("average", self.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(self.weight.detach(), 0.1)
        return F.linear(x, self.weight if self.training else self.average)


class TeacherOfBuffers(Model):
    """A mean teacher, whose weights are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        for name, p in self.net.named_parameters():
            self.register_buffer(f"teacher_{name.replace('.', '_')}", p.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for name, p in self.net.named_parameters():
                self.get_buffer(f"teacher_{name.replace('.', '_')}").mul_(0.9).add_(p.detach(), alpha=0.1)
        teacher = {
            name: self.get_buffer(f"teacher_{name.replace('.', '_')}") for name, _ in self.net.named_parameters()
        }
        self.target = torch.func.functional_call(self.net, teacher, (x,)).detach()
        return self.net(x)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(output, y) + 0.5 * F.mse_loss(output, self.target)


# Tables and filters


class Blur(Model):
    data = staticmethod(images)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
        kernel = torch.tensor([1.0, 3.0, 1.0])
        self.register_buffer("kernel", (kernel[:, None] * kernel / 25).expand(8, 1, 3, 3).clone())

    def forward(self, x: Tensor) -> Tensor:
        conv, act, *rest = self.net
        return nn.Sequential(*rest)(F.conv2d(act(conv(x)), self.kernel, groups=8))


class BinsOfBucketize(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(17, 4), nn.Linear(32, 4)
        self.register_buffer("edges", torch.linspace(-2, 2, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(torch.bucketize(x, self.edges)).flatten(1))


class Graph(Model):
    data = staticmethod(series)

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8, 8)
        links = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() < 3
        self.register_buffer("links", links / links.sum(1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.links @ self.net(self.links @ x)


class GraphBySparse(Graph):
    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.links.nonzero(as_tuple=True)
        messages = self.net(x)[:, columns] * self.links[rows, columns, None]
        return torch.zeros_like(x).index_add_(1, rows, messages)


class NoiseSchedule(Model):
    """Denoising diffusion in vectors: tables of 1000 steps, indexed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8 + WIDTH, 8)
        betas = torch.linspace(1e-4, 0.02, 1000)
        self.register_buffer("betas", betas)
        self.register_buffer("alphas_cumprod", (1 - betas).cumprod(0))
        self.register_buffer("frequencies", inverse_frequencies())

    def noisy(self, x: Tensor, noise: Tensor) -> Tensor:
        t = torch.arange(len(x)) * 31 % 1000
        kept = self.alphas_cumprod[t][:, None]
        angles = t[:, None].to(x.dtype) * self.frequencies
        return torch.cat([kept.sqrt() * x + (1 - kept).sqrt() * noise, angles.sin(), angles.cos()], 1)

    def forward(self, x: Tensor) -> Tensor:
        noise = x.roll(1, 0)
        self.noise = noise
        return self.net(self.noisy(x, noise))

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(output, self.noise)


class Spectrogram(Model):
    """Fourier transform in fp32 with a window, and a filter bank, both buffers."""

    data = staticmethod(classes)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(8, periodic=False) + 0.1)
        self.register_buffer("bank", torch.rand(5, 6))
        self.net = mlp(6)

    def forward(self, x: Tensor) -> Tensor:
        power = torch.fft.rfft((x * self.window).float()).abs().square().to(self.bank.dtype)
        return self.net((power @ self.bank + 0.1).log())
