"""NaN and inf in a batch: which parts of the model and of the scales change, also if only one process sees them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lit import Regression, Steps, dataset, loader, make_trainer, seeded
from processes import all_end_well, as_ranks
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8 import convert, scaling_state


class LeavesOut(Regression):
    """Skips updates by gradients that are not finite, as many training scripts do."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not all(p.grad.isfinite().all() for p in self.parameters() if p.grad is not None):
            optimizer.zero_grad()


EVERYTHING_BUT_WEIGHTS = {"net.0.input", "net.2.input", "net.0.grad_output", "net.2.grad_output"}
BAD = {
    # (which tensor of the batch, the value of one of its elements): which tensors see a non-finite value
    ("x", "nan"): EVERYTHING_BUT_WEIGHTS,
    ("y", "nan"): {"net.0.grad_output", "net.2.grad_output"},
    # a cast turns inf into the largest number of its format, so later values are finite
    ("x", "inf"): {"net.0.input"},
    ("y", "inf"): {"net.2.grad_output"},
}


def spoiled(where: str, what: str, row: int) -> TensorDataset:
    data = dataset(64)
    data.tensors["xy".index(where)][row, 1] = float(what)
    return data


def check_only_they_stay(steps: Steps, names: tuple[str, ...], bad_step: int, saw: set[str]) -> None:
    for step, amax in enumerate(steps.amax):
        before, after = steps.after[step], steps.after[step + 1]
        saw_it = torch.tensor([step == bad_step and name in saw for name in names])
        assert torch.equal(~amax.isfinite(), saw_it)
        assert torch.equal(after["nonfinite_steps"], before["nonfinite_steps"] + saw_it)
        stays = saw_it[:4].nonzero().flatten()
        for field in ("scale", "amax_history"):
            assert torch.equal(after[field][..., stays], before[field][..., stays])
        # the other tensors, and in other steps all of them, keep updating
        moves = (~saw_it[:4]).nonzero().flatten()
        assert torch.equal(after["amax_history"][0, moves], amax[moves])
        # weights have no history
        assert after["amax_history"].shape[1] == 4
        assert torch.equal(after["scale"][4:], torch.tensor(448.0) / amax[4:])
        assert after["scale"].isfinite().all()


@pytest.mark.parametrize(("where", "what", "accumulate"), [(*bad, 1 + at % 2) for at, bad in enumerate(BAD)])
def test_a_bad_batch(tmp_path: Path, where: str, what: str, accumulate: int) -> None:
    model, steps = seeded(LeavesOut), Steps()
    # batch 3 of 8: with two micro-batches per step, it is the second of step 1
    data = DataLoader(spoiled(where, what, row=29), batch_size=8)
    make_trainer(tmp_path, callbacks=[steps], accumulate_grad_batches=accumulate).fit(model, data)
    names = scaling_state(model).names
    assert len(steps.amax) == 8 // accumulate
    check_only_they_stay(steps, names, bad_step=3 // accumulate, saw=BAD[where, what])
    losses = torch.stack(model.losses)
    assert losses[~(torch.arange(8) == 3)].isfinite().all()
    assert all(p.isfinite().all() for p in model.parameters())
    if (where, what) == ("x", "nan"):
        make_trainer(tmp_path, max_epochs=20).fit(model, loader())
        assert torch.stack(model.losses[-4:]).mean() < 0.5 * losses[:3].mean()


def train_with_nan_on_one_rank(path: Path) -> None:
    model, steps = seeded(LeavesOut), Steps()
    data = DataLoader(spoiled("x", "nan", row=29), batch_size=8)
    make_trainer(path, strategy="ddp", devices=2, callbacks=[steps]).fit(model, data)
    losses, weights = torch.stack(model.losses), [p.detach() for p in model.parameters()]
    found = {"after": steps.after, "amax": steps.amax, "losses": losses, "weights": weights}
    torch.save(found, path / f"rank{dist.get_rank()}.pt")


def test_a_bad_batch_on_one_rank(tmp_path: Path) -> None:
    with as_ranks(train_with_nan_on_one_rank, 2, tmp_path) as processes:
        all_end_well(processes, tmp_path)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    bad = ~torch.stack([rank["losses"] for rank in ranks]).isfinite()
    assert bad.sum() == 1
    bad_step = int(bad.any(dim=0).nonzero())
    names = scaling_state(convert(seeded())).names
    for rank in ranks:
        steps = Steps()
        steps.after, steps.amax = rank["after"], rank["amax"]
        assert len(steps.amax) == 4
        check_only_they_stay(steps, names, bad_step=bad_step, saw=EVERYTHING_BUT_WEIGHTS)
    for field in ("scale", "amax_history", "nonfinite_steps"):
        assert torch.equal(ranks[0]["after"][-1][field], ranks[1]["after"][-1][field])
    assert all(map(torch.equal, ranks[0]["weights"], ranks[1]["weights"]))
    assert all(p.isfinite().all() for p in ranks[0]["weights"])
