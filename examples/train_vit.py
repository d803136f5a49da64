"""Train a vision transformer to classify images: scikit-learn's handwritten digits, or your own.

python examples/train_vit.py
python examples/train_vit.py --data images.npz --patch 16 --layers 12 --width 768 --epochs 90 --learning-rate 1e-3

The file of --data is written with `numpy.savez(path, images=..., labels=...)`, where `images` is
``[n, height, width, channels] uint8`` and `labels` is ``[n]``, from 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import lightning_fp8  # noqa: F401  registers the precision


class ViT(pl.LightningModule):
    """Patches ``[patch, patch]`` of an image are the tokens; the head classifies the mean of the encoder's outputs."""

    def __init__(
        self, shape: Sequence[int], classes: int, patch: int, layers: int, width: int, learning_rate: float
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        channels, height, image_width = shape
        if height % patch or image_width % patch:
            raise ValueError(f"--patch {patch} does not divide images of {height} x {image_width} pixels.")
        self.patch = patch
        # a linear layer over 16 or more values runs in FP8; a convolution would not
        self.embedding = nn.Linear(channels * patch * patch, width)
        self.positions = nn.Parameter(0.5 * torch.randn((height // patch) * (image_width // patch), width))
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """images ``[batch, channels, height, width]`` -> logits ``[batch, classes]``."""
        patches = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        return self.head(self.encoder(self.embedding(patches) + self.positions).mean(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]).float(), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits = self(batch[0]).float()
        self.log("val_loss", F.cross_entropy(logits, batch[1]), prog_bar=True)
        self.log("val_accuracy", (logits.argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters())
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def read(path: str | None) -> tuple[Tensor, Tensor]:
    """Images ``[n, channels, height, width] fp32`` in [-1, 1] and labels ``[n] int64``."""
    if path is None:
        digits = load_digits()
        return torch.from_numpy(digits.images).float()[:, None] / 8 - 1, torch.from_numpy(digits.target).long()
    with np.load(path) as file:
        images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(
            f"{path}: `images` must be [n, height, width, channels] uint8, got {list(images.shape)} {images.dtype}."
        )
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1, labels.long()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp8-delayed", help="or bf16-mixed, to compare")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--data", help="a .npz file; by default the digits")
    parser.add_argument("--patch", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="a multiple of 32, the width of an attention head")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    arguments = parser.parse_args(argv)

    pl.seed_everything(0)
    images, labels = read(arguments.data)
    training, validation = random_split(TensorDataset(images, labels), [0.8, 0.2])
    trainer = pl.Trainer(
        precision=arguments.precision,
        accelerator=arguments.accelerator,
        devices=1,
        max_epochs=arguments.epochs,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        default_root_dir="runs/train_vit",
    )
    sizes = (arguments.patch, arguments.layers, arguments.width)
    model = ViT(images.shape[1:], int(labels.max()) + 1, *sizes, arguments.learning_rate)
    trainer.fit(
        model,
        DataLoader(training, arguments.batch_size, shuffle=True),
        DataLoader(validation, arguments.batch_size),
    )
    metrics = trainer.callback_metrics
    print(f"{arguments.precision}: validation loss {metrics['val_loss']:.3f}, accuracy {metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
