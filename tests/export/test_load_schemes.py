"""The quantizations that others publish: values are ``code * scale``, as the real readers of each compute them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from exported import refused
from fp8_checkpoints import (
    HF_FP8,
    HF_PER_TENSOR,
    MODELOPT,
    cast,
    compressed_tensors,
    in_mxfp8,
    model_of,
    published,
    quantized,
    write,
)
from pairwise import pairwise
from small_models import small_mlp
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.pytorch_utils import Conv1D

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, convert, load_exported, scaling_state
from lightning_fp8.modules.fp8_parameter import Fp8Parameter
from lightning_fp8.scalings.recipe import Recipe

KINDS = {"tensor": "tensor", "channel": "row", "block": "block"}
# 576 rows as in DeepSeek-V3: four and a half blocks
RAGGED = {"0": (576, 256), "1": (200, 576), "2": (16, 200)}


@cache
def _weights() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(k, n) for n, k in RAGGED.values())).state_dict()


def ragged(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(k, n) for n, k in RAGGED.values()))
    model.load_state_dict(_weights())
    return model.to(dtype)


def in_file(model: nn.Module, kind: str, suffix: str, input_name: str | None, dtype: torch.dtype) -> dict[str, Tensor]:
    return quantized(model.state_dict(), kind, f"weight{suffix}", input_name, dtype).tensors


def codes_of(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    held = {name: one for name, one in model.named_parameters() if isinstance(one, Fp8Parameter)}
    return {name: (one.payload, one.scale_inv) for name, one in held.items()}


def loaded(folder: Path, frozen: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        model = ragged(dtype)
    return load_exported(model, folder, frozen=frozen)


@pytest.mark.filterwarnings("ignore:.*rounded to FP8 a second time")
@pytest.mark.parametrize(
    ("strategy", "dynamic", "dtype"), pairwise([*KINDS], [True, False], [torch.float32, torch.bfloat16])
)
def test_compressed_tensors_reads_the_same_values(
    strategy: str, dynamic: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """It computes in the dtype of the scales, which is the model's."""
    config = compressed_tensors(strategy, dynamic)
    tensors = in_file(ragged(), KINDS[strategy], "_scale", None if dynamic else "input_scale", dtype)
    write(tmp_path, tensors, config, shards=2)
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    frozen, master = (loaded(tmp_path, how, dtype) for how in (True, False))
    for at in RAGGED:
        held = {name: tensors[f"{at}.{name}"] for name in ("weight", "weight_scale")}
        expected = FloatQuantizationCompressor.decompress(held, scheme)["weight"]
        assert expected.dtype == dtype
        assert torch.equal(master.get_parameter(f"{at}.weight"), expected)
        weight = frozen.get_parameter(f"{at}.weight")
        assert torch.equal(weight.dequantized(), expected)
        assert torch.equal(weight.payload, tensors[f"{at}.weight"].view(torch.uint8))
        assert torch.equal(weight.scale_inv, tensors[f"{at}.weight_scale"].float())
        assert weight.content.scale_dtype == dtype
        assert torch.equal(frozen.get_parameter(f"{at}.bias"), tensors[f"{at}.bias"].to(dtype))
    recipe = BlockScaling if strategy == "block" else CurrentScaling if dynamic else DelayedScaling
    for model in (frozen, master):
        assert type(scaling_state(model).recipe) is recipe
        assert torch.equal(model(torch.zeros(1, 256, dtype=dtype)).isfinite(), torch.ones(1, 16, dtype=torch.bool))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_ragged_blocks(scale_dtype: torch.dtype, tmp_path: Path) -> None:
    """transformers' loader refuses 576 rows in 5 blocks; its function for gradients reads them."""
    tensors = in_file(ragged(), "block", "_scale_inv", None, scale_dtype)
    write(tmp_path, tensors, HF_FP8, shards=3)
    frozen, master = (loaded(tmp_path, how) for how in (True, False))
    for at in RAGGED:
        codes, scale = tensors[f"{at}.weight"], tensors[f"{at}.weight_scale_inv"]
        expected = _dequantize_fp8_weight(codes, scale, [128, 128], torch.float32)
        assert torch.equal(master.get_parameter(f"{at}.weight"), expected)
        assert torch.equal(frozen.get_parameter(f"{at}.weight").dequantized(), expected)


@pytest.mark.parametrize("names", ["transformers", "vllm", "modelopt", "hf_quant_config"])
def test_one_scale_per_tensor_with_static_inputs(names: str, tmp_path: Path) -> None:
    suffix, input_name = ("_scale_inv", "activation_scale") if names == "transformers" else ("_scale", "input_scale")
    model = model_of("llama")
    written = quantized(published(model), "tensor", f"weight{suffix}", input_name)
    config = MODELOPT if names in ("modelopt", "hf_quant_config") else HF_PER_TENSOR
    write(tmp_path, written.tensors, config, model)
    if names == "hf_quant_config":
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    for frozen in (True, False):
        with torch.device("meta"):
            empty = transformers.AutoModelForCausalLM.from_config(model.config)
        loaded = load_exported(empty, tmp_path, frozen=frozen)
        state = scaling_state(loaded)
        assert isinstance(state.recipe, DelayedScaling)
        # 1 / 0.01, from an amax of 4.48
        assert torch.equal(state.scale[: len(state.module_names)], torch.full((14,), 1 / np.float32(0.01)))
        assert torch.allclose(state.amax_history[0, :14], torch.tensor(4.48))
        assert all(torch.equal(loaded.state_dict()[n], torch.from_numpy(v)) for n, v in written.values.items())
        # training goes on from them
        loaded.train()(torch.arange(12)[None]).logits.sum().backward() if not frozen else None
    if names == "transformers":
        config = transformers.FineGrainedFP8Config(dequantize=True)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
        assert all(torch.equal(theirs.state_dict()[n], tensor) for n, tensor in loaded.state_dict().items())


def test_scales_of_a_cache_are_left_out_if_the_config_has_one(tmp_path: Path) -> None:
    model = model_of("llama")
    tensors = quantized(published(model), "tensor", "weight_scale", "input_scale").tensors
    of_cache = {f"model.layers.{at}.self_attn.{of}": torch.ones(1) for at in (0, 1) for of in ("k_scale", "v_scale")}
    write(tmp_path, {**tensors, **of_cache}, MODELOPT)
    refused(model_of("llama"), tmp_path, r"the file has and the model lacks: model\.layers\.0\.self_attn\.k_scale")
    write(tmp_path, {**tensors, **of_cache}, {**MODELOPT, "kv_cache_quant_algo": "FP8"})
    load_exported(model_of("llama"), tmp_path)


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [("tensor", BlockScaling()), ("row", DelayedScaling()), ("row", CurrentScaling()), ("block", CurrentScaling())],
)
def test_a_frozen_base_runs_with_any_recipe(kind: str, recipe: Recipe, tmp_path: Path) -> None:
    tensors = dict(small_mlp().state_dict())
    strategy = {kind: strategy for strategy, kind in KINDS.items()}[kind]
    held = quantized(tensors, kind, "weight_scale", "input_scale")
    write(tmp_path, held.tensors, compressed_tensors(strategy, False))
    model = load_exported(convert(small_mlp(), recipe), tmp_path, frozen=True)
    assert scaling_state(model).recipe == recipe
    reference = small_mlp()
    reference.load_state_dict({name: torch.from_numpy(held.values.get(name, t.numpy())) for name, t in tensors.items()})
    x = torch.randn(8, 32, requires_grad=True)
    y, expected = model(x), reference(x)
    # E4M3 rounds each of two inputs by at most 1/16; a random sum of such errors is far smaller
    assert (y - expected).norm() < 0.06 * expected.norm()
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (y, expected)]
    assert (grads[0] - grads[1]).norm() < 0.15 * grads[1].norm()
    assert not any(one.requires_grad for one in model.parameters())
    assert codes_of(model).keys() == {"0.weight", "2.weight"}


def test_a_row_has_no_recipe_and_is_said_to_be_rounded(tmp_path: Path) -> None:
    write(tmp_path, in_file(ragged(), "row", "_scale", None, torch.float32), compressed_tensors("channel", True))
    with pytest.warns(UserWarning, match=r"3 weights are rounded to FP8 a second time.*: 0\.weight, 1\.weight, 2\.wei"):
        load_exported(ragged(), tmp_path)


def changed(part: str, **change: Any) -> dict[str, Any]:
    config = compressed_tensors("block", False)
    config["config_groups"]["group_0"][part] = {**config["config_groups"]["group_0"][part], **change}
    return config


CONFIGS: dict[str, tuple[Any, str]] = {
    "int8": (
        changed("weights", type="int"),
        r"`quantization_config\.config_groups\.group_0\.weights` must have type='f",
    ),
    "4 bits": (changed("weights", num_bits=4), r"must have num_bits=8, got 4"),
    "groups": (
        changed("weights", strategy="group"),
        r"must have strategy='tensor' or 'channel' or 'block', got 'group'",
    ),
    "small blocks": (
        changed("weights", block_structure=[64, 64]),
        r"must have block_structure=\[128, 128\], got \[64, 6",
    ),
    "zero points": (changed("weights", symmetric=False), r"must have symmetric=True or None, got False"),
    "inputs by row": (changed("input_activations", strategy="channel"), r"must have strategy='tensor', got 'channel'"),
    "packed": (
        compressed_tensors("block", True, format="pack-quantized"),
        r"must have format='float-quantized' or 'mxfp8-quantized', got 'p",
    ),
    "MXFP8 in blocks": (
        compressed_tensors("block", True, format="mxfp8-quantized"),
        r"group_0\.weights` must have strategy='group', got 'block'",
    ),
    "other groups": (in_mxfp8(weights={"group_size": 64}), r"group_0\.weights` must have group_size=32, got 64"),
    "static MXFP8": (in_mxfp8({"dynamic": False, "strategy": "tensor"}), r"must all be in MXFP8, with dynamic inputs"),
    "MXFP8 and blocks": (
        {
            **in_mxfp8(),
            "format": "mixed-precision",
            "config_groups": {
                "a": {**in_mxfp8()["config_groups"]["group_0"], "format": "mxfp8-quantized"},
                "b": compressed_tensors("block", True)["config_groups"]["group_0"],
            },
        },
        r"must all be in MXFP8, with dynamic inputs, or none of them",
    ),
    "rotated": (
        compressed_tensors("block", True, transform_config={"config_groups": {"a": 1}}),
        r"transform_config=None",
    ),
    "sparse": (
        compressed_tensors("block", True, sparsity_config={"format": "sparse-bitmask"}),
        r"must have format='dens",
    ),
    "true for 8": (changed("weights", num_bits=True), r"must have num_bits=8, got True"),
    "FP4 of ModelOpt": ({**MODELOPT, "quant_algo": "NVFP4"}, r"must have quant_algo='FP8', got 'NVFP4'"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_what_is_not_read(what: str, tmp_path: Path) -> None:
    config, message = CONFIGS[what]
    write(tmp_path, in_file(small_mlp(), "block", "_scale", "input_scale", torch.float32), config)
    refused(small_mlp(), tmp_path, message)


def test_groups_of_a_weight_that_is_stored_transposed(tmp_path: Path) -> None:
    """They are along the outputs of the layer, over which fprop does not sum."""
    held = quantized({"0.weight": torch.randn(64, 96)}, "group", "weight_scale")
    write(tmp_path, {**held.tensors, "0.bias": torch.zeros(96)}, in_mxfp8())
    refused(nn.Sequential(Conv1D(96, 64)), tmp_path, r"no scales of the weight can be made.* 0\.weight", frozen=True)
    model: Any = load_exported(nn.Sequential(Conv1D(96, 64)), tmp_path)
    assert np.array_equal(model[0].weight.detach().numpy(), held.values["0.weight"])


def test_groups_with_scales_of_several_kinds(tmp_path: Path) -> None:
    config = compressed_tensors("block", True)
    config["config_groups"]["group_1"] = compressed_tensors("channel", True)["config_groups"]["group_0"]
    tensors = in_file(small_mlp(), "block", "_scale", None, torch.float32)
    tensors["2.weight"], tensors["2.weight_scale"], _ = cast(small_mlp()[2].weight.detach(), "row")
    write(tmp_path, tensors, config)
    model = load_exported(small_mlp(), tmp_path, frozen=True)
    assert {n: tuple(scale.shape) for n, (_, scale) in codes_of(model).items()} == {
        "0.weight": (1, 1),
        "2.weight": (16, 1),
    }
