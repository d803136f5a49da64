"""What grows over time: memory over a thousand steps."""

from __future__ import annotations

import gc
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lit import make_trainer
from processes import PATIENCE, start
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


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


MEASURED = (250, 500, 750, 1_000)


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
def test_a_thousand_steps_of_a_trainer(tmp_path: Path) -> None:
    process = start(many_steps_of_a_trainer, tmp_path)
    process.join(2 * PATIENCE)
    assert process.exitcode == 0
    memories = torch.load(tmp_path / "memories.pt", weights_only=False)
    assert len(memories) == len(MEASURED)
    windows = [later.since(earlier) for earlier, later in pairwise(memories)]
    # what a library creates once is in one interval, and what every step leaves behind is in all: one object per step
    # would be 250; a small tensor has some 500 bytes
    assert min(growth["tensors"] for growth in windows) < 10, windows
    assert min(growth["blocks"] for growth in windows) < 125, windows
    assert min(growth["bytes"] for growth in windows) < 100_000, windows
