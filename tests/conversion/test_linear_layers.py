"""Linear layers that are not `nn.Linear`: which are converted, with which class, and that they stay what they were."""

from __future__ import annotations

import copy
import itertools
import pickle
from abc import ABC
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.models.falcon.modeling_falcon import FalconLinear

from lightning_fp8 import convert, describe, scaling_state, unconvert
from lightning_fp8.conversion import linear_layers, register_linear
from lightning_fp8.modules import Fp8Linear
from lightning_fp8.modules.feed_forward import FeedForward, reason_against_fusing


class Initialised(nn.Linear):
    """Overrides nothing but `__init__`, as those of boltz do."""

    made: list[type] = []  # noqa: RUF012

    def __init__(self, inputs: int, outputs: int, init: str = "default", bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.init = init

    def __init_subclass__(cls, **kwargs: Any) -> None:
        Initialised.made.append(cls)

    def extra_repr(self) -> str:
        return f"init={self.init}"


@register_linear
class OfGraphs(nn.Module):
    """The interface of torch_geometric's `Linear`."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels) / in_channels**0.5)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> OfGraphs:
        copied = OfGraphs(self.in_channels, self.out_channels)
        copied.load_state_dict(self.state_dict())
        return copied

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels})"


OfGraphs.__name__ = "Linear"


class Reduced(nn.Linear):
    def __reduce__(self) -> Any:
        return type(self), (self.in_features, self.out_features), self.__dict__


class Rebuilt(nn.Linear):
    def __reduce__(self) -> Any:
        return type(self), (self.in_features, self.out_features)


class Abstract(nn.Linear, ABC):
    pass


KINDS: list[Callable[[int, int], nn.Module]] = [Initialised, FalconLinear, OfGraphs, Reduced, Abstract]
HOW = {
    OfGraphs: "with the `forward` of Linear, by `register_linear`",
    FalconLinear: "with the known `forward` of transformers.models.falcon.modeling_falcon.FalconLinear",
}


@pytest.mark.parametrize(("kind", "autocast"), list(zip(KINDS, itertools.cycle([False, True]))))
def test_it_computes_what_nn_linear_computes_in_fp8(kind: Any, autocast: bool) -> None:
    layer, plain, x = kind(32, 48), nn.Linear(32, 48), torch.randn(4, 32, requires_grad=True)
    plain.load_state_dict(layer.state_dict())
    keys, parameters, representation = list(layer.state_dict()), dict(layer.named_parameters()), repr(layer)
    convert(layer)
    convert(plain)
    assert isinstance(layer, kind)
    assert isinstance(layer, nn.Linear) == issubclass(kind, nn.Linear)
    assert list(layer.state_dict()) == keys
    assert all(parameters[name] is one for name, one in layer.named_parameters())
    results = []
    for one in (layer, plain):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = one(x)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), (x, one.weight, one.bias))))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*results, strict=True))
    how = HOW.get(kind, "with the `forward` of nn.Linear")
    assert [row.reason for row in describe(layer)] == [f"converted, 32 -> 48; {how}"]
    assert type(unconvert(layer)) is kind
    assert repr(layer) == representation
    assert "fp8" not in vars(layer)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles_are_converted(kind: Any) -> None:
    model, x = convert(nn.Sequential(kind(16, 16), nn.Linear(16, 16))), torch.randn(2, 16)
    model(x).sum().backward()
    scaling_state(model).update()
    expected = model(x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied[0]) is type(model[0])
        assert torch.equal(copied(x), expected)
        assert copied[0].scaling_state is copied[1].scaling_state is not model[0].scaling_state
        assert type(unconvert(copied)[0]) is kind


def test_a_class_that_pickles_without_its_attributes_gives_a_plain_layer_and_says_so() -> None:
    model = convert(nn.Sequential(Rebuilt(16, 16)))
    with pytest.warns(UserWarning, match="A pickled Rebuilt is plain, not in FP8"):
        copied = pickle.loads(pickle.dumps(model[0]))
    assert type(copied) is Rebuilt
    assert type(copy.deepcopy(model)[0]) is type(model[0])


def test_the_class_of_the_user_does_not_see_that_it_is_subclassed() -> None:
    class New(Initialised):
        pass

    layer = convert(New(16, 16, "relu"))
    assert Initialised.made == [New]
    assert repr(layer).startswith("Fp8New(init=relu, fp8=Delayed")


def test_compiled_it_computes_the_same() -> None:
    model, x = convert(nn.Sequential(FalconLinear(16, 32), nn.GELU(), Initialised(32, 16))), torch.randn(4, 16)
    model(x).sum().backward()
    scaling_state(model).update()
    expected = model.eval()(x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


def test_blocks_of_such_layers_are_fused_as_those_of_nn_linear() -> None:
    model = convert(nn.Sequential(FalconLinear(16, 32), nn.GELU(), Initialised(32, 16)))
    assert reason_against_fusing(FeedForward((model[0],), model[1], model[2])) is None
    plain, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), torch.randn(4, 16)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x), convert(plain)(x))


@pytest.mark.usefixtures("one_process")
def test_fully_shard_keeps_both_classes() -> None:
    layer, x = convert(nn.Sequential(FalconLinear(16, 16))), torch.randn(4, 16)
    expected = layer(x)
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(layer[0], mesh=mesh)
    fully_shard(layer, mesh=mesh)
    assert isinstance(layer[0], FalconLinear)
    assert torch.equal(layer(x), expected)
    unconvert(layer)
    assert isinstance(layer[0], FalconLinear)
    assert "FalconLinear" in type(layer[0]).__name__
    convert(layer)
    assert torch.equal(layer(x), expected)


def test_registered_classes_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layers, "_registered", [nn.Linear])

    class Projection(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(16, 16)), None

        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("a kernel that only a GPU has")

    class Special(Projection):
        pass

    class Other(Projection):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight) * 2

    model, x = nn.Sequential(Projection(), Special(), nn.Linear(16, 16)), torch.randn(4, 16)
    assert [row.path for row in describe(model) if row.is_layer] == ["2"]
    assert register_linear(Projection) is register_linear(Projection) is Projection
    convert(model)
    how = "converted, 16 -> 16; with the `forward` of Projection, by `register_linear`"
    assert [row.reason for row in describe(model)[:2]] == [how, how]
    plain = convert(nn.Linear(16, 16, bias=False).requires_grad_(False))
    plain.load_state_dict(model[1].state_dict())
    assert torch.equal(model[1](x), plain(x))
    model.append(Other())
    assert "call `lightning_fp8.conversion.register_linear(Other)`" in describe(model)[3].reason
    with pytest.raises(TypeError, match=r"takes a subclass of nn.Module, got Linear"):
        register_linear(nn.Linear(1, 1))  # type: ignore[type-var]


def test_classes_that_a_conversion_by_class_could_change_are_named() -> None:
    class Meta(type):
        pass

    class WithMeta(nn.Linear, metaclass=Meta):
        pass

    class Called(nn.Linear):
        def __call__(self, x: Tensor) -> Any:
            return super().__call__(x) * 2

    class Computed(nn.Linear):
        weight = property(lambda self: 2 * self._parameters["weight"])

    class Attention(nn.MultiheadAttention):
        pass

    made: list[nn.Module] = [WithMeta(16, 16), Called(16, 16)]
    computed = Computed.__new__(Computed)
    nn.Module.__init__(computed)
    computed._parameters |= {"weight": nn.Parameter(torch.randn(16, 16)), "bias": None}
    model = convert(nn.Sequential(*made, computed, nn.Linear(16, 16)))
    reasons = [row.reason for row in describe(model)]
    expected = ("whose metaclass Meta may act", "has a `__call__` of its own", "whose `weight` is a property")
    assert all(part in reason for part, reason in zip(expected, reasons, strict=False))
    assert type(model[3]) is Fp8Linear
    reasons = [row.reason for row in describe(nn.Sequential(Attention(16, 2)))]
    assert reasons[0] == "a Attention, a subclass of nn.MultiheadAttention, which alone is converted"
    assert "which is not converted" in reasons[1]
