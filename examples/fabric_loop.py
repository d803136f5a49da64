"""Train in a custom loop with Lightning Fabric: on one device or several, saving and loading the scales.

python examples/fabric_loop.py
python examples/fabric_loop.py --epochs 4 --resume runs/fabric_loop.ckpt
python examples/fabric_loop.py --devices 8 --text corpus.txt --layers 12 --width 768 --context 1024
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fp8 import weights_unchanged


class LanguageModel(nn.Module):
    """torch's encoder with a causal mask: tokens ``[batch, time] int64`` -> logits ``[batch, time, 256]``."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.1 * torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.encoder(x, mask, is_causal=True))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])


def read(path: str, context: int) -> Tensor:
    """A text as ``[windows, context + 1] int64``; windows overlap by one byte, as the first is not predicted."""
    text = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
    if len(text) < 10 * context + 1:
        raise ValueError(f"{path} has {len(text)} bytes: --context {context} needs {10 * context + 1} or more.")
    return text.unfold(0, context + 1, context).long()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp8-delayed", help="or bf16-mixed, to compare")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--text", default=argparse.__file__, help="a file; by default the source of argparse")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="a multiple of 32, the width of an attention head")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32, help="on each device")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--checkpoint", default="runs/fabric_loop.ckpt", help="is written after each epoch")
    parser.add_argument("--resume", help="a checkpoint; --epochs counts from the start of its run")
    arguments = parser.parse_args(argv)

    fabric = Fabric(accelerator=arguments.accelerator, devices=arguments.devices, precision=arguments.precision)
    fabric.launch()
    fabric.seed_everything(0)
    windows: Any = read(arguments.text, arguments.context)  # a DataLoader takes a tensor, which its type does not say
    held_out = len(windows) // 10
    net = LanguageModel(arguments.layers, arguments.width, arguments.context)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=2e-3))
    training, validation = fabric.setup_dataloaders(
        DataLoader(windows[held_out:], arguments.batch_size, shuffle=True),
        DataLoader(windows[:held_out], arguments.batch_size),
    )
    saved: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
    if arguments.resume:
        fabric.load(arguments.resume, saved)

    for epoch in range(saved["epoch"], arguments.epochs):
        torch.manual_seed(epoch)  # on one device, a resumed run is exact
        for batch in training:
            loss = loss_of(model, batch)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()  # updates the scales
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), weights_unchanged(model):
            losses = torch.stack([loss_of(model, batch) for batch in validation])
        model.train()
        fabric.print(f"{arguments.precision}: validation loss {fabric.all_reduce(losses.mean()):.3f}")
        saved["epoch"] = epoch + 1
        fabric.save(arguments.checkpoint, saved)


if __name__ == "__main__":
    main()
