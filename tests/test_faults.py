"""What goes wrong in long runs: killed processes, bad batches, checkpoints from elsewhere, and memory that grows.

Processes start from a server that has imported everything already. ``tests/kernels/test_compile.py`` has eight
processes of one version that share a kernel cache, and one that is killed while it writes there.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileOpener
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lit import Regression, dataset, loader, make_trainer, same, seeded, takes_weights_only
from processes import PATIENCE, PROCESSES, all_end_well, as_ranks, start
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import kernels_cuda.compile as kernels_compile
from lightning_fp8 import DelayedScaling, Fp8Precision, convert, scaling_state
from lightning_fp8.scaling import ScalingState

# --- kill -9, then resume ---

STEPS = 12
KILLED_AT = 7
SAVED_EVERY = 2


def shuffled() -> StatefulDataLoader[Any]:
    """Twelve batches, so that the kill comes in the middle of an epoch.

    One epoch, because torchdata does not restore the order of the next one.
    """
    return StatefulDataLoader(dataset(96), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(5))


def saving_trainer(path: Path, *callbacks: pl.Callback) -> pl.Trainer:
    saving = ModelCheckpoint(
        path / "saved", filename="{step}", every_n_train_steps=SAVED_EVERY, save_top_k=-1, save_last=True
    )
    return make_trainer(
        path, max_steps=STEPS, max_epochs=-1, enable_checkpointing=True, callbacks=[saving, *callbacks]
    )  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Regression:
    model = seeded()
    saving_trainer(tmp_path_factory.mktemp("whole")).fit(model, shuffled())
    return model


class StandStill(pl.Callback):
    """Announces the middle of a step, and waits there to be killed."""

    def __init__(self, place: str, said: Connection) -> None:
        self.place, self.said = place, said

    def at(self, place: str, trainer: pl.Trainer, step: int) -> None:
        if place == self.place and trainer.global_step == step:
            stand_still(self.said, step)

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at("forward has run", trainer, KILLED_AT)

    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at("backward has run", trainer, KILLED_AT)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at("weights have changed", trainer, KILLED_AT + 1)

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        state = scaling_state(module)
        update = state.update

        def update_and_wait() -> None:
            update()
            self.at("scales have changed", trainer, KILLED_AT)

        state.update = update_and_wait  # type: ignore[method-assign]


def stand_still(said: Connection, what: Any) -> None:
    said.send(what)
    time.sleep(2 * PATIENCE)


def train_and_stand_still(path: Path, place: str, said: Connection) -> None:
    saving_trainer(path, StandStill(place, said)).fit(seeded(), shuffled())


def kill_when_it_says(target: Callable[..., None], *arguments: Any) -> Any:
    hears, says = PROCESSES.Pipe(duplex=False)
    process = start(target, *arguments, says)
    says.close()
    try:
        assert hears.poll(PATIENCE), "it never came to that place"
        heard = hears.recv()
    finally:
        process.kill()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    return heard


def resumed(path: Path, ckpt_path: str | Path) -> tuple[Regression, int]:
    """The model of a run resumed from there, and the step at which it began."""
    first: list[int] = []

    class First(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
            first.append(trainer.global_step)

    model = seeded()
    with torch.no_grad():
        # nothing of it may survive
        for parameter in model.parameters():
            parameter.zero_()
    saving_trainer(path, First()).fit(model, shuffled(), ckpt_path=ckpt_path)
    return model, first[0]


@pytest.mark.parametrize(
    "place", ["forward has run", "backward has run", "scales have changed", "weights have changed"]
)
def test_killed_in_training(tmp_path: Path, uninterrupted: Regression, place: str) -> None:
    step = kill_when_it_says(train_and_stand_still, tmp_path, place)
    assert step == KILLED_AT + (place == "weights have changed")
    model, began_at = resumed(tmp_path, "last")
    assert began_at == 6
    assert same(model, uninterrupted)
    assert torch.equal(torch.stack(model.losses), torch.stack(uninterrupted.losses[6:]))


def train_and_stand_still_in_writing(path: Path, name: str, how: str, said: Connection) -> None:
    """Stops in the middle of writing the checkpoint of step 6, or ``last.ckpt`` after it."""
    folder = path / "temporary"
    folder.mkdir()
    tempfile.tempdir = str(folder)
    write, move, rename = LocalFileOpener.write, shutil.move, os.rename
    # `last.ckpt` is written each time: the third one is that of step 6
    times = {"step=6.ckpt": 1, "last.ckpt": 3}[name]
    seen: list[Path] = []

    def is_it(target: str) -> bool:
        seen.extend([Path(target)] if Path(target).name == name else [])
        return Path(target).name == name and len(seen) == times

    def write_half(opener: LocalFileOpener, content: bytes) -> int:
        if not is_it(opener.path):
            return write(opener, content)
        write(opener, content[: len(content) // 2])
        opener.f.flush()
        return stand_still(said, "half written")  # type: ignore[return-value]

    def wait_before_move(source: str, target: str) -> Any:
        return stand_still(said, "not moved") if is_it(target) else move(source, target)

    def other_device(source: str, target: str) -> None:
        if Path(target).parent == path / "saved":
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target)

    def copy_half(source: str, target: str, **_: Any) -> Any:
        content = Path(source).read_bytes()
        if not is_it(target):
            return Path(target).write_bytes(content)
        Path(target).write_bytes(content[: len(content) // 2])
        return stand_still(said, "half copied")

    if how == "half written":
        LocalFileOpener.write = write_half
    elif how == "not moved":
        shutil.move = wait_before_move  # type: ignore[assignment]
    else:
        os.rename = other_device  # type: ignore[assignment]
        shutil.copyfile = copy_half  # type: ignore[assignment]
    saving_trainer(path).fit(seeded(), shuffled())


@pytest.mark.parametrize("how", ["half written", "not moved"])
@pytest.mark.parametrize("name", ["step=6.ckpt", "last.ckpt"])
def test_killed_in_writing_a_checkpoint(tmp_path: Path, uninterrupted: Regression, name: str, how: str) -> None:
    assert kill_when_it_says(train_and_stand_still_in_writing, tmp_path, name, how) == how
    # the unfinished file has another name and place
    assert len(list((tmp_path / "temporary").iterdir())) == 1
    assert (tmp_path / "saved" / "step=6.ckpt").exists() == (name == "last.ckpt")
    for file in (tmp_path / "saved").iterdir():
        torch.load(file, weights_only=True)
    model, began_at = resumed(tmp_path, "last")
    assert began_at == 4
    assert same(model, uninterrupted)


def test_killed_in_writing_a_checkpoint_to_another_file_system(tmp_path: Path, uninterrupted: Regression) -> None:
    """fsspec moves from ``$TMPDIR``, and a move between file systems copies: not atomic, but detected if incomplete."""
    kill_when_it_says(train_and_stand_still_in_writing, tmp_path, "last.ckpt", "half copied")
    with pytest.raises((RuntimeError, OSError)):
        resumed(tmp_path, "last")
    model, began_at = resumed(tmp_path, tmp_path / "saved" / "step=6.ckpt")
    assert began_at == 6
    assert same(model, uninterrupted)


# --- a rank dies ---


class Ends(pl.Callback):
    """One rank ends, or stops without ending, in the middle of the third step."""

    def __init__(self, rank: int, place: str, number: int) -> None:
        self.rank, self.place, self.number = rank, place, number

    def at(self, place: str, trainer: pl.Trainer) -> None:
        if place == self.place and trainer.global_rank == self.rank and trainer.global_step == 2:
            # let the other rank finish the preceding work
            time.sleep(0.5)
            os.kill(os.getpid(), self.number)

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at("before gradients are reduced", trainer)

    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at("before amaxes are reduced", trainer)


def train_with_one_that_ends(path: Path, timeout: int, *ends: Any) -> None:
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=timeout))
    make_trainer(path, strategy=strategy, devices=2, max_epochs=9, callbacks=[Ends(*ends)]).fit(seeded(), loader())


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("place", ["before gradients are reduced", "before amaxes are reduced"])
def test_a_rank_dies(tmp_path: Path, dies: int, place: str) -> None:
    with as_ranks(train_with_one_that_ends, 2, tmp_path, 2 * PATIENCE, dies, place, signal.SIGKILL) as processes:
        for process in processes:
            process.join(PATIENCE)
        assert processes[dies].exitcode == -signal.SIGKILL
        assert processes[1 - dies].exitcode == 1
    error = (tmp_path / f"error{1 - dies}").read_text()
    assert "Connection" in error
    assert (", in update\n" in error) == (place == "before amaxes are reduced")


@pytest.mark.slow
def test_a_rank_stops_answering(tmp_path: Path) -> None:
    place = "before amaxes are reduced"
    with as_ranks(train_with_one_that_ends, 2, tmp_path, 12, 1, place, signal.SIGSTOP) as processes:
        processes[0].join(PATIENCE)
        assert processes[0].exitcode == 1
        assert processes[1].exitcode is None
    # gloo's own words for it; one of its threads may print others first
    error = (tmp_path / "error0").read_text()
    assert "Timed out waiting 12000ms" in error or "Application timeout" in error


# --- NaN and inf in a batch ---


class LeavesOut(Regression):
    """Skips updates by gradients that are not finite, as many training scripts do."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not all(p.grad.isfinite().all() for p in self.parameters() if p.grad is not None):
            optimizer.zero_grad()


class Steps(pl.Callback):
    """The scaling state before the first update and after each; and the amaxes that each update started from."""

    def __init__(self, *fields: str) -> None:
        self.fields = fields or ("scale", "amax_history", "nonfinite_steps")
        self.after: list[dict[str, Tensor]] = []
        self.amax: list[Tensor] = []

    def take(self, state: ScalingState) -> None:
        self.after.append({field: getattr(state, field).clone() for field in self.fields})

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.take(scaling_state(module))
        scaling_state(module).model.before_update.append(lambda amax: self.amax.append(amax.clone()))

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if len(self.amax) == len(self.after):
            self.take(scaling_state(module))


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


# --- a loss spike ---

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


# --- checkpoints from elsewhere ---


def train_under_ddp(path: Path, resume: Path | None, epochs: int) -> None:
    model, steps = seeded(), Steps("amax", "scale", "amax_history", "nonfinite_steps")
    trainer = make_trainer(path, strategy="ddp", devices=2, max_epochs=epochs, callbacks=[steps])
    trainer.fit(model, loader(), ckpt_path=resume)
    trainer.save_checkpoint(path / "two.ckpt")
    torch.save({"first": steps.after[0], "last": steps.after[-1], "steps": trainer.global_step},
               path / f"rank{trainer.global_rank}.pt")  # fmt: skip


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def resumed_from(start: dict[str, Tensor], end: dict[str, Tensor]) -> bool:
    """Inputs and gradients continue from the end of the run; no weight has been cast yet."""
    delayed = [{name: value[..., :4] for name, value in fields.items()} for fields in (start, end)]
    return equal(*delayed) and bool((start["scale"][4:] == 1).all() and (start["amax"][4:] == 0).all())


def test_from_two_processes_to_one_and_back(tmp_path: Path) -> None:
    with as_ranks(train_under_ddp, 2, tmp_path, None, 2) as processes:
        all_end_well(processes, tmp_path)
    two = torch.load(tmp_path / "rank0.pt", weights_only=True)
    model, steps = seeded(), Steps("amax", "scale", "amax_history", "nonfinite_steps")
    trainer = make_trainer(tmp_path, max_epochs=3, callbacks=[steps])
    trainer.fit(model, loader(), ckpt_path=tmp_path / "two.ckpt")
    assert resumed_from(steps.after[0], two["last"])
    # two epochs of two steps each, then one of four
    assert (two["steps"], trainer.global_step) == (4, 8)
    assert ((steps.after[-1]["amax_history"] > 0).sum(0) == 8).all()
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    with as_ranks(train_under_ddp, 2, tmp_path, tmp_path / "one.ckpt", 4) as processes:
        all_end_well(processes, tmp_path)
    again = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    for rank in again:
        assert resumed_from(rank["first"], steps.after[-1])
        assert rank["steps"] == 10
    assert equal(again[0]["last"], again[1]["last"])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    trainer = make_trainer(tmp_path)
    trainer.fit(seeded(), loader())
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    return tmp_path / "whole.ckpt"


class Longer(Regression):
    """Has a layer that the checkpoint's model lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(self.net(x))


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_a_checkpoint_of_another_width_or_depth_is_refused_by_name(tmp_path: Path, checkpoint: Path) -> None:
    for model, message in (
        (seeded(width=16), r"size mismatch for net.0.weight: .*\[64, 32\].*\[32, 16\]"),
        (seeded(Longer), r'Missing key\(s\) in state_dict: "extra.weight", "extra.bias"'),
    ):
        with pytest.raises(RuntimeError, match=message):
            make_trainer(tmp_path, max_epochs=2).fit(model, loader(), ckpt_path=checkpoint)
        assert model.losses == []


def test_scales_of_another_model_are_refused_by_name(tmp_path: Path, checkpoint: Path) -> None:
    """Lightning loads weights first: all are then those of the checkpoint, and no scale is."""
    model, plugin = seeded(), Fp8Precision(ignore_modules=["net.2"])
    message = "The scaling state does not fit this model. In the checkpoint but not in the model: 'net.2.input', "
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, plugins=plugin, max_epochs=2).fit(model, loader(), ckpt_path=checkpoint)
    state = scaling_state(model)
    assert state.amax_history.count_nonzero() == 0
    assert (state.scale == 1).all()
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in saved.items())
    assert model.losses == []
    # and the weights can be loaded alone
    model.load_state_dict(saved, strict=False)
    make_trainer(tmp_path, plugins=plugin).fit(model, loader())
    assert torch.stack(model.losses).isfinite().all()


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_checkpoint_changes_nothing(tmp_path: Path, checkpoint: Path, part: float) -> None:
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[: int(part * len(content))])
    model = seeded()
    before = values(model)
    # torch's message depends on where the file ends
    with pytest.raises((RuntimeError, OSError, EOFError)):
        make_trainer(tmp_path, max_epochs=2).fit(model, loader(), ckpt_path=checkpoint)
    assert all(map(torch.equal, before, values(model)))
    assert model.losses == []


class Malicious:
    """Would create a file of this name when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


@takes_weights_only
@pytest.mark.parametrize("where", ["scale", "net.2.grad_output", "Fp8Precision"])
@pytest.mark.parametrize("weights_only", [True, None])
def test_a_malicious_checkpoint_does_not_run(
    tmp_path: Path, checkpoint: Path, where: str, weights_only: bool | None
) -> None:
    content = torch.load(checkpoint, weights_only=True)
    marker = tmp_path / "it ran"
    place = {
        "scale": content["Fp8Precision"]["net.0.input"],
        "net.2.grad_output": content["Fp8Precision"],
        "Fp8Precision": content,
    }[where]
    place[where] = Malicious(marker)
    torch.save(content, checkpoint)
    model = seeded()
    before = values(model)
    with pytest.raises(UnpicklingError, match="Weights only load failed"):
        make_trainer(tmp_path, max_epochs=2).fit(model, loader(), ckpt_path=checkpoint, weights_only=weights_only)
    assert not marker.exists()
    assert all(map(torch.equal, before, values(model)))
    torch.load(checkpoint, weights_only=False)
    assert marker.exists()


RECIPE = DelayedScaling(margin=1)


class WithEverything(Regression):
    """Hyperparameters, a schedule and a logged metric: the usual contents of a checkpoint."""

    def __init__(self, width: int = 32, lr: float = 1e-2, name: str = "tiny", recipe: Any = RECIPE) -> None:
        super().__init__(width, lr)
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)]


@takes_weights_only
@pytest.mark.parametrize("precision", ["fp8-delayed", "bf16-mixed", "bf16-true"])
def test_our_checkpoints_need_weights_only(tmp_path: Path, precision: str) -> None:
    def run(epochs: int, **how: Any) -> WithEverything:
        saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, monitor="val_loss")
        model = seeded(WithEverything)
        options: dict[str, Any] = {"callbacks": [saving], "enable_checkpointing": True, "precision": precision}
        make_trainer(tmp_path, max_epochs=epochs, **options).fit(model, loader(), loader(), **how)
        return model

    whole = run(2)
    resumed = run(2, ckpt_path=tmp_path / "epoch=0.ckpt", weights_only=True)
    assert len(resumed.losses) == 4
    assert all(map(torch.equal, values(whole), values(resumed)))
    if precision == "fp8-delayed":
        assert same(whole, resumed)
    assert resumed.hparams["name"] == "tiny"
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)["hyper_parameters"]
    assert saved["recipe"] == RECIPE


@pytest.mark.parametrize(
    "entry",
    [
        {"scale": 1.0}, {"scale": None}, {"amax": "2"}, {"amax_history": [1.0, 2.0]}, {"nonfinite_steps": 0},
        {"scale": torch.ones(3)}, {"in_fp8": "no"}, {"in_fp8": torch.ones(2)}, {"amax": torch.tensor(1j)},
        {"scale": torch.tensor(float("nan"))}, {"scale": torch.tensor(0.0)}, {"scale": torch.tensor(-1.0)},
        {"amax_history": torch.tensor([float("inf")])}, {"amax_history": torch.tensor([-1.0])},
        {"amax_history": torch.ones(1, 2)}, {"amax_history": torch.tensor(1.0)},
    ],
)  # fmt: skip
def test_only_well_formed_tensors_are_loaded_as_scales(entry: dict[str, Any]) -> None:
    state = scaling_state(convert(seeded()))
    state.amax.fill_(2.0)
    state.update()
    loaded = state.state_dict()
    before = {name: {field: value.clone() for field, value in fields.items()} for name, fields in loaded.items()}
    for fields in loaded.values():
        fields["scale"] = fields["scale"] * 2
    loaded["net.2.grad_output"].update(entry)
    field, value = next(iter(entry.items()))
    wrong = "lacks the tensors|must hold single real numbers|must have a scale that is|must have a history of finite"
    with pytest.raises(ValueError, match=rf"'net\.2\.grad_output' ({wrong})") as error:
        state.load_state_dict(loaded)
    assert field in str(error.value) or isinstance(value, torch.Tensor)
    assert all(equal(fields, before[name]) for name, fields in state.state_dict().items())


@pytest.mark.parametrize("entry", ["text", None, torch.ones(2)])
def test_an_entry_that_is_no_mapping_is_named(entry: Any) -> None:
    state = scaling_state(convert(seeded()))
    with pytest.raises(
        ValueError, match=r"'net\.2\.grad_output' lacks the tensors amax, amax_history, scale, nonfinite_steps"
    ):
        state.load_state_dict({**state.state_dict(), "net.2.grad_output": entry})


# --- two runs share a kernel cache ---


def compile_in_a_shared_folder(folder: Path, version: int, goes: Any, result: Path) -> None:
    os.environ["LIGHTNING_FP8_CACHE_DIR"] = str(folder)
    kernel = f'extern "C" __global__ void times(float* x) {{ x[threadIdx.x] *= {version}.0f; }}\n'
    kernels_compile.source = lambda family: kernel  # type: ignore[assignment]
    kernels_compile.headers = dict  # type: ignore[assignment]
    goes.wait(PATIENCE)
    for _ in range(3):
        compiled = kernels_compile.compiled("times", "sm_89")
        assert kernels_compile.compile_source("times", kernel, "sm_89", (), {})[0] == compiled.read_bytes()
    result.write_text(compiled.name)


def test_runs_of_two_versions_share_a_kernel_cache(tmp_path: Path) -> None:
    """Started at the same time on an empty folder, each finds its own kernels, and leaves the other version's alone."""
    folder, goes = tmp_path / "cache", PROCESSES.Event()
    results = [tmp_path / f"result{number}" for number in range(4)]
    processes = [
        start(compile_in_a_shared_folder, folder, 2 + number % 2, goes, result) for number, result in enumerate(results)
    ]
    goes.set()
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
    names = [result.read_text() for result in results]
    assert names[:2] == names[2:]
    assert names[0] != names[1]
    assert {file.name for file in folder.iterdir()} == set(names)


# --- memory over many steps ---


class Memory:
    """Counts tensors, Python objects and memory, to find what is never freed."""

    def __init__(self) -> None:
        for _ in range(3):
            gc.collect()
        self.blocks = sys.getallocatedblocks()
        self.tensors = sum(issubclass(type(found), Tensor) for found in gc.get_objects())
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.bytes = pages * os.sysconf("SC_PAGE_SIZE")

    def since(self, before: Memory) -> dict[str, int]:
        return {name: getattr(self, name) - getattr(before, name) for name in ("blocks", "tensors", "bytes")}


MEASURED = (500, 1_000, 1_500, 2_000)


def growths(path: Path, target: Callable[..., None]) -> list[dict[str, int]]:
    """Differences between consecutive measurements."""
    process = start(target, path)
    process.join(2 * PATIENCE)
    assert process.exitcode == 0
    memories = torch.load(path / "memories.pt", weights_only=False)
    assert len(memories) == len(MEASURED)
    return [later.since(earlier) for earlier, later in pairwise(memories)]


def check_no_growth(windows: list[dict[str, int]]) -> None:
    # what a library creates once is in one interval, and what every step leaves behind is in all: one object per step
    # would be 500; a small tensor has some 500 bytes
    assert min(growth["tensors"] for growth in windows) < 10, windows
    assert min(growth["blocks"] for growth in windows) < 250, windows
    assert min(growth["bytes"] for growth in windows) < 125_000, windows


def many_steps_of_a_plain_loop(path: Path) -> None:
    torch.manual_seed(0)
    model = convert(nn.Linear(16, 16), DelayedScaling(amax_history_len=16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(4, 16)
    memories = []
    for step in range(1, MEASURED[-1] + 1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
        if step in MEASURED:
            memories.append(Memory())
    torch.save(memories, path / "memories.pt")


@pytest.mark.slow
def test_thousands_of_steps_of_a_plain_loop(tmp_path: Path) -> None:
    check_no_growth(growths(tmp_path, many_steps_of_a_plain_loop))


class Tiny(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Measures(pl.Callback):
    def __init__(self) -> None:
        self.memories: list[Memory] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in MEASURED:
            self.memories.append(Memory())


def many_steps_of_a_trainer(path: Path) -> None:
    data = DataLoader(TensorDataset(torch.randn(1_000, 16)), batch_size=4)
    measures = Measures()
    make_trainer(path, max_steps=MEASURED[-1], max_epochs=-1, callbacks=[measures]).fit(Tiny(), data)
    torch.save(measures.memories, path / "memories.pt")


@pytest.mark.slow
def test_thousands_of_steps_of_a_trainer(tmp_path: Path) -> None:
    check_no_growth(growths(tmp_path, many_steps_of_a_trainer))
