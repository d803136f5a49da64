"""Linear layers modified by other code: parametrized, wrapped for LoRA, lazily initialised, normalised."""

from __future__ import annotations

import copy

import pytest
import torch
from sqnr import sqnr
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_fp8 import Fp8Precision, convert, describe, scaling_state, unconvert
from lightning_fp8.modules import Fp8Linear
from lightning_fp8.plugins import Bf16TruePrecision
from lightning_fp8.plugins.settings import PRECISIONS
from lightning_fp8.plugins.trainer import PLUGINS


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def trains(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    y.float().square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    return y.detach()


def test_parametrized_after_conversion_runs_in_fp8_with_the_weight_of_each_forward() -> None:
    model = convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    plain, x = copy.deepcopy(model[0]), torch.randn(4, 16)
    parametrize.register_parametrization(model[0], "weight", Doubled())
    expected = nn.functional.linear(x, 2 * plain.weight, plain.bias)
    assert sqnr(model[0](x), expected) > 24
    assert not torch.equal(model[0](x), expected)
    trains(model, x)
    assert torch.equal(trains(copy.deepcopy(model), x), trains(model, x))
    assert (scaling_state(model).amax > 0).all()
    convert(model, ignore_modules=("0",))
    assert type(model[1]) is Fp8Linear
    assert torch.equal(model[0](x), expected)
    parametrize.remove_parametrizations(model[0], "weight")
    unconvert(model)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]


def test_weight_norm_by_hook_runs_in_fp8() -> None:
    with pytest.warns(FutureWarning):
        layer, plain = (nn.utils.weight_norm(nn.Linear(16, 16)) for _ in range(2))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(4, 16)
    model = convert(nn.Sequential(layer))
    assert type(layer) is Fp8Linear
    assert sqnr(trains(model, x), plain(x)) > 24
    with torch.no_grad():
        layer.weight_g.mul_(3)
        plain.weight_g.mul_(3)
    assert sqnr(trains(model, x), plain(x)) > 24
    assert layer.weight_g.grad is not None


def test_lazy_layers_are_named_until_they_are_initialised() -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 16))
    for precision in PRECISIONS:
        plugin = PLUGINS[precision]()
        plugin.convert_module(model)
        assert isinstance(model[0], nn.LazyLinear)
    plugin = Fp8Precision()
    plugin.convert_module(model)
    rows = {row.path: row for row in describe(model)}
    assert "is not initialised yet: run a batch through the model" in rows["0"].reason
    assert rows["2"].converted
    with plugin.forward_context():
        model(torch.randn(2, 24))
    assert type(model[0]) is nn.Linear
    convert(model)
    assert type(model[0]) is Fp8Linear
    assert scaling_state(model).module_names == ("0", "2")


def test_bf16_true_reaches_lazy_parameters() -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.Linear(16, 4))
    plugin = Bf16TruePrecision()
    plugin.convert_module(model)
    with plugin.forward_context():
        model(torch.randn(2, 8, dtype=torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
