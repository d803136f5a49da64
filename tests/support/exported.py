"""Models trained for a few steps, what is in the files of their exports, and files changed by other programs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_fp8 import DelayedScaling, convert, load_exported, scaling_state
from lightning_fp8.conversion.convert import is_converted

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


class Before:
    """The complete state of a model that loading can change."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [(type(layer), layer.training) for layer in model.modules()]
        self.objects = [*model.parameters(), *model.buffers()]
        self.trained = [tensor.requires_grad for tensor in self.objects]
        self.tensors = copy.deepcopy(model.state_dict())
        self.state = scaling_state(model) if is_converted(model) else None
        self.entries = self.state.state_dict() if self.state else {}

    def check(self, model: nn.Module) -> None:
        assert [(type(layer), layer.training) for layer in model.modules()] == self.layers
        now = [*model.parameters(), *model.buffers()]
        assert all(new is old for new, old in zip(now, self.objects, strict=True))
        assert [tensor.requires_grad for tensor in now] == self.trained
        tensors = model.state_dict()
        assert tensors.keys() == self.tensors.keys()
        assert all(t.is_meta or torch.equal(t, self.tensors[name]) for name, t in tensors.items())
        if self.state is not None:
            assert scaling_state(model) is self.state
            entries = self.state.state_dict()
            assert entries.keys() == self.entries.keys()
            assert all(torch.equal(entries[name][field], value)
                       for name, entry in self.entries.items() for field, value in entry.items())  # fmt: skip


def refused(
    model: nn.Module, folder: Path, message: str, kind: type[Exception] = ValueError, frozen: bool = False
) -> None:
    """The folder is refused with this message, and the model is as it was."""
    before = Before(model)
    with pytest.raises(kind, match=message) as caught:
        load_exported(model, folder, frozen=frozen)
    assert kind is TypeError or str(folder) in str(caught.value)
    before.check(model)
