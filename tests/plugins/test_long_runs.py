"""What grows or collides over time: a kernel cache that two runs share, and memory over a thousand steps."""

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
from processes import PATIENCE, PROCESSES, start
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import kernels_cuda.compile as kernels_compile


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
