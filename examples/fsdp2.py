"""Train a model sharded by FSDP2 on several devices of a machine, or in two processes on a CPU.

python examples/fsdp2.py
python examples/fsdp2.py --devices 8 --fp8-all-gather --text corpus.txt --layers 24 --width 1024 --context 1024
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from lightning_fp8 import Fp8Precision
from lightning_fp8.plugins import fsdp2_policy


class Sharded(pl.LightningModule):
    """A language model over bytes, made of torch's encoder layers, each sharded separately."""

    def __init__(self, layers: int, width: int, context: int, policy: MixedPrecisionPolicy) -> None:
        super().__init__()
        self.policy = policy
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.1 * torch.randn(context, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def configure_model(self) -> None:
        # Lightning calls this for each of its loops
        if isinstance(self, FSDPModule):
            return
        mesh = cast(DeviceMesh, self.device_mesh)["data_parallel"]
        for part in (*self.blocks, self):  # the whole after its parts
            fully_shard(part, mesh=mesh, mp_policy=self.policy)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(self.norm(x))

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).float().transpose(1, 2), batch[:, 1:])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def read(path: str, context: int) -> Tensor:
    """A text as ``[windows, context + 1] int64``; windows overlap by one byte, as the first is not predicted."""
    text = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
    if len(text) < 10 * context + 1:
        raise ValueError(f"{path} has {len(text)} bytes: --context {context} needs {10 * context + 1} or more.")
    return text.unfold(0, context + 1, context).long()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp8-delayed", help="or bf16-mixed, to compare")
    parser.add_argument("--fp8-all-gather", action="store_true", help="gather weights in FP8: half the bytes of bf16")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2, help="on a CPU, processes")
    parser.add_argument("--text", default=argparse.__file__, help="a file; by default the source of argparse")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="a multiple of 32, the width of an attention head")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16, help="on each device")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args(argv)
    if arguments.fp8_all_gather and arguments.precision != "fp8-delayed":
        parser.error("--fp8-all-gather needs --precision fp8-delayed")

    pl.seed_everything(0)
    windows: Any = read(arguments.text, arguments.context)  # a DataLoader takes a tensor, which its type does not say
    held_out = len(windows) // 10
    if arguments.fp8_all_gather:
        precision: dict[str, Any] = {"plugins": Fp8Precision(fp8_all_gather=True)}
    else:
        precision = {"precision": arguments.precision}
    trainer = pl.Trainer(
        **precision,
        strategy=ModelParallelStrategy(data_parallel_size=arguments.devices, tensor_parallel_size=1),
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        log_every_n_steps=10,
        default_root_dir="runs/fsdp2",
    )
    trainer.fit(
        Sharded(arguments.layers, arguments.width, arguments.context, fsdp2_policy(arguments.precision)),
        DataLoader(windows[held_out:], arguments.batch_size, shuffle=True),
        DataLoader(windows[:held_out], arguments.batch_size),
    )
    if trainer.is_global_zero:
        print(f"{arguments.precision}: validation loss {trainer.callback_metrics['val_loss']:.3f}")


if __name__ == "__main__":
    main()
