"""Pretrain a GPT on the bytes of a text, from scratch, with callbacks and checkpoints.

python examples/pretrain_gpt.py
python examples/pretrain_gpt.py --epochs 6 --resume runs/pretrain_gpt/version_0/checkpoints/last.ckpt
python examples/pretrain_gpt.py --text corpus.txt --layers 12 --width 768 --heads 12 --context 1024
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fp8 import Fp8Monitor, ScaleFactorLogger


class Block(nn.Module):
    """A pre-norm transformer block: x ``[batch, time, width]`` -> the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class GPT(pl.LightningModule):
    """An ordinary Lightning module: nothing in it is about FP8."""

    def __init__(self, layers: int, width: int, heads: int, context: int, learning_rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens ``[batch, time] int64`` -> logits ``[batch, time, 256]``."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).float().transpose(1, 2), batch[:, 1:])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95))
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


def read(path: str, context: int) -> Tensor:
    """A text as ``[windows, context + 1] int64``; shuffled once, so that a resumed run is exact."""
    text = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
    if len(text) < 10 * context + 1:
        raise ValueError(f"{path} has {len(text)} bytes: --context {context} needs {10 * context + 1} or more.")
    windows = text.unfold(0, context + 1, context).long()
    return windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp8-delayed", help="or bf16-mixed, to compare")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--text", default=argparse.__file__, help="a file; by default the source of argparse")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--resume", help="a checkpoint; --epochs counts from the start of its run")
    arguments = parser.parse_args(argv)

    pl.seed_everything(0)
    windows: Any = read(arguments.text, arguments.context)  # a DataLoader takes a tensor, which its type does not say
    held_out = len(windows) // 10
    last = ModelCheckpoint(monitor="val_loss", save_last=True)
    callbacks: list[Callback] = [last, LearningRateMonitor()]
    if arguments.precision == "fp8-delayed":
        callbacks += [ScaleFactorLogger(every_n_steps=10), Fp8Monitor(every_n_steps=10)]
    trainer = pl.Trainer(
        precision=arguments.precision,
        accelerator=arguments.accelerator,
        devices=1,
        max_epochs=arguments.epochs,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        callbacks=callbacks,
        logger=CSVLogger("runs", name="pretrain_gpt"),
    )
    model = GPT(arguments.layers, arguments.width, arguments.heads, arguments.context, arguments.learning_rate)
    training = DataLoader(windows[held_out:], arguments.batch_size)
    validation = DataLoader(windows[:held_out], arguments.batch_size)
    trainer.fit(model, training, validation, ckpt_path=arguments.resume)
    print(f"checkpoint: {last.last_model_path}")
    print(f"{arguments.precision}: validation loss {trainer.callback_metrics['val_loss']:.3f}")


if __name__ == "__main__":
    main()
