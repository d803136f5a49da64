"""Weights in the codes of a checkpoint when they are loaded again, changed, moved and copied; what is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from frozen_models import same
from lightning.pytorch import strategies
from published_weights import KINDS, in_numpy, published, with_codes
from torch import Tensor, nn

from lightning_fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Precision,
    MXScaling,
    convert,
    describe,
    scaling_state,
    unconvert,
)
from lightning_fp8.modules.fp8_parameter import Fp8Parameter, from_codes
from lightning_fp8.runtime.warn_once import warn_once
from lightning_fp8.scalings.recipe import Recipe

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
X = torch.linspace(-2, 2, 6 * 200).view(6, 200)


def model_of(kind: str, dtype: torch.dtype = torch.bfloat16, recipe: Recipe | None = None) -> Any:
    """Two layers; the first has a published weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 300, dtype=dtype), nn.Linear(300, 8, dtype=dtype))
    with_codes(model[0], kind, dtype=dtype)
    return convert(model, recipe or CurrentScaling(), min_features=0, frozen_weights="fp8")


def held(model: Any) -> tuple[Tensor, Tensor]:
    return model[0].weight.payload.clone(), model[0].weight.scale_inv.clone()


@pytest.mark.parametrize(("kind", "dtype"), list(zip([*KINDS, "blocks"], itertools.cycle(DTYPES))))
def test_a_checkpoint_of_the_values_gives_the_same_codes(kind: str, dtype: torch.dtype) -> None:
    model, x = model_of(kind, dtype), X.to(dtype)
    before = held(model)
    with warnings.catch_warnings():
        # nothing has been rounded here
        warnings.simplefilter("error")
        saved = copy.deepcopy(model.state_dict())
        expected = model(x)
        again = model_of(kind, dtype)
        again.load_state_dict(saved)
    assert type(saved["0.weight"]) is Tensor
    assert same(held(again), before)
    assert same(again(x), expected)


@pytest.mark.parametrize("recipe", [CurrentScaling(), BlockScaling(), BlockScaling(power_of_2_scales=True)], ids=repr)
def test_other_values_are_rounded_as_the_recipe_says(recipe: Recipe) -> None:
    model = model_of("rows", torch.float32, recipe)
    other = nn.Linear(200, 300)
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"FP8 codes that came with their scales were replaced by other values"):
        model[0].load_state_dict(other.state_dict())
    reference = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 8)).requires_grad_(False)
    reference[0].load_state_dict(other.state_dict())
    convert(reference, recipe, min_features=0, frozen_weights="fp8")
    assert same(held(model), held(reference))
    assert same(model[0](X), reference[0](X))
    with pytest.warns(UserWarning, match="1 frozen weights are rounded to FP8"):
        model.state_dict()


def test_histories_stay_when_masters_are_freed() -> None:
    model = nn.Sequential(nn.Linear(200, 300).requires_grad_(False), nn.Linear(300, 16))
    convert(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(X).sum().backward()
    scaling_state(model).update()
    optimizer.step()
    before = scaling_state(model).amax_history.clone()
    assert before.any()
    convert(model, frozen_weights="fp8")
    model(X)
    assert same(scaling_state(model).amax_history, before)


@pytest.mark.parametrize(("kind", "dtype"), list(zip([*KINDS, "blocks"], itertools.cycle(DTYPES))))
def test_moves_and_copies_never_round(kind: str, dtype: torch.dtype) -> None:
    model = model_of(kind, torch.bfloat16)
    before = held(model)
    values = torch.from_numpy(in_numpy(*before))
    moved = copy.deepcopy(model).to(dtype)
    assert same(held(moved), before)
    assert moved[0].weight.dtype == dtype
    assert same(moved[0].weight.dequantized(), values.to(dtype))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), convert(model), model.cpu()):
        assert same(held(other), before)
        assert same(other(X.bfloat16()), model(X.bfloat16()))
        assert other[0].weight.content.has_own_codes
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved[0].weight.zero_()
    assert same(held(model), before)
    assert model.to("meta")[0].weight.payload.is_meta


@pytest.mark.parametrize("kind", KINDS)
def test_merges(kind: str) -> None:
    model = model_of(kind)
    values = model[0].weight.dequantized()
    delta = values.clone()
    model[0].weight.data += delta
    assert same(model[0].weight.dequantized(), values + delta)
    with pytest.warns(UserWarning, match="'0' was to be kept in FP8 only and has been changed in place"):
        model(X.bfloat16())
    # back, as `unmerge_adapter` would be without a rounding error
    model[0].weight.data -= delta
    assert type(model[0].weight) is nn.Parameter
    assert same(model[0].weight.detach(), values)
    convert(model)
    assert model[0].weight.is_fp8
    assert not model[0].weight.content.has_own_codes


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("tensor", DelayedScaling()),
        ("blocks", BlockScaling()),
        ("mx", MXScaling()),
        ("squares", MXScaling()),
        ("mx", CurrentScaling()),
    ],
)
def test_compiled(kind: str, recipe: Recipe) -> None:
    model = model_of(kind, torch.float32, recipe)
    compiled, found = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True), []
    for run in (model, compiled):
        x = X.detach().clone().requires_grad_()
        y = run(x)
        y.square().sum().backward()
        found.append((y.detach(), x.grad))
    assert same(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_masters_and_plain_layers(kind: str) -> None:
    model = model_of(kind)
    codes, scale_inv = held(model)
    values = torch.from_numpy(in_numpy(codes, scale_inv)).bfloat16()
    assert describe(model)[0].reason.endswith("dgrad in bf16 with its values" if kind == "mx" else "weight in FP8 only")
    with pytest.warns(UserWarning, match="1 weights were kept in the FP8 codes that they came in, 'weight' the first"):
        plain = unconvert(copy.deepcopy(model))
    assert type(plain[0].weight) is nn.Parameter
    assert same(plain[0].weight.detach(), values)
    # a layer that is not converted takes the values
    left_out: Any = nn.Linear(200, 300, bias=False, dtype=torch.bfloat16)
    left_out.weight = from_codes(codes, scale_inv, torch.bfloat16, "left_out")
    expected = nn.functional.linear(X.bfloat16(), values)
    assert same(left_out(X.bfloat16()).detach(), expected)
    # and may be converted afterwards, or be given the weight afterwards
    late = convert(nn.Sequential(nn.Linear(200, 300, bias=False, dtype=torch.bfloat16)), CurrentScaling())
    late[0].weight = from_codes(codes, scale_inv, torch.bfloat16, "0")
    early = convert(nn.Sequential(left_out), CurrentScaling(), frozen_weights="fp8")
    assert same(late(X.bfloat16()), early(X.bfloat16()))
    assert isinstance(early[0].weight, Fp8Parameter)


def test_products_in_bf16_need_a_master() -> None:
    model = model_of("blocks")
    values = model[0].weight.dequantized()
    with pytest.warns(UserWarning, match="They have masters now, with the memory of their dtype"):
        convert(model, overrides={"0": {"dgrad": "bf16"}})
    assert same(model[0].weight.detach(), values)
    assert describe(model)[0].reason.endswith("weight keeps its master: it is multiplied in bf16")


GOOD, MX = published("blocks", 200, 300), published("mx", 200, 300)
NAN, ZERO, NEGATIVE = (torch.full((2, 3), value) for value in (float("nan"), 0.0, -1.0))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((GOOD[0].int(), GOOD[1], torch.float32), TypeError, r"'it' must be uint8 or float8_e4m3fn.* got int32"),
        ((*GOOD, torch.float64), TypeError, "values float32, bfloat16 or float16; got uint8 and float64"),
        ((GOOD[0], GOOD[1].t(), torch.float32), ValueError, r"\(\), \(2, 3\), \(200, 1\)\. .* scales \(3, 2\)"),
        ((GOOD[0], GOOD[1][:1], torch.float32), ValueError, r"codes \(200, 300\) and scales \(1, 3\)"),
        ((GOOD[0][0], GOOD[1], torch.float32), ValueError, r"codes \(300,\)"),
        ((GOOD[0][:0], torch.ones(()), torch.float32), ValueError, "not empty"),
        ((GOOD[0][None], torch.ones(()), torch.float32), ValueError, r"\(1,\), \(1, 2, 3\), \(1, 200, 1\)"),
        ((GOOD[0], NAN, torch.float32), ValueError, "scales of 'it' must be finite and above zero"),
        ((GOOD[0], ZERO, torch.float32), ValueError, "finite and above zero"),
        ((GOOD[0], NEGATIVE, torch.float32), ValueError, "finite and above zero: from -1"),
        ((MX[0], MX[1] | 255, torch.float32), ValueError, "finite and above zero: from nan to nan"),
        (
            (MX[0], MX[1][:, :3], torch.float32),
            ValueError,
            r"\(200, 10\), \(7, 10\)\. .* scales \(200, 3\)",
        ),
    ],
)
def test_codes_that_are_refused(arguments: tuple[Any, ...], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        from_codes(*arguments, name="it")


def test_uses_that_are_refused() -> None:
    model = model_of("blocks")
    with pytest.raises(RuntimeError, match=r"'weight' is kept in the FP8 codes .* cannot be split .* use DDP"):
        model[0].weight.chunk(2)
    module: Any = nn.Sequential(model)
    module._trainer = SimpleNamespace(strategy=strategies.FSDPStrategy())
    with pytest.raises(ValueError, match="`frozen_weights='fp8'` does not work under FSDP"):
        Fp8Precision(recipe=CurrentScaling()).convert_module(module)
