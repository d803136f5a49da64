"""How much of a model runs in FP8: its share of the parameters, and large parameters outside the supported layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experts import mixtral
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_fp8 import Fp8Precision, convert, describe
from lightning_fp8.conversion import fall_back
from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.conversion.rows import coverage
from lightning_fp8.plugins.fp8 import _say_once


class Experts(nn.Module):
    """``y = x + sum over experts of x @ up @ down``, with the experts stacked in two parameters."""

    def __init__(self, experts: int = 4, width: int = 16, hidden: int = 24) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / 8)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        up = torch.bmm(rows.expand(len(self.up), -1, -1), self.up.to(x.dtype))
        return x + torch.bmm(F.relu(up), self.down.to(x.dtype)).sum(0).view_as(x)


def mixture() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(20, 16))
    model.append(nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), Experts()) for _ in range(2))))
    return model.append(nn.Linear(16, 24))


PARAMETERS = ["1.0.1.up", "1.0.1.down", "1.1.1.up", "1.1.1.down"]


def unknown(model: nn.Module) -> dict[str, str]:
    """Reasons by the path of the parameters that are listed."""
    return {row.path: row.reason for row in describe(model) if not row.is_layer}


def covered(model: nn.Module, **settings: Any) -> str:
    return coverage(conversion_plan(convert(model, **settings), settings.get("ignore_modules", ())))


def said_by_the_plugin(model: nn.Module, caplog: pytest.LogCaptureFixture, **settings: Any) -> str:
    caplog.clear()
    _say_once.cache_clear()
    with caplog.at_level("INFO"):
        Fp8Precision(**settings).convert_module(model)
    (message,) = [record.getMessage() for record in caplog.records if "run in FP8" in record.getMessage()]
    return message


class OwnLinear(nn.Linear):
    pass


class OwnEmbedding(nn.Embedding):
    pass


def test_mixtral(caplog: pytest.LogCaptureFixture) -> None:
    model = mixtral()
    elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total = sum(elements.values())
    linear = sum(count for name, count in elements.items() if "_proj.weight" in name or name == "lm_head.weight")
    said = said_by_the_plugin(copy.deepcopy(model), caplog, ignore_modules=("*.experts",))
    assert f"9 of 13 linear layers run in FP8, with {linear / total:.0%} of the parameters" in said
    assert f"model.layers.*.mlp.experts ({2 * 4 * (128 * 32 + 32 * 64) / total:.0%}, matches `ignore_modules`)" in said
    assert "11 of 13 linear layers run in FP8, with 94% of the parameters;" in said_by_the_plugin(model, caplog)
    # the same settings say it once
    with caplog.at_level("INFO"):
        caplog.clear()
        Fp8Precision().convert_module(model)
    assert "run in FP8" not in caplog.text
    assert not unknown(model)


def test_a_parameter_multiplied_by_hand() -> None:
    model = mixture()
    assert list(unknown(model)) == PARAMETERS
    total = 20 * 16 + 2 * (16 * 16 + 16 + 2 * 4 * 16 * 24) + 16 * 24 + 24
    # of paths of numbers and names alike, each is one
    said = covered(model, ignore_modules=("2",))
    assert f"*.*.*.up, *.*.*.down ({4 * 4 * 16 * 24 / total:.0%}, outside of linear layers)" in said
    # a parameter inside an ignored part is still listed
    assert len(unknown(convert(model, ignore_modules=("1.1",)))) == 4
    assert "1.1.0 (4%, not converted)" in coverage(conversion_plan(model))
    # in the outermost module
    with pytest.raises(ValueError, match=r"(?s)nothing to convert in Experts.*-   up \(Parameter\): \[4, 16, 24\]"):
        convert(Experts())


def test_what_torch_has_layers_for_is_not_listed() -> None:
    lookups = [nn.Embedding(50, 16), nn.EmbeddingBag(50, 16)]
    linear = [nn.Linear(16, 16), nn.Bilinear(16, 16, 16), nn.MultiheadAttention(16, 2)]
    convolutions = [nn.Conv1d(16, 16, 3), nn.Conv2d(16, 16, 3), nn.ConvTranspose3d(16, 16, 3)]
    norms = [nn.LayerNorm((16, 16)), nn.RMSNorm((16, 16)), nn.GroupNorm(4, 16), nn.BatchNorm2d(16)]
    parametrized = [parametrizations.weight_norm(nn.Linear(16, 16)), parametrizations.weight_norm(nn.Conv1d(16, 16, 3))]
    model = nn.Sequential(*linear, *convolutions, *norms, *parametrized, OwnLinear(8, 8), OwnEmbedding(50, 8))
    assert unknown(model) == unknown(convert(model)) == {}
    share = f"{272 / (2 * 50 * 16 + 272):.0%}"
    model = nn.Sequential(*lookups, nn.Linear(16, 16))
    assert covered(model) == f"1 of 1 linear layers run in FP8, with {share} of the parameters"
    # parameters that are not initialised yet count as none
    lazy = [nn.LazyLinear(4), nn.LazyConv1d(4, 3), nn.ParameterList([nn.UninitializedParameter()])]
    model = nn.ModuleList([*lazy, nn.Linear(16, 16), nn.Embedding(5, 16)])
    assert f"1 of 2 linear layers run in FP8, with {272 / (272 + 80):.0%} of the parameters" in covered(model)
    assert unknown(model) == {}
    model = nn.Sequential(nn.LSTM(16, 16), nn.Linear(16, 16))
    assert unknown(model) == {
        f"0.weight_{kind}_l0": "[64, 16] parameter of LSTM: no layer known here multiplies with it"
        for kind in ("ih", "hh")
    }


def test_ties() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.embedding.weight
            self.again = self.head
            self.linear = nn.Linear(16, 16, bias=False)
            self.one, self.two = Experts(2), Experts(2)
            self.two.up = self.one.up

    model = Tied()
    # the parameters of linear layers under other names, too
    model.aside = nn.ParameterDict({"a": model.linear.weight, "b": model.head.weight})
    assert list(unknown(model)) == ["one.up", "one.down", "two.down"]
    assert covered(model) == (
        f"2 of 2 linear layers run in FP8, with {(50 * 16 + 256) / (50 * 16 + 256 + 3 * 768):.0%} of the parameters;"
        " not in FP8: one.up, one.down, two.down (69%, outside of linear layers)"
    )
    # a weight counts once, in FP8 if one of its layers runs in FP8
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(2)))
    model[1].weight = model[0].weight
    assert covered(model, ignore_modules=("1",)) == "1 of 2 linear layers run in FP8, with 100% of the parameters"
    # an embedding that is used elsewhere, too, is not only looked up
    lookup = nn.Embedding(50, 16)
    model = nn.ModuleList([lookup, nn.ParameterList([lookup.weight]), nn.Linear(4, 4)])
    assert list(unknown(model)) == ["1.0"]


@pytest.mark.parametrize(("stacked", "listed"), [(1, 0), (9, 0), (10, 10), (30, 30)])
def test_a_stack_counts_as_one_from_one_percent_on(stacked: int, listed: int) -> None:
    layers = (nn.ParameterDict({"table": nn.Parameter(torch.zeros(2, 5))}) for _ in range(stacked))
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    # `stacked` times 10 elements of 10 000 in all
    model["rest"] = nn.Linear(10, 1000 - stacked, bias=False)
    assert list(unknown(model)) == [f"layers.{layer}.table" for layer in range(listed)]
    assert ("layers.*.table" in covered(model, min_features=0)) == bool(listed)


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(16, 16)), nn.Parameter(torch.zeros(16))


def test_the_largest_shares_are_named_first() -> None:
    sizes = (16, 80, 32, 48, 64)
    model = nn.ModuleDict({f"layer{n}": nn.Linear(n, n, bias=False) for n in sizes})
    share = f"{1 - 16 * 16 / sum(n * n for n in sizes):.0%}"
    said = covered(model, ignore_modules=("layer[3-8]*",))
    assert said.startswith("1 of 5 linear layers run in FP8, with 2% of the parameters")
    assert said.endswith(f"layer80, layer64, layer48 and 1 more ({share}, matches `ignore_modules`)")
    fall_back(model, "layer16")
    assert coverage(conversion_plan(model, ("layer[3-8]*",))).startswith("0 of 5 linear layers run in FP8, with 0% of")


def test_convolutions_and_other_kinds_of_linear_layers_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    stages = nn.ModuleList(nn.Conv2d(16, 16, 3, bias=False) for _ in range(3))
    model = nn.ModuleDict({"stages": stages, "own": Own(16, 16), "fc": nn.Linear(16, 16), "head": nn.Linear(16, 1)})
    said = said_by_the_plugin(model, caplog)
    for part in (
        "1 of 3 linear layers",
        "3 convolutions (",
        "own (4%, a Own",
        "head (under 1%, fewer than 16 features)",
    ):
        assert part in said
    assert "`lightning_fp8.conversion.register_linear(Own)`" in {row.path: row.reason for row in describe(model)}["own"]
