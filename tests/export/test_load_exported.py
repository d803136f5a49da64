"""What ``load_exported`` makes of a file: bit-identical outputs, FP8 where it was, scales from which a run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import Run, Shared, in_fp8, on, quantization, rewrite, tensors_of, trained
from small_models import small_mlp
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
    load_exported,
    scaling_state,
)
from lightning_fp8.conversion import fall_back
from lightning_fp8.examples import ByteGPT
from lightning_fp8.modules.fp8_parameter import Fp8Parameter
from lightning_fp8.scalings.recipe import Recipe
from lightning_fp8.serialization.tensors import codes_of


def same_outputs(model: nn.Module, loaded: nn.Module, run: Run) -> None:
    model.eval()
    assert not loaded.training
    for autocast in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert torch.equal(run(model), run(loaded))


def back(folder: Path, model: nn.Module, make: Callable[[], nn.Module], run: Run) -> nn.Module:
    """The export read into another model gives the same model, with the same outputs, and in FP8 where it was."""
    export(model, folder)
    fresh = make()
    for parameter in fresh.parameters():
        nn.init.normal_(parameter)
    loaded = load_exported(fresh, folder)
    assert loaded is fresh
    same_outputs(model, loaded, run)
    assert [row[:3] for row in describe(loaded)] == [row[:3] for row in describe(model)]
    assert scaling_state(loaded).fallbacks == scaling_state(model).fallbacks
    assert loaded.state_dict().keys() == model.state_dict().keys()
    return loaded


def of_zeros() -> nn.Module:
    model = small_mlp()
    nn.init.zeros_(model[2].weight)
    model[2].weight.requires_grad_(False)
    return model


def gpt(tied: bool) -> nn.Module:
    model = ByteGPT(layers=1, width=32, heads=2, context=16)
    if tied:
        model.head.weight = model.byte_embedding.weight
    return model


def ends() -> nn.Sequential:
    model = nn.Sequential()
    for name, layer in {"body": small_mlp(), "head[0]": nn.Linear(16, 24), "last": nn.Linear(24, 16)}.items():
        model.add_module(name, layer)
    return model


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)


def of_attention(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(2, length, width, generator=generator) for length, width in ((6, 32), (5, 24), (5, 40))
    )
    return model(query, key, value, need_weights=False)[0]


TOKENS = torch.arange(24).view(2, 12)
# how it is made and run, the layers that fall back, settings, the weights that are FP8 in the file (a part of their
# names), and the layers that the config lists as plain
Case = tuple[Callable[[], nn.Module], Run, tuple[str, ...], dict[str, Any], set[str], list[str]]
CASES: dict[str, Case] = {
    "encoder": (encoder, on(2, 6, 32), (), {},
                {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"}, []),
    "projections": (lambda: nn.MultiheadAttention(32, 4, batch_first=True, kdim=24, vdim=40), of_attention, (), {},
                    {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"}, []),
    "ignored": (ends, on(8, 32), (), {"ignore_modules": ("head[[]0]", "body.0")}, {"body.2.weight", "last.weight"},
                ["body.0", "head[0]"]),
    "in_proj fell back": (encoder, on(2, 6, 32), ("self_attn.in_proj",), {},
                          {"self_attn.out_proj.weight", "linear1.weight", "linear2.weight"}, ["self_attn.in_proj"]),
    "conv1d fell back": (lambda: nn.Sequential(Conv1D(40, 24), nn.Linear(40, 16)), on(5, 24), ("0",), {}, {"1.weight"},
                         ["0"]),
    "zeros": (of_zeros, on(8, 32), (), {}, {"0.weight", "2.weight"}, []),
    "tied layers": (Shared, on(8, 16), (), {}, {"a.weight"}, []),
    # if one of them reads the weight without FP8, the weight itself is kept
    "one of them fell back": (Shared, on(8, 16), ("b",), {}, set(), ["a", "b"]),
    # the embedding looks up rows in it: it cannot be stored in FP8, although the head's GEMM runs in FP8
    "tied to an embedding": (lambda: gpt(True), lambda model: model(TOKENS), (), {}, {
        "blocks.0.up.weight"}, ["head"]),
    "not tied": (lambda: gpt(False), lambda model: model(TOKENS), (), {}, {"head.weight"}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    make, run, fallen, settings, written, plain = CASES[name]
    model = trained(make(), run, **settings)
    for path in fallen:
        fall_back(model, path)
    loaded = back(tmp_path, model, make, run)
    found, tensors = in_fp8(tmp_path), tensors_of(tmp_path)
    assert written <= found
    assert found == written or "tied to" in name or name == "not tied"
    # of a shared weight, under each of its names
    scaled = {key.removesuffix("_scale") for key in tensors if key.endswith("weight_scale")}
    assert found <= scaled
    assert found == scaled or name == "tied layers"
    assert sorted(quantization(tmp_path)["ignored_layers"]) == sorted(plain)
    # also into a model that is converted as a whole
    same_outputs(loaded, load_exported(convert(make()), tmp_path), run)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_face(tmp_path: Path, name: str) -> None:
    batch = made(name)[1]

    def run(model: nn.Module) -> Tensor:
        return model(**batch).logits

    model = trained(made(name)[0].net, run)
    loaded = back(tmp_path, model, lambda: made(name)[0].net, run)
    # the output embedding is not FP8 in the file, and runs in FP8 again
    head = model.get_output_embeddings().weight
    stored = next(key for key, tensor in model.state_dict(keep_vars=True).items() if tensor is head)
    assert tensors_of(tmp_path)[stored].dtype == torch.float32
    assert all(row.converted for row in describe(loaded))


def test_scales_and_histories(tmp_path: Path) -> None:
    # with a window in which the loaded scale stays
    make = lambda: convert(small_mlp(), DelayedScaling(amax_history_len=4))  # noqa: E731
    model = trained(make(), on(16, 32))
    loaded = back(tmp_path, model, make, on(16, 32))
    state, other = scaling_state(model), scaling_state(loaded)
    # two inputs, two gradients, two weights: these have been cast in both models since
    assert torch.equal(other.scale[[0, 1, 4, 5]], state.scale[[0, 1, 4, 5]])
    assert torch.equal(other.amax[4:], state.amax[4:])
    assert torch.allclose(448 / other.amax_history[0, :2], other.scale[:2])
    assert (other.amax_history > 0).sum(0).tolist() == [1, 1, 0, 0]
    # training can continue: with a smaller input, the scale still follows the history
    loaded.train()(1e-3 * torch.randn(16, 32)).sum().backward()
    other.update()
    assert torch.allclose(other.scale[:2], state.scale[:2], rtol=1e-6)
    assert (other.amax_history > 0).sum(0).tolist() == [2, 2, 1, 1]


def test_histories_fit_the_recipe_of_the_model(tmp_path: Path) -> None:
    margin = 3
    export(trained(small_mlp(), on(8, 32)), tmp_path)
    state = scaling_state(load_exported(convert(small_mlp(), DelayedScaling(margin=margin)), tmp_path))
    for row in (0, 1):
        assert state.scale[row].item() == pytest.approx(448 / state.amax_history[0, row].item() / 2**margin)


def test_scales_survive_whose_reciprocal_is_rounded(tmp_path: Path) -> None:
    model = trained(small_mlp(), on(8, 32))
    scale = scaling_state(model).scale
    amax = torch.rand(1000) + 1
    # a tensor, as torch rounds number / tensor twice
    scales = torch.full_like(amax, 448) / amax
    awkward = [number for number, of in enumerate(scales) if of.reciprocal().reciprocal() != of][:2]
    state = scaling_state(model)
    entries = state.state_dict()
    for name, number in zip(("0.input", "2.input"), awkward, strict=True):
        entries[name]["amax_history"].zero_()[0] = amax[number]
    state.load_state_dict(entries)
    assert torch.equal(scale[:2], scales[awkward])
    loaded = back(tmp_path, model, small_mlp, on(8, 32))
    assert torch.equal(scaling_state(loaded).scale[:2], scale[:2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.randn(16, 32, dtype=dtype)
    model = trained(small_mlp().to(dtype), lambda model: model(x))
    export(model, tmp_path, dtype=dtype)
    loaded = load_exported(small_mlp().to(dtype), tmp_path)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), loaded(x))


def test_every_code_comes_back() -> None:
    """``code * (1 / scale)``, stored in fp32, is cast back to the same code, for every possible scale.

    In bf16 too, if the smallest value is a normal bf16 number.
    """
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[~codes.float().isnan()][None]
    largest = torch.finfo(torch.float32).max
    exponents = torch.empty(300).uniform_(-119, 127)
    for scale in torch.cat([torch.exp2(exponents), torch.tensor([1.0, 448.0, largest, 448.0 / largest])]):
        dequantized = finite.float() * scale.reciprocal()
        for dtype in (torch.float32, torch.bfloat16) if scale <= 2.0**117 else (torch.float32,):
            again = codes_of(dequantized.to(dtype), scale)
            assert torch.equal(again.view(torch.uint8), finite.view(torch.uint8)), (scale, dtype)
    assert codes_of(torch.tensor([[float("nan")]]), torch.tensor(3.0)).float().isnan().all()


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 128), nn.Linear(128, 200))


@pytest.mark.parametrize(
    ("recipe", "meta"), [(DelayedScaling(amax_history_len=4), False), (CurrentScaling(), True), (BlockScaling(), False)]
)
def test_a_frozen_model_has_the_same_outputs(tmp_path: Path, recipe: Recipe, meta: bool) -> None:
    run = on(16, 256)
    model = convert(wide(), recipe, ignore_modules=("3",))
    run(model).sum().backward()
    scaling_state(model).update()
    export(model, tmp_path)
    made = convert(wide().to("meta" if meta else "cpu"), recipe)
    loaded = load_exported(made, tmp_path, frozen=True)
    same_outputs(model, loaded, run)
    held = [name for name, one in loaded.named_parameters() if isinstance(one, Fp8Parameter)]
    assert held == ["0.weight", "2.weight"]
    saved = tensors_of(tmp_path)
    assert all(torch.equal(loaded.get_parameter(name).payload, saved[name].view(torch.uint8)) for name in held)
    # and again, into a model whose weights are in FP8 already
    same_outputs(model, load_exported(loaded, tmp_path, frozen=True), run)
    # or with masters, as before
    same_outputs(model, load_exported(convert(loaded, frozen_weights="master"), tmp_path), run)


@pytest.mark.parametrize(
    ("exported", "recipe", "message"),
    [
        (DelayedScaling(), CurrentScaling(), r"converted with CurrentScaling.*has static scales of inputs.*unconvert"),
        (CurrentScaling(), BlockScaling(), r"converted with BlockScaling.*has one scale for each weight.*unconvert"),
    ],
)
def test_models_with_another_recipe_are_refused(tmp_path: Path, exported: Recipe, recipe: Recipe, message: str) -> None:
    model = convert(small_mlp(), exported)
    model(torch.randn(4, 32)).sum().backward()
    scaling_state(model).update()
    export(model, tmp_path)
    with pytest.raises(ValueError, match=message):
        load_exported(convert(small_mlp(), recipe), tmp_path)


def test_part_of_a_model_that_was_converted_as_a_whole(tmp_path: Path) -> None:
    run = on(8, 32)
    model = trained(nn.Sequential(small_mlp(), nn.Linear(16, 16)), run)
    export(model[0], tmp_path)
    fresh = small_mlp()
    load_exported(nn.Sequential(checkpoint_wrapper(fresh[0]), *fresh[1:]), tmp_path)
    same_outputs(model[0], fresh.eval(), run)
    # loaded into a part, which gets its own scales; converting the whole model joins them
    whole = convert(nn.Sequential(small_mlp(), nn.Linear(16, 16)))
    load_exported(whole[0], tmp_path)
    same_outputs(model[0], whole[0], run)
    assert scaling_state(convert(whole)).module_names == ("0.0", "0.2", "1")
    same_outputs(model[0], whole[0], run)


# files of other programs: without our metadata


def test_an_attention_that_is_fp8_in_part(tmp_path: Path) -> None:
    model = trained(encoder(), on(2, 6, 32))
    fall_back(model, "self_attn.in_proj")
    export(model, tmp_path)
    rewrite(tmp_path, tensors_of(tmp_path))
    assert scaling_state(load_exported(encoder(), tmp_path)).fallbacks == ("self_attn.in_proj",)
