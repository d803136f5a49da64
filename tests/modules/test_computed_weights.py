"""Linear layers whose weight a parametrization computes: weight, spectral and orthogonal normalisation, and others."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sqnr import sqnr
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from lightning_fp8 import convert, describe, export, load_exported, scaling_state, unconvert
from lightning_fp8.scalings.recipe import RECIPES


class Counted(nn.Module):
    """Doubles a weight, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return 2 * weight


def doubled(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Counted())


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "doubled": doubled,
    "two": lambda layer: doubled(parametrizations.weight_norm(layer)),
}


def layer_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind](nn.Linear(48, 32))


@pytest.mark.parametrize(("kind", "recipe"), list(zip(KINDS, itertools.cycle(RECIPES))))
def test_equals_a_linear_layer_that_holds_the_weight(kind: str, recipe: str) -> None:
    """Bit for bit: results, both gradients and scales; the originals get the gradient of the weight, through torch."""
    plain, held = layer_of(kind), convert(nn.Sequential(nn.Linear(48, 32)), RECIPES[recipe]())
    model = convert(nn.Sequential(copy.deepcopy(plain)), RECIPES[recipe]())
    assert model.state_dict().keys() == {f"0.{name}" for name in plain.state_dict()}
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (plain, model)]
    for step in range(4):
        x = torch.randn(2, 16, 48, generator=torch.Generator().manual_seed(step))
        weight = plain.weight
        hold(held[0], weight, plain.bias)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = model(ours), held(theirs)
        assert torch.equal(y, expected)
        y.square().sum().backward()
        held.zero_grad()
        expected.square().sum().backward()
        assert torch.equal(ours.grad, theirs.grad)
        weight.backward(held[0].weight.grad)
        plain.bias.grad = held[0].bias.grad
        for (name, one), other in zip(plain.named_parameters(), model[0].parameters(), strict=True):
            assert torch.equal(one.grad, other.grad), (step, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for one in (model, held):
            scaling_state(one).update()
        assert torch.equal(scaling_state(model).scale, scaling_state(held).scale)
    plain.eval(), model.eval(), held.eval()
    hold(held[0], plain.weight, plain.bias)
    with torch.no_grad():
        assert torch.equal(model(x), held(x))


@torch.no_grad()
def hold(layer: nn.Module, weight: Tensor, bias: Tensor) -> None:
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)


def test_a_weight_is_computed_once_in_each_forward_and_nowhere_else() -> None:
    counter = Counted()
    layer, x = (
        parametrize.register_parametrization(nn.Linear(32, 32), "weight", counter, unsafe=True),
        torch.randn(4, 32),
    )
    counter.calls = 0
    model = convert(nn.Sequential(nn.Linear(32, 32), layer, nn.GELU(), nn.Linear(32, 32)))
    # a fused block would read it, too
    assert type(model) is nn.Sequential
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    describe(model)
    assert counter.calls == 0
    for step in range(1, 4):
        model(x).sum().backward()
        optimizer.step()
        scaling_state(model).update()
        assert counter.calls == step
    model.eval()
    describe(model)
    model.state_dict()
    copied = copy.deepcopy(model).double().float()
    unconvert(convert(copied, ignore_modules=("3",)))
    assert counter.calls == 3
    assert copied[1].parametrizations["weight"][0].calls == 3
    model(x)
    assert counter.calls == 4


def test_described() -> None:
    model = nn.ModuleDict({kind: layer_of(kind) for kind in KINDS})
    model["bias"] = parametrize.register_parametrization(nn.Linear(32, 32), "bias", Counted())
    reasons = {row.path: row.reason for row in describe(convert(model))}
    # a second conversion changes nothing
    assert reasons == {row.path: row.reason for row in describe(convert(model))}
    assert reasons["weight_norm"].endswith("; its weight is computed by WeightNorm")
    assert reasons["two"].endswith("; its weight is computed by WeightNorm and Counted")
    assert reasons["bias"] == "is parametrized, other than in the weight of a linear layer"


def test_parameters_of_a_dtype_that_cannot_be_cast_are_named() -> None:
    layer = layer_of("weight_norm").double()
    layer.bias = nn.Parameter(layer.bias.float())
    with pytest.raises(TypeError, match=r"0\.parametrizations\.weight\.original0 is torch\.float64"):
        convert(nn.Sequential(layer))


def test_an_attention_reads_the_weight_of_its_projection_itself() -> None:
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(32, 2, batch_first=True), torch.randn(2, 8, 32)
    parametrizations.weight_norm(attention.out_proj)
    plain = copy.deepcopy(attention)
    model = convert(nn.Sequential(attention))
    reasons = {row.path: row.reason for row in describe(model)}
    assert reasons["0"] == "converted, 32 -> 96"
    assert reasons["0.out_proj"] == "is parametrized, other than in the weight of a linear layer"
    assert sqnr(model[0](x, x, x)[0], plain(x, x, x)[0]) > 24


def test_parametrizations_come_and_go() -> None:
    model, x = convert(nn.Sequential(layer_of("doubled"))), torch.randn(8, 48)
    y = model(x)
    parametrize.remove_parametrizations(model[0], "weight")
    assert torch.equal(model(x), y)
    parametrizations.weight_norm(model[0])
    torch.testing.assert_close(model(x), y, atol=0.2, rtol=0.2)
    plain = unconvert(model)[0]
    assert torch.equal(plain(x), nn.functional.linear(x, plain.weight, plain.bias))
    assert type(parametrize.remove_parametrizations(plain, "weight")) is nn.Linear


def test_compiled() -> None:
    model, x = convert(nn.Sequential(layer_of("weight_norm"))), torch.randn(8, 48)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        y, expected = compiled(x), model(x)
        torch.testing.assert_close(y, expected)
        y.sum().backward(), expected.sum().backward()
    for one, other in zip(compiled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_exports_name_the_remedy(tmp_path: Path) -> None:
    model = convert(nn.Sequential(layer_of("weight_norm")))
    model(torch.randn(8, 48)).sum().backward()
    scaling_state(model).update()
    with pytest.raises(ValueError, match=r"Remove parametrizations"):
        export(model, tmp_path / "computed")
    parametrize.remove_parametrizations(model[0], "weight")
    export(model, tmp_path / "held")
    before = layer_of("weight_norm")
    other = copy.deepcopy(before)
    with pytest.raises(ValueError, match=r"the model has and the file lacks: 0\.parametrizations"):
        load_exported(nn.Sequential(other), tmp_path / "held")
    assert torch.equal(other.weight, before.weight)
