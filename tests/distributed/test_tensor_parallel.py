"""Tensor parallel plans on converted linear layers, in real processes on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_numpy import power_of_two_below
from processes import DEVICES, run_processes
from sqnr import sqnr

pytestmark = pytest.mark.slow
every_device = pytest.mark.parametrize("device", DEVICES)

COMMON = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("tensor_parallel",))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 16))


def train(model, steps=3, checkpointed=False):
    generator, seen, gradients = torch.Generator(device).manual_seed(3), [], []
    for step in range(steps):
        x = torch.randn(2, 8, 32, generator=generator)
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        y.float().square().mean().backward()
        if any(hasattr(layer, "fp8") for layer in model.modules()):
            scaling_state(model).update()
        seen.append(y.detach().float())
    whole = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t.clone()
    return {"y": torch.stack(seen), "gradients": {n: whole(p.grad) for n, p in model.named_parameters()}}


def casts(model, parts=world, part=rank, dtype=torch.float32):
    # scales of the rows of the first weight, the columns of the second, and the third, that one process holds
    weights = model[0].weight.chunk(parts, 0), model[2].weight.chunk(parts, 1), [model[3].weight] * parts
    held = [weight[part if parts > 1 else 0].detach().to(dtype).float() for weight in weights]
    return torch.stack([torch.tensor(448.0) / weight.abs().max() for weight in held])


def parallel(model, columns="0", rows="2"):
    # the other layer stays whole
    return parallelize_module(model, mesh, {columns: ColwiseParallel(), rows: RowwiseParallel()})
"""


@every_device
def test_column_and_row_parallel_train_as_one_process_does(device: str, tmp_path: Path) -> None:
    body = """
from lightning_fp8 import BlockScaling, CurrentScaling, MXScaling

fp32 = train(net())
for recipe in (DelayedScaling(), CurrentScaling(wgrad="bf16"), BlockScaling(), MXScaling()):
    found = result[recipe.precision] = {"fp32": fp32}
    alone = convert(net(), recipe)
    found["alone"] = train(alone)
    # conversion comes before the plan or after it
    split = convert(parallel(net()), recipe)
    found["split"] = train(split)
    found["calls"] = [type(layer).__name__ for layer in split]
    found["alone scale"], found["split scale"] = scaling_state(alone).scale.clone(), scaling_state(split).scale.clone()
    found["alone history"], found["split history"] = (scaling_state(m).amax_history.clone() for m in (alone, split))
    found["casts"], found["whole casts"] = casts(net()), casts(net(), parts=1)
    # a layer before the split ones gets the whole gradient
    found["behind"] = train(parallel(convert(net(), recipe), "2", "3"))
    again = parallel(convert(net(), recipe))
    found["recomputed"] = train(again, checkpointed=True)
    found["recomputed scale"] = scaling_state(again).scale.clone()
"""
    ranks = run_processes(COMMON + body, tmp_path, device=device)
    for precision in ("fp8-delayed", "fp8-current", "fp8-block", "fp8-mx"):
        check_split([rank[precision] for rank in ranks], precision == "fp8-mx")


def check_split(ranks: list[dict[str, Any]], in_powers_of_two: bool) -> None:
    for rank in ranks:
        assert rank["calls"] == ["Fp8Linear", "GELU", "Fp8Linear", "Fp8Linear"]
        # the first input is bit-identical in both; the last weight is whole
        assert torch.equal(rank["split history"][:, 0], rank["alone history"][:, 0])
        assert torch.allclose(rank["split history"], rank["alone history"], rtol=0.1, atol=1e-8)
        assert torch.equal(rank["split scale"][:6], ranks[0]["split scale"][:6])
        # each process scales its own part of a weight; the state has the smallest scale of its blocks
        for kind, expected in (("split", rank["casts"]), ("alone", rank["whole casts"])):
            expected = torch.exp2(expected.log2().floor()) if in_powers_of_two else expected
            assert torch.equal(rank[f"{kind} scale"][6:], expected)
    assert not torch.equal(ranks[0]["casts"], ranks[1]["casts"])
    for rank in ranks:
        # partial sums are rounded to bf16 before they are added, so later casts differ by a code here and there
        assert sqnr(rank["split"]["y"], rank["alone"]["y"]) > 24
        assert sqnr(rank["split"]["y"], rank["fp32"]["y"]) > sqnr(rank["alone"]["y"], rank["fp32"]["y"]) - 1
        for name, gradient in rank["fp32"]["gradients"].items():
            for split in (rank["split"]["gradients"][name], rank["behind"]["gradients"][name]):
                assert split.shape == gradient.shape
                assert sqnr(split, gradient) > sqnr(rank["alone"]["gradients"][name], gradient) - 2, name
        assert torch.equal(rank["recomputed"]["y"], rank["split"]["y"])
        assert torch.equal(rank["recomputed scale"], rank["split scale"])
        for name, gradient in rank["split"]["gradients"].items():
            assert torch.equal(rank["recomputed"]["gradients"][name], gradient)


@every_device
def test_with_fsdp2_over_the_other_dimension(device: str, tmp_path: Path) -> None:
    body = """
from torch.distributed.fsdp import fully_shard
from lightning_fp8.plugins import fsdp2_policy

grid = init_device_mesh(device.type, (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
mesh = grid["tensor_parallel"]
alone = convert(net())
result["alone"] = train(alone)
split = fully_shard(parallel(convert(net())), mesh=grid["data_parallel"], mp_policy=fsdp2_policy())
result["split"] = train(split)
result["scale"] = scaling_state(split).scale.clone()
result["history"] = [scaling_state(model).amax_history[:, 0].clone() for model in (alone, split)]
result["casts"] = casts(net(), 2, mesh.get_local_rank(), torch.bfloat16)
"""
    ranks = run_processes(COMMON + body, tmp_path, 4, device)
    for rank in ranks:
        assert torch.equal(rank["scale"][:6], ranks[0]["scale"][:6])
        assert torch.equal(rank["scale"][6:], rank["casts"])
        assert sqnr(rank["split"]["y"], rank["alone"]["y"]) > 24
        alone, split = rank["history"]
        # FSDP gathers the weights, and passes on the input, in bf16
        assert torch.allclose(split, alone, rtol=2**-8)


@every_device
def test_compiled(device: str, tmp_path: Path) -> None:
    body = """
from torch._dynamo.testing import CompileCounterWithBackend

counter = CompileCounterWithBackend("aot_eager")
eager, compiled = parallel(convert(net())), parallel(convert(net()))
for layer in (compiled[0], compiled[2], compiled[3]):
    layer.compile(backend=counter, fullgraph=True)
result["eager"], result["compiled"], counts = [], [], []
for steps in (2, 2):
    result["eager"].append(train(eager, steps)), result["compiled"].append(train(compiled, steps))
    counts.append(counter.frame_count)
result["counts"] = counts
result["scales"] = [scaling_state(model).scale.clone() for model in (eager, compiled)]
"""
    for rank in run_processes(COMMON + body, tmp_path, device=device):
        first, later = rank["counts"]
        # nothing is compiled after the second step
        assert first == later > 0
        assert torch.equal(*rank["scales"])
        for eager, compiled in zip(rank["eager"], rank["compiled"], strict=True):
            assert torch.equal(eager["y"], compiled["y"])
            for name, gradient in eager["gradients"].items():
                assert torch.equal(compiled["gradients"][name], gradient), name


@every_device
def test_what_does_not_work_says_so(device: str, tmp_path: Path) -> None:
    body = """
from torch.distributed.tensor import Replicate
from lightning_fp8.conversion import fall_back


def message(function):
    try:
        function()
    except (TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


model = parallel(convert(net()))
layer = model[0]
result["by hand"] = message(lambda: layer.forward(torch.randn(2, 32)))
attention = convert(nn.MultiheadAttention(32, 4))
from torch.distributed.tensor import distribute_tensor, Shard

attention.in_proj_weight = nn.Parameter(distribute_tensor(attention.in_proj_weight.detach(), mesh, [Shard(0)]))
result["attention"] = message(lambda: attention(*[torch.randn(4, 2, 32)] * 3))
fall_back(attention, "in_proj")
result["in bf16"] = message(lambda: attention(*[torch.randn(4, 2, 32)] * 3))
odd = convert(net())
odd[0].weight = nn.Parameter(distribute_tensor(odd[0].weight.detach(), mesh, [Shard(1)]))
x = distribute_tensor(torch.randn(4, 32), mesh, [Replicate()])
result["placements"] = message(lambda: odd[0](x))
"""
    for rank in run_processes(COMMON + body, tmp_path, device=device):
        assert rank["by hand"].startswith("TypeError: The weight of '0' is distributed over processes, but its input")
        for attention in ("attention", "in bf16"):
            assert rank[attention].startswith("NotImplementedError: 'in_proj': the weight is distributed")
        assert "ColwiseParallel and RowwiseParallel on one dimension" in rank["placements"]


def test_gradients_of_evaluation_have_the_scale_of_the_whole_gradient(tmp_path: Path) -> None:
    """They are scaled by their own largest value, of which each process knows its part alone."""
    body = """
def saliency(model):
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(5)).requires_grad_()
    # much larger than the loss of the training
    weight = torch.logspace(0, 3, 16)
    return torch.autograd.grad((model(x) * weight).sum() * 1000, x)[0]

split = parallel(convert(net()))
train(split)
plain = net()
result["gradients"] = saliency(split.eval())
result["expected"] = saliency(plain)
result["recorded"] = scaling_state(split).amax[: scaling_state(split).delayed].any()
"""
    first, second = run_processes(COMMON + body, tmp_path)
    assert torch.equal(first["gradients"], second["gradients"])
    assert not first["recorded"]
    difference = first["gradients"] - first["expected"]
    assert float(difference.norm() / first["expected"].norm()) < 0.12


@every_device
def test_a_shard_of_an_evaluation_is_scaled_by_its_own_values(device: str, tmp_path: Path) -> None:
    body = """
from lightning_fp8 import CurrentScaling

x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 1000.0]).repeat_interleave(32)
result["x"] = x
for recipe in (DelayedScaling(margin=1), CurrentScaling(margin=1)):
    model = convert(nn.Sequential(nn.Linear(64, 64, bias=False)), recipe).eval()
    # its cast is exact, and each sum has one number
    model[0].weight.data = 7 * torch.eye(64, device=device)
    split = parallelize_module(model, mesh, {"0": RowwiseParallel()})
    with torch.no_grad():
        result[recipe.precision] = split(x.to(device).chunk(world, -1)[rank]) / 7
"""
    for rank in run_processes(COMMON + body, tmp_path, device=device):
        parts = []
        for part in rank["x"].double().chunk(2, -1):
            scale = power_of_two_below(part.abs().max().item(), "e4m3")
            parts.append((part * scale).to(torch.float8_e4m3fn).double() / scale)
        for precision in ("fp8-delayed", "fp8-current"):
            assert torch.equal(rank[precision].double(), torch.cat(parts, -1))
