"""Exported models: their files, as a reader by vLLM's rule sees them, and what is not exported."""

from __future__ import annotations

import builtins
import copy
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp8_numpy
import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from exported import in_fp8, metadata_of, on, quantization, tensors_of, trained
from fp8_numpy import cast_in_blocks, power_of_two_below
from in_blocks import spread
from moved import to_current
from small_models import small_mlp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformer_models import made
from transformers.pytorch_utils import Conv1D

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, convert, export, load_exported, scaling_state
from lightning_fp8.conversion import fall_back
from lightning_fp8.ops.formats import E5M2, Fp8Format, Role


@pytest.mark.parametrize("k_by_n", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_independent_reader_agrees(tmp_path: Path, dtype: torch.dtype, k_by_n: bool) -> None:
    """Weights by their definition, and the input with a scale of its own values as evaluation has it; sums in fp64."""
    model = nn.Sequential(Conv1D(24, 40) if k_by_n else nn.Linear(40, 24))
    export(trained(model, on(16, 40)), tmp_path)
    tensors = tensors_of(tmp_path)
    # larger than any in training
    x = 1.5 * torch.randn(7, 40).to(dtype)
    values = fp8_numpy.code_values("e4m3")
    weight = values[tensors["0.weight"].view(torch.uint8).numpy()] * tensors["0.weight_scale"].double().numpy()
    scale = power_of_two_below(x.float().abs().max().item(), "e4m3")
    inputs = values[fp8_numpy.saturating_cast(x.float().numpy(), np.float32(scale), "e4m3")] / scale
    expected = inputs @ (weight if k_by_n else weight.T) + tensors["0.bias"].double().numpy()
    with torch.no_grad():
        actual = model.eval()(x).double().numpy()
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6
    assert np.abs(actual - expected).max() < 2 * tolerance * np.abs(expected).max()


def test_scales_are_those_of_the_history_and_of_the_current_weight(tmp_path: Path) -> None:
    x = torch.randn(16, 32)
    model = trained(small_mlp(), lambda model: model(x), 1)
    export(model, tmp_path)
    tensors = tensors_of(tmp_path)
    assert tensors["0.input_scale"].item() == pytest.approx(x.abs().max().item() / 448, rel=1e-6)
    # after the last optimizer step, as an evaluation casts it
    weight = model[0].weight.detach().numpy()
    expected = fp8_numpy.saturating_cast(weight, np.float32(448) / np.abs(weight).max(), "e4m3")
    assert np.array_equal(tensors["0.weight"].view(torch.uint8).numpy(), expected)
    assert model[0].weight.dtype == torch.float32
    assert quantization(tmp_path) == {
        "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "ignored_layers": [],
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_current_scaling_needs_no_scales_of_inputs(tmp_path: Path, dtype: torch.dtype | None) -> None:
    model = convert(nn.ModuleDict({"a": small_mlp(), "head": nn.Linear(16, 64)}), CurrentScaling(wgrad="bf16"))
    # the head's weight is shared with a layer outside FP8: its scale is in the metadata
    model["tied"] = nn.Embedding(64, 16)
    model["tied"].weight = model["head"].weight
    fall_back(model, "a.0")
    export(model, tmp_path, dtype=dtype)
    assert quantization(tmp_path) == {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None,
        "ignored_layers": ["a.0", "head"],
    }  # fmt: skip
    saved, weight = tensors_of(tmp_path), model["a"][2].weight.detach()
    assert {name for name in saved if "scale" in name} == {"a.2.weight_scale"}
    scale = np.float32(448) / np.float32(weight.abs().max())
    assert saved["a.2.weight_scale"] == 1 / scale
    codes = fp8_numpy.saturating_cast(weight.numpy(), scale, "e4m3")
    assert np.array_equal(saved["a.2.weight"].view(torch.uint8).numpy(), codes)


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


def test_llama_as_vllm_reads_it(tmp_path: Path) -> None:
    wrapped, batch = made("llama")
    export(trained(wrapped.net, lambda model: model(**batch).logits), tmp_path, dtype=torch.bfloat16)
    tensors = tensors_of(tmp_path)
    shapes = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32),
              "self_attn.o_proj": (32, 32), "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32),
              "mlp.down_proj": (32, 64)}  # fmt: skip
    expected = {"model.embed_tokens.weight": (96, 32), "model.norm.weight": (32,), "lm_head.weight": (96, 32)}
    of_linear = {}
    for layer in ("model.layers.0", "model.layers.1"):
        expected |= {f"{layer}.{norm}_layernorm.weight": (32,) for norm in ("input", "post_attention")}
        of_linear |= {f"{layer}.{linear}": shape for linear, shape in shapes.items()}
    for path, shape in of_linear.items():
        expected |= {f"{path}.weight": shape, f"{path}.weight_scale": (), f"{path}.input_scale": ()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert in_fp8(tmp_path) == {f"{path}.weight" for path in of_linear}
    assert {tensors[name].dtype for name in tensors if name.endswith("_scale")} == {torch.float32}
    assert {tensors[name].dtype for name in tensors if "_proj" not in name} == {torch.bfloat16}
    assert quantization(tmp_path)["ignored_layers"] == ["lm_head"]
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.architectures, config.dtype) == (["LlamaForCausalLM"], torch.bfloat16)
    # q, k and v read the same tensor, so their static input scales agree, as vLLM's fused layer requires
    assert len({tensors[f"model.layers.1.self_attn.{name}_proj.input_scale"].item() for name in "qkv"}) == 1
    assert metadata_of(tmp_path)["format"] == "pt"


def test_wrappers_do_not_show_in_names(tmp_path: Path) -> None:
    plain = trained(small_mlp(), on(8, 32))
    export(plain, tmp_path / "plain")
    wrapped = nn.Sequential(checkpoint_wrapper(plain[0]), plain[1], torch.compile(plain[2], backend="eager"))
    expected = tensors_of(tmp_path / "plain")
    for name, model in {"parts": wrapped, "whole": torch.compile(plain, backend="eager")}.items():
        export(model, tmp_path / name)
        tensors = tensors_of(tmp_path / name)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor.float(), expected[key].float()) for key, tensor in tensors.items())
        assert metadata_of(tmp_path / name) == metadata_of(tmp_path / "plain")


def test_another_dtype_rounds_only_what_is_not_fp8(tmp_path: Path) -> None:
    model = trained(small_mlp(), on(8, 32))
    export(model, tmp_path, dtype=torch.bfloat16)
    loaded = load_exported(small_mlp(), tmp_path)
    assert torch.equal(loaded[0].bias, model[0].bias.bfloat16().float())
    x = torch.randn(8, 32)
    assert torch.allclose(loaded(x), model.eval()(x), atol=1e-2)
    with pytest.raises(TypeError, match=r"one of float32, bfloat16, float16, got torch\.float64"):
        export(model, tmp_path, dtype=torch.float64)


class ForwardInE5m2(DelayedScaling):
    def format_of(self, role: Role) -> Fp8Format:
        return E5M2


def changed(change: Callable[[nn.Module], object], steps: int = 1, size: float = 1.0) -> nn.Module:
    model = trained(small_mlp(), lambda model: model(torch.full((8, 32), size)), steps)
    with torch.no_grad():
        change(model)
    return model


def fill(name: str, value: float) -> Callable[[nn.Module], object]:
    return lambda model: model.get_parameter(name).view(-1)[3].fill_(value)


RULE = r"a scale in a file must be a number from 2\*\*-118 to 2\*\*118"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "plain": (small_mlp, r"no layers that run in FP8. Convert it"),
    "fallen back": (lambda: changed(lambda m: [fall_back(m, at) for at in "02"]), "no layers that run in FP8"),
    "NaN in a weight": (lambda: changed(fill("2.weight", float("nan"))), r"2\.weight has values that are not finite"),
    "inf in a bias": (lambda: changed(fill("2.bias", float("inf"))), r"2\.bias has values that are not finite in fl"),
    "too large": (lambda: changed(fill("0.bias", 1e6)), r"0\.bias has values that are not finite in float16"),
    "E5M2": (lambda: convert(small_mlp(), ForwardInE5m2()), r"only E4M3, and the recipe casts 0\.input to e5m2"),
    "a tiny weight": (lambda: changed(lambda m: m[0].weight.mul_(1e-34)), rf"{RULE}.* not: 0\.weight \(.*e\+37\)\. L"),
    "a tiny input": (lambda: changed(len, size=1e-35), rf"{RULE}.* not: 0\.input \(4\.48e\+37\)\. Leave the layers"),
    "renamed": (lambda: changed(lambda m: nn.utils.parametrizations.weight_norm(m[0])), r"no '0\.weight' in the model"),
    "a name taken": (
        lambda: changed(lambda m: m[0].register_buffer("input_scale", torch.ones(()))), r"a tensor '0\.input_scale'"
    ),
    "meta": (lambda: changed(len).to("meta"), r"0\.weight is on the meta device"),
}  # fmt: skip


DYNAMIC: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "not trained": (lambda: convert(small_mlp()), r"no history of a training, .*: 0\.input, 2\.input\.$"),
    "loaded": (lambda: changed(lambda m: m.load_state_dict(small_mlp().state_dict())), r": 0\.input, 2\.input\.$"),
    "one layer loaded": (
        lambda: changed(lambda m: m[2].load_state_dict(small_mlp()[2].state_dict())), r": 2\.input\.$"
    ),
    "moved": (lambda: changed(lambda m: to_current(scaling_state(m), 0)), r"on current scaling: 0\.input\.$"),
}  # fmt: skip


@pytest.mark.parametrize("what", DYNAMIC)
def test_where_a_history_is_empty_all_inputs_are_scaled_by_the_reader(what: str, tmp_path: Path) -> None:
    make, message = DYNAMIC[what]
    model = make()
    with pytest.warns(UserWarning, match=message):
        export(model, tmp_path)
    assert quantization(tmp_path)["activation_scheme"] == "dynamic"
    assert not [name for name in tensors_of(tmp_path) if name.endswith("input_scale")]
    x = 1000 * torch.randn(16, 32)
    with torch.no_grad():
        for recipe in (DelayedScaling(), CurrentScaling()):
            loaded = load_exported(convert(small_mlp(), recipe), tmp_path)
            assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_a_margin_is_for_training_alone(tmp_path: Path) -> None:
    model = convert(small_mlp(), CurrentScaling(2))
    export(model, tmp_path)
    x = torch.randn(16, 32)
    assert torch.equal(load_exported(small_mlp(), tmp_path)(x), model.eval()(x))


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_exported(what: str, tmp_path: Path) -> None:
    make, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        export(make(), tmp_path / "out", dtype=torch.float16 if what == "too large" else None)
    assert not (tmp_path / "out").exists()


def test_entries_that_are_no_whole_tensors(tmp_path: Path) -> None:
    class WithExtra(nn.Sequential):
        def get_extra_state(self) -> Any:
            return {"step": 3}

    model = trained(small_mlp(), on(8, 32))
    with pytest.raises(TypeError, match=r"_extra_state: safetensors files hold tensors only.* a dict"):
        export(WithExtra(*model), tmp_path)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh))
        with pytest.raises(TypeError, match=r"0\.weight is sharded .*full_tensor"):
            export(model, tmp_path / "out")
    finally:
        dist.destroy_process_group()


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(small_mlp(), on(8, 32))
    target = tmp_path / "a" / "b"
    assert export(model, target) == target
    assert sorted(os.listdir(target)) == ["config.json", "model.safetensors"]
    modes = {stat.S_IMODE((target / name).stat().st_mode) for name in os.listdir(target)}
    (tmp_path / "other").touch()
    assert modes == {stat.S_IMODE((tmp_path / "other").stat().st_mode)}
    with pytest.raises(FileExistsError, match=r"holds model\.safetensors and config\.json already.*overwrite=True"):
        export(model, target)
    before = (target / "model.safetensors").read_bytes()
    (target / "tokenizer.json").write_text("{}")
    trained(model, on(8, 32), 1)
    # an interrupted export leaves the earlier files, and nothing else
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(model, target, overwrite=True)
    monkeypatch.undo()
    assert (target / "model.safetensors").read_bytes() == before
    assert sorted(os.listdir(target)) == ["config.json", "model.safetensors", "tokenizer.json"]
    # one interrupted between its two files leaves nothing that could be loaded
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: 1 / 0 if to.name == "config.json" else replace(self, to))
    with pytest.raises(ZeroDivisionError):
        export(model, target, overwrite=True)
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_exported(small_mlp(), target)
    export(model, str(target), overwrite=True)
    assert (target / "model.safetensors").read_bytes() != before
    with pytest.raises(FileExistsError, match=r"must be a folder, and .* is a file"):
        export(model, target / "tokenizer.json")
    (target / "model-00001-of-00002.safetensors").write_text("")
    with pytest.raises(FileExistsError, match=r"weights of another model.*model-00001-of-00002"):
        export(model, target, overwrite=True)


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(small_mlp(), on(8, 32))
    export(model, tmp_path)
    original = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    for call in (lambda: export(copy.deepcopy(model), tmp_path / "out"), lambda: load_exported(small_mlp(), tmp_path)):
        with pytest.raises(ImportError, match=r"pip install safetensors"):
            call()
