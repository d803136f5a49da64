"""NaN, inf and outliers in a batch, and a spike of the loss: which parts of the model and of the scales change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lit import Regression, Steps, dataset, loader, make_trainer, seeded
from processes import all_end_well, as_ranks
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8 import DelayedScaling, Fp8Precision, convert, scaling_state


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


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("where", "what"), BAD)
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


SPIKE_AT = 9


class Spiky(Regression):
    """With gradient clipping, multiplies the loss of one step by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__(lr=0.1)
        self.factor = factor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * self.factor if self.trainer.global_step == SPIKE_AT else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Clipped(pl.Callback):
    """Records how much of each tensor was saturated in the step of the spike, and the gradients before clipping."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == SPIKE_AT:
            scaling_state(module).cast_counts.start(self)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == SPIKE_AT:
            state = scaling_state(module)
            assert state.cast_counts.values is not None
            self.saturated = dict(zip(state.names, state.cast_counts.values[:, 1].tolist(), strict=True))
            self.gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
            state.cast_counts.stop(self)


def with_spike(path: Path, factor: float, history: int) -> tuple[Spiky, Steps, Clipped]:
    model, steps, clipped = seeded(Spiky, factor=factor), Steps("scale"), Clipped()
    plugin = Fp8Precision(recipe=DelayedScaling(amax_history_len=history))
    options: dict[str, Any] = {"plugins": plugin, "max_epochs": 10, "gradient_clip_val": 1.0}
    make_trainer(path, callbacks=[steps, clipped], **options).fit(model, loader())
    return model, steps, clipped


@pytest.mark.parametrize("factor", [1e6, -1e6])
def test_a_loss_spike(tmp_path: Path, factor: float) -> None:
    history = 4
    calm, calm_steps, calm_clipped = with_spike(tmp_path, 1.0, history)
    model, steps, clipped = with_spike(tmp_path, factor, history)
    names = scaling_state(model).names
    spiked = torch.tensor([name == "net.2.grad_output" for name in names])
    # no difference before that step
    assert torch.equal(steps.after[SPIKE_AT]["scale"], calm_steps.after[SPIKE_AT]["scale"])
    assert torch.equal(torch.stack(model.losses[: SPIKE_AT + 1]), torch.stack(calm.losses[: SPIKE_AT + 1]))
    # in that step: saturated, finite
    assert sum(calm_clipped.saturated[name] for name in names if name.endswith("grad_output")) < 8
    assert clipped.saturated["net.2.grad_output"] > 16 * 16 * 0.9
    assert all(gradient.isfinite().all() for gradient in clipped.gradients)
    ratio = [after["scale"] / before["scale"] for after, before in zip(steps.after, calm_steps.after, strict=True)]
    for step in range(SPIKE_AT + 1, SPIKE_AT + 1 + history):
        # the scale follows for as long as the spike is in the history; layers after the cast see little of it
        assert 1e-7 < ratio[step][spiked] < 1e-5
        assert ((ratio[step][~spiked] > 0.25) & (ratio[step][~spiked] < 4)).all()
    for step in range(SPIKE_AT + 1 + history, len(ratio)):
        assert ((ratio[step] > 0.25) & (ratio[step] < 4)).all()
    assert torch.stack(model.losses).isfinite().all()
    late, late_calm = torch.stack(model.losses[-8:]).mean(), torch.stack(calm.losses[-8:]).mean()
    assert late < 1.05 * late_calm
    assert late < 0.8 * torch.stack(model.losses[:4]).mean()
