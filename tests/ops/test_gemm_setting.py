"""The setting ``gemm`` reaches the choice of GEMM from a plugin, a conversion or a YAML file, and nothing else."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import lightning.fabric as lf
import pytest
import torch
from connectors import trainer, with_cuda
from gemm_in_fp64 import Gemms
from lit import Regression, loader
from small_models import small_mlp
from torch import nn

import lightning_fp8
from lightning_fp8 import Fp8Precision, convert, scaling_state, unconvert
from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.ops.cuda.gemm_choice import GEMMS, Choice
from lightning_fp8.plugins.settings import GemmString
from lightning_fp8.tools.compare.variants import VARIANTS, plugin_settings

pytestmark = pytest.mark.filterwarnings("ignore:.*only once for all operators.*")


@pytest.fixture
def gemms(cuda_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Gemms:
    found = Gemms(monkeypatch)
    found.choice = Choice(None)
    return found


def asked_by(gemms: Gemms, model: Any, x: torch.Tensor | None = None) -> set[str]:
    """The settings that forward and backward requested."""
    gemms.asked.clear()
    model(torch.randn(8, 32, requires_grad=True) if x is None else x).sum().backward()
    assert len(gemms.asked) >= 6
    return {asked[0] for asked in gemms.asked}


def test_a_conversion_decides_for_all_layers(gemms: Gemms) -> None:
    model = convert(small_mlp())
    assert asked_by(gemms, model) == {"auto"}
    for value in GEMMS:
        assert asked_by(gemms, convert(small_mlp(), gemm=value)) == {value}
        assert asked_by(gemms, convert(model, gemm=value)) == {value}
    # a conversion without the argument changes nothing, whatever layers the model has
    convert(model, gemm="rawkernel")
    model.append(nn.Linear(16, 16))
    assert conversion_plan(convert(model, ignore_modules=("0",))).config.gemm == "rawkernel"
    assert conversion_plan(convert(model)).config.gemm == "rawkernel"
    assert conversion_plan(convert(unconvert(model))).config.gemm == "auto"
    # in a feed-forward block too
    layer = convert(nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True), gemm="cublaslt")
    assert asked_by(gemms, layer, torch.randn(2, 5, 32, requires_grad=True)) == {"cublaslt"}


def test_copies_have_it_and_checkpoints_have_not(gemms: Gemms) -> None:
    model, other = convert(small_mlp(), gemm="rawkernel"), convert(small_mlp())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert asked_by(gemms, copied) == {"rawkernel"}
    scaling_state(other).load_state_dict(scaling_state(model).state_dict())
    assert conversion_plan(other).config.gemm == "auto"


def test_a_compiled_model_follows_it(gemms: Gemms) -> None:
    torch._dynamo.reset()
    model = convert(small_mlp())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for value in GEMMS:
        convert(model, gemm=value)
        assert asked_by(gemms, compiled) == {value}


@pytest.mark.parametrize("call", [lambda **gemm: convert(small_mlp(), **gemm), Fp8Precision])
def test_another_word_is_refused(call: Any) -> None:
    with pytest.raises(ValueError, match="'auto', 'rawkernel', 'cublaslt', got 'cutlass'"):
        call(gemm="cutlass")


def test_a_plugin_decides_for_each_run(gemms: Gemms) -> None:
    model = Regression()
    for value in ("rawkernel", "auto", "cublaslt"):
        gemms.asked.clear()
        plugin = Fp8Precision(gemm=value)  # type: ignore[arg-type]
        trainer(plugins=plugin, max_steps=1, limit_val_batches=0).fit(model, loader())
        assert {asked[0] for asked in gemms.asked} == {value}
    # also if this takes layers out of the conversion of a model that was converted before
    plugin = Fp8Precision(gemm="rawkernel", ignore_modules=["net.0"])
    trainer(plugins=plugin, max_steps=1, limit_val_batches=0).fit(model, loader())
    assert conversion_plan(model).config.gemm == "rawkernel"
    assert len(scaling_state(model).module_names) == 1


def test_fabric_takes_it_over(gemms: Gemms) -> None:
    fabric = lf.Fabric(accelerator="cpu", devices=1, plugins=Fp8Precision(gemm="rawkernel"))
    model = fabric.setup(small_mlp())
    fabric.backward(model(torch.randn(8, 32)).sum())
    assert {asked[0] for asked in gemms.asked} == {"rawkernel"}


def test_fsdp_takes_it_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch)
    lightning_fp8.plugins.register()
    made = trainer(accelerator="cuda", strategy="fsdp", plugins=Fp8Precision(gemm="cublaslt"))
    assert isinstance(made.precision_plugin, Fp8Precision)
    assert made.precision_plugin.gemm == "cublaslt"


def test_a_yaml_file_sets_it(tmp_path: Path, gemms: Gemms) -> None:
    from lightning.pytorch.cli import LightningCLI

    def from_config(value: str) -> Any:
        plugin = {"class_path": "lightning_fp8.Fp8Precision", "init_args": {"gemm": value}}
        config = tmp_path / "config.yaml"
        # JSON is YAML
        config.write_text(json.dumps({"trainer": {"accelerator": "cpu", "logger": False, "plugins": [plugin]}}))
        return LightningCLI(Regression, run=False, args=["--config", str(config)], save_config_callback=None)

    made = from_config("rawkernel")
    made.trainer.precision_plugin.convert_module(made.model)
    assert asked_by(gemms, made.model) == {"rawkernel"}
    with pytest.raises(SystemExit):
        from_config("cutlass")


def test_a_comparison_leaves_it_to_fp8() -> None:
    assert get_args(GemmString) == GEMMS
    for variant in VARIANTS:
        assert plugin_settings(variant, {"gemm": "rawkernel"}).get("gemm") == (
            "rawkernel" if variant.startswith("fp8-") else None
        )
