"""FSDP2 in real processes on the CPU: sharded modules converted, weights gathered in FP8, hybrid sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import DEVICES, run_processes
from repository import ROOT

pytestmark = pytest.mark.slow
every_device = pytest.mark.parametrize("device", DEVICES)

COMMON = """
import functools
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from lightning_fp8 import BlockScaling, describe
from lightning_fp8.conversion import fall_back
from lightning_fp8.plugins import fsdp2_policy
from lightning_fp8.modules.all_gather import gather_in_fp8
from lightning_fp8.modules.base import on_sharded_weights
from lightning_fp8.modules.fp8_parameter import Fp8Parameter

# a layer of Net has one output
convert = functools.partial(convert, min_features=0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # 65 and 1 rows do not divide by the number of processes
        self.first = nn.Linear(32, 65)
        self.second = nn.Linear(65, 64)
        self.encoder = nn.TransformerEncoderLayer(64, 4, 48, 0.0, batch_first=True)
        self.last = nn.Linear(64, 1)
        nn.init.zeros_(self.second.weight)  # a weight whose amax is 0
        self.around = lambda f, x: f(x)

    def forward(self, x):
        x = self.second(torch.relu(self.first(x))) + x.repeat(1, 1, 2)
        return self.last(self.around(self.encoder, x))


def sharded(model, mesh=None):
    for layer in (model.encoder, model.first, model.last, model):
        fully_shard(layer, mp_policy=fsdp2_policy("fp8-delayed"), mesh=mesh)
    return model


def whole(tensor):
    return tensor.full_tensor().detach().clone() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def batch(step, micro=0):
    generator = torch.Generator(device).manual_seed(100 * step + 10 * micro + dist.get_rank())
    return torch.randn(4, 6, 32, generator=generator)


def adamw(model):
    # one operation for all weights: each that a DTensor meets for the first time takes milliseconds
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(model, steps=4, micro=1, clip=None, start=0, optimizer=None):
    '''Losses of training and of the evaluation after each step, gradient norms.'''
    seen = []
    optimizer = optimizer or adamw(model)
    for step in range(start, start + steps):
        for index in range(micro):
            if micro > 1:
                model.set_requires_gradient_sync(index == micro - 1)
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(batch(step, index)).float().square().mean() / micro
            loss.backward()
            seen.append(loss.detach())
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            seen.append(whole(norm))
        scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            seen.append(model(batch(step)).float().square().mean())
        # which leaves the outermost weights gathered: the next forward takes them as they are
        model.train()
    return seen


def message(function):
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def reshard(model):
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def facts(model, seen):
    reshard(model)
    state = scaling_state(model)
    return {
        "seen": torch.stack(seen), "scale": state.scale.clone(), "history": state.amax_history.clone(),
        "weights": {name: whole(parameter) for name, parameter in model.named_parameters()},
    }

"""


def run(body: str, path: Path, processes: int = 2, device: str = "cpu") -> list[dict[str, Any]]:
    return run_processes(COMMON + body, path, processes, device)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert torch.isfinite(expected["seen"]).all()
    for name in ("seen", "scale", "history"):
        assert torch.equal(found[name], expected[name]), name
    for name, weight in expected["weights"].items():
        assert torch.equal(found["weights"][name], weight), name


@every_device
def test_conversion_before_and_after_sharding(device: str, tmp_path: Path) -> None:
    body = """
start = Net()
before, after = copy.deepcopy(start), copy.deepcopy(start)
sharded(convert(before))
convert(sharded(after))
result["classes"] = [[type(part).__name__ for part in model.modules()] for model in (before, after)]
result["before"], result["after"] = (facts(model, train(model)) for model in (before, after))
result["notes"] = [row.reason for row in describe(before) if "linear" in row.path]
scales = scaling_state(after).scale.clone()
convert(after)
assert torch.equal(scales, scaling_state(after).scale)
unconvert(after)
result["plain"] = [type(part).__name__ for part in after.modules()]
with torch.autocast(device.type, torch.bfloat16):
    assert after(batch(0)).isfinite().all()
    # no process keeps an FP8 copy of a whole weight
    reshard(before)
    on_sharded_weights(before)
    before(batch(0))
assert not any(gemm.weight_cast._cast for m in before.modules() for gemm in getattr(m, "fp8", {}).values())
"""
    first, second = run(body, tmp_path, device=device)
    classes = ["FSDPFp8Linear", "Fp8Linear", "FSDPFp8TransformerEncoderLayer", "Fp8MultiheadAttention"]
    for found in first["classes"]:
        assert [name for name in found if name in classes][:4] == classes
        assert "Linear" not in found
    assert_same(first["after"], first["before"])
    assert torch.equal(first["before"]["scale"], second["before"]["scale"])
    assert not any("Fp8" in name for name in first["plain"])
    assert first["plain"].count("FSDPLinear") == 2
    assert [note.rpartition("; ")[2] for note in first["notes"]] == [
        "feed-forward fused if its weights are gathered"
    ] * 2


# world size 1 is what a machine with a single GPU can test; four processes in two groups
@pytest.mark.parametrize(("micro", "processes", "hybrid"), [(1, 1, False), (2, 2, False), (1, 4, True)])
@every_device
def test_gathering_in_fp8_changes_no_bit(micro: int, processes: int, hybrid: bool, device: str, tmp_path: Path) -> None:
    body = f"""
mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard")) if {hybrid} else None
start = Net()
for name in ("bf16", "fp8"):
    model = convert(sharded(copy.deepcopy(start), mesh=mesh), DelayedScaling(amax_history_len=8))
    if name == "fp8":
        result["names"] = gather_in_fp8(model)
        kinds = set()
        model.encoder.linear1.register_forward_pre_hook(lambda layer, args: kinds.add(type(layer.weight).__name__))
    result[name] = facts(model, train(model, micro={micro}, clip=None if {hybrid} else 0.5))
result["kinds"] = sorted(kinds)
"""
    ranks = run(body, tmp_path, processes, device)
    for rank in ranks:
        assert len(rank["names"]) == 7
        assert rank["kinds"] == ["Fp8Parameter"]
        assert_same(rank["fp8"], rank["bf16"])
        assert torch.equal(rank["fp8"]["scale"], ranks[0]["fp8"]["scale"])
    # below the weight of zeros there is no gradient in the first step
    names, fp8 = ranks[0]["names"], ranks[0]["fp8"]
    filled = (fp8["history"] > 0).sum(dim=0)
    assert filled.tolist() == [4] * 7 + [4 - (name == "first") for name in names]
    # the last cast was made in evaluation after the last step: of whole weights, in bf16
    weights = [fp8["weights"].get(f"{name}.weight", fp8["weights"].get(f"{name}_weight")) for name in names]
    assert torch.equal(
        fp8["scale"][14:], torch.stack([torch.tensor(448.0) / w.bfloat16().float().abs().max() for w in weights])
    )


@every_device
def test_bytes_on_the_wire_and_collectives(device: str, tmp_path: Path) -> None:
    body = """
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives

gathered, reduced = [], []
original, original_reduce = collectives.DefaultAllGather.__call__, dist.all_reduce


def counting(self, output_tensor, *args, **kwargs):
    gathered.append(output_tensor.numel() * output_tensor.element_size())
    return original(self, output_tensor, *args, **kwargs)


def counting_reduce(tensor, *args, **kwargs):
    reduced.append(len(tensor))
    return original_reduce(tensor, *args, **kwargs)


def run(model):
    with torch.autocast(device.type, torch.bfloat16):
        return model(torch.randn(8, 64)).float().square().mean()


def counted():
    found = sum(gathered), list(reduced)
    gathered.clear(), reduced.clear()
    return found


collectives.DefaultAllGather.__call__, dist.all_reduce = counting, counting_reduce
for name in ("bf16", "fp8"):
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False))
    convert(fully_shard(model, mp_policy=fsdp2_policy("fp8-delayed"), reshard_after_forward=True))
    if name == "fp8":
        gather_in_fp8(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    counts = result[name] = []
    for step in range(3):
        counted()
        for micro in range(2):
            run(model).backward()
        scaling_state(model).update()
        counts.append(counted())
        optimizer.step()
        optimizer.zero_grad()
        counted()
        # evaluated after the second step alone, twice
        if step == 1:
            with torch.no_grad():
                run(model.eval()), run(model)
            model.train()
            counts.append(counted())
"""
    first, _ = run(body, tmp_path, device=device)
    weights = 2 * 64 * 128
    # two micro-batches each gather for forward and backward; amaxes of inputs and gradients of two layers are reduced
    step = (4 * 2 * weights, [4])
    assert first["bf16"] == [step, step, (2 * 2 * weights, []), step]
    # and the amaxes of both weights, once per optimizer step; in evaluation, once per forward
    step = (4 * weights, [2, 4])
    assert first["fp8"] == [step, step, (2 * weights, [2, 2]), step]


@every_device
def test_recomputation_under_fsdp2(device: str, tmp_path: Path) -> None:
    body = """
start = Net()
for gather, name, around in (
    (False, "plain", lambda f, x: f(x)),
    (False, "reentrant", lambda f, x: checkpoint(f, x, use_reentrant=True)),
    (True, "nested", lambda f, x: checkpoint(lambda y: checkpoint(f, y, use_reentrant=False), x, use_reentrant=False)),
):
    model = convert(sharded(copy.deepcopy(start)), DelayedScaling(amax_history_len=8))
    model.around = around
    if gather:
        gather_in_fp8(model)
    result[name] = facts(model, train(model, steps=2, micro=2))
"""
    for rank in run(body, tmp_path, device=device):
        # gathered in FP8 or not
        for name in ("reentrant", "nested"):
            assert_same(rank[name], rank["plain"])
        # each tensor once per step (those of the zero weight's gradient once in all)
        assert (rank["plain"]["history"] > 0).sum(0).max() == 2


# graphs take FP8 weights as inputs, as they take gathered ones
@pytest.mark.parametrize(("gather", "ways"), [(False, ["by layer"]), (True, ["whole"])])
@every_device
def test_compiled_under_fsdp2(gather: bool, ways: list[str], device: str, tmp_path: Path) -> None:
    body = f"""
import torch._dynamo as dynamo
from torch._dynamo.testing import CompileCounterWithBackend

start = Net()
for name in {("eager", *ways)}:
    dynamo.reset()
    dynamo.utils.counters.clear()
    counter = CompileCounterWithBackend("aot_eager")
    model = convert(copy.deepcopy(start))
    if name == "by layer":
        for layer in (model.first, model.encoder.linear1):
            layer.compile(backend=counter, fullgraph=True)
    sharded(model)
    if {gather}:
        gather_in_fp8(model)
    if name == "whole":
        # graphs end at the hooks of FSDP2
        model.compile(backend=counter)
    optimizer, counts = adamw(model), []
    for step in range(3):
        result[f"{{name}} {{step}}"] = facts(model, train(model, steps=1, start=step, optimizer=optimizer))
        counts.append(counter.frame_count)
    result[name] = counts
    result[name + " breaks"] = [str(reason) for reason in dynamo.utils.counters["graph_break"]]
"""
    for rank in run(body, tmp_path, device=device):
        assert rank.get("by layer breaks", []) == []
        breaks = rank.get("whole breaks", [])
        assert bool(breaks) == ("whole" in ways)
        # of modules or files; the checkout may have the package's name too
        ours = "lightning_fp8.", str(ROOT / "lightning_fp8")
        assert not any(name in reason for reason in breaks for name in ours)
        for name in ways:
            for step in range(3):
                assert_same(rank[f"{name} {step}"], rank[f"eager {step}"])
            # nothing is compiled after the second step
            assert rank[name][0] > 0
            assert len(set(rank[name][1:])) == 1, rank[name]


@every_device
def test_who_reads_a_gathered_weight_gets_its_values(device: str, tmp_path: Path) -> None:
    body = """
model = convert(sharded(Net()))
gather_in_fp8(model)
train(model, steps=2)


def look(layer, args):
    assert type(layer.weight) is Fp8Parameter and type(layer.weight + 0) is torch.Tensor
    assert layer.weight.dtype == torch.bfloat16
    result["values"], result["norm"] = (layer.weight + 0).detach(), layer.weight.norm()


model.first.register_forward_pre_hook(look)
with torch.autocast(device.type, torch.bfloat16):
    model(batch(9))
model.first.reshard()
result["weight"] = whole(model.first.weight)
"""
    for rank in run(body, tmp_path, device=device):
        assert torch.equal(rank["norm"], rank["values"].norm())
        error = (rank["values"].float() - rank["weight"]).abs() / rank["weight"].abs().clamp(min=1e-3)
        # E4M3 keeps three bits after the binary point
        assert 0 < error.max() <= 2**-4 * 1.01


@every_device
def test_other_weights(device: str, tmp_path: Path) -> None:
    """Those that bf16 multiplies are gathered in bf16, and one that is stored transposed in FP8."""
    body = """
from transformers.pytorch_utils import Conv1D

start, other = Net(), nn.Sequential(Conv1D(48, 32), nn.GELU(), nn.Linear(48, 16)).to(device)
products = {"second": {"dgrad": "bf16", "wgrad": "bf16"}, "encoder.linear1": {"fprop": "bf16"}}
for name in ("bf16", "fp8"):
    model = sharded(copy.deepcopy(start))
    convert(model, overrides=products)
    transposed = fully_shard(convert(copy.deepcopy(other)), mp_policy=fsdp2_policy("fp8-delayed"))
    if name == "fp8":
        result["names"], result["transposed names"] = gather_in_fp8(model), gather_in_fp8(transposed)
        result["refused"] = message(lambda: convert(model, overrides={"last": {"dgrad": "bf16"}}))
    result[name] = facts(model, train(model, micro=2))
    result[f"transposed {name}"] = facts(transposed, train(transposed))
"""
    for rank in run(body, tmp_path, device=device):
        assert not {"second", "encoder.linear1"}.intersection(rank["names"])
        assert len(rank["names"]) == 5
        assert "'last' cannot fall back: its weight is gathered in FP8" in rank["refused"]
        assert rank["transposed names"] == ["0", "2"]
        assert_same(rank["fp8"], rank["bf16"])
        assert_same(rank["transposed fp8"], rank["transposed bf16"])


@every_device
def test_what_cannot_be_gathered_in_fp8_is_named(device: str, tmp_path: Path) -> None:
    body = """
result["plain"] = message(lambda: gather_in_fp8(convert(Net())))
result["reduce"] = message(lambda: gather_in_fp8(convert(sharded(Net()), DelayedScaling(reduce_amax=False))))
result["blocks"] = message(lambda: gather_in_fp8(convert(sharded(Net()), BlockScaling())))
tied = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
tied[1].weight = tied[0].weight
result["tied"] = message(lambda: gather_in_fp8(convert(fully_shard(tied))))
model = convert(sharded(Net()))
fall_back(model, "last")
result["names"] = gather_in_fp8(model)
result["fall back"] = message(lambda: fall_back(model, "first"))
train(model, steps=1)
"""
    for rank in run(body, tmp_path, device=device):
        assert "Net has no FP8 layer whose weight FSDP2 shards" in rank["plain"]
        assert "`reduce_amax=True`" in rank["reduce"]
        assert "BlockScaling() gives each block of it a scale of its own" in rank["blocks"]
        assert "there is nothing to gather" in rank["tied"]
        assert "last" not in rank["names"]
        assert "'first' cannot fall back: its weight is gathered in FP8" in rank["fall back"]


def test_weights_gathered_in_fp8_where_products_take_every_layout(tmp_path: Path) -> None:
    """The CUDA functions on a CPU."""
    body = """
import strict_scaled_mm
from lightning_fp8.ops import library
from lightning_fp8.ops.cuda import kernels, layouts, rule

kernels.backend = rule.backend = lambda: "reference"
products = torch.library.Library("aten", "IMPL")
strict_scaled_mm.replace_products(products)
library.cuda_on_cpu = True
for every in (False, True):
    strict_scaled_mm.CAPABILITY = (10, 0) if every else (9, 0)
    layouts.takes_every_layout = lambda device: every
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)))
    for layer in (*model, model):
        fully_shard(layer, mp_policy=fsdp2_policy("fp8-delayed"))
    gather_in_fp8(model)
    result[every] = facts(model, train(model, steps=2))
"""
    for rank in run(body, tmp_path):
        assert_same(rank[True], rank[False])


@pytest.mark.parametrize(("leaves", "gather"), [(False, True), (True, False)], ids=["blocks-fp8", "layers-bf16"])
@every_device
def test_shared_inputs_under_fsdp2(leaves: bool, gather: bool, device: str, tmp_path: Path) -> None:
    body = f"""
from lightning_fp8.core import casts as operators
from projections import Nested, Separate, Shared, train

original, casts = operators.cast, []
operators.cast = lambda x, slot, *rest: (casts.append(int(slot.index)), original(x, slot, *rest))[1]
weights = Nested(Shared).state_dict()
for kind in (Shared, Separate):
    model = Nested(kind)
    model.load_state_dict(weights)
    for block in model.blocks:
        for part in [*(block.children() if {leaves} else []), block]:
            fully_shard(part, mp_policy=fsdp2_policy("fp8-delayed"))
    convert(fully_shard(model, mp_policy=fsdp2_policy("fp8-delayed")))
    if {gather}:
        gather_in_fp8(model)
    casts.clear()
    result[kind.__name__] = [whole(one) for one in train(model, seed=rank)]
    result[f"{{kind.__name__}} casts"] = len(casts)
"""
    for rank in run(body, tmp_path, device=device):
        assert all(map(torch.equal, rank["Shared"], rank["Separate"]))
        # three of four layers share one input tensor; FSDP passes a new tensor object to each layer that it shards
        assert (rank["Shared casts"], rank["Separate casts"]) == (6 * 2 * (4 if leaves else 2), 6 * 2 * 4)
