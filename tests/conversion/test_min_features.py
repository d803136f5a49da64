"""The setting ``min_features``: which layers stay plain, and at which size."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import lightning.fabric as lf
import pytest
import torch
from connectors import trainer, with_cuda
from lit import Regression, loader, make_trainer, seeded
from small_models import small_mlp
from torch import nn

import lightning_fp8
from lightning_fp8 import Fp8Precision, convert, describe, export, load_exported, load_scales, scaling_state, unconvert
from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.ops.cuda import gemm_table
from lightning_fp8.plugins.fp8 import _say_once
from lightning_fp8.runtime.warn_once import warn_once
from lightning_fp8.scaling.state import LAYOUT
from lightning_fp8.tools.compare.variants import VARIANTS, plugin_settings


def forget() -> None:
    for function in (warn_once, gemm_table.rows):
        function.cache_clear()


def reasons(model: nn.Module, **arguments: Any) -> dict[str, str]:
    return {row.path: row.reason for row in describe(model, **arguments)}


def kinds(model: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in model if list(layer.parameters())]


# which layers


def test_both_sizes_of_a_layer_count() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64), nn.Linear(31, 64), nn.Linear(64, 31), nn.Linear(8, 8))
    convert(model, min_features=32)
    assert kinds(model) == ["Fp8Linear", "Fp8Linear", "Linear", "Linear", "Linear"]
    assert scaling_state(model).module_names == ("0", "1")
    assert reasons(model) == {
        "0": "converted, 64 -> 32",
        "1": "converted, 32 -> 64",
        "2": "fewer than 32 features: 31 -> 64 (min_features=32)",
        "3": "fewer than 32 features: 64 -> 31 (min_features=32)",
        "4": "fewer than 32 features: 8 -> 8 (min_features=32)",
    }


def sized_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 15), nn.Linear(1, 16))


@pytest.mark.parametrize(
    ("setting", "converted"),
    [
        ({}, 1),
        ({"min_features": None}, 1),
        ({"min_features": 15}, 2),
        ({"min_features": 1}, 3),
        ({"min_features": 0}, 3),
    ],
)
def test_by_default_layers_with_16_features_are_converted(setting: dict[str, Any], converted: int) -> None:
    expected = ["Fp8Linear"] * converted + ["Linear"] * (3 - converted)
    assert kinds(convert(sized_layers(), **setting)) == expected
    assert kinds(Fp8Precision(**setting).convert_module(sized_layers())) == expected


def test_a_layer_left_alone_computes_as_before() -> None:
    model, x = small_mlp(), torch.randn(5, 32)
    plain = copy.deepcopy(model)
    convert(model, min_features=32)
    assert kinds(model) == ["Fp8Linear", "Linear"]
    hidden = torch.randn(5, 64)
    assert torch.equal(model[2](hidden), plain[2](hidden))
    model(x).sum().backward()
    assert model[2].weight.grad is not None


@pytest.mark.parametrize(
    ("others", "number", "reason"),
    [
        ({}, 16, None),
        ({}, 17, "fewer than 17 features: 16 -> 48 (min_features=17)"),
        ({"kdim": 8}, 8, None),
        ({"kdim": 8}, 9, "fewer than 9 features: 8 -> 16 (min_features=9)"),
        ({"kdim": 8, "vdim": 4}, 9, "fewer than 9 features: 8 -> 16 and 4 -> 16 (min_features=9)"),
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


def test_a_conv1d_has_its_sizes_the_other_way_round() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.Sequential(conv1d(48, 16), conv1d(32, 24))
    assert reasons(convert(model, min_features=20)) == {
        "0": "fewer than 20 features: 16 -> 48 (min_features=20)",
        "1": "converted, 24 -> 32",
    }
    assert reasons(convert(model, min_features=0))["0"] == "converted, 16 -> 48"


def test_a_feed_forward_block_with_a_small_half_runs() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 16, dropout=0.0, batch_first=True)
    convert(layer, min_features=32)
    assert scaling_state(layer).module_names == ("self_attn.in_proj", "self_attn.out_proj")
    layer(torch.randn(2, 5, 32)).sum().backward()
    assert layer.linear2.weight.grad is not None


def test_other_reasons_come_first() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Special(4, 4), nn.Linear(32, 32), nn.Bilinear(4, 4, 4))
    convert(model, ignore_modules=("0",), min_features=8)
    found = reasons(model, ignore_modules=("0",))
    assert found["0"] == "matches `ignore_modules`"
    assert found["1"].startswith("a Special, subclass of nn.Linear; only nn.Linear,")
    assert found["3"].startswith("a Bilinear of torch, not an nn.Linear; only nn.Linear,")


def test_rows_of_a_model_that_is_not_converted() -> None:
    model = small_mlp()
    assert reasons(model)["2"] == "not converted yet: call `convert`"
    assert reasons(model, min_features=32) == {
        "0": "not converted yet: call `convert`",
        "2": "fewer than 32 features: 64 -> 16 (min_features=32)",
    }


def test_a_conversion_again_keeps_the_number_or_takes_another() -> None:
    model = convert(small_mlp(), min_features=32)
    model(torch.randn(4, 32)).sum().backward()
    scaling_state(model).update()
    scale = scaling_state(model).scale.clone()
    assert (scale != 1).all()
    model.append(nn.Linear(4, 64))
    assert kinds(convert(model)) == ["Fp8Linear", "Linear", "Linear"]
    assert conversion_plan(model).config.min_features == 32
    assert kinds(convert(model, min_features=4)) == ["Fp8Linear"] * 3
    state = scaling_state(model)
    assert torch.equal(state.scale[[state.row_of(0, role) for role in LAYOUT]], scale)
    assert kinds(convert(model, min_features=32)) == ["Fp8Linear", "Linear", "Linear"]
    assert torch.equal(scaling_state(model).scale, scale)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert reasons(other)["2"] == "fewer than 32 features: 64 -> 16 (min_features=32)"
    assert kinds(convert(unconvert(model))) == ["Fp8Linear", "Fp8Linear", "Linear"]
    assert conversion_plan(model).config.min_features == 16


def test_nothing_left_names_the_number_and_the_largest() -> None:
    model = nn.ModuleDict({"wide": nn.Linear(8, 4096), "square": nn.Linear(64, 64), "long": nn.Linear(64, 96)})
    model["attention"] = nn.MultiheadAttention(512, 2, kdim=32)
    model["ignored"] = nn.Linear(512, 520)
    with pytest.raises(ValueError, match="nothing to convert") as error:
        convert(model, ignore_modules=("ignored",), min_features=256)
    first, *rows = str(error.value).split("\n")
    assert first.endswith(
        "FP8 needs at least one plain `nn.Linear` with `min_features=256` or more features in and out."
        " The largest here is long, 64 -> 96: pass a smaller `min_features`, or 0."
    )
    assert "-   long (Linear): fewer than 256 features: 64 -> 96 (min_features=256)" in map(str.strip, rows)
    assert type(model["long"]) is nn.Linear
    # a model that is already converted keeps its setting
    convert(model)
    state = scaling_state(model)
    with pytest.raises(ValueError, match="The largest here is ignored, 512 -> 520"):
        convert(model, min_features=513)
    assert scaling_state(model) is state
    assert conversion_plan(model).config.min_features == 16


def test_without_layers_there_is_no_largest() -> None:
    with pytest.raises(ValueError, match=r"FP8 needs at least one plain `nn.Linear`\.$"):
        convert(nn.ReLU(), min_features=8)
    with pytest.raises(ValueError, match=r"FP8 needs at least one plain `nn.Linear`\.\n"):
        convert(small_mlp(), ignore_modules=("*",), min_features=8)


BAD = [-1, True, False, 1024.0, "1024", "auto", ""]


@pytest.mark.parametrize("value", BAD)
def test_other_values_are_refused_by_name(value: Any) -> None:
    model = small_mlp()
    said = f"`min_features` must be an integer of at least 0, got {value!r}"
    with pytest.raises(ValueError, match=said):
        Fp8Precision(min_features=value)
    with pytest.raises(ValueError, match=said):
        convert(model, min_features=value)
    assert type(model[0]) is nn.Linear


# the ways to set it


def test_a_plugin_converts_by_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = seeded()
    _say_once.cache_clear()
    with caplog.at_level("INFO"):
        make_trainer(tmp_path, plugins=Fp8Precision(min_features=32)).fit(model, loader())
    said = (
        "fp8-delayed: 1 of 2 linear layers run in FP8 (min_features=32), with 67% of the parameters; not in FP8: net.2"
        " (33%, fewer than 32 features)."
    )
    assert said in caplog.text
    assert scaling_state(model).module_names == ("net.0",)
    assert type(model.net[2]) is nn.Linear
    # a run without the argument leaves the model unchanged; another number converts more layers, or fewer
    for plugin, names in (
        (Fp8Precision(), ["net.0"]),
        (Fp8Precision(min_features=2), ["net.0", "net.2"]),
        (Fp8Precision(), ["net.0", "net.2"]),
        (Fp8Precision(min_features=32), ["net.0"]),
        (Fp8Precision(min_features=0), ["net.0", "net.2"]),
        (Fp8Precision(min_features=32), ["net.0"]),
        (Fp8Precision(ignore_modules=["net.1"]), ["net.0"]),
    ):
        make_trainer(tmp_path, plugins=plugin, max_steps=1).fit(model, loader())
        assert list(scaling_state(model).module_names) == names


def test_fabric_and_fsdp_take_it_over(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = lf.Fabric(accelerator="cpu", devices=1, plugins=Fp8Precision(min_features=32))
    assert scaling_state(fabric.setup(small_mlp())).module_names == ("0",)
    with_cuda(monkeypatch)
    lightning_fp8.plugins.register()
    made = trainer(accelerator="cuda", strategy="fsdp", plugins=Fp8Precision(min_features=32))
    assert isinstance(made.precision_plugin, Fp8Precision)
    assert made.precision_plugin.min_features == 32


def test_a_yaml_file_sets_it(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, 32).min_features == 32


@pytest.mark.parametrize("value", ["auto", -1, True, 1.5])
def test_a_yaml_file_with_another_value_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises((SystemExit, ValueError)):
        from_yaml(tmp_path, value)


def from_yaml(folder: Path, value: Any) -> Any:
    from lightning.pytorch.cli import LightningCLI

    plugin = {"class_path": "lightning_fp8.Fp8Precision", "init_args": {"min_features": value}}
    config = folder / "config.yaml"
    # JSON is YAML
    config.write_text(json.dumps({"trainer": {"accelerator": "cpu", "logger": False, "plugins": [plugin]}}))
    made = LightningCLI(Regression, run=False, args=["--config", str(config)], save_config_callback=None)
    return made.trainer.precision_plugin


def test_a_comparison_leaves_it_to_fp8() -> None:
    for variant in VARIANTS:
        settings = plugin_settings(variant, {"min_features": 64})
        assert settings.get("min_features") == (64 if variant.startswith("fp8-") else None)


# checkpoints


def fitted(path: Path, number: Any) -> tuple[Regression, Path]:
    model, made = seeded(), make_trainer(path, plugins=Fp8Precision(min_features=number))
    made.fit(model, loader())
    made.save_checkpoint(path / "model.ckpt")
    return model, path / "model.ckpt"


def test_a_run_resumes_with_its_number(tmp_path: Path) -> None:
    model, path = fitted(tmp_path, 32)
    resumed = seeded()
    plugin = Fp8Precision(min_features=32)
    make_trainer(tmp_path, plugins=plugin, max_epochs=1).fit(resumed, loader(), ckpt_path=path)
    delayed = scaling_state(model).delayed
    assert torch.equal(scaling_state(resumed).scale[:delayed], scaling_state(model).scale[:delayed])
    assert list(scaling_state(resumed).state_dict()) == ["net.0.input", "net.0.grad_output"]


@pytest.mark.parametrize(
    ("saved", "resumed", "said"),
    [(32, 0, "In the model but not in the checkpoint"), (0, 32, "In the checkpoint but not in the model")],
)
def test_another_number_is_refused_with_the_layers_names(tmp_path: Path, saved: int, resumed: int, said: str) -> None:
    _, path = fitted(tmp_path, saved)
    plugin = Fp8Precision(min_features=resumed)
    with pytest.raises(ValueError, match=f"{said}: 'net.2.input', 'net.2.grad_output'.*`min_features`"):
        make_trainer(tmp_path, plugins=plugin, max_epochs=2).fit(seeded(), loader(), ckpt_path=path)


def test_an_exported_model_has_the_layers_of_its_run(tmp_path: Path) -> None:
    model, x = small_mlp(), torch.randn(16, 32)
    convert(model, min_features=4)
    model(x).sum().backward()
    scaling_state(model).update()
    export(model.eval(), tmp_path / "exported")
    # into a model that has left more layers plain
    loaded = load_exported(convert(small_mlp(), min_features=32), tmp_path / "exported")
    assert kinds(loaded) == ["Fp8Linear"] * 2


def test_what_is_loaded_has_the_small_layers_of_its_run(tmp_path: Path) -> None:
    model, x = convert(sized_layers()[:2], min_features=0), torch.randn(16, 32)
    model(x).sum().backward()
    scaling_state(model).update()
    export(model.eval(), tmp_path)
    scaled = load_scales(sized_layers()[:2], {"scaling": scaling_state(model).state_dict()})
    for loaded in (load_exported(sized_layers()[:2], tmp_path), scaled):
        assert kinds(loaded) == ["Fp8Linear"] * 2
        # a run keeps them
        assert kinds(Fp8Precision().convert_module(loaded)) == ["Fp8Linear"] * 2
