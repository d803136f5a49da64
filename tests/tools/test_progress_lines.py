from __future__ import annotations

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fp8.cli import ProgressLines


class Model(pl.LightningModule):
    """Its losses are known: 100, 99, ..."""

    def __init__(self, returned: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(100.0))
        self.returned = returned

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.weight * 1.0
        return {"loss": loss} if self.returned == "dict" else loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.weight)

    def configure_optimizers(self) -> torch.optim.SGD:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize(("returned", "accumulate", "max_steps"), [("tensor", 1, 7), ("dict", 2, -1)])
def test_every_third_step_and_each_validation_has_a_line(returned: str, accumulate: int, max_steps: int) -> None:
    lines: list[str] = []
    data = DataLoader(torch.randn(7 * accumulate, 1))
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1,
        max_steps=max_steps, accumulate_grad_batches=accumulate, callbacks=[ProgressLines(3, lines.append)],
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(returned), data, DataLoader(torch.randn(1, 1)))
    of_all = "/7" if max_steps > 0 else ""
    # the loss before the step
    expected = [rf"step 3{of_all}: loss 98\.0000, \S+ steps/s", rf"step 6{of_all}: loss 95\.0000, \S+ steps/s"]
    expected.append(r"validation after step 7: val_loss 93\.0000")
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), lines
