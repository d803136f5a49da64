"""A schedule on two processes: they switch at the same step, and as a run that is restarted there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lit import LONG_WINDOW, Regression, loader, make_trainer, seeded
from processes import all_end_well, as_ranks
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_fp8 import Fp8Precision, PrecisionSchedule, scaling_state
from lightning_fp8.plugins import fsdp2_policy

pytestmark = pytest.mark.slow
SCHEDULE = {0.5: {"fprop": "bf16"}, 6: "bf16"}


class Sharded(Regression):
    """Under FSDP2 sharded by layer. Keeps what its layers run in at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[tuple[str, ...]]] = []

    def configure_model(self) -> None:
        if self.device_mesh is not None and not isinstance(self.net, FSDPModule):
            for layer in (self.net[0], self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"], mp_policy=fsdp2_policy())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append([one.in_bf16 for one in scaling_state(self).precisions])
        return super().training_step(batch, batch_idx)


def train(path: Path, strategy: str) -> None:
    found = {}
    for what, settings in RUNS.items():
        model = seeded(Sharded)
        trainer = make_trainer(
            path,
            plugins=Fp8Precision(recipe=LONG_WINDOW, **settings.get("plugin", {})),
            callbacks=[PrecisionSchedule(SCHEDULE)] if settings["is_scheduled"] else [],
            strategy="ddp" if strategy == "ddp" else ModelParallelStrategy(2, 1),
            devices=2,
            # four steps in an epoch
            max_epochs=settings["epochs"],
        )
        resumed = settings.get("resumes")
        trainer.fit(model, loader(128), ckpt_path=path / f"{resumed}.ckpt" if resumed else None)
        trainer.save_checkpoint(path / f"{what}.ckpt")
        weights = [getattr(one, "full_tensor", lambda one=one: one)().detach().clone() for one in model.parameters()]
        state = scaling_state(model)
        scales = {"scale": state.scale[: state.delayed].clone(), "history": state.amax_history.clone()}
        found[what] = {"losses": torch.stack(model.losses), "seen": model.seen, "weights": weights, **scales}
    torch.save(found, path / f"rank{os.environ['RANK']}.pt")


# eight steps, the first four of them, a run with the new precision from there, and the same run resumed
RUNS: dict[str, dict[str, Any]] = {
    "whole": {"is_scheduled": True, "epochs": 2},
    "half": {"is_scheduled": False, "epochs": 1},
    "resumed": {"is_scheduled": True, "epochs": 2, "resumes": "half"},
}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_processes_switch_at_one_step_and_a_resumed_run_is_the_same(strategy: str, tmp_path: Path) -> None:
    with as_ranks(train, 2, tmp_path, strategy) as ranks:
        all_end_well(ranks, tmp_path)
    mine, theirs = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    before, middle, after = [()] * 2, [("fprop",)] * 2, [("fprop", "dgrad", "wgrad")] * 2
    assert mine["whole"]["seen"] == theirs["whole"]["seen"] == [before] * 4 + [middle] * 2 + [after] * 2
    for name in ("scale", "history"):
        assert torch.equal(mine["whole"][name], theirs["whole"][name])
        assert torch.equal(mine["half"][name], theirs["half"][name])
    assert (mine["half"]["history"] > 0).sum(0).tolist() == [4] * 4
    # the ranks saw different data, so they do not agree by accident
    assert not torch.equal(mine["half"]["losses"], theirs["half"]["losses"])
    assert mine["resumed"]["seen"] == mine["whole"]["seen"][4:]
    for rank in (mine, theirs):
        assert torch.equal(rank["resumed"]["losses"], rank["whole"]["losses"][4:])
        assert torch.equal(rank["resumed"]["scale"], rank["whole"]["scale"])
        assert all(map(torch.equal, rank["resumed"]["weights"], rank["whole"]["weights"]))
        assert all(map(torch.equal, rank["whole"]["weights"], mine["whole"]["weights"]))
