"""Products under ``CurrentScaling`` and ``BlockScaling``: those of the quantized operands, in every half and layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from experts import Separate, experts, routing
from feed_forward_blocks import converted, llama, part_by_part, phi3, vit
from fp8_numpy import code_values, saturating_cast
from in_blocks import in_fp8 as in_blocks
from in_blocks import linear, spread
from processes import run_processes
from scales_in_numpy import largest, scale_of
from torch import Tensor, nn

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, convert, describe, scaling_state
from lightning_fp8.scalings.recipe import Recipe


def in_fp8(x: Tensor, fmt: str, margin: int = 0) -> np.ndarray:
    """A tensor quantized to FP8 with the scale of its own values, in fp64, from the formats' definitions."""
    values = x.detach().numpy()
    scale = scale_of(largest(values), fmt, margin)
    return code_values(fmt)[saturating_cast(values, scale, fmt)] / np.float64(scale)


def quantized(recipe: Recipe, role: str) -> Callable[[Tensor], np.ndarray]:
    """How a tensor of this role is quantized, in blocks along its rows."""
    if isinstance(recipe, BlockScaling):
        return lambda x: in_blocks(x, 128 if role == "weight" else 1, recipe)
    assert isinstance(recipe, CurrentScaling)
    is_wide = role == "grad_output" and recipe.fp8_format == "HYBRID"
    return lambda x: in_fp8(x, "e5m2" if is_wide else "e4m3", 0 if role == "weight" else recipe.margin)


RECIPES = [CurrentScaling(), CurrentScaling(3, "E4M3"), BlockScaling(), BlockScaling(power_of_2_scales=True)]


@pytest.fixture(params=["reference", "kernels"])
def half(request: pytest.FixtureRequest) -> str:
    if request.param == "kernels":
        request.getfixturevalue("cuda_half")
    return str(request.param)


# rows and columns that end within a block, and several blocks each way
@pytest.mark.parametrize("sizes", [(16, 32, 48), (200, 300, 136)])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_products(recipe: Recipe, sizes: tuple[int, int, int], half: str) -> None:
    """Steps of one layer, whose amaxes grow and shrink by far more than FP8's range."""
    tokens, inputs, outputs = sizes
    model = linear(recipe, inputs, outputs, bias=True)
    with torch.no_grad():
        model.weight.copy_(spread(outputs, inputs, seed=2))
    of_input, of_weight, of_gradient = (quantized(recipe, role) for role in ("input", "weight", "grad_output"))
    for step, magnitude in enumerate((1.0, 1e5, 1e-4)):
        x = (spread(tokens, inputs, seed=3 + step) * magnitude).requires_grad_()
        dy = spread(tokens, outputs, seed=9 + step) * magnitude
        model.zero_grad()
        y = model(x)
        y.backward(dy)
        w = of_weight(model.weight)
        # with blocks, inputs and gradients have others along the tokens than along their features
        expected = {
            "y": of_input(x) @ w.T + model.bias.detach().numpy(),
            "dx": of_gradient(dy) @ w,
            "dw": of_gradient(dy.T) @ of_input(x.T).T,
            "db": dy.numpy().astype(np.float64).sum(0),
        }
        found = {"y": y.detach(), "dx": x.grad, "dw": model.weight.grad, "db": model.bias.grad}
        for name, value in expected.items():
            error = np.abs(found[name].numpy() - value).max()
            assert error < 2e-6 * np.abs(value).max(), (magnitude, name)
        amax = [float(tensor.detach().abs().max()) for tensor in (x, dy, model.weight)]
        state = scaling_state(model)
        state.update()
        # what is logged is the largest value and its scale
        assert [*state.amax_history[0].tolist(), float(state.amax[2])] == amax
        if isinstance(recipe, BlockScaling):
            scales = 448 / np.float32(amax)
            powers = 2.0 ** np.floor(np.log2(scales))
            assert state.scale.tolist() == list(powers if recipe.power_of_2_scales else scales)


FUSED = {
    "Llama": llama,
    "Llama with biases": lambda: llama(bias=True),
    # gate and up are one tensor, whose halves have whole blocks or not
    "Phi-3": phi3,
    "Phi-3 of 256": lambda: phi3(256),
    "ViT": vit,
}


FUSED_RECIPES = [CurrentScaling(2), BlockScaling(), BlockScaling(power_of_2_scales=True), MXScaling()]


@pytest.mark.parametrize(("block", "recipe"), [*zip(FUSED, FUSED_RECIPES * 2), *zip(FUSED, FUSED_RECIPES[::-1] * 2)])
def test_feed_forward_blocks(recipe: Recipe, block: str, half: str) -> None:
    """Fused, the tensor cast between the products has its own scales too, as in separate layers."""
    model = converted(FUSED[block], recipe=recipe)
    assert "feed-forward fused" in str(describe(model))
    found, amaxes, counts = [], [], []
    for one in (part_by_part(model), model):
        scaling_state(one).model.counts.start("test")
        x = spread(12, 32, seed=8).requires_grad_()
        y = one(x)
        y.square().sum().backward()
        found.append([y, x.grad, *(parameter.grad for parameter in one.parameters())])
        amaxes.append(scaling_state(one).amax)
        counts.append(scaling_state(one).model.counts.values)
    # each tensor in its own row: gate and up have gradients of different sizes
    torch.testing.assert_close(*amaxes, rtol=1e-4, atol=0)
    torch.testing.assert_close(*counts, rtol=0.05, atol=2)
    assert counts[0].any()
    for one, other in zip(*found, strict=True):
        # the products of a fused block may be summed in a different order
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * one.detach().abs().max().item())


# power-of-two operands are exact, so the scale shows in which numbers underflow
POWERS = torch.tensor([[1.0, 2.0**-16, 2.0**-17, 2.0**-18] + [0.0] * 12])


def test_a_margin_is_kept_free() -> None:
    alive = []
    for margin in (0, 1, 4):
        model = linear(CurrentScaling(margin), 16, 16)
        nn.init.eye_(model.weight)
        with torch.no_grad():
            alive.append(int((model(POWERS)[0, :4] != 0).sum()))
    # 448 * 2**-18 = 2**-9.2 is above 2**-10, half of the smallest number, so it survives; a margin halves it per unit
    assert alive == [4, 3, 1]


def test_a_margin_is_kept_free_above_past_values_only(half: str) -> None:
    """The first cast, by its own values, has no margin; the second one, by the history, has it."""
    model = linear(DelayedScaling(margin=1), 16, 16)
    nn.init.eye_(model.weight)
    alive = []
    for _ in range(2):
        alive.append(int((model(POWERS)[0, :4] != 0).sum()))
        scaling_state(model).update()
    assert alive == [4, 3]


def test_a_margin_above_the_largest_fp32_number() -> None:
    """The amax times the margin's factor is limited to fp32's range, so the scale stays below 1 and keeps the order of
    numbers that scale 1 would clip."""
    x = torch.tensor([[3e38, 1.5e38, -7.5e37, 1e37] + [0.0] * 12])
    # float(2**128 - 2**104) is the largest fp32 number
    scale = np.float32(np.float32(448) / np.float32(2.0**128 - 2.0**104))
    expected = code_values("e4m3")[saturating_cast(x.numpy(), scale, "e4m3")] / np.float64(scale)
    model = linear(CurrentScaling(2), 16, 16)
    nn.init.eye_(model.weight)
    np.testing.assert_allclose(model(x).detach().numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_block_that_is_not_finite_harms_no_other(bad: float) -> None:
    model = linear(BlockScaling(), 256, 8)
    x = spread(4, 256, seed=7)
    exact = in_blocks(x, 1, BlockScaling())
    x[1, 5] = bad
    x.requires_grad_()
    y = model(x)
    y.backward(torch.ones_like(y))
    w = in_blocks(model.weight, 128, BlockScaling())
    # with a scale of 1, the finite values of the block survive
    assert np.allclose(in_blocks(x, 1, BlockScaling())[1, 128:], exact[1, 128:])
    expected = in_blocks(x, 1, BlockScaling()) @ w.T
    np.testing.assert_allclose(y.detach().numpy(), expected, rtol=0, atol=1e-5 * np.nanmax(np.abs(expected)))
    assert bool(y[[0, 2, 3]].isfinite().all())
    state = scaling_state(model)
    before = state.amax_history.clone()
    state.update()
    assert state.nonfinite_steps.tolist() == [1, 0, 0]
    assert torch.equal(state.amax_history[:, 0], before[:, 0])


@pytest.mark.parametrize("width", [64, 128])
def test_attention_of_other_keys_has_the_blocks_of_each_projection(width: int) -> None:
    """The rows of a packed weight are those of three weights: at width 64, one square contains rows of q and k."""
    plain = nn.MultiheadAttention(width, 4, bias=False, batch_first=True)
    with torch.no_grad():
        plain.in_proj_weight[width : 2 * width] *= 1e6
    packed = convert(copy.deepcopy(plain), BlockScaling(), ignore_modules=["out_proj"])
    query, key = torch.randn(2, 3, width, requires_grad=True), torch.randn(2, 5, width) * 1e-6
    y = packed(query, key, key.clone(), need_weights=False)[0]
    y.sum().backward()
    weights = plain.in_proj_weight.chunk(3)
    q, k, v = (
        torch.from_numpy(in_blocks(of.flatten(0, 1), 1, BlockScaling()) @ in_blocks(w, 128, BlockScaling()).T)
        .view(2, -1, 4, width // 4)
        .transpose(1, 2)
        for of, w in zip((query, key, key), weights, strict=True)
    )
    heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(y.double(), heads @ plain.out_proj.weight.double().T, rtol=1e-4, atol=1e-12)
    assert query.grad is not None
    assert bool(packed.in_proj_weight.grad.isfinite().all())


def test_experts_have_blocks_of_their_own() -> None:
    stacked = experts()
    separate = convert(Separate(stacked), BlockScaling())
    hidden, (index, weights) = torch.randn(12, 32), routing()
    assert torch.equal(convert(stacked, BlockScaling())(hidden, index, weights), separate(hidden, index, weights))


# across processes

SPLIT = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from lightning_fp8 import BlockScaling, CurrentScaling

mesh = init_device_mesh("cpu", (world,))
local = lambda t: (t.to_local() if hasattr(t, "to_local") else t).detach().clone()


def split(model):
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})

"""
CURRENT = """
columns, rows = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
with torch.no_grad():
    # the two parts of what goes from one to the other differ a thousandfold, and those of its gradient the other way
    columns.weight[:16] *= 1000
    rows.weight[:, 16:] *= 1000
model, result["rows"] = convert(nn.Sequential(columns, rows), CurrentScaling()), rows.weight.detach().clone()
split(model)
hidden = {}
columns.register_forward_hook(lambda module, args, y: hidden.update(y=y))
x = torch.randn(8, 16, requires_grad=True)
y = model(x)
y.backward(torch.ones_like(y))
result |= {"x": x.detach(), "y": y.detach() + 0, "h": local(hidden["y"]), "dw": local(columns.weight.grad)}
"""
BLOCKS = """
model = convert(nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)), BlockScaling())
whole = copy.deepcopy(model)
split(model)
x = torch.randn(8, 64) * torch.logspace(-4, 4, 64)
for number, one in enumerate((model, whole)):
    y = one(x)
    y.backward(torch.ones_like(y))
    scaling_state(one).update()
    result[number] = {"y": local(y + 0), "dw": local(one[0].weight.grad), "amax": scaling_state(one).amax_history[0]}
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_processes(SPLIT + CURRENT + BLOCKS, tmp_path_factory.mktemp("split"))


def test_a_split_tensor_has_the_scale_of_the_whole(ranks: list[Any]) -> None:
    h = torch.cat([rank["h"] for rank in ranks], dim=1)
    assert h[:, :16].abs().max() > 100 * h[:, 16:].abs().max()
    # each process scales its own part of a weight
    w = np.concatenate([in_fp8(part, "e4m3") for part in ranks[0]["rows"].chunk(2, 1)], axis=1)
    expected = in_fp8(h, "e4m3") @ w.T
    apart = np.concatenate([in_fp8(part, "e4m3") for part in h.chunk(2, 1)], axis=1) @ w.T
    assert np.abs(expected - apart).max() > 1e-3 * np.abs(expected).max()
    dh = torch.from_numpy((in_fp8(torch.ones(8, 16), "e5m2") @ w).astype(np.float32))
    dw = in_fp8(dh, "e5m2").T @ in_fp8(ranks[0]["x"], "e4m3")
    for number, rank in enumerate(ranks):
        assert np.abs(rank["y"].numpy() - expected).max() < 1e-5 * np.abs(expected).max()
        part = dw[16 * number : 16 * (number + 1)]
        assert np.abs(rank["dw"].numpy() - part).max() < 1e-5 * np.abs(part).max()


def test_parts_of_128_have_the_blocks_of_the_whole(ranks: list[Any]) -> None:
    for number, rank in enumerate(ranks):
        part, whole = rank[0], rank[1]
        torch.testing.assert_close(part["y"], whole["y"], rtol=1e-5, atol=1e-6 * whole["y"].abs().max().item())
        expected = whole["dw"].chunk(2)[number]
        torch.testing.assert_close(part["dw"], expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())
        # the logged values are those of the whole weight
        torch.testing.assert_close(part["amax"], whole["amax"], rtol=1e-6, atol=0)
