"""Small Lightning models and data for the tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from small_models import small_mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8 import DelayedScaling, Fp8Precision, convert, scaling_state
from lightning_fp8.scaling import ScalingState
from lightning_fp8.scalings.recipe import Recipe

# histories with an entry for each step of a test
LONG_WINDOW = DelayedScaling(amax_history_len=64)

# the first versions of Lightning 2.5 lack it
Averaging: Any = getattr(callbacks, "WeightAveraging", None)
needs_averaging = pytest.mark.skipif(Averaging is None, reason="Lightning has no WeightAveraging")
# Lightning 2.5 lacks it too, and loads any checkpoint
_TAKES_WEIGHTS_ONLY = "weights_only" in signature(pl.Trainer.fit).parameters
takes_weights_only = pytest.mark.skipif(not _TAKES_WEIGHTS_ONLY, reason="Trainer.fit has no weights_only")
TRUSTED: dict[str, Any] = {"weights_only": False} if _TAKES_WEIGHTS_ONLY else {}


class Regression(pl.LightningModule):
    """Fits a fixed random function; records its training losses in ``losses``."""

    def __init__(self, width: int = 32, lr: float = 1e-2) -> None:
        super().__init__()
        self.net = small_mlp(width)
        self.lr = lr
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x).float(), y.float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.step(batch)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.step(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.step(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def dataset(rows: int = 64, width: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, width, generator=generator)
    return TensorDataset(x, torch.sin(x[:, :4] * 2).repeat(1, 4))


def loader(rows: int = 64, batch_size: int = 16, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(dataset(rows), batch_size=batch_size, **kwargs)


def make_trainer(path: Path, **kwargs: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "precision": None if "plugins" in kwargs else "fp8-delayed",
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": path,
    }
    return pl.Trainer(**{**defaults, **kwargs})


def long_window() -> Fp8Precision:
    """A plugin with ``LONG_WINDOW``."""
    return Fp8Precision(recipe=LONG_WINDOW)


def seeded(cls: type[Regression] = Regression, **kwargs: Any) -> Any:
    torch.manual_seed(7)
    return cls(**kwargs)


def warned(start: str, run: Callable[[], Any]) -> list[str]:
    """The warnings of a run that begin with ``start``, repetitions included."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [text for text in (str(warning.message) for warning in caught) if text.startswith(start)]


def by_hand(steps: int, accumulate: int = 1, clip: float | None = None, recipe: Recipe | None = None) -> Regression:
    """The same training as a plain PyTorch loop."""
    model = seeded()
    convert(model, recipe)
    optimizer = model.configure_optimizers()
    for index, batch in enumerate(loader()):
        if index == steps * accumulate:
            break
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model.step(batch) / accumulate
        loss.backward()
        if (index + 1) % accumulate == 0:
            scaling_state(model).update()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    weights = all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    first, second = scaling_state(a), scaling_state(b)
    return weights and torch.equal(first.scale, second.scale) and torch.equal(first.amax_history, second.amax_history)


class Steps(pl.Callback):
    """The scaling state before the first update and after each; and the amaxes that each update started from."""

    def __init__(self, *fields: str) -> None:
        self.fields = fields or ("scale", "amax_history", "nonfinite_steps")
        self.after: list[dict[str, Tensor]] = []
        self.amax: list[Tensor] = []

    def take(self, state: ScalingState) -> None:
        self.after.append({field: getattr(state, field).clone() for field in self.fields})

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.take(scaling_state(module))
        scaling_state(module).model.before_update.append(lambda amax: self.amax.append(amax.clone()))

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if len(self.amax) == len(self.after):
            self.take(scaling_state(module))
