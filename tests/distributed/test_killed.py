"""Processes that are killed, and ranks that die: what was saved is whole, and resumes exactly.

Processes start from a server that has imported everything already.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
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

STEPS = 12


def trained(path: Path, ckpt_path: str | None = None) -> Regression:
    """One epoch, killed in its middle: torchdata does not restore the order of the next one."""
    model = seeded()
    if ckpt_path:
        with torch.no_grad():
            # nothing of it may survive
            for parameter in model.parameters():
                parameter.zero_()
    data = StatefulDataLoader(dataset(96), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(5))
    saving = ModelCheckpoint(path / "saved", "{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1, "enable_checkpointing": True}
    make_trainer(path, callbacks=[saving], **options).fit(model, data, ckpt_path=ckpt_path)
    return model  # type: ignore[no-any-return]


def train_and_stand_still_in_writing(path: Path, said: Connection) -> None:
    """Stops in the middle of writing ``last.ckpt`` of step 6."""
    folder = path / "temporary"
    folder.mkdir()
    tempfile.tempdir = str(folder)
    write, seen = LocalFileOpener.write, []

    def write_half(opener: LocalFileOpener, content: bytes) -> int:
        seen.extend([opener.path] if Path(opener.path).name == "last.ckpt" else [])
        # it is written each time: the third one is that of step 6
        if len(seen) < 3:
            return write(opener, content)
        opener.f.write(content[: len(content) // 2])
        opener.f.flush()
        said.send("half written")
        time.sleep(2 * PATIENCE)
        return 0

    LocalFileOpener.write = write_half
    trained(path)


def test_killed_in_writing_a_checkpoint(tmp_path: Path) -> None:
    hears, says = PROCESSES.Pipe(duplex=False)
    process = start(train_and_stand_still_in_writing, tmp_path, says)
    says.close()
    try:
        assert hears.poll(PATIENCE), "it never came to that place"
    finally:
        process.kill()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    # the unfinished file has another name and place
    assert len(list((tmp_path / "temporary").iterdir())) == 1
    assert (tmp_path / "saved" / "step=6.ckpt").exists()
    for file in (tmp_path / "saved").iterdir():
        torch.load(file, weights_only=True)
    resumed, uninterrupted = trained(tmp_path, "last"), trained(tmp_path / "whole")
    # from step 4 on
    assert len(resumed.losses) == STEPS - 4
    assert same(resumed, uninterrupted)


class Ends(pl.Callback):
    """One rank ends, or stops without ending, in the third step before amaxes are reduced."""

    def __init__(self, rank: int, number: int) -> None:
        self.rank, self.number = rank, number

    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 2:
            # let the other rank finish the preceding work
            time.sleep(0.5)
            os.kill(os.getpid(), self.number)


def train_with_one_that_ends(path: Path, timeout: int, *ends: Any) -> None:
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=timeout))
    make_trainer(path, strategy=strategy, devices=2, max_epochs=9, callbacks=[Ends(*ends)]).fit(seeded(), loader())


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_dies(tmp_path: Path, dies: int) -> None:
    with as_ranks(train_with_one_that_ends, 2, tmp_path, 2 * PATIENCE, dies, signal.SIGKILL) as processes:
        for process in processes:
            process.join(PATIENCE)
        assert processes[dies].exitcode == -signal.SIGKILL
        assert processes[1 - dies].exitcode == 1
    error = (tmp_path / f"error{1 - dies}").read_text()
    assert "Connection" in error
    assert ", in update\n" in error


@pytest.mark.slow
def test_a_rank_stops_answering(tmp_path: Path) -> None:
    with as_ranks(train_with_one_that_ends, 2, tmp_path, 8, 1, signal.SIGSTOP) as processes:
        processes[0].join(PATIENCE)
        assert processes[0].exitcode == 1
        assert processes[1].exitcode is None
    # gloo's own words for it; one of its threads may print others first
    error = (tmp_path / "error0").read_text()
    assert "Timed out waiting 8000ms" in error or "Application timeout" in error
