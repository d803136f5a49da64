"""Ranks that die or stop answering: the others end with an error."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy
from lit import loader, make_trainer, seeded
from processes import PATIENCE, as_ranks


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


def test_a_rank_dies(tmp_path: Path) -> None:
    dies = 1
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
    with as_ranks(train_with_one_that_ends, 2, tmp_path, 4, 1, signal.SIGSTOP) as processes:
        processes[0].join(PATIENCE)
        assert processes[0].exitcode == 1
        assert processes[1].exitcode is None
    # gloo's own words for it; one of its threads may print others first
    error = (tmp_path / "error0").read_text()
    assert "Timed out waiting 4000ms" in error or "Application timeout" in error
