"""``python -m benchmarks.packages``: what is measured of one package, here a stand-in that saves weights alone."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from benchmarks import packages


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def stand_in(trainer_arguments: dict[str, Any], folder: Path, is_saved: bool) -> packages.Made:
    model, x = Net(), torch.randn(8, 32)
    trainer = pl.Trainer(max_steps=2, enable_checkpointing=False, **trainer_arguments)
    if is_saved:
        model.load_state_dict(torch.load(folder / "weights.pt"))
    else:
        trainer.fit(model, torch.utils.data.DataLoader(10 * x, batch_size=4))
        torch.save(model.state_dict(), folder / "weights.pt")
    return model, lambda: torch.cat(trainer.predict(model, torch.utils.data.DataLoader(x, batch_size=4))), 1.0


@pytest.mark.parametrize("precision", ["32-true", "fp8-delayed"])
def test_a_package_that_saves_weights_alone(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packages.PACKAGES, "torch", stand_in)
    trained = packages.run("torch", precision, tmp_path)
    found = packages.run("torch", precision, tmp_path)
    # without the name of a build, as the package's metadata have it
    assert trained["version"] == version("torch")
    assert trained["coverage"] == (precision == "fp8-delayed")
    assert found == {"difference": 0}
    assert f" {trained['loss']:.0f} |" in packages.table([{**trained, **found}])
