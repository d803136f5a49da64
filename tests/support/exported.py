"""Models trained for a few steps, what is in the files of their exports, and files changed by other programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_fp8 import DelayedScaling, convert, scaling_state

Run = Callable[[nn.Module], Tensor]
KEY = "lightning_fp8.scales"


class Shared(nn.Module):
    """A layer under two names, a weight tied to another layer, and buffers in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.again, self.b.weight = self.a, self.a.weight
        numbers = torch.arange(10.0)
        self.register_buffer("part", numbers[2:5])
        self.register_buffer("overlapping", numbers[4:8])

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.again(self.a(x).relu()).relu())


def on(*shape: int) -> Run:
    """Calls a model with one input, always the same."""
    x = torch.randn(*shape)
    return lambda model: model(x)


def trained(model: nn.Module, run: Run, steps: int = 2, **options: Any) -> nn.Module:
    """The model converted, after some steps of training, of which the last has changed the weights."""
    convert(model, DelayedScaling(amax_history_len=4), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        run(model).float().square().mean().backward()
        scaling_state(model).update()
        optimizer.step()
    return model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def metadata_of(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return file.metadata()


def quantization(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def in_fp8(folder: Path) -> set[str]:
    """Names of the weights that are FP8 in the file."""
    return {name for name, tensor in tensors_of(folder).items() if tensor.dtype == torch.float8_e4m3fn}


def rewrite(folder: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Replace the tensors, and the metadata; without metadata, it is a file of another program."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", metadata)
