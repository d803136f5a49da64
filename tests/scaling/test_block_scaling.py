"""Exports of models with ``BlockScaling``, and what the recipe refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from exported import quantization, tensors_of
from fp8_numpy import cast_in_blocks
from in_blocks import spread
from small_models import small_mlp
from torch import nn

from lightning_fp8 import BlockScaling, convert, export, fall_back


def test_an_export_has_the_blocks_that_readers_of_deepseek_take(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 384), nn.ReLU(), nn.Linear(384, 192), nn.Linear(192, 128))
    convert(model, BlockScaling())
    with torch.no_grad():
        model[0].weight.copy_(spread(384, 256, seed=9))
    fall_back(model, "2")
    with pytest.warns(UserWarning, match=r"1 weights are written as they are: .* ones: 3\.weight \(128, 192\)"):
        export(model, tmp_path)
    assert quantization(tmp_path) == {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "ignored_layers": ["2", "3"],
    }  # fmt: skip
    saved = tensors_of(tmp_path)
    assert set(saved) == {"0.weight", "0.weight_scale_inv", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"}
    codes, scale_inv = cast_in_blocks(model[0].weight.detach().numpy(), "e4m3", 128)
    assert saved["0.weight"].dtype == torch.float8_e4m3fn
    assert np.array_equal(saved["0.weight"].view(torch.uint8).numpy(), codes)
    assert np.array_equal(saved["0.weight_scale_inv"].numpy(), scale_inv)
    assert all(torch.equal(saved[f"{at}.weight"], model[at].weight) for at in (2, 3))
    with pytest.raises(ValueError, match=r"incomplete ones: 0\.weight \(64, 32\), 2.* No weight would be in FP8"):
        export(convert(small_mlp(), BlockScaling(), min_features=0), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_transformers_reads_the_weights_of_an_export(tmp_path: Path) -> None:
    """It computes blocks as rows // scales: of 192 rows in 2 blocks it would take 96 for each."""
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=256, intermediate_size=192, num_hidden_layers=1, num_attention_heads=2
    )
    model = convert(transformers.LlamaForCausalLM(config), BlockScaling())
    with pytest.warns(UserWarning, match=r"3 weights are .* model\.layers\.0\.mlp\.gate_proj\.weight \(192, 256\)"):
        export(model, tmp_path, dtype=torch.bfloat16)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected, found = model.state_dict(), loaded.state_dict()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        error = (found[name] - weight).abs()
        # a rounding of E4M3, whose subnormals are multiples of 2^-9 of 448ths of the largest; or one of bf16
        of_fp8 = "self_attn" in name
        assert (error <= weight.abs() / (16 if of_fp8 else 256) + of_fp8 * weight.abs().max() * 2**-9 / 448).all()


def test_what_has_one_scale_for_each_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`frozen_weights='fp8'` keeps one scale .* BlockScaling\("):
        convert(small_mlp().requires_grad_(False), BlockScaling(), frozen_weights="fp8")
