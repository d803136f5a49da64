"""FSDP2 under a Trainer in real processes on the CPU: a sharded checkpoint, and weights gathered in FP8."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lit import LONG_WINDOW, Regression, loader, make_trainer, seeded
from processes import DEVICES, all_end_well, as_ranks
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_fp8 import Fp8Precision, scaling_state
from lightning_fp8.conversion import fall_back
from lightning_fp8.plugins import fsdp2_policy

pytestmark = pytest.mark.slow
every_device = pytest.mark.parametrize("device", DEVICES)


class Sharded(Regression):
    """Keeps its initial values in ``start``."""

    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            for layer in (self.net[0], self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"], mp_policy=fsdp2_policy())

    def on_train_start(self) -> None:
        self.start = self.whole()

    def whole(self) -> dict[str, Any]:
        # after a forward without gradients, some weights stay gathered
        for part in self.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        weights = [parameter.full_tensor().detach().to("cpu", copy=True) for parameter in self.parameters()]
        state = scaling_state(self)
        entries = (state.amax_history > 0).sum(0).cpu()
        scale = state.scale.to("cpu", copy=True)
        return {"scale": scale, "entries": entries, "weights": weights, "fallbacks": state.fallbacks}


def train_sharded(path: Path, what: str, gather: bool, device: str) -> None:
    world = int(os.environ["WORLD_SIZE"])
    model = seeded(Sharded)
    trainer = make_trainer(
        path,
        plugins=Fp8Precision(recipe=LONG_WINDOW, fp8_all_gather=gather),
        strategy=ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
        accelerator=device,
        devices=world,
        gradient_clip_val=0.5,
        max_epochs=2 if what == "resume" else 1,
    )
    checkpoint = path / "sharded.ckpt"
    trainer.fit(model, loader(128), loader(), ckpt_path=checkpoint if what == "resume" else None)
    if what == "save":
        if not gather:
            fall_back(model, "net.2")
        trainer.save_checkpoint(checkpoint)
    found = {"start": model.start, "end": model.whole(), "losses": torch.stack(model.losses).cpu()}
    torch.save(found, path / f"{what}{trainer.global_rank}.pt")


def trained(path: Path, what: str, world: int, gather: bool, device: str) -> list[dict[str, Any]]:
    if device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, here are {torch.cuda.device_count()}")
    with as_ranks(train_sharded, world, path, what, gather, device) as ranks:
        all_end_well(ranks, path)
    return [torch.load(path / f"{what}{rank}.pt", weights_only=True) for rank in range(world)]


@every_device
def test_a_sharded_checkpoint_of_four_resumed_on_two(device: str, tmp_path: Path) -> None:
    """Weights are gathered in bf16 or in FP8, which changes no bit."""
    runs = []
    for gather in (False, True):
        folder = tmp_path / str(gather)
        folder.mkdir()
        saved = trained(folder, "save", 4, gather, device)
        assert (folder / "sharded.ckpt" / ".metadata").exists()
        check_resumed(trained(folder, "resume", 2, gather, device), saved[0]["end"], gather)
        runs.append(saved[0])
    assert torch.equal(runs[0]["losses"], runs[1]["losses"])
    # the other layer has fallen back at the end of the first run, which drops its histories
    first = slice(0, None, 2)
    assert torch.equal(runs[0]["end"]["scale"][first], runs[1]["end"]["scale"][first])
    assert all(map(torch.equal, runs[0]["end"]["weights"], runs[1]["end"]["weights"]))


def check_resumed(resumed: list[dict[str, Any]], end: dict[str, Any], gather: bool) -> None:
    for rank in resumed:
        assert torch.equal(rank["start"]["scale"][:4], end["scale"][:4])
        assert all(map(torch.equal, rank["start"]["weights"], end["weights"]))
        assert rank["start"]["fallbacks"] == (() if gather else ("net.2",))
        # and training continues
        assert len(rank["losses"]) == 4
        assert torch.isfinite(rank["losses"]).all()
        entries = rank["end"]["entries"] - rank["start"]["entries"]
        assert entries.tolist() == [4, 4 * gather] * 2
        # the sanity check cast the loaded weights, and the last validation those at the end of training
        for found in (rank["start"], rank["end"]):
            largest = [found["weights"][index].bfloat16().float().abs().max() for index in (0, 2)]
            first, second = torch.tensor(448.0) / torch.stack(largest)
            assert found["scale"][4:].tolist() == [first, second if gather else 1]
    assert torch.equal(resumed[0]["end"]["scale"], resumed[1]["end"]["scale"])
