"""Every recipe on two processes gives the results of one process that accumulates the gradients of both halves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import DEVICES, run_processes
from sqnr import sqnr

pytestmark = pytest.mark.slow

COMMON = """
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from lightning_fp8 import BlockScaling, CurrentScaling, MXScaling
from lightning_fp8.plugins import fsdp2_policy
from lightning_fp8.modules.all_gather import gather_in_fp8

RECIPES = DelayedScaling(), CurrentScaling(), BlockScaling(wgrad="bf16"), BlockScaling(), MXScaling()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # more than one block, and rows that do not divide by the number of processes
        self.first, self.second = nn.Linear(144, 33), nn.Linear(33, 144)
        self.attention = nn.MultiheadAttention(144, 1, batch_first=True)
        self.last = nn.Linear(144, 16)

    def forward(self, x):
        x = x + self.second(torch.relu(self.first(x)))
        return self.last(self.attention(x, x, x, need_weights=False)[0])


def batch(step, part, rows=2):
    # of sizes that differ between the parts, and from step to step
    generator = torch.Generator(device).manual_seed(10 * step + part)
    return torch.randn(rows, 3, 144, generator=generator) * (1 + 20 * part) * 10.0 ** (step % 2)


def train(model, run, parts, autocast=False, steps=2):
    # SGD, as others hide the size of a gradient
    optimizer, outputs = torch.optim.SGD(model.parameters(), lr=1e-5), []
    for step in range(steps):
        for part in parts:
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                y = run(batch(step, part))
            y.float().square().mean().backward()
        for parameter in model.parameters():
            parameter.grad /= len(parts)
        scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            outputs.append(run(batch(step, 0)).detach().float())
        model.train()
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    whole = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t
    state = scaling_state(model)
    weights = [whole(parameter).detach().clone() for parameter in model.parameters()]
    return [*weights, *outputs, state.scale.clone(), state.amax_history.clone()]


def sharded(model, policy=None):
    options = {} if policy is None else {"mp_policy": policy}
    for layer in (model.first, model.last):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def gathered(model):
    gather_in_fp8(model)
    return model


start = Net()
"""

TRAINED = """
for recipe in RECIPES:
    make = lambda: convert(copy.deepcopy(start), recipe)
    found = result[str(recipe)] = {}
    alone = make()
    found["alone"] = train(alone, alone, (0, 1))
    model = make()
    found["ddp"] = train(model, DistributedDataParallel(model), (rank,))
    # weights as they are, so that their casts are those of one process
    model = sharded(make())
    found["fsdp2"] = train(model, model, (rank,))
    # and gathered in bf16, as under the precision's own policy
    policy = fsdp2_policy(recipe.precision)
    model = sharded(make(), policy)
    found["in bf16"] = train(model, model, (rank,), autocast=True)
    if recipe.precision not in ("fp8-block", "fp8-mx"):
        model = gathered(sharded(make()))
        found["fsdp2 in fp8"] = train(model, model, (rank,))
        model = gathered(sharded(make(), policy))
        found["in bf16 in fp8"] = train(model, model, (rank,), autocast=True)
    # the parts as one batch: of 3 whole blocks of rows each
    found["gradients"] = []
    for run, parts in ((DistributedDataParallel(make()), (rank,)), (make(), (0, 1))):
        run(torch.cat([batch(1, part, 128) for part in parts])).square().mean().backward()
        found["gradients"].append([parameter.grad for parameter in run.parameters()])
"""


@pytest.mark.parametrize("device", DEVICES)
def test_two_processes_train_as_one(device: str, tmp_path: Path) -> None:
    ranks = run_processes(COMMON + TRAINED, tmp_path, device=device)
    for rank in ranks:
        assert len(rank) == 5
        for recipe, found in rank.items():
            ddp, whole = found.pop("gradients")
            # a part's blocks are those of the whole batch, but a single scale for the tensor differs
            nearest = min(sqnr(mine, expected) for mine, expected in zip(ddp, whole, strict=True))
            assert (nearest > 60) == ("Block" in recipe or "MX" in recipe)
            assert nearest > 10
            # each process casts its part of the batch as a single process casts a micro-batch
            in_bf16 = found.pop("in bf16")
            for name, trained in found.items():
                expected = in_bf16 if name == "in bf16 in fp8" else found["alone"]
                assert all(map(torch.equal, trained, expected)), (recipe, name)
            assert not all(map(torch.equal, in_bf16, found["alone"]))
