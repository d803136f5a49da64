"""One parameter in two layers: exported once, and one parameter again after loading, which both layers use."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import in_fp8, metadata_of, quantization, refused, rewrite, tensors_of
from pairwise import pairwise
from published_weights import in_numpy
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    convert,
    describe,
    export,
    load_exported,
    scaling_state,
)
from lightning_fp8.modules.fp8_parameter import Fp8Parameter
from lightning_fp8.scalings.recipe import Recipe

X = torch.linspace(-2, 3, 12 * 128).view(12, 128)
SUFFIXES = {None: ("_scale", "_scale_inv"), "hf-fp8": ("_scale_inv",) * 2, "compressed-tensors": ("_scale",) * 2}
INPUTS = {None: "input_scale", "hf-fp8": "activation_scale", "compressed-tensors": "input_scale"}
RECIPES = [DelayedScaling(amax_history_len=4), CurrentScaling(), BlockScaling(), MXScaling()]
CASES = [(layout, recipe) for recipe in RECIPES for layout in SUFFIXES
         if layout == "compressed-tensors" or not isinstance(recipe, MXScaling)]  # fmt: skip
# whether it is loaded as frozen, and into what
TARGETS = ((False, "meta"), (True, "plain"), (True, "converted"))


class Tied(nn.Module):
    """The first layer and the last: two with one weight, or one under two names."""

    def __init__(self, what: str = "two layers") -> None:
        super().__init__()
        self.a, self.between, self.b = (nn.Linear(128, 128) for _ in range(3))
        if what == "one layer":
            self.b = self.a
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x).relu()).relu())


class WithHead(nn.Module):
    """An embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.head = nn.Embedding(256, 128), nn.Linear(128, 128), nn.Linear(128, 256)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.up(self.embedding(tokens)))


def made(kind: Any, seed: int, *arguments: Any) -> nn.Module:
    torch.manual_seed(seed)
    return kind(*arguments)


def trained(model: nn.Module, x: Tensor, recipe: Recipe, how: str) -> nn.Module:
    """After a step, so that inputs have histories; ``fp8``: with what is frozen in FP8 only."""
    convert(model.requires_grad_(how == "master"), recipe, frozen_weights=how)  # type: ignore[arg-type]
    model(x.requires_grad_(x.is_floating_point())).square().mean().backward() if how == "master" else None
    scaling_state(model).update()
    return model.eval()


def target(kind: Any, where: str, recipe: Recipe, *arguments: Any) -> nn.Module:
    with torch.device("meta" if where == "meta" else "cpu"):
        model = made(kind, 1, *arguments)
    return convert(model, recipe) if where == "converted" else model


@pytest.mark.parametrize(("case", "what", "how"), pairwise(CASES, ["two layers", "one layer"], ["master", "fp8"]))
@pytest.mark.filterwarnings("ignore:export. readers will scale each input")
def test_layers(case: tuple[str | None, Recipe], what: str, how: str, tmp_path: Path) -> None:
    layout, recipe = case
    model = trained(made(Tied, 0, what), X, recipe, how)
    export(model, tmp_path, layout=layout)
    saved = tensors_of(tmp_path)
    assert in_fp8(tmp_path) == {"a.weight", "between.weight"}
    assert "b.weight" not in saved
    # readers look for the scales of each layer
    suffix = SUFFIXES[layout][isinstance(recipe, BlockScaling)]
    assert torch.equal(saved["a.weight" + suffix], saved["b.weight" + suffix])
    is_static = isinstance(recipe, DelayedScaling) and how == "master"
    assert ("b." + INPUTS[layout] in saved) == is_static
    codes, scale = saved["a.weight"].view(torch.uint8), saved["a.weight" + suffix]
    values = torch.from_numpy(in_numpy(codes, scale.reshape(()) if scale.numel() == 1 else scale))
    with torch.no_grad():
        y = model(X)
    for frozen, where in TARGETS:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = load_exported(target(Tied, where, recipe, what), tmp_path, frozen=frozen)
        weight = loaded.a.weight
        assert weight is loaded.b.weight
        assert (loaded.a is loaded.b) == (what == "one layer")
        assert all(row.converted for row in describe(loaded))
        assert not scaling_state(loaded).fallbacks
        found = weight.dequantized() if isinstance(weight, Fp8Parameter) else weight.detach()
        assert torch.allclose(found, values, rtol=2e-7, atol=0)
        entries = scaling_state(loaded).state_dict()
        for name in ("a", "b")[: 1 + (what == "two layers")] if is_static else ():
            amax = entries[f"{name}.input"]["amax_history"].max().item()
            assert amax == pytest.approx(448 * saved[f"{name}.{INPUTS[layout]}"].item(), rel=1e-6)
        with torch.no_grad():
            assert torch.equal(loaded(X), y)


@pytest.mark.parametrize(
    ("layout", "recipe", "what", "to"), pairwise([*SUFFIXES], RECIPES[:3], ["two layers", "one layer"], [*SUFFIXES])
)
def test_a_base_is_written_back(layout: str | None, recipe: Recipe, what: str, to: str | None, tmp_path: Path) -> None:
    model = trained(made(Tied, 0, what), X, recipe, "master")
    export(model, tmp_path / "first", layout=layout)
    base = load_exported(made(Tied, 1, what), tmp_path / "first", frozen=True)
    export(base, tmp_path / "again", layout=to)
    if to in (None, layout):
        first, again = tensors_of(tmp_path / "first"), tensors_of(tmp_path / "again")
        assert first.keys() == again.keys()
        assert all(first[name].dtype == tensor.dtype for name, tensor in again.items())
        assert all(torch.equal(first[name].float(), tensor.float()) for name, tensor in again.items())
        assert metadata_of(tmp_path / "again") == metadata_of(tmp_path / "first")
        assert quantization(tmp_path / "again") == quantization(tmp_path / "first")
    loaded = load_exported(made(Tied, 2, what), tmp_path / "again", frozen=True)
    assert loaded.a.weight is loaded.b.weight
    with torch.no_grad():
        assert torch.equal(loaded(X), base(X))


@pytest.mark.parametrize(
    ("layout", "recipe", "how"), [(*case, ("master", "fp8")[at % 2]) for at, case in enumerate(CASES)], ids=str
)
@pytest.mark.filterwarnings("ignore:export. readers will scale each input")
def test_an_embedding_and_a_head(layout: str | None, recipe: Recipe, how: str, tmp_path: Path) -> None:
    tokens = torch.arange(24)
    model = trained(made(WithHead, 0), tokens, recipe, how)
    before = model.embedding.weight.detach().clone()
    export(model, tmp_path, layout=layout)
    saved = tensors_of(tmp_path)
    # rows are looked up in it
    assert torch.equal(saved["embedding.weight"], before)
    assert "head.weight" not in saved
    assert in_fp8(tmp_path) == {"up.weight"}
    # the head runs in FP8 again if the file's metadata say so, else as it is in the file
    if layout is not None or isinstance(recipe, BlockScaling):
        model = convert(model, ignore_modules=("head",))
    for frozen, where in TARGETS:
        loaded = load_exported(target(WithHead, where, recipe), tmp_path, frozen=frozen)
        assert loaded.embedding.weight is loaded.head.weight
        assert torch.equal(loaded.head.weight, before)
        with torch.no_grad():
            assert torch.equal(loaded(tokens), model(tokens))


class Transposed(nn.Module):
    """A weight that one layer stores as ``[K, N]`` and the other as ``[N, K]``, as in an autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = Conv1D(256, 128), nn.Linear(256, 128)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x).tanh())


@pytest.mark.parametrize(("recipe", "frozen"), [*zip(RECIPES[:3], (True, False, True))], ids=str)
def test_a_weight_and_its_transpose(recipe: Recipe, frozen: bool, tmp_path: Path) -> None:
    model = trained(made(Transposed, 0), X, recipe, "master")
    export(model, tmp_path)
    assert in_fp8(tmp_path) == {"encode.weight"}
    loaded = load_exported(made(Transposed, 1), tmp_path, frozen=frozen)
    assert loaded.encode.weight is loaded.decode.weight
    with torch.no_grad():
        assert torch.equal(loaded(X), model(X))


@pytest.mark.parametrize("frozen", [False, True])
def test_files_of_others_may_have_the_scales_once(frozen: bool, tmp_path: Path) -> None:
    model = trained(made(Tied, 0), X, DelayedScaling(), "master")
    export(model, tmp_path, layout="hf-fp8")
    rewrite(tmp_path, {name: one for name, one in tensors_of(tmp_path).items() if name[:2] != "b." or "bias" in name})
    loaded = load_exported(made(Tied, 1), tmp_path, frozen=frozen)
    assert [row.converted for row in describe(loaded)] == [True, True, True]
    assert not scaling_state(loaded).fallbacks
    # the input of that layer has no history then
    assert (scaling_state(loaded).amax_history[0, :3] > 0).tolist() == [True, True, False]
    with torch.no_grad():
        assert torch.equal(loaded(X), model(X))


@pytest.mark.parametrize("layout", ["hf-fp8", "compressed-tensors"])
def test_scales_that_differ_are_refused(layout: str, tmp_path: Path) -> None:
    export(trained(made(Tied, 0), X, DelayedScaling(), "master"), tmp_path, layout=layout)
    assert quantization(tmp_path)["quant_method"] in ("fp8", "compressed-tensors")
    tensors, suffix = tensors_of(tmp_path), SUFFIXES[layout][0]
    rewrite(tmp_path, {**tensors, f"b.weight{suffix}": tensors[f"b.weight{suffix}"] * 2})
    for model in (made(Tied, 1), convert(made(Tied, 1))):
        message = rf"scales of one weight of the model and differ: b\.weight{suffix} and a\.weight{suffix}"
        refused(model, tmp_path, message)
    of_input = f"b.{INPUTS[layout]}"
    rewrite(tmp_path, {**tensors, of_input: torch.ones(3)})
    refused(made(Tied, 1), tmp_path, rf"lack scales in the form of single numbers: b\.{INPUTS[layout]}")
