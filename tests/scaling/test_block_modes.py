"""``BlockScaling`` in every mode and kind of layer; what runs unfused, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from feed_forward_blocks import converted, llama, part_by_part
from fp8_numpy import cast_in_blocks
from in_blocks import in_fp8, spread
from processes import run_processes
from safetensors.torch import load_file
from small_models import small_mlp
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_fp8 import (
    BlockScaling,
    convert,
    describe,
    export,
    fall_back,
    load_exported,
)
from lightning_fp8.export.write import static_scales


@pytest.mark.parametrize("half", ["reference", "kernels"])
def test_a_block_that_would_be_fused_runs_part_by_part(half: str, request: pytest.FixtureRequest) -> None:
    if half == "kernels":
        request.getfixturevalue("cuda_half")
    model = converted(llama, recipe=BlockScaling())
    found = []
    for block in (part_by_part(model), model):
        x = spread(12, 32, seed=8).requires_grad_()
        y = block(x)
        y.square().sum().backward()
        found.append([y, x.grad, *(parameter.grad for parameter in block.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert "not fused: its tensors are scaled in blocks" in str(describe(model))


def test_a_counter_finds_the_three_products() -> None:
    model, x = convert(nn.Linear(200, 48), BlockScaling()), torch.randn(8, 200, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 8 * 200 * 48


@pytest.mark.parametrize("width", [64, 128])
def test_attention_of_other_keys_has_the_blocks_of_each_projection(width: int) -> None:
    """The rows of a packed weight are those of three weights: at width 64, one square contains rows of q and k."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(width, 4, bias=False, batch_first=True)
    with torch.no_grad():
        plain.in_proj_weight[width : 2 * width] *= 1e6
    packed = convert(copy.deepcopy(plain), BlockScaling(), ignore_modules=["out_proj"])
    query, key = torch.randn(2, 3, width, requires_grad=True), torch.randn(2, 5, width) * 1e-6
    y = packed(query, key, key.clone(), need_weights=False)[0]
    y.sum().backward()
    projections = [in_fp8(part, 128, BlockScaling()) for part in plain.in_proj_weight.chunk(3)]
    q, k, v = (
        torch.from_numpy(in_fp8(of.flatten(0, 1), 1, BlockScaling()) @ w.T).view(2, -1, 4, width // 4).transpose(1, 2)
        for of, w in zip((query, key, key), projections, strict=True)
    )
    heads = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(y.double(), heads @ plain.out_proj.weight.double().T, rtol=1e-4, atol=1e-12)
    assert query.grad is not None
    assert packed.in_proj_weight.grad is not None
    assert bool(packed.in_proj_weight.grad.isfinite().all())


def test_an_export_has_the_blocks_that_readers_of_deepseek_take(tmp_path: Path) -> None:
    model = convert(nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 16)), BlockScaling())
    with torch.no_grad():
        model[0].weight.copy_(spread(300, 200, seed=9))
    fall_back(model, "2")
    export(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["weight_block_size"] == [128, 128]
    assert (config["activation_scheme"], config["ignored_layers"]) == ("dynamic", ["2"])
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == {"0.weight", "0.weight_scale_inv", "0.bias", "2.weight", "2.bias"}
    codes, scale_inv = cast_in_blocks(model[0].weight.detach().numpy(), "e4m3", 128)
    assert saved["0.weight"].dtype == torch.float8_e4m3fn
    assert np.array_equal(saved["0.weight"].view(torch.uint8).numpy(), codes)
    assert np.array_equal(saved["0.weight_scale_inv"].numpy(), scale_inv)
    assert torch.equal(saved["2.weight"], model[2].weight)
    with pytest.raises(ValueError, match=r"weight_block_size=None, got \[128, 128\]"):
        load_exported(nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 16)), tmp_path)


def test_what_has_one_scale_for_each_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`frozen_weights='fp8'` keeps one scale .* BlockScaling\("):
        convert(small_mlp().requires_grad_(False), BlockScaling(), frozen_weights="fp8")
    model = convert(small_mlp(), BlockScaling())
    with pytest.raises(ValueError, match=r"BlockScaling\(.*no static scales to write"):
        static_scales(model, {})


def test_experts_have_blocks_of_their_own() -> None:
    from experts import Separate, experts, routing

    stacked = experts()
    separate = Separate(stacked)
    hidden = torch.randn(12, 32)
    index, weights = routing()
    convert(stacked, BlockScaling())
    convert(separate, BlockScaling())
    assert torch.equal(stacked(hidden, index, weights), separate(hidden, index, weights))


SPLIT = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from lightning_fp8 import BlockScaling

torch.manual_seed(0)
model = convert(nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)), BlockScaling())
whole = copy.deepcopy(model)
parallelize_module(model, init_device_mesh("cpu", (world,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
x = torch.randn(8, 64) * torch.logspace(-4, 4, 64)
local = lambda t: (t.to_local() if hasattr(t, "to_local") else t).detach().clone()
for number, one in enumerate((model, whole)):
    y = one(x)
    y.backward(torch.ones_like(y))
    scaling_state(one).update()
    result[number] = {"y": local(y + 0), "dw": local(one[0].weight.grad), "amax": scaling_state(one).amax_history[0]}
"""


def test_parts_of_128_have_the_blocks_of_the_whole(tmp_path: Path) -> None:
    for number, rank in enumerate(run_processes(SPLIT, tmp_path)):
        part, whole = rank[0], rank[1]
        torch.testing.assert_close(part["y"], whole["y"], rtol=1e-5, atol=1e-6 * whole["y"].abs().max().item())
        expected = whole["dw"].chunk(2)[number]
        torch.testing.assert_close(part["dw"], expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())
        # the logged values are those of the whole weight
        torch.testing.assert_close(part["amax"], whole["amax"], rtol=1e-6, atol=0)
