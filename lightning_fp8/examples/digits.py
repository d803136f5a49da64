"""Handwritten digits that come with scikit-learn: real images without a download."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

SIZE = 8
BRIGHTEST = 16


class Digits(LightningDataModule):
    """The 1,797 images of ``sklearn.datasets.load_digits``: batches ``[batch, size, size] fp32``, ``[batch] int64``.

    Pixels are in [-1, 1]. Every fourth image, 449 of them, is held out for validation.

    Args:
        size: edge of an image in pixels; the originals have 8, other sizes are interpolated bilinearly.
        batch_size: images per batch.
    """

    def __init__(self, size: int = SIZE, batch_size: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.size = size
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images, labels = load_digits()
        if self.size != SIZE:
            images = F.interpolate(images[:, None], self.size, mode="bilinear", align_corners=False)[:, 0]
        held_out = torch.arange(len(images)) % 4 == 3
        self.train_set = TensorDataset(images[~held_out], labels[~held_out])
        self.val_set = TensorDataset(images[held_out], labels[held_out])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val_set, self.batch_size)


def load_digits() -> tuple[Tensor, Tensor]:
    """Images ``[1797, 8, 8] fp32`` in [-1, 1] and labels ``[1797] int64``.

    Raises:
        ModuleNotFoundError: without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("The digits come with scikit-learn: pip install scikit-learn") from error
    digits = load()
    images = torch.from_numpy(digits.images).float() * (2 / BRIGHTEST) - 1
    return images, torch.from_numpy(digits.target).long()
