"""The precisions that layers and models are trained in: our plugin, Lightning's own, and torchao."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import nn

from lightning_fp8.plugins import Fp8Precision
from lightning_fp8.runtime.cpu import emulates_bf16

OURS, FP32, BF16 = "lightning_fp8", "32-true", "bf16-mixed"
# what others are compared with; fp32 on a CPU that emulates bf16 products, where bf16 takes many times as long
BASELINE = (BF16, FP32)


class Setting(NamedTuple):
    """A Trainer's precision, and how a model is prepared for it.

    Attributes:
        plugin: creates the plugin, one for each model.
        prepare: changes the model in place, or returns another one.
        weights_change: whether what is timed is a whole step, after which weights are cast again; else it is one of
            several micro-batches.
    """

    plugin: Callable[[], Precision]
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    weights_change: bool = True


def settings(device: torch.device) -> dict[str, Setting]:
    """By name of the variant; torchao, which runs under autocast as intended, only where it is installed.

    ``lightning_fp8`` is ``fp8-delayed`` with its defaults; ``bf16-mixed`` and ``bf16-true`` are Lightning's own.
    """
    variants = {OURS: Setting(Fp8Precision), **_of_torchao(device)}
    if device.type == "cpu" and emulates_bf16():
        return {**variants, FP32: Setting(Precision)}
    mixed = functools.partial(MixedPrecision, "bf16-mixed", device.type)
    return {**variants, BF16: Setting(mixed), "bf16-true": Setting(lambda: HalfPrecision("bf16-true"))}


def every_setting(device: torch.device) -> dict[str, Setting]:
    """The same with fp32."""
    return {FP32: Setting(Precision), **settings(device)}


def with_kept_weights(device: torch.device) -> dict[str, Setting]:
    """The same as :func:`settings`, with weights that are cast already."""
    return {**settings(device), f"{OURS} same weights": Setting(Fp8Precision, weights_change=False)}


def _of_torchao(device: torch.device) -> dict[str, Setting]:
    """Tensor-wise dynamic scaling; emulated on the CPU."""
    if find_spec("torchao") is None:
        return {}
    emulate = device.type != "cuda"

    def prepare(model: nn.Module) -> nn.Module:
        float8 = import_module("torchao.float8")
        return float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=emulate))

    mixed = functools.partial(MixedPrecision, "bf16-mixed", device.type)
    return {"torchao(emulated)" if emulate else "torchao": Setting(mixed, prepare)}
