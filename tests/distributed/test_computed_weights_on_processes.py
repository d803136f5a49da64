"""Weights that parametrizations compute, in real processes on the CPU: sharded by FSDP2, and under DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run_processes

pytestmark = pytest.mark.slow

BODY = """
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from lightning_fp8.modules.all_gather import gather_in_fp8


def net():
    torch.manual_seed(0)
    layers = weight_norm(nn.Linear(32, 32)), nn.ReLU(), spectral_norm(nn.Linear(32, 32)), nn.Linear(32, 16)
    return nn.Sequential(*layers)


def train(model, inner, average):
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.05)
    for step in range(3):
        x = torch.randn(6, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        for parameter in inner.parameters() if average else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        scaling_state(inner).update()
        optimizer.step()
        optimizer.zero_grad()
    parts = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in inner.named_parameters()}
    state = scaling_state(inner)
    return {"scale": state.scale.clone(), "u": inner[2].parametrizations["weight"][0]._u.clone(),
            **{name: one.detach().clone() for name, one in parts.items()}}


alone = convert(net(), DelayedScaling(amax_history_len=4))
result["alone"] = train(alone, alone, True)
replicated = convert(net(), DelayedScaling(amax_history_len=4))
result["ddp"] = train(DistributedDataParallel(replicated), replicated, False)
for name in ("before", "after", "gathered"):
    sharded = net()
    sharded = convert(sharded, DelayedScaling(amax_history_len=4)) if name != "after" else sharded
    for layer in (*sharded, sharded):
        if not isinstance(layer, nn.ReLU):
            fully_shard(layer)
    sharded = convert(sharded, DelayedScaling(amax_history_len=4)) if name == "after" else sharded
    if name == "gathered":
        gather_in_fp8(sharded)
    result[name] = train(sharded, sharded, False)
"""


def test_train_as_one_process_does(tmp_path: Path) -> None:
    for rank in run_processes(BODY, tmp_path):
        for way in ("ddp", "before", "after", "gathered"):
            for name, expected in rank["alone"].items():
                torch.testing.assert_close(rank[way][name], expected, rtol=1e-4, atol=1e-5, msg=f"{way} {name}")


GATHERED = """
import warnings
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrizations import weight_norm

model = convert(nn.Sequential(weight_norm(nn.Linear(32, 32)), nn.ReLU(), weight_norm(nn.Linear(32, 16))))
fully_shard(model)
x, result["said"] = torch.randn(6, 32), []
first, second = (torch.optim.SGD(model.parameters(), lr=0.05) for _ in range(2))
for optimizer, updates in ((first, 2), (second, 0)):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(10):
            model(x).square().mean().backward()
            if step < updates:
                scaling_state(model).update()
            if optimizer is second:
                with torch.no_grad():
                    # leaves the root's parameters gathered
                    model(x)
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 == updates:
                break
    result["said"].append([str(one.message) for one in said])
"""


def test_an_optimizer_of_gathered_weights_is_known_by_the_sharded_ones(tmp_path: Path) -> None:
    for rank in run_processes(GATHERED, tmp_path):
        updated, not_updated = rank["said"]
        assert not [said for said in updated if "nothing has updated its scales" in said]
        assert [said for said in not_updated if "nothing has updated its scales" in said]
