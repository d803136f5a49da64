"""Small models that train under Lightning's own bf16 plugins: with parametrizations, recurrent layers, and buffers of
unusual kinds."""

from __future__ import annotations

import torch
from bf16_models import WIDTH, Model, images, mlp, series
from bf16_parameter_models import weight
from torch import Tensor, nn
from torch.nn import functional as F
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


class SpectralNormOfConvolution(Model):
    data = staticmethod(images)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(2, 8, 3, 2)), nn.LeakyReLU(0.2))
        self.head = parametrizations.spectral_norm(nn.Linear(8 * 9, 4), n_power_iterations=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).flatten(1))


class WeightNormOld(SpectralNormOld):
    def __init__(self) -> None:
        super().__init__(nn.utils.weight_norm(nn.Linear(8, WIDTH)))


class WeightNorm(SpectralNormOld):
    def __init__(self) -> None:
        super().__init__(parametrizations.weight_norm(nn.Linear(8, WIDTH)))


class Orthogonal(SpectralNormOld):
    def __init__(self) -> None:
        super().__init__(parametrizations.orthogonal(nn.Linear(8, WIDTH)))


class OrthogonalOfHouseholder(SpectralNormOld):
    def __init__(self) -> None:
        super().__init__(parametrizations.orthogonal(nn.Linear(8, WIDTH), orthogonal_map="householder"))


class OrthogonalOfSquare(Model):
    def __init__(self) -> None:
        super().__init__()
        self.turn = parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="matrix_exp", use_trivialization=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.turn(x).tanh())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([1.0, 0.5]).repeat(WIDTH // 2)[:, None])

    def forward(self, w: Tensor) -> Tensor:
        return w * self.mask


class OwnParametrization(SpectralNormOld):
    def __init__(self) -> None:
        layer = nn.Linear(8, WIDTH)
        nn.utils.parametrize.register_parametrization(layer, "weight", Scaled())
        super().__init__(layer)


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


class RnnFromBuffer(GruFromBuffer):
    def __init__(self) -> None:
        super().__init__(nn.RNN)


class LstmFromBuffers(GruFromBuffer):
    def __init__(self) -> None:
        super().__init__(nn.LSTM)
        self.register_buffer("cell", torch.zeros(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x, (self.start.repeat(1, len(x), 1), self.cell.repeat(1, len(x), 1)))[0])


class LstmFromParameters(LstmFromBuffers):
    def __init__(self) -> None:
        super().__init__()
        start = self.start
        del self.start
        self.start = nn.Parameter(start)


class CellsFromBuffer(GruFromBuffer):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRUCell(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = self.start[0].repeat(len(x), 1), []
        for u in x.unbind(1):
            h = self.layer(u, h)
            outputs.append(self.head(h))
        return torch.stack(outputs, 1)


class OwnCellsFromBuffer(GruFromBuffer):
    """A recurrence of bare products from an initial state."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.recur = weight(8, WIDTH), weight(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = self.start[0].expand(len(x), -1), []
        for u in x.unbind(1):
            h = (u @ self.into + h @ self.recur).tanh()
            outputs.append(h)
        return self.head(torch.stack(outputs, 1))


class StatefulGru(GruFromBuffer):
    """Keeps its last state in buffers, from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(1, 8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.head(self.layer(x, self.state.mean(1, keepdim=True).repeat(1, len(x), 1))[0])
        y, state = self.layer(x, self.state.clone())
        self.state.copy_(state.detach())
        return self.head(y)


# Unusual buffers


class Float64Buffer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("nodes", torch.linspace(0.5, 1.5, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.nodes.to(x.dtype))


class Float64BufferAlone(Float64Buffer):
    """No cast: a float64 buffer of no dimensions does not promote."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.factor)


class Bfloat16Buffer(Float64Buffer):
    def __init__(self) -> None:
        super().__init__()
        self.nodes = self.nodes.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.nodes)


class Float16Buffer(Float64Buffer):
    def __init__(self) -> None:
        super().__init__()
        self.nodes = self.nodes.half()


class BufferNotSaved(Float64Buffer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gate", torch.rand(8), persistent=False)
        self.weight = weight(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.gate * x @ self.weight)


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


class BufferMadeInForward(Model):
    """A cache that the first forward makes from the dtype of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.weight = mlp(), weight(8, 8)
        self.register_buffer("cache", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.linspace(-1, 1, 8, dtype=torch.float32).to(x.dtype)
        return self.net((x + self.cache) @ self.weight)


class BufferOfNoDimensions(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.weight = mlp(), weight(8, 8)
        self.register_buffer("scale", torch.tensor(0.7071))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x @ self.weight * self.scale)


class LazyLayers(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(4))
        self.register_buffer("offset", torch.linspace(-1, 1, 8))
        # Lightning asks for initialized parameters before it trains
        self(torch.zeros(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + self.offset)


class LazyLayersWithoutData(LazyLayers):
    def __init__(self) -> None:
        Model.__init__(self)
        self.net = nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d(affine=False), nn.Tanh(), nn.LazyLinear(4))
        self.register_buffer("offset", torch.linspace(-1, 1, 8))


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


class MomentumEncoder(Model):
    """MoCo: a queue of keys in a buffer with a whole-number pointer, and a frozen encoder that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.keys = mlp(), mlp()
        self.keys.load_state_dict(self.net.state_dict())
        self.keys.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, 64), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.keys.parameters(), self.net.parameters()):
                    slow.mul_(0.9).add_(fast, alpha=0.1)
                self.positive = F.normalize(self.keys(x + 0.1), dim=1)
        return self.net(x)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        q = F.normalize(output, dim=1)
        logits = torch.cat([(q * self.positive).sum(1, keepdim=True), q @ self.queue.clone()], 1) / 0.5
        at = int(self.pointer)
        self.queue[:, at : at + len(q)] = self.positive.t()
        self.pointer[0] = (at + len(q)) % 64
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long)) + F.mse_loss(output, y)


class Dueling(Model):
    """A distributional critic: its atoms are a buffer, the loss projects on them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8, 11)
        self.register_buffer("atoms", torch.linspace(-2, 2, 11))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).softmax(-1) @ self.atoms

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(output, y.sum(1))
