"""The layouts of ``export(layout=...)``: transformers' and compressed-tensors' own readers give ``code * scale``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import fp8_numpy
import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import QuantizationConfig
from exported import quantization, refused, rewrite, tensors_of, trained
from frozen_models import frozen_weights
from mx_numpy import in_mx
from torch import Tensor, nn

from lightning_fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    convert,
    export,
    load_exported,
    scaling_state,
)
from lightning_fp8.conversion import fall_back
from lightning_fp8.scalings.recipe import Recipe

LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LINEAR += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # type: ignore[assignment]
IDS = torch.arange(12).view(2, 6)
# sizes that are no multiples of 128, and with them
RAGGED, WHOLE = (192, 320), (256, 384)


def llama(sizes: tuple[int, int]) -> nn.Module:
    torch.manual_seed(2)
    hidden, intermediate = sizes
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config)


def exported(folder: Path, layout: str | None, recipe: Recipe, sizes: tuple[int, int] = WHOLE) -> nn.Module:
    """A model after a step, and its export; the second block's ``up_proj`` is not in FP8."""
    model = llama(sizes)
    convert(model, recipe)
    model(IDS).logits.square().mean().backward()
    model.get_submodule("model.layers.0.mlp.gate_proj").fp8[""].state.update()
    fall_back(model, "model.layers.1.mlp.up_proj")
    export(model, folder, layout=layout)
    return model


def in_fp8(model: nn.Module) -> dict[str, Tensor]:
    """The masters of the weights that are to be in FP8."""
    names = [f"model.layers.{block}.{name}.weight" for block in range(2) for name in LINEAR]
    names.remove("model.layers.1.mlp.up_proj.weight")
    return {name: model.get_parameter(name).detach() for name in names}


def values_of(codes: Tensor, scale: Tensor) -> np.ndarray:
    """``code * scale`` in fp32, from the definition of FP8; a scale for the whole, for each row, or for 128 x 128."""
    values = fp8_numpy.code_values("e4m3")[codes.view(torch.uint8).numpy()].astype(np.float32)
    scales = scale.float().numpy()
    if scales.ndim == 2 and scales.shape != (len(values), 1):
        scales = scales.repeat(128, 0).repeat(128, 1)[: values.shape[0], : values.shape[1]]
    return values * scales


RECIPES = {"static": DelayedScaling(), "dynamic": CurrentScaling(), "blocks": BlockScaling()}
HF = {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": ["model.layers.1.mlp.up_proj", "lm_head"]}


@pytest.mark.parametrize("name", RECIPES)
def test_transformers_reads_hf_fp8(name: str, tmp_path: Path) -> None:
    model = exported(tmp_path, "hf-fp8", RECIPES[name])
    scheme = "static" if name == "static" else "dynamic"
    blocks = [128, 128] if name == "blocks" else None
    assert quantization(tmp_path) == {**HF, "activation_scheme": scheme, "weight_block_size": blocks}
    saved, weights = tensors_of(tmp_path), in_fp8(model)
    suffixes = ("weight_scale_inv", "activation_scale")[: 2 if name == "static" else 1]
    scales = {weight.removesuffix("weight") + suffix for weight in weights for suffix in suffixes}
    assert set(saved) == set(model.state_dict()) | scales
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    )
    for weight, parameter in loaded.named_parameters():
        if weight not in weights:
            assert torch.equal(parameter, saved[weight])
            continue
        assert saved[weight].dtype == torch.float8_e4m3fn
        scale = saved[f"{weight}_scale_inv"]
        assert scale.shape == ((weights[weight].shape[0] // 128, weights[weight].shape[1] // 128) if blocks else ())
        assert np.array_equal(parameter.detach().numpy(), values_of(saved[weight], scale))
        # one rounding of the master
        error = (parameter - weights[weight]).abs().max() / weights[weight].abs().max()
        assert 0 < error < 2**-4


def test_names_are_those_of_transformers_own_layers(tmp_path: Path) -> None:
    """On a GPU it does not dequantize: its layers hold the tensors of the file under these names, in these shapes."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    for name, recipe in RECIPES.items():
        exported(tmp_path / name, "hf-fp8", recipe)
        config, saved = quantization(tmp_path / name), tensors_of(tmp_path / name)
        layer = FP8Linear(256, 384, config["weight_block_size"], config["activation_scheme"])
        of_file = {key.rpartition(".")[2]: one for key, one in saved.items() if "layers.0.mlp.up_proj." in key}
        expected = {key: (one.shape, one.dtype) for key, one in layer.state_dict().items()}
        assert {key: (one.shape, one.dtype) for key, one in of_file.items()} == expected


@pytest.mark.parametrize(
    ("name", "sizes"), [("static", RAGGED), ("dynamic", WHOLE), ("blocks", WHOLE), ("blocks", RAGGED)]
)
def test_compressed_tensors_reads_its_layout(name: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    model = exported(tmp_path, "compressed-tensors", RECIPES[name], sizes)
    saved, weights = tensors_of(tmp_path), in_fp8(model)
    config = QuantizationConfig.model_validate(quantization(tmp_path))
    (group,) = config.config_groups.values()
    assert (config.format, config.quantization_status) == ("float-quantized", "compressed")
    assert group.weights.strategy == ("block" if name == "blocks" else "tensor")
    assert group.input_activations.dynamic == (name != "static")
    if name == "blocks":
        assert (group.input_activations.strategy, group.input_activations.group_size) == ("group", 128)
    expected = {name: values_of(saved[name], saved[f"{name}_scale"]) for name in weights}
    for name_of_weight, master in weights.items():
        assert 0 < np.abs(expected[name_of_weight] - master.numpy()).max() / master.abs().max() < 2**-4
    # the package's own layers, decompressed by it; and transformers, which dequantizes each tensor as it reads it
    held = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    if name == "static":
        own = held.get_submodule("model.layers.0.mlp.up_proj").input_scale
        assert torch.equal(own, saved["model.layers.0.mlp.up_proj.input_scale"])
    ModelCompressor.from_compression_config(held.config.quantization_config).decompress_model(held)
    dequantize = transformers.CompressedTensorsConfig(dequantize=True)
    dense = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=dequantize
    )
    for loaded in (held, dense):
        found = {key: one for key, one in loaded.named_parameters() if "scale" not in key and "zero_point" not in key}
        assert found.keys() == dict(model.named_parameters()).keys()
        for key, parameter in found.items():
            plain = parameter.detach().numpy()
            assert np.array_equal(plain, expected[key] if key in weights else saved[key].numpy())


def test_incomplete_blocks_are_left_to_a_layout_whose_readers_take_them(tmp_path: Path) -> None:
    model = convert(nn.ModuleDict({"a": llama(RAGGED), "b": nn.Linear(128, 128)}), BlockScaling())
    for path in ("a.lm_head", "a.model.layers.1.mlp.up_proj"):
        fall_back(model, path)
    with pytest.warns(UserWarning, match=r"13 weights are written as they are.* `layout='compressed-tensors'` writes"):
        export(model, tmp_path / "hf", layout="hf-fp8")
    assert [name for name, one in tensors_of(tmp_path / "hf").items() if one.element_size() == 1] == ["b.weight"]
    export(model, tmp_path / "ct", layout="compressed-tensors")
    saved = tensors_of(tmp_path / "ct")
    assert saved["a.model.layers.0.mlp.up_proj.weight_scale"].shape == (3, 2)
    codes, scale = fp8_numpy.cast_in_blocks(model["a"].model.layers[0].mlp.up_proj.weight.detach().numpy(), "e4m3", 128)
    assert np.array_equal(saved["a.model.layers.0.mlp.up_proj.weight"].view(torch.uint8).numpy(), codes)
    assert np.array_equal(saved["a.model.layers.0.mlp.up_proj.weight_scale"].numpy(), scale)


MX = {"1 x 32": MXScaling(), "squares": MXScaling(weight_blocks=(32, 32))}


def in_groups(codes: Tensor, scale: Tensor) -> np.ndarray:
    """``code * 2**(scale - 127)`` in fp64, a scale for every 32 elements of a row."""
    values = fp8_numpy.code_values("e4m3")[codes.view(torch.uint8).numpy()]
    return np.ldexp(values, scale.numpy().astype(int).repeat(32, 1) - 127)


@pytest.mark.parametrize("kind", MX)
def test_compressed_tensors_reads_mxfp8(kind: str, tmp_path: Path) -> None:
    model = exported(tmp_path, "compressed-tensors", MX[kind], RAGGED)
    saved, weights = tensors_of(tmp_path), in_fp8(model)
    config = QuantizationConfig.model_validate(quantization(tmp_path))
    (group,) = config.config_groups.values()
    for one, dynamic in ((group.weights, False), (group.input_activations, True)):
        assert (one.num_bits, one.type, one.strategy, one.group_size) == (8, "float", "group", 32)
        assert (one.scale_dtype, one.dynamic, one.symmetric) == (torch.uint8, dynamic, True)
    expected = {}
    for name, master in weights.items():
        codes, scale = saved[name], saved[f"{name}_scale"]
        assert (codes.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.uint8)
        assert scale.shape == (len(master), master.shape[1] // 32)
        expected[name] = in_groups(codes, scale)
        assert np.array_equal(expected[name], in_mx(master, squares=kind == "squares"))
        # the package's own compressor, given the scales, writes the same bytes
        of_layer = {"weight": master, "weight_scale": torch.exp2(scale.float() - 127)}
        made = BaseCompressor.load_from_registry("mxfp8-quantized").compress(of_layer, group)
        assert torch.equal(made["weight"].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(made["weight_scale"], scale)
    held = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ModelCompressor.from_compression_config(held.config.quantization_config).decompress_model(held)
    found = {key: one for key, one in held.named_parameters() if "scale" not in key}
    assert found.keys() == dict(model.named_parameters()).keys()
    for key, parameter in found.items():
        plain = parameter.detach().float().numpy()
        assert np.array_equal(plain, expected[key] if key in weights else saved[key].numpy())


@pytest.mark.filterwarnings("error:.*rounded to FP8 a second time")
@pytest.mark.parametrize("kind", MX)
def test_mxfp8_is_read_back(kind: str, tmp_path: Path) -> None:
    model = exported(tmp_path, "compressed-tensors", MX[kind], RAGGED).eval()
    # which the file has in fp32
    fall_back(model, "lm_head")
    saved, outputs = tensors_of(tmp_path), model(IDS).logits
    for recipe in (None, MX[kind]):
        loaded = llama(RAGGED)
        load_exported(loaded if recipe is None else convert(loaded, recipe), tmp_path)
        assert scaling_state(loaded).recipe == (recipe or MXScaling())
        for name in in_fp8(model):
            values = in_groups(saved[name], saved[f"{name}_scale"])
            assert np.array_equal(loaded.get_parameter(name).detach().double().numpy(), values)
        with torch.no_grad():
            assert torch.equal(loaded(IDS).logits, outputs)
    export(loaded, tmp_path / "again", layout="compressed-tensors")
    again = tensors_of(tmp_path / "again")
    for name in in_fp8(model):
        values = (in_groups(one[name], one[f"{name}_scale"]) for one in (saved, again))
        assert np.array_equal(*values)
    # without masters: the same outputs, and the same bytes, also by a copy, which does not know the file
    held = load_exported(llama(RAGGED), tmp_path, frozen=True)
    assert [weight.content.has_both_orders for weight in frozen_weights(held).values()] == [kind == "squares"] * 13
    with torch.no_grad():
        assert torch.equal(held(IDS).logits, outputs)
    assert torch.equal(held.train()(IDS).logits, outputs)
    export(held, tmp_path / "held", layout="compressed-tensors")
    assert [one.read_bytes() for one in sorted((tmp_path / "held").iterdir())] == [
        one.read_bytes() for one in sorted(tmp_path.iterdir()) if one.is_file()
    ]
    export(copy.deepcopy(held), tmp_path / "copy", layout="compressed-tensors")
    assert_same_bytes(tensors_of(tmp_path / "copy"), saved)


def assert_same_bytes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert found[name].dtype == one.dtype
        assert torch.equal(found[name].view(torch.uint8), one.view(torch.uint8))


def test_mxfp8_in_squares_of_a_file_that_has_none(tmp_path: Path) -> None:
    exported(tmp_path, "compressed-tensors", MXScaling(), RAGGED)
    with pytest.warns(UserWarning, match="13 weights are rounded to FP8 a second time"):
        load_exported(convert(llama(RAGGED), MX["squares"]), tmp_path)


@pytest.mark.filterwarnings("ignore:export. 1 weights are written as they are")
def test_what_mxfp8_has_no_place_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64), nn.Linear(64, 16))
    with torch.no_grad():
        layers[0].weight[:, 32:] = 0
    model = convert(layers, MXScaling())
    for layout in (None, "hf-fp8"):
        with pytest.raises(ValueError, match=r"one for every 32 elements: 0\.weight, .*Pass `layout='compressed-"):
            export(model, tmp_path / "none", layout=layout)
    with pytest.warns(UserWarning, match=r"1 weights are written as they are: a scale is for 32 elements.* \(64, 48\)"):
        export(model, tmp_path, layout="compressed-tensors")
    assert quantization(tmp_path)["ignore"] == ["1"]
    saved = tensors_of(tmp_path)
    # of zeros
    assert not saved["0.weight_scale"][:, 1].any()
    plain = [nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64), nn.Linear(64, 16)) for _ in range(2)]
    load_exported(plain[0], tmp_path)
    assert torch.equal(plain[0][0].weight[:, 32:], torch.zeros(48, 32))
    with pytest.raises(ValueError, match=r"converted with BlockScaling.*has a scale for each group"):
        load_exported(convert(copy.deepcopy(plain[1]), BlockScaling()), tmp_path)
    # NaN in E8M0
    saved["2.weight_scale"][3, 1] = 255
    rewrite(tmp_path, saved)
    scale, lacks = saved["2.weight_scale"], r"lack scales in the form of a matrix in uint8.*2\.weight_scale"
    damaged = [
        ({}, r"must be a number from 2\*\*-127 to 2\*\*127, not the code 255, NaN: 2\.weight_scale \(255\)"),
        ({"2.weight_scale": scale.float()}, rf"{lacks} \(\(16, 2\) float32\)"),
        ({"2.weight_scale": scale[:1]}, rf"{lacks} \(\(1, 2\) uint8\)"),
        ({"2.weight_scale": torch.full_like(scale, 250)}, r"do not keep the values of the file in the model's dtype"),
        ({"2.weight": torch.full((16, 64), float("nan")).to(torch.float8_e4m3fn), "2.weight_scale": scale * 0}, "NaN"),
    ]
    for changes, message in damaged:
        rewrite(tmp_path, {**saved, **changes})
        for frozen in (False, True):
            refused(plain[1], tmp_path, message, frozen=frozen)


def in_a_step(model: nn.Module, recipe: Recipe, *shape: int) -> nn.Module:
    return trained(model, lambda m: m(torch.randn(*shape)), 1) if recipe.from_history else convert(model, recipe)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def of_conv1d() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), transformers.pytorch_utils.Conv1D(32, 32))


REFUSED: dict[str, tuple[Any, str, str]] = {
    "unknown": (of_conv1d, "fp8", r"`layout` must be one of 'hf-fp8', 'compressed-tensors', got 'fp8'"),
    "Conv1D": (
        of_conv1d,
        "hf-fp8",
        r"is for weights of `nn\.Linear`, and these belong to other layers: 1\.weight\. Pass `lay",
    ),
    "attention": (Attention, "compressed-tensors", r"other layers: attention\.in_proj_weight\. Pass `layout=None`"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_layout_has_no_place_for(what: str, tmp_path: Path) -> None:
    make, layout, message = REFUSED[what]
    model = in_a_step(make(), DelayedScaling(), 2, 4, 32)
    with pytest.raises(ValueError, match=message):
        export(model, tmp_path / "out", layout=layout)
    assert not (tmp_path / "out").exists()
    export(model, tmp_path / "out", layout=None)


def test_transformers_would_take_a_layer_for_a_plain_one(tmp_path: Path) -> None:
    """Its list of plain layers has paths of which the end is enough."""
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "extra": nn.ModuleDict({"a": nn.Linear(32, 32)})})
    fall_back(convert(model, CurrentScaling()), "a")
    with pytest.raises(ValueError, match=r"whose paths end like theirs: extra\.a \(as a\)\. Pass `layout='compressed-"):
        export(model, tmp_path, layout="hf-fp8")
    export(model, tmp_path, layout="compressed-tensors")
    assert quantization(tmp_path)["ignore"] == ["a"]
    assert tensors_of(tmp_path)["extra.a.weight"].element_size() == 1
