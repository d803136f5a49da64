"""A base in FP8 is written with the names, codes and scales that it was read with, or the same under other names."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exported import metadata_of, quantization, tensors_of, trained
from fp8_bases import KINDS, STRATEGIES, llama, values, write_base
from fp8_checkpoints import HF_FP8, MODELOPT, cast, compressed_tensors, in_mxfp8, model_of, published, quantized, write
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, convert, export, load_exported


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def all_of(folder: Path) -> dict[str, Tensor]:
    """The tensors of all files, which are those that the index names."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        places = json.loads(index.read_text())["weight_map"]
        assert places == {name: file.name for file in files for name in load_file(file)}
    else:
        assert [file.name for file in files] == ["model.safetensors"]
    return tensors


def differences(read: Path, written: Path) -> list[str]:
    """Names of tensors that only one folder has, or that differ in dtype, shape or any bit."""
    first, second = all_of(read), all_of(written)
    return [
        name
        for name in sorted({*first, *second})
        if name not in first
        or name not in second
        or (first[name].dtype, first[name].shape) != (second[name].dtype, second[name].shape)
        or not first[name].reshape(-1).view(torch.uint8).equal(second[name].reshape(-1).view(torch.uint8))
    ]


def check_same(read: Path, written: Path) -> None:
    assert differences(read, written) == []
    assert config_of(written) == config_of(read)


DOWN = "model.layers.1.mlp.down_proj.weight"
CASES: dict[str, dict[str, Any]] = {
    "tensor": {"kind": "tensor"},
    "tensor, static": {"kind": "tensor", "static": True},
    "row": {"kind": "row"},
    "block, scales in bf16": {"kind": "block", "scale_dtype": torch.bfloat16},
    "three files": {"kind": "block", "shards": 3},
    "as transformers, static": {"kind": "tensor", "layout": "hf-fp8", "static": True},
    "block, compressed-tensors": {"kind": "block", "layout": "compressed-tensors", "shards": 2},
    "block, static": {"kind": "block", "layout": "compressed-tensors", "static": True},
    "MX, three files": {"kind": "group", "shards": 3},
    "MX, squares": {"kind": "square"},
}


@pytest.mark.parametrize("case", CASES)
def test_an_unchanged_base_keeps_names_codes_and_scales(case: str, tmp_path: Path) -> None:
    write_base(tmp_path / "read", **CASES[case])
    model = load_exported(llama(), tmp_path / "read", frozen=True)
    with torch.no_grad():
        model(torch.arange(6).view(1, 6))
    assert export(model, tmp_path / "written") == tmp_path / "written"
    check_same(tmp_path / "read", tmp_path / "written")
    # into its own folder, and by the name of its layout
    layout = "hf-fp8" if quantization(tmp_path / "read")["quant_method"] == "fp8" else "compressed-tensors"
    export(model, tmp_path / "read", layout=layout, overwrite=True)
    check_same(tmp_path / "read", tmp_path / "written")


def test_an_unchanged_base_in_the_layout_of_modelopt(tmp_path: Path) -> None:
    """Also where a file of its own has the config."""
    tensors = quantized(llama().state_dict(), "tensor", "weight_scale", "input_scale").tensors
    cache = {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0)}
    write(tmp_path / "read", {**tensors, **cache}, {**MODELOPT, "kv_cache_quant_algo": "FP8"}, llama())
    model = load_exported(llama(), tmp_path / "read", frozen=True)
    export(model, tmp_path / "written")
    check_same(tmp_path / "read", tmp_path / "written")
    config = config_of(tmp_path / "read")
    (tmp_path / "read/hf_quant_config.json").write_text(json.dumps({"quantization": config["quantization_config"]}))
    (tmp_path / "read/config.json").write_text(json.dumps({**config, "quantization_config": None}))
    export(load_exported(llama(), tmp_path / "read", frozen=True), tmp_path / "again")
    check_same(tmp_path / "written", tmp_path / "again")
    with pytest.warns(UserWarning, match=r"left out: model\.layers\.0\.self_attn\.k_proj\.k_scale"):
        export(model, tmp_path / "ct", layout="compressed-tensors")


def test_an_export_that_is_read_and_written_back_keeps_its_exact_scales(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 64)
    model = trained(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)), lambda model: model(x))
    export(model, tmp_path / "read")
    base = load_exported(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)), tmp_path / "read", frozen=True)
    export(base, tmp_path / "written")
    check_same(tmp_path / "read", tmp_path / "written")
    assert metadata_of(tmp_path / "written") == metadata_of(tmp_path / "read")
    with torch.no_grad():
        base[0].weight.data *= 1.3
    with pytest.warns(UserWarning, match="1 tensors have changed since"):
        export(base, tmp_path / "changed")
    # the scales in the metadata would be those of the former codes
    again = load_exported(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)), tmp_path / "changed")
    assert torch.allclose(again[0].weight, base[0].weight.dequantized(), rtol=2**-4, atol=1e-3)


@pytest.mark.parametrize("layout", [None, "compressed-tensors"])
def test_tensors_outside_of_fp8_are_written_as_the_model_holds_them(layout: str | None, tmp_path: Path) -> None:
    tensors = dict(quantized(llama().state_dict(), "row", "weight_scale").tensors)
    wider = {name: tensor.float() * 1.001 for name, tensor in tensors.items() if "norm" in name}
    half = {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"].half()}
    write(tmp_path / "read", {**tensors, **wider, **half}, compressed_tensors("channel", True), llama())
    model = load_exported(llama(), tmp_path / "read", frozen=True)
    said = rf"{len(wider) + 1} tensors are narrower now .*: 1 from float16 to bfloat16, {len(wider)} from float32 to"
    with pytest.warns(UserWarning, match=said) as warned:
        export(model, tmp_path / "written", layout=layout)
    assert len([one for one in warned if "export:" in str(one.message)]) == 1
    saved = all_of(tmp_path / "written")
    assert differences(tmp_path / "read", tmp_path / "written") == sorted({*wider, *half})
    assert all(saved[name].equal(wider[name].bfloat16()) for name in wider)
    # a model with the files' dtypes, or wider ones, keeps all bits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(load_exported(llama(torch.float32), tmp_path / "read", frozen=True), tmp_path / "wide", layout=layout)
    saved = all_of(tmp_path / "wide")
    assert all(saved[name].equal(wider[name]) for name in wider)
    assert saved["lm_head.weight"].equal(tensors["lm_head.weight"].float())


def test_dtype_is_that_of_tensors_outside_of_fp8(tmp_path: Path) -> None:
    write_base(tmp_path / "read", "row", shards=2)
    model = load_exported(llama(), tmp_path / "read", frozen=True)
    export(model, tmp_path / "written", dtype=torch.float32)
    read, saved = all_of(tmp_path / "read"), all_of(tmp_path / "written")
    assert differences(tmp_path / "read", tmp_path / "written") == sorted(
        name for name in read if name.endswith("weight") and "_proj" not in name
    )
    assert all(saved[name].float().equal(tensor.float()) for name, tensor in read.items())
    assert saved["lm_head.weight"].dtype == torch.float32
    assert config_of(tmp_path / "written") == {**config_of(tmp_path / "read"), "dtype": "float32"}


@pytest.mark.parametrize(
    ("kind", "recipe"), [*zip(KINDS, (DelayedScaling(), MXScaling(), CurrentScaling(), BlockScaling()))], ids=str
)
def test_after_training_with_any_recipe(kind: str, recipe: Any, tmp_path: Path) -> None:
    """Histories of inputs and a step of the optimizer change nothing of a base."""
    write_base(tmp_path / "read", kind, static=kind == "tensor")
    model = load_exported(convert(llama(), recipe), tmp_path / "read", frozen=True).train()
    embeddings = model.get_input_embeddings()(torch.arange(6).view(1, 6)).requires_grad_()
    model(inputs_embeds=embeddings).logits.square().mean().backward()
    export(model, tmp_path / "written")
    check_same(tmp_path / "read", tmp_path / "written")


@pytest.mark.parametrize("to", ["hf-fp8", "compressed-tensors"])
@pytest.mark.parametrize("kind", ["tensor", "block"])
def test_the_same_codes_in_another_layout(kind: str, to: str, tmp_path: Path) -> None:
    other = {"hf-fp8": "compressed-tensors", "compressed-tensors": "hf-fp8"}[to]
    # no reader of the other layout takes static scales of inputs with blocks
    static = kind == "tensor" or other == "compressed-tensors"
    expected = write_base(tmp_path / "read", kind, layout=other, static=static)
    model = load_exported(llama(), tmp_path / "read", frozen=True)
    export(model, tmp_path / "written", layout=to, dtype=torch.float32)
    read, saved = (tensors_of(tmp_path / name) for name in ("read", "written"))
    suffix = "_scale_inv" if to == "hf-fp8" else "_scale"
    for name, value in expected.items():
        assert torch.equal(saved[name].float(), read[name].float())
        if "_proj" in name:
            assert torch.equal(values(saved[name], saved[name + suffix]), value)
        else:
            assert saved[name].dtype == torch.float32
    names = {"hf-fp8": "activation_scale", "compressed-tensors": "input_scale"}
    assert (DOWN.replace("weight", names[to]) in saved) == (kind == "tensor")
    if to == "compressed-tensors":
        dequantize = transformers.CompressedTensorsConfig(dequantize=True)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "written", dtype=torch.float32, quantization_config=dequantize
        ).state_dict()
        assert all(torch.equal(loaded[name], value.float()) for name, value in expected.items())
    else:
        assert quantization(tmp_path / "written")["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]


def test_rows_have_a_place_in_one_layout_only(tmp_path: Path) -> None:
    write_base(tmp_path / "read", "row")
    model = load_exported(llama(), tmp_path / "read", frozen=True)
    with pytest.raises(
        ValueError, match=r"layout='hf-fp8' has no place for such scales.*each row.*`layout='compressed"
    ):
        export(model, tmp_path / "written", layout="hf-fp8")
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize(
    ("kind", "scale_dtype"),
    [
        ("tensor", torch.float32),
        ("row", torch.bfloat16),
        ("block", torch.float32),
        ("block", torch.bfloat16),
        ("group", torch.uint8),
    ],
)
def test_what_has_changed_is_rounded_again_and_named(kind: str, scale_dtype: torch.dtype, tmp_path: Path) -> None:
    write_base(tmp_path / "read", kind, shards=2, scale_dtype=scale_dtype)
    model = load_exported(llama(), tmp_path / "read", frozen=True)
    weight = model.get_parameter(DOWN)
    with torch.no_grad():
        # as a merge of an adapter
        weight.data += torch.randn(weight.shape, generator=torch.Generator().manual_seed(4)).to(weight) * 0.02
    merged = weight.dequantized().float()
    with pytest.warns(UserWarning, match=rf"1 tensors have changed since .*: {DOWN} \(relative RMS error 2\.\d+%\)"):
        export(model, tmp_path / "written")
    suffix = "_scale_inv" if kind == "block" else "_scale"
    assert differences(tmp_path / "read", tmp_path / "written") == [DOWN, DOWN + suffix]
    tensors = all_of(tmp_path / "written")
    found = values(tensors[DOWN], tensors[DOWN + suffix])
    assert (found - merged).norm() < 0.03 * merged.norm()
    # the nearest codes for the scales as the file has them
    _, expected, _ = cast(merged, kind, scale_dtype)
    expected = expected.view(tensors[DOWN + suffix].shape)
    assert tensors[DOWN + suffix].dtype == scale_dtype
    rounding = 2**-7 if scale_dtype == torch.bfloat16 else 1e-6
    assert torch.allclose(tensors[DOWN + suffix], expected, rtol=0 if kind == "group" else rounding, atol=0)
    ones = values(torch.ones(merged.shape).to(torch.float8_e4m3fn), tensors[DOWN + suffix])
    assert torch.equal(tensors[DOWN].float(), (merged / ones).clamp(-448, 448).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_were_loaded_since(kind: str, tmp_path: Path) -> None:
    """They are kept in FP8 too, with other scales: the file gets the kind that it had."""
    write_base(tmp_path / "read", kind)
    model = load_exported(llama(), tmp_path / "read", frozen=True)
    other = {name: one * 0.73 for name, one in llama().state_dict().items()}
    model.load_state_dict(other)
    assert model.get_parameter(DOWN).is_fp8
    # values that were rounded to MX have codes in MX, so that nothing is rounded again
    is_said = pytest.warns(UserWarning, match=r"export: 14 tensors have changed since")
    with is_said if kind != "group" else nullcontext():
        export(model, tmp_path / "written")
    read, written = (tensors_of(tmp_path / folder) for folder in ("read", "written"))
    suffix = "_scale_inv" if kind == "block" else "_scale"
    assert written[DOWN + suffix].shape == read[DOWN + suffix].shape
    assert (values(written[DOWN], written[DOWN + suffix]) - other[DOWN].float()).norm() < 0.06 * other[
        DOWN
    ].float().norm()


def test_other_tensors_than_those_of_the_checkpoint(tmp_path: Path) -> None:
    write_base(tmp_path / "read", "block")
    model = load_exported(llama(), tmp_path / "read", frozen=True)
    model.model.extra = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"these tensors: model\.extra\.weight, model\.extra\.bias\. If they"):
        export(model, tmp_path / "written")
    assert not (tmp_path / "written").exists()


MERGED = {"qwen3_moe": "model.layers.0.mlp.experts.gate_up_proj", "deepseek_v3": "model.layers.1.mlp.experts.down_proj"}


def base_of(name: str, folder: Path, shards: int = 2, kind: str = "block") -> Any:
    """A model with experts, whose files have a matrix for each projection of each expert."""
    suffix, config = ("weight_scale_inv", HF_FP8) if kind == "block" else ("weight_scale", in_mxfp8())
    held = quantized(published(model_of(name, torch.bfloat16)), kind, suffix)
    write(folder, held.tensors, config, model_of(name, torch.bfloat16), shards)
    model = load_exported(model_of(name, torch.bfloat16), folder, frozen=True)
    assert model.get_parameter(MERGED[name]).dim() == 3
    return model


@pytest.mark.parametrize("name", MERGED)
def test_experts_are_written_under_the_names_of_the_files(name: str, tmp_path: Path) -> None:
    model = base_of(name, tmp_path / "read")
    export(model, tmp_path / "written")
    check_same(tmp_path / "read", tmp_path / "written")
    # and in another layout
    export(model, tmp_path / "ct", layout="compressed-tensors")
    read = all_of(tmp_path / "read")
    saved = all_of(tmp_path / "ct")
    assert len(saved) == len(read)
    assert all(saved[key.replace("_scale_inv", "_scale")].float().equal(one.float()) for key, one in read.items())
    assert any(".experts.3." in key for key in saved)


@pytest.mark.parametrize("kind", ["group", "square"])
def test_experts_in_mx(kind: str, tmp_path: Path) -> None:
    name = "qwen3_moe"
    model, masters = base_of(name, tmp_path / "read", kind=kind), model_of(name, torch.bfloat16)
    assert model.get_parameter(MERGED[name]).content.has_both_orders == (kind == "square")
    load_exported(masters, tmp_path / "read")
    with torch.no_grad():
        # a cast of the values gives the values, in bf16
        assert torch.equal(*(one(torch.arange(12).view(2, 6)).logits for one in (model, masters)))
    export(model, tmp_path / "written")
    check_same(tmp_path / "read", tmp_path / "written")


def test_one_changed_expert(tmp_path: Path) -> None:
    name = "qwen3_moe"
    model = base_of(name, tmp_path / "read", shards=1)
    with torch.no_grad():
        # the second half of the rows of expert 2 is its `up_proj`
        model.get_parameter(MERGED[name]).data[2, 128:] *= 1.7
    changed = "model.layers.0.mlp.experts.2.up_proj.weight"
    with pytest.warns(UserWarning, match="tensors have changed since"):
        export(model, tmp_path / "written")
    read, written = (tensors_of(tmp_path / folder) for folder in ("read", "written"))
    expected = 1.7 * values(read[changed], read[f"{changed}_scale_inv"]).bfloat16().float()
    found = values(written[changed], written[f"{changed}_scale_inv"])
    assert (found - expected).norm() < 0.03 * expected.norm()
    # the other experts of the same parameter are as they were; of this one, the same codes have a larger scale
    different = [key for key, one in read.items() if not one.float().equal(written[key].float())]
    assert different == [f"{changed}_scale_inv"]


@pytest.mark.parametrize("kind", KINDS[2:])
def test_a_base_that_has_got_masters_is_not_rounded_again(kind: str, tmp_path: Path) -> None:
    write_base(tmp_path / "read", kind)
    model = load_exported(llama(), tmp_path / "read", frozen=True)
    convert(model, frozen_weights="master")
    assert type(model.get_parameter(DOWN)) is torch.nn.Parameter
    export(model, tmp_path / "written")
    check_same(tmp_path / "read", tmp_path / "written")


@pytest.mark.parametrize("layout", [None, "compressed-tensors"])
def test_tensors_that_the_model_has_no_place_for_are_left_out(layout: str | None, tmp_path: Path) -> None:
    """Such as the layer of DeepSeek-V3 that predicts further tokens; the folder that was read is not needed."""
    tensors = quantized(published(model_of("deepseek_v3", torch.bfloat16)), "block", "weight_scale_inv").tensors
    extra = {"model.layers.61.eh_proj.weight": torch.randn(8, 8)}
    # a buffer of old files
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    write(tmp_path / "read", {**tensors, **extra}, HF_FP8, model_of("deepseek_v3"), 2)
    model = load_exported(model_of("deepseek_v3", torch.bfloat16), tmp_path / "read", frozen=True)
    shutil.rmtree(tmp_path / "read")
    with pytest.warns(UserWarning, match=r"are left out: .*rotary_emb\.inv_freq, model\.layers\.61\.eh_proj\.weight"):
        export(model, tmp_path / "written", layout=layout)
    names = {name.replace("_scale_inv", "_scale") if layout else name for name in tensors}
    assert {*all_of(tmp_path / "written")} == names
    load_exported(model_of("deepseek_v3", torch.bfloat16), tmp_path / "written", frozen=True)


@pytest.mark.parametrize(("kind", "recipe"), [("row", CurrentScaling()), ("block", DelayedScaling())])
def test_a_copy_does_not_know_the_files_and_keeps_its_codes(kind: str, recipe: Any, tmp_path: Path) -> None:
    expected = write_base(tmp_path / "read", kind)
    model = load_exported(convert(llama(), recipe, ignore_modules=["lm_head"]), tmp_path / "read", frozen=True)
    export(copy.deepcopy(model), tmp_path / "written", layout="compressed-tensors")
    read, saved = (tensors_of(tmp_path / folder) for folder in ("read", "written"))
    group = quantization(tmp_path / "written")["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == STRATEGIES[kind]
    # with blocks, readers take no static scales of inputs
    assert group["input_activations"]["dynamic"]
    assert not any("input_scale" in name for name in saved)
    own = read[DOWN + ("_scale_inv" if kind == "block" else "_scale")]
    assert torch.equal(saved[f"{DOWN}_scale"], own)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "written",
        dtype=torch.float32,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    ).state_dict()
    assert all(torch.equal(loaded[name], value.float()) for name, value in expected.items())


@pytest.mark.parametrize("layout", [None, "hf-fp8", "compressed-tensors"])
def test_one_scale_is_repeated_where_others_have_one_for_each_block(layout: str | None, tmp_path: Path) -> None:
    """Half of a model is a base in blocks, and the other half has masters."""
    write_base(tmp_path / "read", "block")
    model = load_exported(
        convert(llama(), CurrentScaling(), ignore_modules=["lm_head"]), tmp_path / "read", frozen=True
    )
    model = copy.deepcopy(model)
    trained = model.model.layers[1].mlp.up_proj
    trained.weight = torch.nn.Parameter(trained.weight.dequantized() * 1.1)
    export(model, tmp_path / "written", layout=layout)
    name = "model.layers.1.mlp.up_proj.weight"
    saved = tensors_of(tmp_path / "written")
    scale = saved[f"{name}_scale" if layout == "compressed-tensors" else f"{name}_scale_inv"]
    assert scale.shape == (3, 2)
    assert scale.unique().item() == pytest.approx(trained.weight.abs().max().item() / 448, rel=1e-6)
    assert (values(saved[name], scale) - trained.weight.float()).abs().max() < trained.weight.abs().max() / 16
    assert saved[DOWN].float().equal(tensors_of(tmp_path / "read")[DOWN].float())
