"""Small models that train under Lightning's own bf16 plugins: with parametrizations, recurrent layers, and buffers of
unusual kinds."""

from __future__ import annotations

import torch
from bf16_models import WIDTH, Model, mlp, series
from bf16_parameter_models import weight
from torch import Tensor, nn
from torch.nn.utils import parametrizations

# Parametrizations


class SpectralNormOld(Model):
    def __init__(self, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first = first or nn.utils.spectral_norm(nn.Linear(8, WIDTH))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).tanh())


class SpectralNorm(SpectralNormOld):
    def __init__(self) -> None:
        super().__init__(parametrizations.spectral_norm(nn.Linear(8, WIDTH)))


class Pruned(SpectralNormOld):
    """The masks of pruning are buffers."""

    def __init__(self) -> None:
        layer = nn.Linear(8, WIDTH)
        nn.utils.prune.l1_unstructured(layer, "weight", 0.5)
        super().__init__(layer)


# Recurrent layers


class GruFromBuffer(Model):
    data = staticmethod(series)

    def __init__(self, layer: type[nn.RNNBase] = nn.GRU) -> None:
        super().__init__()
        self.layer, self.head = layer(8, WIDTH, batch_first=True), nn.Linear(WIDTH, 8)
        self.register_buffer("start", torch.linspace(-0.5, 0.5, WIDTH).view(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x, self.start.repeat(1, len(x), 1))[0])


class LstmFromBuffers(GruFromBuffer):
    def __init__(self) -> None:
        super().__init__(nn.LSTM)
        self.register_buffer("cell", torch.zeros(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x, (self.start.repeat(1, len(x), 1), self.cell.repeat(1, len(x), 1)))[0])


# Unusual buffers


class Bfloat16Buffer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("nodes", torch.linspace(0.5, 1.5, 8, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.nodes)


class Holder(nn.Module):
    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.register_buffer("shared", shared)
        self.weight = weight(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.shared) @ self.weight


class BufferOfTwoModules(Model):
    """One module writes the buffer that both read."""

    def __init__(self) -> None:
        super().__init__()
        shared = torch.ones(8)
        self.first, self.second, self.head = Holder(shared), Holder(shared), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.first.shared.mul_(0.98)
        return self.head(self.second(self.first(x).tanh()))


class BufferOfParameter(Model):
    """A buffer that is a view of a parameter's storage, and follows its training."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.weight = nn.Linear(8, WIDTH), weight(WIDTH, 4)
        self.register_buffer("view", self.weight.detach().t())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).tanh() @ self.weight + 0.1 * (x[:, :4] @ self.view[:, :4])


class BufferMadeLate(Model):
    def configure_model(self) -> None:
        self.net, self.weight = mlp(), weight(8, 8)
        self.register_buffer("offset", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x + self.offset) @ self.weight)


class LazyLayersWithoutData(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d(affine=False), nn.Tanh(), nn.LazyLinear(4))
        self.register_buffer("offset", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + self.offset)


class Affine(nn.Module):
    """Nothing but buffers and a parameter; ``keep_fp32`` may name it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = weight(8, 8)
        self.register_buffer("offset", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.offset) @ self.weight


class NamedByKeepFp32(Model):
    def __init__(self) -> None:
        super().__init__()
        self.affine, self.net = Affine(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.affine(x))


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


class BufferNamedByKeepFp32(NamedByKeepFp32):
    """``keep_fp32`` names a module without parameters; a bare product follows."""

    def __init__(self) -> None:
        super().__init__()
        self.affine, self.weight = Holding(), weight(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.affine(x) @ self.weight)
