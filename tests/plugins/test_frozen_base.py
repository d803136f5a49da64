"""``Fp8Precision(frozen_weights="fp8")``: runs of a Trainer and of Fabric, checkpoints, and a configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from frozen_models import ADAPTERS, on_frozen_base
from lit import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fp8 import Fp8Precision, convert
from lightning_fp8.modules.fp8_parameter import Fp8Parameter

LAYERS = ("attention.in_proj", "attention.out_proj", "mlp.0", "mlp.2", "conv", "query.base")


class Tuning(pl.LightningModule):
    def __init__(self, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
        super().__init__()
        self.net = on_frozen_base(dtype, seed)
        self.losses: list[float] = []

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(x).float() - x[..., :16]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(16, 5, 32, generator=torch.Generator().manual_seed(3)), batch_size=4)


def trainer(folder: Path, how: str | None, steps: int = 4, **more: Any) -> pl.Trainer:
    plugin = Fp8Precision(frozen_weights=how, ignore_modules=ADAPTERS)  # type: ignore[arg-type]
    return make_trainer(folder, plugins=plugin, max_steps=steps, max_epochs=-1, **more)


def payloads(model: nn.Module) -> list[Tensor]:
    return [p.payload for p in model.parameters() if isinstance(p, Fp8Parameter)]


def test_a_run_its_checkpoint_and_its_continuation(tmp_path: Path) -> None:
    runs = {how: Tuning() for how in ("master", "fp8")}
    for how, model in runs.items():
        torch.manual_seed(5)
        trainer(tmp_path / how, how, enable_checkpointing=True).fit(model)
    tuned = runs["fp8"]
    assert tuned.losses == runs["master"].losses
    assert len(tuned.losses) == 4
    assert len(payloads(tuned)) == 6
    assert not payloads(runs["master"])
    (path,) = (tmp_path / "fp8").rglob("*.ckpt")
    saved = torch.load(path, weights_only=True)["state_dict"]
    plain = Tuning()
    # the base in its own dtype: masters are stored in fp32, and there are none
    bf16 = {name for name, tensor in saved.items() if tensor.dtype == torch.bfloat16}
    assert bf16 == {name for name, p in tuned.named_parameters() if isinstance(p, Fp8Parameter)}
    assert len(bf16) == 6
    plain.load_state_dict(saved)
    # a resumed run loads into a base with other values, and continues exactly like the run with masters
    losses = []
    for how in runs:
        (path,), model = (tmp_path / how).rglob("*.ckpt"), Tuning(seed=1)
        trainer(tmp_path / how, how, steps=6).fit(model, ckpt_path=path)
        losses.append(model.losses)
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    assert all(map(torch.equal, payloads(model), payloads(tuned)))


def test_a_second_run_keeps_the_setting_and_another_one_changes_it(tmp_path: Path) -> None:
    model = Tuning()
    for how, count in (("fp8", 6), (None, 6), ("master", 0), ("fp8", 6)):
        trainer(tmp_path, how, steps=1).fit(model)
        assert len(payloads(model)) == count
    own = convert(Tuning(), ignore_modules=ADAPTERS)
    trainer(tmp_path, "fp8", steps=1).fit(own)
    assert len(payloads(own)) == 6
