"""Export of weights that are kept in FP8 only: the file has their payloads unchanged."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from frozen_models import ADAPTERS, on_frozen_base
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_fp8 import BlockScaling, MXScaling, convert, export, load_exported, scaling_state
from lightning_fp8.conversion import fall_back
from lightning_fp8.modules.fp8_parameter import Fp8Parameter
from lightning_fp8.scalings.recipe import Recipe


def test_payloads_are_written_and_read_as_they_are(tmp_path: Path) -> None:
    models = {how: convert(on_frozen_base(), ignore_modules=ADAPTERS, frozen_weights=how) for how in ("master", "fp8")}
    x = torch.randn(2, 5, 32)
    for how, model in models.items():
        model(x).sum().backward()
        scaling_state(model).update()
        export(model, tmp_path / how)
    files = [load_file(tmp_path / how / "model.safetensors") for how in models]
    assert list(files[0]) == list(files[1])
    assert all(files[0][name].float().equal(files[1][name].float()) for name in files[0])
    held = {name: p for name, p in models["fp8"].named_parameters() if isinstance(p, Fp8Parameter)}
    assert len(held) == 6
    for name, weight in held.items():
        codes = files[1][name].view(torch.uint8)
        assert codes.equal(weight.payload.t() if name == "conv.weight" else weight.payload)
        assert files[1][f"{name}_scale"].equal(weight.scale_inv)
    expected = models["fp8"].eval()(x)
    frozen = convert(on_frozen_base(seed=1), ignore_modules=ADAPTERS, frozen_weights="fp8")
    for other in (on_frozen_base(seed=1), frozen):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert load_exported(other, tmp_path / "fp8")(x).equal(expected)
    assert all(frozen.get_parameter(name).payload.equal(weight.payload) for name, weight in held.items())


def test_weights_that_are_plain_in_the_file(tmp_path: Path) -> None:
    model = convert(on_frozen_base(), ignore_modules=ADAPTERS, frozen_weights="fp8")
    model(torch.randn(2, 5, 32)).sum().backward()
    scaling_state(model).update()
    fall_back(model, "mlp.0")
    merged = model.mlp[2].weight
    with torch.no_grad():
        merged.data += 1e-3
    export(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["mlp.0.weight"].equal(model.mlp[0].weight.dequantized())
    # a changed weight is rounded with its own scale
    scale = 448 / merged.dequantized().abs().max()
    assert saved["mlp.2.weight_scale"].equal(scale.reciprocal())


@pytest.mark.filterwarnings("ignore:export. 1 weights are written as they are")
@pytest.mark.parametrize("recipe", [BlockScaling(), MXScaling(), MXScaling(weight_blocks=(32, 32))], ids=repr)
def test_blocks_are_those_of_masters(recipe: Recipe, tmp_path: Path) -> None:
    for how in ("master", "fp8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 80), nn.Linear(80, 256)).requires_grad_(False)
        with torch.no_grad():
            model[0].weight *= torch.logspace(-3, 1, 128)[:, None]
        convert(model, recipe, frozen_weights=how)
        export(model, tmp_path / how, layout="compressed-tensors")
    masters, held = (load_file(tmp_path / how / "model.safetensors") for how in ("master", "fp8"))
    assert list(masters) == list(held)
    if isinstance(recipe, MXScaling):
        # readers take no groups that are not whole: the third weight is plain
        assert held.pop("2.weight").equal(model[2].weight.dequantized())
    assert all(
        one.dtype == masters[name].dtype and one.float().equal(masters[name].float()) for name, one in held.items()
    )


def test_blocks_of_a_weight_that_is_stored_transposed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Conv1D(300, 136)).requires_grad_(False), torch.randn(3, 136)
    model[0].weight[:, :128] *= 30
    expected = convert(model, BlockScaling(), frozen_weights="fp8").eval()(x)
    export(model, tmp_path)
    assert load_file(tmp_path / "model.safetensors")["0.weight_scale_inv"].shape == (2, 3)
    for frozen in (False, True):
        assert load_exported(nn.Sequential(Conv1D(300, 136)), tmp_path, frozen=frozen)(x).equal(expected)
