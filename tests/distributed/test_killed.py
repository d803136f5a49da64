"""Processes that are killed, and ranks that die: what was saved is whole, and resumes exactly.

Processes start from a server that has imported everything already.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fsspec.implementations.local import LocalFileOpener
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lit import Regression, dataset, loader, make_trainer, same, seeded
from processes import PATIENCE, PROCESSES, as_ranks, start
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_fp8 import scaling_state

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
