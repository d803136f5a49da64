"""Frozen weights that are stored only in FP8, in real processes: DDP broadcasts them; sharded ones keep masters."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_processes
from published_weights import KINDS

pytestmark = pytest.mark.slow

BODY = """
import warnings
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from lightning_fp8 import describe


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16))
    model[:3].requires_grad_(False)
    return model


def train(how):
    # DDP broadcasts the base of rank 0, which all have
    model = convert(make(0), frozen_weights=how)
    run, optimizer, losses = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        loss = run(torch.randn(8, 32)).square().mean()
        loss.backward()
        scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


(_, result["master"]), (model, result["fp8"]) = train("master"), train("fp8")
result["payloads"] = [model[at].weight.payload for at in (0, 2)]
result["of rank 0"] = [convert(make(0), frozen_weights="fp8")[at].weight.payload for at in (0, 2)]

# here rank 1 gets other values than it has
other = convert(make(rank), frozen_weights="fp8")
y = DistributedDataParallel(other)(torch.ones(4, 32)).detach()
result["of another base"] = other.state_dict()["0.weight"], type(other[0].weight).__name__, y

model = convert(make(0), frozen_weights="fp8")
expected = model(torch.ones(4, 32)).detach()
for layer in (model[0], model[2], model):
    fully_shard(layer)
result["described"] = describe(model)[0].reason
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    result["same"] = torch.equal(model(torch.ones(4, 32)).detach(), expected)
    sharded = make(0)
    fully_shard(sharded)
    convert(sharded, frozen_weights="fp8")
result["told"] = [str(one.message) for one in told if "FP8 only" in str(one.message) or "fp8'" in str(one.message)]
"""


def test_ddp_broadcasts_them_and_fully_shard_makes_masters(tmp_path: Path) -> None:
    ranks = run_processes(BODY, tmp_path)
    assert ranks[0]["fp8"] != ranks[1]["fp8"]
    assert [rank["of another base"][1] for rank in ranks] == ["Fp8Parameter", "Parameter"]
    for rank in ranks:
        assert rank["fp8"] == rank["master"]
        for payload, expected in zip(rank["payloads"], rank["of rank 0"], strict=True):
            assert payload.equal(expected)
        assert rank["same"]
        assert rank["of another base"][0].equal(ranks[0]["of another base"][0])
        assert rank["of another base"][2].equal(ranks[0]["of another base"][2])
        assert rank["described"].endswith("weight keeps its master: it is sharded")
        replaced, no_effect = rank["told"]
        assert "The weight of '0' was to be kept in FP8 only and has been replaced, as by `fully_shard`" in replaced
        assert no_effect.startswith("`frozen_weights='fp8'` has no effect")


PUBLISHED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from published_weights import KINDS, published, with_codes
from lightning_fp8 import CurrentScaling


def make(kind):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(200, 136), nn.Tanh(), nn.Linear(136, 24))
    with_codes(model[0], kind, dtype=torch.bfloat16)
    return convert(model, CurrentScaling(), frozen_weights="fp8")


result["kept"], result["trained"], result["refused"] = [], [], []
for kind in KINDS:
    model = make(kind)
    run, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        run(torch.randn(8, 200)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    codes, scale_inv = published(kind, 136, 200)
    weight = model[0].weight
    result["kept"].append(torch.equal(weight.payload, codes) and torch.equal(weight.scale_inv, scale_inv))
    result["trained"].append(model[2].weight.detach())
    mesh, plan = init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()}
    for share in (lambda: fully_shard(model[0]), lambda: parallelize_module(model, mesh, plan)):
        try:
            share()
        except RuntimeError as error:
            result["refused"].append(str(error))
"""


def test_ddp_leaves_the_codes_of_a_checkpoint_as_they_are(tmp_path: Path) -> None:
    ranks = run_processes(PUBLISHED, tmp_path)
    for rank in ranks:
        assert rank["kept"] == [True] * len(KINDS)
        assert len(rank["refused"]) == 2 * len(KINDS)
        assert all(
            "'weight' is kept in the FP8 codes that it came in, and cannot be split" in one for one in rank["refused"]
        )
    for one, other in zip(ranks[0]["trained"], ranks[1]["trained"], strict=True):
        assert one.equal(other)
