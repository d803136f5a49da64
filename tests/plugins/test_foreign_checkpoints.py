"""Checkpoints of other numbers of processes and of other models, and what they contain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lit import Regression, Steps, loader, make_trainer, same, seeded, takes_weights_only
from processes import all_end_well, as_ranks
from torch import Tensor, nn

from lightning_fp8 import DelayedScaling


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


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


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
