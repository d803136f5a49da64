"""The setting ``min_features``: which layers stay plain, and at which size."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lit import loader, make_trainer, seeded
from small_models import small_mlp
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_fp8 import Fp8Precision, convert, describe, scaling_state, unconvert
from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.scaling.state import LAYOUT


def reasons(model: nn.Module, **arguments: Any) -> dict[str, str]:
    return {row.path: row.reason for row in describe(model, **arguments)}


def kinds(model: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in model if list(layer.parameters())]


def test_both_sizes_of_a_layer_count() -> None:
    model = nn.Sequential(nn.Linear(64, 32), Conv1D(64, 32), nn.Linear(31, 64), Conv1D(31, 64), nn.Bilinear(4, 4, 4))
    before = reasons(model, min_features=32)
    assert ["fewer than 32 features" in reason for reason in before.values()] == [False, False, True, True, False]
    convert(model, min_features=32)
    assert scaling_state(model).module_names == ("0", "1")
    found = reasons(model)
    assert (found["0"], found["1"]) == ("converted, 64 -> 32", "converted, 32 -> 64")
    assert [*found.values()][2:] == [*before.values()][2:]
    # another reason comes first
    assert reasons(model, ignore_modules=("3",))["3"].startswith("matches `ignore_modules`")


def sized_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 15), nn.Linear(1, 16))


@pytest.mark.parametrize(("number", "converted"), [(None, 1), (15, 2), (1, 3), (0, 3)])
def test_by_default_layers_with_16_features_are_converted(number: int | None, converted: int) -> None:
    expected = ["Fp8Linear"] * converted + ["Linear"] * (3 - converted)
    assert kinds(convert(sized_layers(), min_features=number)) == expected
    assert kinds(Fp8Precision(min_features=number).convert_module(sized_layers())) == expected


@pytest.mark.parametrize(
    ("others", "number", "reason"),
    [
        ({}, 16, None),
        ({}, 17, "fewer than 17 features: 16 -> 48; `min_features=16` converts it"),
        ({"kdim": 8}, 8, None),
        ({"kdim": 8, "vdim": 4}, 9, "fewer than 9 features: 8 -> 16 and 4 -> 16; `min_features=4` converts it"),
    ],
)
def test_an_attention_goes_by_all_its_weights(others: dict[str, int], number: int, reason: str | None) -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(16, 2, **others), "b": nn.Linear(32, 32)})
    found = reasons(convert(model, min_features=number))
    if reason is None:
        assert scaling_state(model).module_names[-2:] == ("a.out_proj", "b")
        return
    assert scaling_state(model).module_names == ("b",)
    assert found["a"] == reason
    assert found["a.out_proj"] == "nn.MultiheadAttention, which is not converted, reads its weight directly"


def test_a_conversion_again_keeps_the_number_or_takes_another() -> None:
    model = convert(small_mlp(), min_features=32)
    model(torch.randn(4, 32)).sum().backward()
    scaling_state(model).update()
    scale = scaling_state(model).scale.clone()
    assert (scale != 1).all()
    model.append(nn.Linear(4, 64))
    assert kinds(convert(model)) == ["Fp8Linear", "Linear", "Linear"]
    assert kinds(convert(model, min_features=4)) == ["Fp8Linear"] * 3
    state = scaling_state(model)
    assert torch.equal(state.scale[[state.row_of(0, role) for role in LAYOUT]], scale)
    assert kinds(convert(model, min_features=32)) == ["Fp8Linear", "Linear", "Linear"]
    assert torch.equal(scaling_state(model).scale, scale)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert reasons(other)["2"] == "fewer than 32 features: 64 -> 16; `min_features=16` converts it"
    assert kinds(convert(unconvert(model))) == ["Fp8Linear", "Fp8Linear", "Linear"]


def test_nothing_left_names_the_number_and_the_largest() -> None:
    model = nn.ModuleDict({"wide": nn.Linear(8, 4096), "square": nn.Linear(64, 64), "long": nn.Linear(64, 96)})
    model["attention"] = nn.MultiheadAttention(512, 2, kdim=32)
    model["ignored"] = nn.Linear(512, 520)
    with pytest.raises(ValueError, match="nothing to convert") as error:
        convert(model, ignore_modules=("ignored",), min_features=256)
    assert "The largest here is long, 64 -> 96: pass a smaller `min_features`, or 0." in str(error.value)
    # a model that is already converted keeps its setting
    state = scaling_state(convert(model))
    with pytest.raises(ValueError, match="The largest here is ignored, 512 -> 520"):
        convert(model, min_features=513)
    assert scaling_state(model) is state
    assert conversion_plan(model).config.min_features == 16


@pytest.mark.parametrize("value", [-1, True, 1024.0, "auto"])
def test_other_values_are_refused_by_name(value: Any) -> None:
    said = f"`min_features` must be an integer of at least 0, got {value!r}"
    with pytest.raises(ValueError, match=said):
        Fp8Precision(min_features=value)
    with pytest.raises(ValueError, match=said):
        convert(small_mlp(), min_features=value)


def test_a_plugin_converts_by_it(tmp_path: Path) -> None:
    model = seeded()
    # a run without the argument leaves the model unchanged; another number converts more layers, or fewer
    for plugin, names in (
        (Fp8Precision(min_features=32), ["net.0"]),
        (Fp8Precision(), ["net.0"]),
        (Fp8Precision(min_features=2), ["net.0", "net.2"]),
        (Fp8Precision(), ["net.0", "net.2"]),
        (Fp8Precision(min_features=0), ["net.0", "net.2"]),
        (Fp8Precision(min_features=32), ["net.0"]),
        (Fp8Precision(ignore_modules=["net.1"]), ["net.0"]),
    ):
        make_trainer(tmp_path, plugins=plugin, max_steps=1).fit(model, loader())
        assert list(scaling_state(model).module_names) == names
