"""Export of weights that are kept in FP8 only: the file has their payloads unchanged."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from frozen_models import ADAPTERS, on_frozen_base
from safetensors.torch import load_file

from lightning_fp8 import convert, export, fall_back, load_exported, scaling_state
from lightning_fp8.modules.fp8_parameter import Fp8Parameter


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
