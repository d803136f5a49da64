"""Exported models: their files, a reader by vLLM's rule as well as ours, and bit-identical outputs after loading."""

from __future__ import annotations

import builtins
import copy
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp8_numpy
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import small_mlp
from sqnr import sqnr
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformer_models import made
from transformers.pytorch_utils import Conv1D

from lightning_fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    convert,
    describe,
    export,
    fall_back,
    load_exported,
    scaling_state,
)
from lightning_fp8.examples import ByteGPT
from lightning_fp8.export.layout import amax_of_scale, codes_of, scale_names
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.ops.formats import E5M2, Fp8Format, Role
from lightning_fp8.scaling.state import ScalingState

Run = Callable[[nn.Module], Tensor]


def trained(model: nn.Module, run: Run, steps: int = 2, **options: Any) -> nn.Module:
    """The model converted, after some steps of training, of which the last has changed the weights."""
    convert(model, DelayedScaling(amax_history_len=4), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        run(model).float().square().mean().backward()
        scaling_state(model).update()
        optimizer.step()
    return model


def same_outputs(model: nn.Module, loaded: nn.Module, run: Run) -> None:
    model.eval()
    assert not loaded.training
    for autocast in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert torch.equal(run(model), run(loaded))


def round_trip(path: Path, make: Callable[[], nn.Module], run: Run, **options: Any) -> tuple[nn.Module, nn.Module]:
    model = trained(make(), run, **options)
    return model, back(path, model, make, run)


def back(path: Path, model: nn.Module, make: Callable[[], nn.Module], run: Run) -> nn.Module:
    """The export read into another model gives the same model, with the same outputs, and in FP8 where it was."""
    assert export(model, path / "out") == path / "out"
    fresh = make()
    for parameter in fresh.parameters():
        nn.init.normal_(parameter)
    loaded = load_exported(fresh, path / "out")
    assert loaded is fresh
    same_outputs(model, loaded, run)
    assert [row[:3] for row in describe(loaded)] == [row[:3] for row in describe(model)]
    return loaded


def on(*shape: int) -> Run:
    x = torch.randn(*shape)
    return lambda model: model(x)


def tensors_of(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path / "model.safetensors", framework="pt") as file:
        return file.metadata()


def quantization(path: Path) -> Any:
    return json.loads((path / "config.json").read_text())["quantization_config"]


def test_mlp(tmp_path: Path) -> None:
    # with a window in which the loaded scale stays
    model, loaded = round_trip(tmp_path, lambda: convert(small_mlp(), DelayedScaling(amax_history_len=4)), on(16, 32))
    # the exported model is unchanged, and the other's scales agree with its histories
    assert model[0].weight.dtype == torch.float32
    state, other = scaling_state(model), scaling_state(loaded)
    # two inputs, two gradients, two weights: these have been cast in both models since
    assert torch.equal(other.scale[[0, 1, 4, 5]], state.scale[[0, 1, 4, 5]])
    assert torch.equal(other.amax[4:], state.amax[4:])
    assert torch.allclose(448 / other.amax_history[0, :2], other.scale[:2])
    assert (other.amax_history > 0).sum(0).tolist() == [1, 1, 0, 0]
    assert quantization(tmp_path / "out") == {
        "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "ignored_layers": [],
    }  # fmt: skip
    # training can continue: with a smaller input, the scale still follows the history
    loaded.train()(1e-3 * torch.randn(16, 32)).sum().backward()
    other.update()
    assert torch.allclose(other.scale[:2], state.scale[:2], rtol=1e-6)
    assert (other.amax_history > 0).sum(0).tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize("tied", [False, True])
def test_byte_gpt(tmp_path: Path, tied: bool) -> None:
    tokens = torch.randint(256, (2, 12))

    def make() -> nn.Module:
        model = ByteGPT(layers=2, width=32, heads=2, context=16)
        if tied:
            model.head.weight = model.byte_embedding.weight
        return model

    model, loaded = round_trip(tmp_path, make, lambda model: model(tokens))
    tensors = tensors_of(tmp_path / "out")
    # the embedding looks up rows in it: it cannot be stored in FP8, although the head's GEMM runs in FP8
    assert ("head.weight" in tensors) is not tied
    assert ("head.weight_scale" in tensors) is not tied
    assert quantization(tmp_path / "out")["ignored_layers"] == (["head"] if tied else [])
    assert (loaded.head.weight is loaded.byte_embedding.weight) is tied
    assert loaded.head.in_fp8
    assert loaded.state_dict().keys() == model.state_dict().keys()


def test_after_a_fit(tmp_path: Path) -> None:
    batches = torch.randint(256, (8, 13), dtype=torch.uint8)
    trainer = pl.Trainer(
        max_steps=3, accelerator="cpu", precision="fp8-delayed", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = ByteGPT(layers=1, width=32, heads=2, context=16)
    trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=2))
    back(tmp_path, model, lambda: ByteGPT(layers=1, width=32, heads=2, context=16), lambda m: m(batches.long()))


def test_transformer_encoder(tmp_path: Path) -> None:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    round_trip(tmp_path, make, on(2, 6, 32))
    tensors = tensors_of(tmp_path / "out")
    name = "layers.1.self_attn.in_proj_"
    assert tensors[name + "weight"].dtype == torch.float8_e4m3fn
    assert tensors[name + "weight"].shape == (96, 32)
    assert {name + "weight_scale", name + "input_scale", "layers.1.linear2.input_scale"} < tensors.keys()


def test_attention_with_separate_projections(tmp_path: Path) -> None:
    query, key, value = torch.randn(2, 6, 32), torch.randn(2, 5, 24), torch.randn(2, 5, 40)

    def run(model: nn.Module) -> Tensor:
        return model(query, key, value, need_weights=False)[0]

    round_trip(tmp_path, lambda: nn.MultiheadAttention(32, 4, batch_first=True, kdim=24, vdim=40), run)
    tensors = tensors_of(tmp_path / "out")
    fp8 = {name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}
    assert fp8 == {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"}
    assert {"k_proj_weight_scale", "k_proj_input_scale"} < tensors.keys()


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_hugging_face(tmp_path: Path, name: str) -> None:
    batch = made(name)[1]
    model, loaded = round_trip(tmp_path, lambda: made(name)[0].net, lambda model: model(**batch).logits)
    # the config is the model's own
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert type(config) is type(model.config)
    assert config.architectures == [type(model).__name__]
    head = model.get_output_embeddings().weight
    stored = next(key for key, tensor in model.state_dict(keep_vars=True).items() if tensor is head)
    assert tensors_of(tmp_path / "out")[stored].dtype == torch.float32
    assert all(row.converted for row in describe(loaded))


def test_gpt2_keeps_its_layout(tmp_path: Path) -> None:
    wrapped, batch = made("gpt2")
    export(trained(wrapped.net, lambda model: model(**batch).logits), tmp_path)
    tensors = tensors_of(tmp_path)
    assert tensors["transformer.h.0.mlp.c_fc.weight"].shape == (32, 128)
    assert tensors["transformer.h.0.mlp.c_fc.weight"].dtype == torch.float8_e4m3fn
    assert "lm_head.weight" not in tensors
    assert quantization(tmp_path)["ignored_layers"] == ["lm_head"]


def test_llama_as_vllm_reads_it(tmp_path: Path) -> None:
    wrapped, batch = made("llama")
    export(trained(wrapped.net, lambda model: model(**batch).logits), tmp_path, dtype=torch.bfloat16)
    tensors = tensors_of(tmp_path)
    shapes = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32),
              "self_attn.o_proj": (32, 32), "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32),
              "mlp.down_proj": (32, 64)}  # fmt: skip
    expected = {"model.embed_tokens.weight": (96, 32), "model.norm.weight": (32,), "lm_head.weight": (96, 32)}
    for layer in ("model.layers.0", "model.layers.1"):
        expected |= {f"{layer}.{norm}_layernorm.weight": (32,) for norm in ("input", "post_attention")}
        for linear, shape in shapes.items():
            path = f"{layer}.{linear}"
            assert tensors[f"{path}.weight"].dtype == torch.float8_e4m3fn
            assert tensors[f"{path}.weight_scale"].dtype == torch.float32
            assert tensors[f"{path}.input_scale"].dtype == torch.float32
            expected |= {f"{path}.weight": shape, f"{path}.weight_scale": (), f"{path}.input_scale": ()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    others = {tensors[name].dtype for name in tensors if "_proj" not in name}
    assert others == {torch.bfloat16}
    assert quantization(tmp_path)["ignored_layers"] == ["lm_head"]
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    # q, k and v read the same tensor, so their static input scales agree, as vLLM's fused layer requires
    scales = {tensors[f"model.layers.1.self_attn.{name}_proj.input_scale"].item() for name in "qkv"}
    assert len(scales) == 1
    assert metadata_of(tmp_path)["format"] == "pt"


def test_transformers_does_not_read_one_scale_for_each_tensor(tmp_path: Path) -> None:
    """It has other names for scales; without them it takes codes for weights, as docs/export.md says."""
    wrapped, batch = made("llama")
    export(trained(wrapped.net, lambda model: model(**batch).logits), tmp_path)
    loaded, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    tensors = tensors_of(tmp_path)
    assert said["unexpected_keys"] == {name for name in tensors if name.endswith("_scale")}
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(loaded.get_parameter(name).float(), tensors[name].float())


@pytest.mark.parametrize("k_by_n", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_independent_reader_agrees(tmp_path: Path, dtype: torch.dtype, k_by_n: bool) -> None:
    """vLLM's rule without our code: codes by definition, ``x / input_scale`` in FP8, sums in fp64."""
    model = nn.Sequential(Conv1D(24, 40) if k_by_n else nn.Linear(40, 24))
    export(trained(model, on(16, 40)), tmp_path)
    tensors = tensors_of(tmp_path)
    # an input that saturates in places, because it is larger than any in training
    x = 1.5 * torch.randn(7, 40).to(dtype)
    weight_scale, input_scale = (tensors[f"0.{name}_scale"].double().numpy() for name in ("weight", "input"))
    values = fp8_numpy.code_values("e4m3")
    weight = values[tensors["0.weight"].view(torch.uint8).numpy()] * weight_scale
    codes = fp8_numpy.saturating_cast(x.float().numpy(), np.float32(1) / np.float32(input_scale), "e4m3")
    expected = values[codes] * input_scale @ (weight if k_by_n else weight.T) + tensors["0.bias"].double().numpy()
    with torch.no_grad():
        actual = model.eval()(x).double().numpy()
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6
    assert np.abs(actual - expected).max() < 2 * tolerance * np.abs(expected).max()
    assert (np.abs(values[codes]) == 448).any()


def test_static_scales_are_those_of_the_history(tmp_path: Path) -> None:
    x = torch.randn(16, 32)
    model = trained(small_mlp(), lambda model: model(x), 1)
    export(model, tmp_path)
    tensors = tensors_of(tmp_path)
    assert tensors["0.input_scale"].item() == pytest.approx(x.abs().max().item() / 448, rel=1e-6)
    # with the scale of its current values, after the last optimizer step, as an evaluation casts it
    weight = model[0].weight.detach().numpy()
    expected = fp8_numpy.saturating_cast(weight, np.float32(448) / np.abs(weight).max(), "e4m3")
    assert np.array_equal(tensors["0.weight"].view(torch.uint8).numpy(), expected)


def test_every_code_comes_back() -> None:
    """``code * (1 / scale)``, stored in fp32, is cast back to the same code, for every possible scale.

    In bf16 too, if the smallest value is a normal bf16 number.
    """
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[~codes.float().isnan()][None]
    largest = torch.finfo(torch.float32).max
    exponents = torch.empty(2000).uniform_(-119, 127)
    scales = torch.cat([torch.exp2(exponents), torch.tensor([1.0, 448.0, largest, 448.0 / largest])])
    for scale in scales:
        dequantized = finite.float() * scale.reciprocal()
        for dtype in (torch.float32, torch.bfloat16) if scale <= 2.0**117 else (torch.float32,):
            again = codes_of(dequantized.to(dtype), scale)
            assert torch.equal(again.view(torch.uint8), finite.view(torch.uint8)), (scale, dtype)
    nan = codes_of(torch.tensor([[float("nan")]]), torch.tensor(3.0))
    assert nan.float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.randn(16, 32, dtype=dtype)
    model = trained(small_mlp().to(dtype), lambda model: model(x))
    export(model, tmp_path, dtype=dtype)
    for make in (lambda: small_mlp().to(dtype), lambda: convert(small_mlp().to(dtype))):
        loaded = load_exported(make(), tmp_path)
        with torch.no_grad():
            assert torch.equal(model.eval()(x), loaded(x))


def test_ignored_modules_stay_plain(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.ModuleDict({"body": small_mlp(), "head[0]": nn.Linear(16, 24), "last": nn.Linear(24, 16)})

    x = torch.randn(8, 32)

    def run(model: Any) -> Tensor:
        return model["last"](model["head[0]"](model["body"](x)))

    _, loaded = round_trip(tmp_path, make, run, ignore_modules=("head[[]0]", "body.0"))
    assert type(loaded["head[0]"]) is nn.Linear
    assert quantization(tmp_path / "out")["ignored_layers"] == ["body.0", "head[0]"]
    # also for a model that was converted as a whole
    again = load_exported(convert(make()), tmp_path / "out")
    assert type(again["head[0]"]) is nn.Linear
    same_outputs(loaded, again, run)


@pytest.mark.parametrize("fallen", [("self_attn.in_proj",), ("self_attn.out_proj", "linear2"), ("linear1",)])
def test_layers_that_fell_back(tmp_path: Path, fallen: tuple[str, ...]) -> None:
    def make() -> nn.Module:
        return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    run = on(2, 6, 32)
    model = trained(make(), run)
    for name in fallen:
        fall_back(model, name)
    loaded = back(tmp_path, model, make, run)
    tensors = tensors_of(tmp_path / "out")
    plain = {name for name, tensor in tensors.items() if "weight" in name and tensor.dtype == torch.float32}
    for name in fallen:
        weight = name + ("_weight" if name.endswith("in_proj") else ".weight")
        assert weight in plain
        assert not {*scale_names(weight)} & tensors.keys()
    assert sorted(quantization(tmp_path / "out")["ignored_layers"]) == sorted(fallen)
    assert scaling_state(loaded).fallbacks == scaling_state(model).fallbacks


def test_conv1d_that_fell_back(tmp_path: Path) -> None:
    run = on(5, 24)
    model = trained(nn.Sequential(Conv1D(40, 24), nn.Linear(40, 16)), run)
    fall_back(model, "0")
    back(tmp_path, model, lambda: nn.Sequential(Conv1D(40, 24), nn.Linear(40, 16)), run)


def test_wrappers_do_not_show_in_names(tmp_path: Path) -> None:
    run = on(8, 32)
    plain = trained(small_mlp(), run)
    export(plain, tmp_path / "plain")
    wrapped = nn.Sequential(checkpoint_wrapper(plain[0]), plain[1], torch.compile(plain[2], backend="eager"))
    export(wrapped, tmp_path / "parts")
    export(torch.compile(plain, backend="eager"), tmp_path / "whole")
    expected = tensors_of(tmp_path / "plain")
    for name in ("parts", "whole"):
        tensors = tensors_of(tmp_path / name)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor.float(), expected[key].float()) for key, tensor in tensors.items())
        assert metadata_of(tmp_path / name) == metadata_of(tmp_path / "plain")
    fresh = small_mlp()
    load_exported(nn.Sequential(checkpoint_wrapper(fresh[0]), *fresh[1:]), tmp_path / "plain")
    same_outputs(plain, fresh.eval(), run)


def test_of_a_lightning_module_whole_or_a_part(tmp_path: Path) -> None:
    wrapped, batch = made("llama")
    trained(wrapped, lambda model: model.net(**batch).logits)
    export(wrapped, tmp_path / "whole")
    export(wrapped.net, tmp_path / "net")
    assert {f"net.{name}" for name in tensors_of(tmp_path / "net") if "lm_head" not in name} == {
        name for name in tensors_of(tmp_path / "whole") if "lm_head" not in name
    }
    for path, pick in ("whole", lambda model: model), ("net", lambda model: model.net):
        fresh = made("llama")[0]
        load_exported(pick(fresh), tmp_path / path)
        same_outputs(wrapped, fresh.eval(), lambda model: model.net(**batch).logits)


def test_shared_layers_and_weights(tmp_path: Path) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
            self.again, self.b.weight = self.a, self.a.weight
            numbers = torch.arange(10.0)
            self.register_buffer("part", numbers[2:5])
            self.register_buffer("overlapping", numbers[4:8])

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.again(self.a(x).relu()).relu())

    model, loaded = round_trip(tmp_path, Shared, on(8, 16))
    tensors = tensors_of(tmp_path / "out")
    assert {name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn} == {"a.weight"}
    # if one of them reads the weight without FP8, the weight itself is kept
    fall_back(model, "b")
    export(model, tmp_path / "out", overwrite=True)
    assert not any(t.dtype == torch.float8_e4m3fn for t in tensors_of(tmp_path / "out").values())
    assert sorted(quantization(tmp_path / "out")["ignored_layers"]) == ["a", "b"]
    same_outputs(model, load_exported(loaded, tmp_path / "out"), on(8, 16))


def test_a_weight_of_zeros_is_exported(tmp_path: Path) -> None:
    model = small_mlp()
    nn.init.zeros_(model[2].weight)
    model[2].weight.requires_grad_(False)
    run = on(8, 32)
    loaded = back(tmp_path, trained(model, run), small_mlp, run)
    assert tensors_of(tmp_path / "out")["2.weight_scale"] == 1
    assert loaded[2].weight.eq(0).all()


def test_half_the_size_of_bf16(tmp_path: Path) -> None:
    model = trained(small_mlp(512), on(4, 512), 1)
    export(model, tmp_path, dtype=torch.bfloat16)
    in_bf16 = sum(2 * parameter.numel() for parameter in model.parameters())
    assert 0.5 < (tmp_path / "model.safetensors").stat().st_size / in_bf16 < 0.51


def test_another_dtype_rounds_only_what_is_not_fp8(tmp_path: Path) -> None:
    model = trained(small_mlp(), on(8, 32))
    export(model, tmp_path, dtype=torch.bfloat16)
    loaded = load_exported(small_mlp(), tmp_path)
    assert torch.equal(loaded[0].bias, model[0].bias.bfloat16().float())
    x = torch.randn(8, 32)
    assert torch.allclose(loaded(x), model.eval()(x), atol=1e-2)
    with pytest.raises(TypeError, match=r"one of float32, bfloat16, float16, got torch\.float64"):
        export(model, tmp_path, dtype=torch.float64)


def test_a_file_of_somebody_elses(tmp_path: Path) -> None:
    """Without our metadata, and with scales of shape ``[1]``, as in `compressed-tensors`."""
    run = on(8, 32)
    model = trained(small_mlp(), run, ignore_modules=("2",))
    export(model, tmp_path)
    tensors = {name: t.reshape(1) if name.endswith("_scale") else t for name, t in tensors_of(tmp_path).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_exported(small_mlp(), tmp_path)
    assert [row.converted for row in describe(loaded)] == [True, False]
    with torch.no_grad():
        # a code can differ only where 1 / (1 / scale) is not the scale
        assert torch.allclose(run(loaded), run(model.eval()), atol=1e-2)
    (scale,), state = (scaling_state(model).scale[:1], scaling_state(loaded))
    assert torch.equal(state.scale[:1], scale.reciprocal().reciprocal()[None])
    # the weight's own scale, except for the last bit
    theirs = scaling_state(model).scale[-1]
    assert state.scale[-1].item() == pytest.approx(theirs.item(), rel=3e-7)


def test_a_weight_of_somebody_elses_that_is_rounded_again_is_named(tmp_path: Path) -> None:
    """Its scale leaves room above its largest code, as when several layers share a scale."""
    run = on(8, 32)
    model = trained(small_mlp(), run)
    export(model, tmp_path)

    def leave_room(tensors: dict[str, Tensor]) -> None:
        tensors["0.weight_scale"] *= 1.5
        codes = codes_of(model[0].weight, tensors["0.weight_scale"].reciprocal())
        tensors["0.weight"] = codes

    edited(tmp_path, leave_room, keep_metadata=False)
    with pytest.warns(UserWarning, match=r"1 weights are rounded to FP8 a second time.*: 0\.weight\.") as said:
        loaded = load_exported(small_mlp(), tmp_path)
    assert len(said) == 1
    with torch.no_grad():
        # two more roundings of the weight than in the other, of about 28 dB each
        assert sqnr(run(loaded), run(model.eval())) > 22


def test_an_attention_that_is_fp8_in_part_of_somebody_elses(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    run = on(2, 6, 32)
    model = trained(make(), run)
    fall_back(model, "self_attn.in_proj")
    export(model, tmp_path)
    edited(tmp_path, lambda tensors: None, keep_metadata=False)
    loaded = load_exported(make(), tmp_path)
    assert scaling_state(loaded).fallbacks == ("self_attn.in_proj",)


@pytest.mark.parametrize("margin", [0, 3])
def test_histories_fit_the_recipe_of_the_model(tmp_path: Path, margin: int) -> None:
    run = on(8, 32)
    export(trained(small_mlp(), run), tmp_path)
    state = scaling_state(load_exported(convert(small_mlp(), DelayedScaling(margin=margin)), tmp_path))
    for row in (0, 1):
        assert state.scale[row].item() == pytest.approx(448 / state.amax_history[0, row].item() / 2**margin)


def test_scales_survive_whose_reciprocal_is_rounded(tmp_path: Path) -> None:
    run = on(8, 32)
    model = trained(small_mlp(), run)
    scale = scaling_state(model).scale
    awkward = [s for s in torch.rand(1000) * 100 + 1 if s.reciprocal().reciprocal() != s]
    scale[[0, 1]] = torch.stack(awkward[:2])
    loaded = back(tmp_path, model, small_mlp, run)
    assert torch.equal(scaling_state(loaded).scale[:2], scale[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_scale_of_a_weight_has_an_amax_that_gives_it(dtype: torch.dtype) -> None:
    amaxes = (torch.rand(3000) * 2.0 ** torch.randint(-14, 15, (3000,))).to(dtype).float()
    for amax in amaxes[amaxes > 0]:
        scale = torch.tensor(448.0) / amax
        found = amax_of_scale(scale)
        assert torch.tensor(448.0) / found == scale
        # so that a model in this dtype can hold it
        assert found.to(dtype) == found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_current_scaling_needs_no_scales_of_inputs(tmp_path: Path, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = convert(nn.ModuleDict({"a": small_mlp(), "head": nn.Linear(16, 64)}), CurrentScaling(wgrad="bf16"))
    # the head's weight is shared with a layer outside FP8: its scale is in the metadata
    model["tied"] = nn.Embedding(64, 16)
    model["tied"].weight = model["head"].weight
    fall_back(model, "a.0")
    export(model, tmp_path / "out", dtype=dtype)
    assert quantization(tmp_path / "out") == {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None,
        "ignored_layers": ["a.0", "head"],
    }  # fmt: skip
    saved, weight = tensors_of(tmp_path / "out"), model["a"][2].weight.detach()
    assert {name for name in saved if "scale" in name} == {"a.2.weight_scale"}
    scale = np.float32(448) / np.float32(weight.abs().max())
    assert saved["a.2.weight_scale"] == 1 / scale
    codes = fp8_numpy.saturating_cast(weight.numpy(), scale, "e4m3")
    assert np.array_equal(saved["a.2.weight"].view(torch.uint8).numpy(), codes)
    if dtype is not None:
        return
    for converted in (False, True):
        fresh = nn.ModuleDict({"a": small_mlp(), "head": nn.Linear(16, 64), "tied": nn.Embedding(64, 16)})
        fresh["tied"].weight = fresh["head"].weight
        loaded = load_exported(convert(fresh, CurrentScaling()) if converted else fresh, tmp_path / "out")
        assert scaling_state(loaded).recipe == CurrentScaling()
        assert scaling_state(loaded).fallbacks == ("a.0",)
        for size in (1.0, 1e5):
            x = torch.randn(16, 32) * size
            same_outputs(model, loaded, lambda model, x=x: model["head"](model["a"](x)))


def test_what_has_no_static_scales(tmp_path: Path) -> None:
    model = convert(small_mlp(), CurrentScaling()).eval()
    with pytest.raises(ValueError, match=r"CurrentScaling\(margin=2.*readers of the layout keep none"):
        export(convert(small_mlp(), CurrentScaling(2)), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(trained(small_mlp(), lambda model: model(torch.randn(4, 32))), tmp_path / "static")
    with pytest.raises(ValueError, match=r"converted with CurrentScaling.*has static scales of inputs.*unconvert"):
        load_exported(model, tmp_path / "static")
    export(model, tmp_path / "dynamic")
    for other in (DelayedScaling(), CurrentScaling(1), BlockScaling()):
        with pytest.raises(ValueError, match=r"converted with .*scales inputs by their own values.*unconvert"):
            load_exported(convert(small_mlp(), other), tmp_path / "dynamic")
    edited(tmp_path / "dynamic", lambda t: t.update({"0.input_scale": torch.ones(())}))
    with pytest.raises(ValueError, match=r"0\.input_scale"):
        load_exported(small_mlp(), tmp_path / "dynamic")


class ForwardInE5m2(DelayedScaling):
    def format_of(self, role: Role) -> Fp8Format:
        return E5M2


def test_what_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, target = convert(small_mlp()), tmp_path / "out"
    with pytest.raises(ValueError, match=r"no layers that run in FP8. Convert it"):
        export(small_mlp(), target)
    with pytest.raises(ValueError, match=r"2 tensors have no history.* 0\.input, 2\.input\. Train for at least one st"):
        export(model, target)
    model = trained(small_mlp(), on(8, 32))
    for value in (float("nan"), float("inf")):
        for name in ("2.weight", "2.bias"):
            broken = copy.deepcopy(model)
            with torch.no_grad():
                broken.get_parameter(name).view(-1)[3] = value
            with pytest.raises(ValueError, match=rf"{name} has values that are not finite in float32"):
                export(broken, target)
    large = copy.deepcopy(model)
    with torch.no_grad():
        large[0].bias[0] = 1e6
    with pytest.raises(ValueError, match=r"0\.bias has values that are not finite in float16"):
        export(large, target, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"knows only E4M3, and the recipe casts 0\.input to e5m2"):
        export(convert(small_mlp(), ForwardInE5m2()), target)
    tiny, rule = trained(small_mlp(), on(8, 32), 1), r"a scale in a file must be a number from 2\*\*-118 to 2\*\*118"
    with torch.no_grad():
        tiny[0].weight.mul_(1e-34)
    with pytest.raises(ValueError, match=rf"{rule}.* not: 0\.weight \(.*e\+37\)\. Leave the layers out"):
        export(tiny, target)
    tiny = trained(small_mlp(), lambda model: model(torch.full((8, 32), 1e-35)), 1)
    with pytest.raises(ValueError, match=rf"{rule}.* not: 0\.input \(4\.48e\+37\)\. Leave the layers out"):
        export(tiny, target)
    fallen = copy.deepcopy(model)
    for name in ("0", "2"):
        fall_back(fallen, name)
    with pytest.raises(ValueError, match="no layers that run in FP8"):
        export(fallen, target)
    renamed = copy.deepcopy(model)
    nn.utils.parametrizations.weight_norm(renamed[0])
    with pytest.raises(ValueError, match=r"no '0\.weight' in the model's `state_dict`"):
        export(renamed, target)
    named = copy.deepcopy(model)
    named[0].register_buffer("input_scale", torch.ones(()))
    with pytest.raises(ValueError, match=r"has a tensor '0\.input_scale'"):
        export(named, target)
    assert not target.exists()


def test_meta_sharded_and_other_entries(tmp_path: Path) -> None:
    model = trained(small_mlp(), on(8, 32))
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device"):
        export(copy.deepcopy(model).to("meta"), tmp_path)

    class WithExtra(nn.Sequential):
        def get_extra_state(self) -> Any:
            return {"step": 3}

    with pytest.raises(TypeError, match=r"_extra_state: safetensors files hold tensors only.* a dict"):
        export(WithExtra(*model), tmp_path)


def test_sharded_parameters_are_refused(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = trained(small_mlp(), on(8, 32))
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
    export(model, target)
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
    assert sorted(os.listdir(target)) == ["config.json", "model.safetensors", "tokenizer.json"]
    with pytest.raises(FileExistsError, match=r"must be a folder, and .* is a file"):
        export(model, target / "tokenizer.json")
    (target / "model-00001-of-00002.safetensors").write_text("")
    with pytest.raises(FileExistsError, match=r"weights of another model.*model-00001-of-00002"):
        export(model, target, overwrite=True)


def edited(path: Path, change: Callable[[dict[str, Tensor]], Any], keep_metadata: bool = True) -> None:
    tensors, metadata = tensors_of(path), metadata_of(path) if keep_metadata else {}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", metadata)


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.pop("2.bias"), r"the model has and the file lacks: 2\.bias"),
    (lambda t: t.update({"3.bias": torch.ones(1)}), r"the file has and the model lacks: 3\.bias"),
    (lambda t: t.pop("0.input_scale"), r"lack their scales as single numbers: 0\.input_scale"),
    (lambda t: t.update({"0.weight_scale": torch.ones(64)}), r"lack their scales as single numbers: 0\.weight_scale"),
    (lambda t: t.update({"0.weight_scale": t["0.weight_scale"] * 2}), r"other than those in the file's metadata: 0\.w"),
    (lambda t: t.update({"0.weight": t["0.weight"].t()}), r"0\.weight \(\(32, 64\) float8_e4m3fn in the file, \(64"),
    (lambda t: t.update({"2.bias": torch.ones(4, dtype=torch.int32)}), r"2\.bias \(\(4,\) int32 in the file"),
])  # fmt: skip
def test_files_that_do_not_fit(tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], message: str) -> None:
    export(trained(small_mlp(), on(8, 32)), tmp_path)
    edited(tmp_path, change)
    model = small_mlp()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        load_exported(model, tmp_path)
    assert not any(isinstance(layer, Fp8Module) for layer in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("change", "message"), [
    ({"quant_method": "compressed-tensors"}, r"must have quant_method='fp8', got 'compressed-tensors'"),
    ({"activation_scheme": "both"}, r"must have activation_scheme='static' or 'dynamic', got 'both'"),
    ({"activation_scheme": "dynamic"}, r"static scales, where .* activation_scheme='dynamic': 0\.input_scale"),
    ({"weight_block_size": [128, 128]}, r"must have weight_block_size=None, got \[128, 128\]"),
])  # fmt: skip
def test_other_quantizations(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    export(trained(small_mlp(), on(8, 32)), tmp_path)
    config = {"quantization_config": {**quantization(tmp_path), **change}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_exported(small_mlp(), tmp_path)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    export(trained(small_mlp(), on(8, 32)), tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, text = weights.read_bytes(), config.read_text()
    for length in (len(whole) - 1, len(whole) // 2, 20, 0):
        weights.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
            load_exported(small_mlp(), tmp_path)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors in"):
        load_exported(small_mlp(), tmp_path)
    weights.write_bytes(whole)
    for content, message in (text[:20], "is not valid JSON"), ("{}", "no `quantization_config`"), ("[]", "no `quanti"):
        config.write_text(content)
        with pytest.raises(ValueError, match=message):
            load_exported(small_mlp(), tmp_path)
    with pytest.raises(FileNotFoundError, match="no exported model in"):
        load_exported(small_mlp(), tmp_path / "nowhere")
    config.write_text(text)
    edited(tmp_path, lambda t: t.update({n: x.float() for n, x in t.items()}), keep_metadata=False)
    with pytest.raises(ValueError, match=r"has no torch\.float8_e4m3fn weights"):
        load_exported(small_mlp(), tmp_path)


def test_models_that_do_not_fit(tmp_path: Path) -> None:
    class Special(nn.Linear):
        pass

    export(trained(small_mlp(), on(8, 32)), tmp_path)
    other = small_mlp()
    other[2] = Special(64, 16)
    with pytest.raises(ValueError, match=r"ran in FP8 and cannot here.*2\.weight"):
        load_exported(other, tmp_path)
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device"):
        load_exported(small_mlp().to("meta"), tmp_path)
    # 2**-20 / 448 and its neighbours are not fp16 numbers
    tiny = trained(small_mlp(), lambda model: model(torch.ones(2, 32)))
    state = scaling_state(tiny)
    with torch.no_grad():
        tiny[0].weight.mul_(2.0**-18)
    state.scale[1] *= 2.0**18
    export(tiny, tmp_path, overwrite=True)
    with pytest.raises(ValueError, match=r"do not keep the values of the file.*0\.weight \(float16\)"):
        load_exported(small_mlp().half(), tmp_path)


def test_part_of_a_model_that_was_converted_as_a_whole(tmp_path: Path) -> None:
    model = trained(nn.Sequential(small_mlp(), nn.Linear(16, 16)), on(8, 32))
    export(model[0], tmp_path)
    same_outputs(model[0], load_exported(small_mlp(), tmp_path), on(8, 32))
    # loaded into a part, which gets its own scales; converting the whole model joins them
    whole = convert(nn.Sequential(small_mlp(), nn.Linear(16, 16)))
    load_exported(whole[0], tmp_path)
    same_outputs(model[0], whole[0], on(8, 32))
    assert scaling_state(convert(whole)).module_names == ("0.0", "0.2", "1")
    same_outputs(model[0], whole[0], on(8, 32))


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(small_mlp(), on(8, 32))
    export(model, tmp_path)
    original = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    for call in (lambda: export(model, tmp_path / "out"), lambda: load_exported(small_mlp(), tmp_path)):
        with pytest.raises(ImportError, match=r"pip install safetensors"):
            call()


def test_on_the_device_path(tmp_path: Path, cuda_half: Any) -> None:
    """The casts of the CUDA half, whose sources run on the CPU here, write the same codes."""
    run = on(32, 32)
    model = trained(small_mlp(), run)
    export(model, tmp_path / "out")
    assert isinstance(scaling_state(model), ScalingState)
    loaded = load_exported(small_mlp(), tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(run(model.eval()), run(loaded))
