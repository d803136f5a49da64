"""DDP in real processes on the CPU: what is reduced and how often, and that ranks agree whichever layers run where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from processes import DEVICES, run_processes

pytestmark = pytest.mark.slow
every_device = pytest.mark.parametrize("device", DEVICES)

COMMON = """
from contextlib import nullcontext
from torch.nn.parallel import DistributedDataParallel

reductions = []
original = dist.all_reduce


def counting(tensor, *args, **kwargs):
    reductions.append(tuple(tensor.shape))
    return original(tensor, *args, **kwargs)


dist.all_reduce = counting


class Net(nn.Module):
    def __init__(self, sometimes=False):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.some, self.never = nn.Linear(32, 32), nn.Linear(32, 32)
        self.last = nn.Linear(32, 16)
        self.sometimes = sometimes
        self.around = lambda f, x: f(x)

    def forward(self, x):
        x = x + self.around(lambda y: self.second(torch.relu(self.first(y))), x)
        if not self.sometimes or rank == 1:
            x = x + self.some(x)
        return self.last(x)


def batch(step, micro=0):
    generator = torch.Generator(device).manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(8, 32, generator=generator) * (1 + rank)


def layers(model):
    return [model.first, model.second, model.some, model.never, model.last]


def train(model, run, steps=4, micro=1):
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        for index in range(micro):
            with run.no_sync() if index < micro - 1 else nullcontext():
                with torch.autocast(device.type, torch.bfloat16):
                    loss = run(batch(step, index)).float().square().mean()
                loss.backward()
            seen.append(loss.detach())
        reductions.clear()
        scaling_state(model).update()
        # inputs and gradients of five layers; each process measures the weights, which are the same, by itself
        assert reductions == [(2 * 5,)], reductions
        casts = torch.stack([torch.tensor(448.0) / layer.weight.detach().abs().max() for layer in layers(model)])
        optimizer.step()
        optimizer.zero_grad()
    state = scaling_state(model)
    return {
        "losses": torch.stack(seen), "scale": state.scale.clone(), "history": state.amax_history.clone(),
        "casts": casts, "weights": torch.cat([parameter.detach().flatten() for parameter in model.parameters()]),
    }


def epoch(model, ddp, join, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with join:
        for step in range(batches):
            ddp(batch(step)).square().mean().backward()
            scaling_state(model).update()
            optimizer.step()
            optimizer.zero_grad()


start = Net()
# with an entry for each step
long_window = DelayedScaling(amax_history_len=8)
"""
SEEN = ("losses", "scale", "history", "weights")


def assert_agree(ranks: list[dict[str, torch.Tensor]], not_run: Sequence[Sequence[int]]) -> None:
    """``not_run``: for each rank, the layers that did not run there, and whose weights it has therefore not cast."""
    for rank, layers in zip(ranks, not_run, strict=True):
        casts = rank["casts"].clone()
        casts[list(layers)] = 1
        assert torch.equal(rank["scale"][10:], casts)
    for rank in ranks[1:]:
        assert torch.equal(rank["scale"][:10], ranks[0]["scale"][:10])
        assert all(torch.equal(rank[name], ranks[0][name]) for name in ("casts", "history", "weights"))
        # on different data
        assert not torch.equal(rank["losses"], ranks[0]["losses"])


@every_device
def test_one_reduction_a_step_and_ranks_agree(device: str, tmp_path: Path) -> None:
    body = """
for name, sometimes, options, micro in (
    ("unused", False, {"find_unused_parameters": True}, 1),
    ("on some ranks", True, {"find_unused_parameters": True}, 1),
    ("accumulated", False, {"find_unused_parameters": True}, 3),
    ("static", False, {"static_graph": True}, 1),
):
    model = convert(copy.deepcopy(start), long_window)
    model.sometimes = sometimes
    result[name] = train(model, DistributedDataParallel(model, **options), micro=micro)
"""
    ranks = run_processes(COMMON + body, tmp_path, device=device)
    for name in ranks[0]:
        assert_agree([rank[name] for rank in ranks], [[2, 3] if name == "on some ranks" else [3], [3]])
        filled = (ranks[0][name]["history"] > 0).sum(0).view(2, 5)
        # inputs and gradients of: first, second, some, never, last
        assert filled.tolist() == [[4, 4, 4, 0, 4]] * 2, name


@every_device
def test_recomputation_under_ddp(device: str, tmp_path: Path) -> None:
    body = """
for name, around in {
    "plain": lambda f, x: f(x),
    "reentrant": lambda f, x: checkpoint(f, x.requires_grad_(), use_reentrant=True),
    "not reentrant": lambda f, x: checkpoint(f, x, use_reentrant=False),
}.items():
    model = convert(copy.deepcopy(start), long_window)
    model.around = around
    # DDP itself takes reentrant checkpoints only where every parameter gets its gradient
    model.never.requires_grad_(False)
    result[name] = train(model, DistributedDataParallel(model), micro=2)
"""
    ranks = run_processes(COMMON + body, tmp_path, device=device)
    assert_agree([rank["plain"] for rank in ranks], [[3], [3]])
    for rank in ranks:
        for name in ("reentrant", "not reentrant"):
            assert all(torch.equal(rank[name][part], rank["plain"][part]) for part in SEEN)


@every_device
def test_compiled_under_ddp(device: str, tmp_path: Path) -> None:
    body = """
import torch._dynamo as dynamo
from torch._dynamo.testing import CompileCounterWithBackend

for name in ("eager", "whole"):
    dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = convert(copy.deepcopy(start))
    run = DistributedDataParallel(model, static_graph=True)
    if name == "whole":
        run.module.forward = torch.compile(run.module.forward, backend=counter, fullgraph=True)
    counts = []
    for steps in (2, 1):
        result[f"{name} {steps}"] = train(model, run, steps=steps)
        counts.append(counter.frame_count)
    # nothing is compiled after the second step
    assert counts[0] == counts[1] and (counts[0] > 0) == (name != "eager"), counts
"""
    for rank in run_processes(COMMON + body, tmp_path, device=device):
        for steps in (2, 1):
            found, expected = rank[f"whole {steps}"], rank[f"eager {steps}"]
            assert all(torch.equal(found[part], expected[part]) for part in SEEN)


@every_device
def test_shared_inputs_under_ddp(device: str, tmp_path: Path) -> None:
    body = """
from projections import Nested, Separate, Shared, train

weights = Nested(Shared).state_dict()
for kind in (Shared, Separate):
    model = Nested(kind)
    model.load_state_dict(weights)
    run = DistributedDataParallel(convert(model))
    result[kind.__name__] = train(model, run, seed=rank)
    result[f"{kind.__name__} owners"] = len(scaling_state(model).input_owners)
    result[f"{kind.__name__} history"] = scaling_state(model).amax_history
"""
    ranks = run_processes(COMMON + body, tmp_path, device=device)
    for rank in ranks:
        assert (rank["Shared owners"], rank["Separate owners"]) == (4, 0)
        assert all(map(torch.equal, rank["Shared"], rank["Separate"]))
        assert torch.equal(rank["Shared history"], ranks[0]["Shared history"])
    # on different data
    assert not torch.equal(ranks[0]["Shared"][0], ranks[1]["Shared"][0])


def test_uneven_inputs_are_refused(tmp_path: Path) -> None:
    body = """
for reduce_amax in (True, False):
    model = convert(copy.deepcopy(start), DelayedScaling(reduce_amax=reduce_amax))
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    try:
        epoch(model, ddp, ddp.join(), 3 if rank == 0 else 5)
        result[reduce_amax] = scaling_state(model).updates
    except RuntimeError as error:
        result[reduce_amax] = str(error)
"""
    ranks = run_processes(COMMON + body, tmp_path)
    for rank in ranks:
        assert "Give all processes as many batches" in rank[True]
    assert [rank[False] for rank in ranks] == [3, 5]
