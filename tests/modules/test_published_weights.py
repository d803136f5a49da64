"""Weights that are kept in the FP8 codes and scales of a checkpoint: their values, and all products with them."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from experts import experts, routing
from feed_forward_blocks import llama, vit
from fp8_numpy import cast_in_blocks
from frozen_models import same
from pairwise import pairwise
from published_weights import KINDS, cast_in_numpy, gradient_in_numpy, in_numpy, published, with_codes
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, convert, describe, scaling_state
from lightning_fp8.conversion import fall_back
from lightning_fp8.modules.fp8_parameter import Fp8Parameter, from_codes
from lightning_fp8.scalings.recipe import Recipe

# blocks that are whole, ragged in one or both dimensions, smaller than one, and no multiples of 16
SHAPES = [(256, 128), (200, 300), (576, 168), (24, 40), (130, 7), (1, 300), (300, 1)]
RECIPES = [DelayedScaling(), CurrentScaling(), BlockScaling(), MXScaling()]


def near(found: Tensor, expected: np.ndarray, error: float) -> bool:
    """Whether the relative RMS error is at most ``error``."""
    difference = found.detach().double().numpy() - expected
    return bool(np.linalg.norm(difference) <= error * np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("kind", "shape"), [*zip(itertools.cycle(KINDS), [*SHAPES, *SHAPES]), *((kind, (3, 130, 200)) for kind in KINDS)]
)
def test_values_are_codes_times_scales(kind: str, shape: tuple[int, ...]) -> None:
    codes, scale_inv = published(kind, *shape)
    expected = in_numpy(codes, scale_inv)
    for dtype, rounded in (
        (torch.float32, expected),
        (torch.bfloat16, expected.astype(ml_dtypes.bfloat16).astype(np.float32)),
        (torch.float16, expected.astype(np.float16).astype(np.float32)),
    ):
        for given in (codes, codes.view(torch.float8_e4m3fn)):
            weight: Any = from_codes(given, scale_inv, dtype, "layer")
            assert (weight.shape, weight.dtype, weight.requires_grad) == (shape, dtype, False)
            assert np.array_equal(weight.dequantized().float().numpy(), rounded)
            assert np.array_equal(weight.data.clone().float().numpy(), rounded)
            if len(shape) == 3:
                assert np.array_equal(weight[1].dequantized().float().numpy(), rounded[1])
            assert torch.equal(weight.payload, codes)
            assert torch.equal(weight.scale_inv, scale_inv)
    if len(shape) == 2:
        stored: Any = from_codes(codes, scale_inv, torch.float32, "layer", k_by_n=True)
        assert np.array_equal(stored.dequantized().numpy(), expected.T)


def routed(model: nn.Module, x: Tensor) -> Tensor:
    return model(x, *routing())  # type: ignore[no-any-return]


def step(layer: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Output and input gradient."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize(
    ("kind", "recipe", "shape", "half"), pairwise(KINDS, RECIPES, SHAPES, ["reference", "kernels"])
)
def test_products_are_those_of_the_values(
    kind: str, recipe: Recipe, shape: tuple[int, int], half: str, request: pytest.FixtureRequest
) -> None:
    """Inputs and gradients are rounded to FP8 as ever, by numpy; the values of the weight enter without rounding."""
    if half == "kernels":
        request.getfixturevalue("cuda_half")
    n, k = shape
    layer = convert(with_codes(nn.Linear(k, n), kind), recipe, min_features=0, frozen_weights="fp8")
    values = in_numpy(layer.weight.payload, layer.weight.scale_inv)
    x, dy = torch.randn(21, k) * torch.logspace(-2, 2, 21)[:, None], torch.randn(21, n)
    y, dx = step(layer, x, dy)
    bias = layer.bias.detach().numpy()
    assert near(y - layer.bias, cast_in_numpy(x, recipe, "input") @ values.T.astype(np.float64), 2e-6)
    assert near(y, cast_in_numpy(x, recipe, "input") @ values.T.astype(np.float64) + bias, 2e-6)
    assert near(dx, gradient_in_numpy(dy, recipe, kind) @ values.astype(np.float64), 2e-6)
    state = scaling_state(layer)
    if kind == "mx" and n > 1:
        # a gradient that is not cast is not recorded
        assert state.amax[state.names.index("grad_output")] == 0
    # the row of the state has the largest block's amax and scale
    row = state.names.index("weight")
    assert state.amax[row] == np.abs(values).max()
    largest = np.unravel_index(np.abs(values).argmax(), values.shape)
    sides = {"tensor": (n, k), "blocks": (128, 128), "rows": (1, k), "mx": (1, 32), "squares": (32, 32)}[kind]
    scale = tuple(at // side for at, side in zip(largest, sides))
    held = layer.weight.scale_inv if kind != "tensor" else layer.weight.scale_inv[None, None]
    assert state.scale[row] == (1 / held[scale] if held.is_floating_point() else 2.0 ** (127 - int(held[scale])))


@pytest.mark.parametrize("kind", KINDS)
def test_conv1d_and_bf16(kind: str, half: str) -> None:
    layer = convert(with_codes(Conv1D(200, 136), kind), CurrentScaling(), frozen_weights="fp8")
    values = in_numpy(layer.weight.payload, layer.weight.scale_inv)
    assert layer.weight.shape == (136, 200)
    x, dy = torch.randn(9, 136), torch.randn(9, 200).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y, dx = step(layer, x, dy)
    assert near(y, cast_in_numpy(x, CurrentScaling(), "input") @ values.T.astype(np.float64), 4e-3)
    assert near(dx, gradient_in_numpy(dy, CurrentScaling(), kind) @ values.astype(np.float64), 4e-3)


@pytest.mark.parametrize(("kind", "make"), list(zip(KINDS, itertools.cycle([vit, llama]))))
def test_a_fused_block_is_the_unfused_one(kind: str, make: Any, half: str) -> None:
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        block = make()
        for layer in block.modules():
            if type(layer) is nn.Linear:
                layer.requires_grad_(False)
                with_codes(layer, kind)
        convert(block, CurrentScaling(), min_features=0, frozen_weights="fp8")
        reason = "feed-forward fused" if kind != "mx" else "not fused: dgrad takes the values of a weight"
        assert reason in describe(block)[0].reason
        if not fused:
            for layer in block.modules():
                layer.register_forward_hook(lambda *_: None)
        width = next(block.parameters()).shape[1]
        found.append(step(block, torch.linspace(-2, 2, 8 * width).view(8, width), torch.ones(8, width)))
    for one, other in zip(*found, strict=True):
        assert near(one, other.double().numpy(), 1e-6)


@pytest.mark.parametrize(("kind", "recipe", "width"), pairwise(KINDS, RECIPES[1:], [72, 96, 128]))
def test_slices_of_an_attention(kind: str, recipe: Recipe, width: int, half: str) -> None:
    """The projections of query, key and value are slices of one weight: slices of 96 rows split its blocks."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(width, 1, batch_first=True).requires_grad_(False)
    with_codes(attention, kind, "in_proj_weight")
    values = in_numpy(attention.in_proj_weight.payload, attention.in_proj_weight.scale_inv)
    convert(attention, recipe, min_features=0, frozen_weights="fp8")
    found: list[Tensor] = []
    query, key, value = (torch.randn(1, 5, width, requires_grad=True) for _ in range(3))
    operand = attention._in_operand("in_proj")
    for at, x in enumerate((query, key, value)):
        rows = slice(at * width, (at + 1) * width)
        y = attention._project("in_proj", x, operand, rows, None)
        dy = torch.randn(5, width)
        y.backward(dy[None])
        part = values[rows].astype(np.float64)
        assert near(y[0], cast_in_numpy(x[0], recipe, "input") @ part.T, 2e-6)
        # slices that split squares have a scale for 32 of each row
        of_slice = "mx" if kind == "squares" and width % 32 else kind
        assert near(x.grad[0], gradient_in_numpy(dy, recipe, of_slice) @ part, 2e-6)
        found.append(y)
    assert torch.isfinite(attention(query, key, value, need_weights=False)[0]).all()


@pytest.mark.parametrize(("kind", "recipe"), list(zip(KINDS, itertools.cycle(RECIPES[:3]))))
def test_experts(kind: str, recipe: Recipe, half: str) -> None:
    torch.manual_seed(0)
    model = experts().requires_grad_(False)
    for name in ("gate_up_proj", "down_proj"):
        with_codes(model, kind, name)
    master = copy.deepcopy(model)
    for name in ("gate_up_proj", "down_proj"):
        setattr(master, name, nn.Parameter(getattr(model, name).dequantized(), requires_grad=False))
    for one, how in ((model, "fp8"), (master, "master")):
        convert(one, recipe, min_features=0, frozen_weights=how)
    x = torch.randn(12, 32)
    (y, dx), (expected, expected_dx) = (step(partial(routed, one), x, torch.ones(12, 32)) for one in (model, master))
    assert near(y, expected.double().numpy(), 0.05)
    assert near(dx, expected_dx.double().numpy(), 0.08)
    assert model.down_proj.is_fp8
    state = scaling_state(model)
    values = in_numpy(model.down_proj.payload, model.down_proj.scale_inv)
    assert [state.amax[state.names.index(f"down_proj.{at}.weight")] for at in range(4)] == list(
        np.abs(values).max((1, 2))
    )


@pytest.mark.parametrize("form", ["gate", "transposed, biases, interleaved gate"])
def test_masters_of_experts_are_freed_and_come_back(form: str) -> None:
    x, found = torch.randn(12, 32), []
    for recipe in (RECIPES[1] if form == "gate" else RECIPES[2], MXScaling(weight_blocks=(32, 32))):
        for how in ("master", "fp8"):
            torch.manual_seed(0)
            model = convert(experts(form).requires_grad_(False), recipe, min_features=0, frozen_weights=how)
            assert isinstance(model.gate_up_proj, Fp8Parameter) == (how == "fp8")
            found.append(step(partial(routed, model), x, torch.ones(12, 32)))
            saved = model.state_dict()
            assert saved["down_proj"].shape == ((4, 32, 24) if form == "gate" else (4, 24, 32))
        assert same(*found[-2:])
    fall_back(model, "gate_up_proj.1")
    assert torch.isfinite(routed(model, x)).all()
    with torch.no_grad():
        model.down_proj[2] += 0.1
    with pytest.warns(UserWarning, match="'down_proj.* was to be kept in FP8 only and has been changed in place"):
        routed(model, x)
    with pytest.warns(UserWarning, match="have masters again"):
        convert(model, frozen_weights="master")
    assert type(model.down_proj) is nn.Parameter


@pytest.mark.parametrize("power_of_2_scales", [False, True])
def test_block_scaling_keeps_masters_in_blocks(power_of_2_scales: bool, half: str) -> None:
    """``frozen_weights="fp8"`` with `BlockScaling`: bit for bit as with masters."""
    recipe, found = BlockScaling(power_of_2_scales=power_of_2_scales), []
    for how in ("master", "fp8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(200, 136), nn.Tanh(), nn.Linear(136, 72)).requires_grad_(False)
        plain = model[0].weight.detach().clone()
        convert(model, recipe, frozen_weights=how)
        found.append([step(model, torch.linspace(-2, 2, 10 * 200).view(10, 200), torch.ones(10, 72))])
        state = scaling_state(model)
        found[-1] += [state.amax[state.delayed :], state.scale[state.delayed :]]
    assert same(*found)
    codes, scale_inv = cast_in_blocks(plain.numpy(), "e4m3", 128, power_of_2=power_of_2_scales)
    assert np.array_equal(model[0].weight.payload.numpy(), codes)
    assert np.array_equal(model[0].weight.scale_inv.numpy(), scale_inv)
    assert [row.reason.endswith("weight in FP8 only") for row in describe(model)] == [True, True]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = model.state_dict()
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(200, 136), nn.Tanh(), nn.Linear(136, 72)).requires_grad_(False)
    other = convert(other, recipe, frozen_weights="fp8")
    other.load_state_dict(saved)
    assert same(other.state_dict(), saved)
    if not power_of_2_scales:
        assert same(other[0].weight.payload, model[0].weight.payload)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_per_parameter_and_what_backward_keeps(kind: str) -> None:
    layer = convert(with_codes(nn.Linear(576, 1000, bias=False), kind), CurrentScaling(), frozen_weights="fp8")
    kept: Counter[torch.dtype] = Counter()

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.dtype] += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(torch.randn(4, 576, requires_grad=True))
    y.sum().backward()
    stack: Any = from_codes(*published(kind, 3, 256, 576), torch.bfloat16, "experts")
    for weight in (layer.weight, stack):
        tensors = [held for held in vars(weight.content).values() if isinstance(held, Tensor)]
        storages = {held.untyped_storage().data_ptr(): held.untyped_storage().nbytes() for held in tensors}
        assert sum(storages.values()) <= (1.0313 if kind == "mx" else 1.02) * weight.numel()
    in_e8m0 = layer.weight.scale_inv.numel() if kind in ("mx", "squares") else 0
    assert kept.pop(torch.uint8) == 576 * 1000 + in_e8m0
    assert kept.total() <= 1000 + 1
