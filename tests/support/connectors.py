"""Trainers as Lightning's connectors build them from arguments, with or without a GPU."""

from __future__ import annotations

from typing import Any

import lightning.fabric as lf
import lightning.pytorch as pl
import pytest
import torch

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def trainer(**kwargs: Any) -> pl.Trainer:
    return pl.Trainer(**{"devices": 1, **QUIET, **kwargs})


def with_cuda(monkeypatch: pytest.MonkeyPatch, packages: tuple[Any, ...] = (pl, lf)) -> None:
    """Pretends enough of a GPU for connectors that refuse to build FSDP without one."""
    for module in (package.accelerators.CUDAAccelerator for package in packages):
        monkeypatch.setattr(module, "is_available", staticmethod(lambda: True))
        monkeypatch.setattr(module, "auto_device_count", staticmethod(lambda: 1))
        monkeypatch.setattr(module, "parse_devices", staticmethod(lambda devices: [0]))
        monkeypatch.setattr(module, "get_parallel_devices", staticmethod(lambda d: [torch.device("cuda", 0)]))
