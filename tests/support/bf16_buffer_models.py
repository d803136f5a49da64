"""Small models that train under Lightning's own bf16 plugins: with statistics, tables, filters and unusual buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from bf16_models import LENGTH, WIDTH, Model, images, inverse_frequencies, mlp, series
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


class Graph(Model):
    data = staticmethod(series)

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8, 8)
        links = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() < 3
        self.register_buffer("links", links / links.sum(1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.links @ self.net(self.links @ x)


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
