"""One training step of an example model."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch import LightningDataModule, LightningModule


def one_step(model: LightningModule, data: LightningDataModule, precision: str, folder: Path) -> pl.Trainer:
    trainer = pl.Trainer(
        precision=precision,  # type: ignore[arg-type]
        accelerator="cpu",
        devices=1,
        max_steps=1,
        limit_val_batches=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, data)
    return trainer
