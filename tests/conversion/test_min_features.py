"""The setting ``min_features``: which layers stay plain, at which size, and how that size is measured."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.fabric as lf
import pytest
import torch
from connectors import trainer, with_cuda
from lit import Regression, loader, make_trainer, seeded
from processes import run_processes
from small_models import small_mlp
from torch import nn
from warm import run_warm

import lightning_fp8
from lightning_fp8 import (
    Fp8FabricPrecision,
    Fp8FSDPPrecision,
    Fp8Linear,
    Fp8Precision,
    convert,
    describe,
    export,
    load_exported,
    scaling_state,
    unconvert,
)
from lightning_fp8.conversion import min_features
from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.ops.cuda import gemm_table, kernels
from lightning_fp8.runtime.warn_once import warn_once
from lightning_fp8.scaling.state import LAYOUT
from lightning_fp8.tools.compare.variants import VARIANTS, plugin_settings
from lightning_fp8.tools.timing import Times, Variant
from lightning_fp8.tools.tune import command
from lightning_fp8.tools.tune import min_features as measuring
from lightning_fp8.tools.tune.min_features import BF16, FP8, Timed, smallest_that_pays, timed

NAME, CPU = "NVIDIA H200", torch.device("cpu")
ABOUT = {"gpu": NAME, "driver": "580", "versions": {"torch": "2.13"}, "commit": "abc", "command": "tune it"}
ROW = {
    "m": 64, "n": 64, "k": 64, "promote": False, "output": "bfloat16", "configuration": None, "splits": 1,
    "p50_us": None, "cublaslt_p50_us": 2.0,
}  # fmt: skip


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An H200 by name only, with its own tables."""
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(gemm_table, "_SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: NAME)
    for name in ("own", "shipped"):
        (tmp_path / name).mkdir()
    forget()
    yield tmp_path
    forget()


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
        "2": "31 -> 64: below min_features=32",
        "3": "64 -> 31: below min_features=32",
        "4": "8 -> 8: below min_features=32",
    }


@pytest.mark.parametrize("setting", [{}, {"min_features": 0}, {"min_features": 1}, {"min_features": None}])
def test_by_default_all_layers_are_converted(setting: dict[str, Any]) -> None:
    assert kinds(convert(nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)), **setting)) == ["Fp8Linear"] * 2


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
        ({}, 17, "16 -> 48: below min_features=17"),
        ({"kdim": 8}, 8, None),
        ({"kdim": 8}, 9, "8 -> 16: below min_features=9"),
        ({"kdim": 8, "vdim": 4}, 9, "8 -> 16 and 4 -> 16: below min_features=9"),
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
        "0": "16 -> 48: below min_features=20",
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
    assert found["1"].startswith("a Special; only nn.Linear,")
    assert found["3"].startswith("a Bilinear; only nn.Linear,")


def test_rows_of_a_model_that_is_not_converted() -> None:
    model = small_mlp()
    assert reasons(model)["2"] == "not converted yet: call `convert`"
    assert reasons(model, min_features=32) == {
        "0": "not converted yet: call `convert`",
        "2": "64 -> 4: below min_features=32",
    }


def test_a_conversion_again_keeps_the_number_or_takes_another() -> None:
    model = convert(small_mlp(), min_features=32)
    model(torch.randn(4, 32)).sum().backward()
    scaling_state(model).update()
    scale = scaling_state(model).scale.clone()
    assert (scale != 1).all()
    model.append(nn.Linear(4, 64))
    assert kinds(convert(model)) == ["Fp8Linear", "Linear", "Linear"]
    assert conversion_plan(model).settings.min_features == 32
    assert kinds(convert(model, min_features=4)) == ["Fp8Linear"] * 3
    state = scaling_state(model)
    assert torch.equal(state.scale[[state.row_of(0, role) for role in LAYOUT]], scale)
    assert kinds(convert(model, min_features=32)) == ["Fp8Linear", "Linear", "Linear"]
    assert torch.equal(scaling_state(model).scale, scale)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert reasons(other)["2"] == "64 -> 4: below min_features=32"
    assert kinds(convert(unconvert(model))) == ["Fp8Linear"] * 3
    assert conversion_plan(model).settings.min_features == 0


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
    assert "-   long (Linear): 64 -> 96: below min_features=256" in map(str.strip, rows)
    assert type(model["long"]) is nn.Linear
    # a model that is already converted keeps its setting
    convert(model)
    state = scaling_state(model)
    with pytest.raises(ValueError, match="The largest here is ignored, 512 -> 520"):
        convert(model, min_features=513)
    assert scaling_state(model) is state
    assert conversion_plan(model).settings.min_features == 0


def test_without_layers_there_is_no_largest() -> None:
    with pytest.raises(ValueError, match=r"FP8 needs at least one plain `nn.Linear`\.$"):
        convert(nn.ReLU(), min_features=8)
    with pytest.raises(ValueError, match=r"FP8 needs at least one plain `nn.Linear`\.\n"):
        convert(small_mlp(), ignore_modules=("*",), min_features=8)


BAD = [-1, True, False, 1024.0, "1024", "all", "", None]


@pytest.mark.parametrize("value", BAD)
def test_other_values_are_refused_by_name(value: Any) -> None:
    model = small_mlp()
    said = f"`min_features` must be an integer of at least 0 or 'auto', got {value!r}"
    for plugin in (Fp8Precision, Fp8FSDPPrecision, Fp8FabricPrecision):
        with pytest.raises(ValueError, match=said):
            plugin(min_features=value)
    if value is not None:
        with pytest.raises(ValueError, match=said):
            convert(model, min_features=value)
        assert type(model[0]) is nn.Linear


# the value of "auto"


def test_without_a_gpu_auto_converts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kinds(convert(small_mlp(), min_features="auto")) == ["Fp8Linear"] * 2


def test_unmeasured_auto_is_an_estimate_and_says_so_once(gpu: Path) -> None:
    with pytest.warns(UserWarning, match=r"is 1024 on NVIDIA H200, an estimate .*tune --min-features"):
        assert min_features.as_number("auto") == 1024
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert min_features.as_number("auto") == 1024
        assert min_features.as_number(7) == 7


def test_the_estimate_has_a_margin() -> None:
    # square layers: GEMM time saved per token = time of the casts of x and dy, which move 4 bytes per element
    even = (4 * 2 / 4.3e12) / (6 * (1 / 790e12 - 1 / 1400e12))
    assert 560 < even < 565
    assert 1.5 * even < min_features.ESTIMATE < 2 * even


def written(features: Any, path: Path) -> None:
    path.write_text(json.dumps({**ABOUT, "min_features": {"features": features}, "rows": []}))


def test_auto_is_what_was_measured_by_the_user_first(gpu: Path) -> None:
    written(48, gemm_table.shipped_path(NAME))
    assert min_features.as_number("auto") == 48
    gemm_table.write(gemm_table.own_path(NAME), ABOUT, [ROW])
    assert min_features.as_number("auto") == 48
    written(32, gemm_table.own_path(NAME))
    assert min_features.as_number("auto") == 32
    model = convert(small_mlp(), min_features="auto")
    assert reasons(model)["2"] == "64 -> 4: below min_features=32"
    assert gemm_table.min_features("NVIDIA H100 PCIe") is None


@pytest.mark.parametrize("features", [0, -1, 1.5, "512", True, None])
def test_what_is_no_size_is_left_out_of_account(gpu: Path, features: Any) -> None:
    written(48, gemm_table.shipped_path(NAME))
    own = gemm_table.own_path(NAME)
    gemm_table.write(own, ABOUT, [ROW])
    own.write_text(json.dumps({**json.loads(own.read_text()), "min_features": {"features": features}}))
    with pytest.warns(UserWarning, match=r"left out of account for `min_features`: `min_features` is .*'features'"):
        assert gemm_table.min_features(NAME) == 48
    # its rows are correct
    assert len(gemm_table.rows(NAME, (9, 0))) == 1


def test_a_broken_file_counts_as_none(gpu: Path) -> None:
    gemm_table.own_path(NAME).write_text("{")
    with pytest.warns(UserWarning, match="is not JSON"):
        assert gemm_table.min_features(NAME) is None


def test_the_size_and_the_rows_of_a_table_do_not_disturb_each_other(gpu: Path) -> None:
    path = gemm_table.own_path(NAME)
    gemm_table.write(path, ABOUT, [ROW])
    later = {**ABOUT, "driver": "590", "command": "tune --min-features"}
    gemm_table.write_min_features(path, later, {"features": 768, "tokens": 8192})
    table = json.loads(path.read_text())
    assert {name: table[name] for name in ABOUT} == ABOUT
    assert table["rows"] == [ROW]
    how = {"features": 768, "tokens": 8192, "driver": "590", "versions": ABOUT["versions"], "commit": "abc",
           "command": "tune --min-features"}  # fmt: skip
    assert table["min_features"] == how
    gemm_table.write(path, {**ABOUT, "commit": "def"}, [{**ROW, "m": 128}])
    table = json.loads(path.read_text())
    assert (table["commit"], len(table["rows"]), table["min_features"]) == ("def", 2, how)
    gemm_table.write_min_features(path, later, {"features": 512})
    assert gemm_table.min_features(NAME) == 512
    assert len(gemm_table.rows(NAME, (9, 0))) == 2


def test_a_table_may_have_a_size_alone(gpu: Path) -> None:
    path = gemm_table.own_path(NAME)
    gemm_table.write_min_features(path, ABOUT, {"features": 768})
    assert json.loads(path.read_text())["gpu"] == NAME
    assert gemm_table.min_features(NAME) == 768
    assert gemm_table.rows(NAME, (9, 0)) == ()
    gemm_table.write(path, ABOUT, [ROW])
    assert gemm_table.min_features(NAME) == 768


# the ways to set it


def test_a_plugin_converts_by_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = seeded()
    with caplog.at_level("INFO"):
        make_trainer(tmp_path, plugins=Fp8Precision(min_features=32)).fit(model, loader())
    assert "fp8-delayed: 1 of 2 linear layers run in FP8 (min_features=32), with 89% of the parameters" in caplog.text
    assert scaling_state(model).module_names == ("net.0",)
    assert type(model.net[2]) is nn.Linear
    # a run without the argument leaves the model unchanged; another number converts more layers, or fewer
    for plugin, names in (
        (Fp8Precision(), ["net.0"]),
        (Fp8Precision(min_features=2), ["net.0", "net.2"]),
        (Fp8Precision(), ["net.0", "net.2"]),
        (Fp8Precision(min_features=32), ["net.0"]),
        (Fp8Precision(ignore_modules=["net.1"]), ["net.0"]),
    ):
        make_trainer(tmp_path, plugins=plugin, max_steps=1).fit(model, loader())
        assert list(scaling_state(model).module_names) == names


def test_a_plugin_has_the_number_of_its_gpu(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(32, gemm_table.own_path(NAME))
    plugin = Fp8Precision(min_features="auto")
    assert plugin.min_features == plugin.settings["min_features"] == "auto"
    model = plugin.convert_module(Regression())
    assert scaling_state(model).module_names == ("net.0",)


def test_fabric_and_fsdp_take_it_over(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = lf.Fabric(accelerator="cpu", devices=1, plugins=Fp8Precision(min_features=32))
    assert isinstance(fabric._precision, Fp8FabricPrecision)
    assert scaling_state(fabric.setup(small_mlp())).module_names == ("0",)
    with_cuda(monkeypatch)
    lightning_fp8.register()
    made = trainer(accelerator="cuda", strategy="fsdp", plugins=Fp8Precision(min_features="auto"))
    assert isinstance(made.precision_plugin, Fp8FSDPPrecision)
    assert made.precision_plugin.min_features == "auto"


@pytest.mark.parametrize("value", [32, "auto"])
def test_a_yaml_file_sets_it(tmp_path: Path, value: Any) -> None:
    assert from_yaml(tmp_path, value).min_features == value


@pytest.mark.parametrize("value", ["all", -1, True, 1.5])
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


def test_processes_with_other_tables_agree_on_the_largest(tmp_path: Path) -> None:
    body = """
from lightning_fp8 import Fp8Precision
from lightning_fp8.conversion import min_features

min_features.as_number = lambda asked: {"auto": 16 << rank}.get(asked, asked)
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 16))
for run, asked in enumerate(("auto", 16, "auto")):
    Fp8Precision(min_features=asked).convert_module(model)
    result[run] = len(scaling_state(model).module_names)
"""
    assert run_processes(body, tmp_path) == [{0: 1, 1: 2, 2: 1}] * 2


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


# measuring


def times(us: float) -> Times:
    return Times(us - 1, us, us + 1, None)


def sized(features: int, fp8: float, bf16: float) -> Timed:
    return Timed(features, times(fp8), times(bf16))


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ({128: 0.5, 256: 0.9, 512: 1.1, 1024: 1.4}, 512),
        ({128: 1.1, 256: 1.2, 512: 1.3}, 128),
        # faster at one size but not at the next: that size is not the limit
        ({128: 0.5, 256: 1.2, 512: 0.9, 1024: 1.1}, 1024),
        ({128: 0.5, 256: 1.0, 512: 1.1}, 512),
        ({1024: 1.2, 128: 0.5, 512: 1.1, 256: 0.7}, 512),
        ({128: 0.5, 256: 1.2, 512: 0.9}, 513),
        ({128: 0.5}, 129),
    ],
)
def test_the_smallest_size_from_which_fp8_is_faster(speedups: dict[int, float], expected: int) -> None:
    assert smallest_that_pays([sized(size, 100.0, 100.0 * speedup) for size, speedup in speedups.items()]) == expected


def fakes(features: int, checked: list[str], wrong: str | None = None) -> list[Variant]:
    def variant(name: str) -> Variant:
        def check() -> str | None:
            checked.append(f"{name} {features}")
            return wrong

        return Variant(name, lambda at: features, check)

    return [variant(FP8), variant(BF16)]


def test_every_size_is_checked_and_timed_in_both(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(measuring.timing, "release", lambda: checked.append("released"))
    taken = {FP8: 50_000.0, BF16: 20_000.0}

    def batch(variant: Variant, calls: int) -> float:
        # FP8 with a fixed extra cost per layer, independent of the size
        return taken[FP8] if variant.name == FP8 else taken[BF16] * variant.call(0)

    found = list(timed((1, 2, 4), lambda features: fakes(features, checked), 3, batch))
    assert checked == [said for size in (1, 2, 4) for said in (f"{FP8} {size}", f"{BF16} {size}", "released")]
    assert [(one.features, one.fp8.p50_us, one.bf16.p50_us) for one in found] == [
        (1, 50_000.0, 20_000.0),
        (2, 50_000.0, 40_000.0),
        (4, 50_000.0, 80_000.0),
    ]
    assert [one.speedup for one in found] == [0.4, 0.8, 1.6]
    assert smallest_that_pays(found) == 4


def test_a_wrong_result_is_not_timed() -> None:
    def batch(variant: Variant, calls: int) -> float:
        raise AssertionError("timed")

    with pytest.raises(RuntimeError, match="lightning_fp8 at 64 features gave another y"):
        next(timed((64,), lambda features: fakes(features, [], "another y"), 1, batch))


def test_what_is_measured_is_a_layer_in_fp8_and_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "TOKENS", 64)
    fp8, bf16 = measuring.variants(CPU)(32)
    assert [fp8.name, bf16.name] == [FP8, BF16]
    assert fp8.check() is bf16.check() is None
    layers = {name: one.call.__closure__ for name, one in ((FP8, fp8), (BF16, bf16))}
    made = {
        name: next(cell.cell_contents for cell in closure if isinstance(cell.cell_contents, list))[0]
        for name, closure in layers.items()
        if closure
    }
    assert isinstance(made[FP8].block, Fp8Linear)
    assert type(made[BF16].block) is nn.Linear
    for one in made.values():
        assert one.block.weight.shape == (32, 32)
        assert one.block.weight.dtype == torch.float32
        assert one.x.shape == one.dy.shape == (64, 32)
        assert one.precision.autocast
        assert one.precision.weights_change


def test_the_sizes() -> None:
    assert measuring.SIZES == (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
    assert measuring.TOKENS == 8192


# the command


@pytest.fixture
def tune(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The command, with layers that take the given times in FP8, and in bf16 one microsecond per feature."""

    def run(fp8_us: float, *arguments: str, wrong: str | None = None) -> None:
        def batch(variant: Variant, calls: int) -> float:
            return fp8_us if variant.name == FP8 else float(variant.call(0))

        monkeypatch.setattr(command, "_device", lambda for_gemms: CPU)
        monkeypatch.setattr(command, "_about", lambda device, said: {**ABOUT, "command": said})
        monkeypatch.setattr(command.timing, "device_batch", batch)
        monkeypatch.setattr(command.timing, "release", lambda: None)
        monkeypatch.setattr(measuring, "variants", lambda _: lambda features: fakes(features, [], wrong))
        command.main(["--min-features", "--rounds", "2", *arguments])

    return run


def test_the_command_keeps_and_shows_what_it_finds(
    tune: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = gemm_table.own_path(NAME)
    gemm_table.write(path, ABOUT, [ROW])
    tune(600.0)
    assert min_features.as_number("auto") == 768
    table = json.loads(path.read_text())
    assert table["rows"] == [ROW]
    found = table["min_features"]
    assert (found["tokens"], found["command"]) == (8192, "python -m lightning_fp8 tune --min-features --rounds 2")
    assert found["rows"][2] == {
        "features": 512, **{f"fp8_{part}": 600.0 for part in ("p20_us", "p50_us", "p80_us")},
        **{f"bf16_{part}": 512.0 for part in ("p20_us", "p50_us", "p80_us")},
    }  # fmt: skip
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["512", "600.0", "512.0", "0.853"] in lines
    assert ["768", "600.0", "768.0", "1.280"] in lines
    assert ["Written:", str(path)] in lines


def test_where_fp8_never_pays_no_measured_size_is_converted(
    tune: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    tune(5000.0)
    assert min_features.as_number("auto") == 4097
    assert "FP8 is not faster at the largest of these sizes." in capsys.readouterr().out


def test_a_wrong_layer_is_named_and_nothing_written(tune: Callable[..., None]) -> None:
    with pytest.raises(SystemExit, match=r"tune: lightning_fp8 at 128 features gave another y\. Nothing is written"):
        tune(600.0, wrong="another y")
    assert not gemm_table.own_path(NAME).exists()


def test_a_table_elsewhere(tune: Callable[..., None], gpu: Path) -> None:
    tune(600.0, "--out", str(gpu / "table.json"))
    assert json.loads((gpu / "table.json").read_text())["min_features"]["features"] == 768
    assert not gemm_table.own_path(NAME).exists()


def test_sizes_and_shapes_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--min-features", "--shapes", "64x64x64"])
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(("capability", "said"), [((8, 0), "needs a GPU of compute capability 8.9"), ((10, 0), None)])
def test_gpus_that_can_be_measured(gpu: Path, monkeypatch: pytest.MonkeyPatch, capability: Any, said: Any) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(kernels, "backend", lambda: "auto")
    monkeypatch.setattr(command, "nvrtc_version", lambda: (13, 0))
    if said is None:
        # none of our GEMM kernels is needed
        assert command._device(for_gemms=False) == torch.device("cuda", 0)
    else:
        with pytest.raises(SystemExit, match=said):
            command._device(for_gemms=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said where there is no GPU")
def test_without_a_gpu_it_says_so_and_fails() -> None:
    ran = run_warm("-m", "lightning_fp8", "tune", "--min-features")
    assert ran.returncode == 1
    assert "on a CUDA GPU of compute capability 8.9 or newer" in ran.stderr
    assert "Traceback" not in ran.stderr
