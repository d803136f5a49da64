"""The precisions that whole models are compared in: our plugin, Lightning's own two, and torchao."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import nn

from benchmarks.baselines import torchao_precisions
from lightning_fp8.plugins import Fp8Precision

OURS, REFERENCE = "lightning_fp8", "bf16-mixed"


class Setting(NamedTuple):
    """A Trainer's precision, and how a model is prepared for it.

    Attributes:
        plugin: creates the plugin, one for each model.
        prepare: changes the model in place, or returns another one.
    """

    plugin: Callable[[], Precision]
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model


def settings(device: torch.device) -> dict[str, Setting]:
    """Settings by name of the variant; torchao, which runs under autocast as intended, only where it is installed.

    ``lightning_fp8`` is ``fp8-delayed`` with its defaults; ``bf16-mixed`` and ``bf16-true`` are Lightning's own.
    """

    def mixed() -> Precision:
        return MixedPrecision("bf16-mixed", device.type)

    return {
        OURS: Setting(Fp8Precision),
        REFERENCE: Setting(mixed),
        "bf16-true": Setting(lambda: HalfPrecision("bf16-true")),
        **{name: Setting(mixed, precision.make) for name, precision in torchao_precisions(device).items()},
    }


def summary(rows: list[dict[str, Any]]) -> str | None:
    """``lightning_fp8`` compared with ``bf16-mixed`` and torchao, eager with eager and compiled with compiled.

    Speeds are ratios of medians; peak memory is left out where it is unknown.
    """
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["variant"]] = row
    told = [f"{case}: {'; '.join(said)}" for case, found in cases.items() if (said := _compared(found))]
    return f"{OURS} compared with others. " + ". ".join(told) + "." if told else None


def _compared(found: dict[str, dict[str, Any]]) -> list[str]:
    ours = found.get(OURS)
    others = {name: row for name, row in found.items() if name == REFERENCE or name.startswith("torchao")}
    if ours is None:
        return []
    said = []
    for name, row in others.items():
        told = f"{ours['tokens_per_s'] / row['tokens_per_s']:.2f} times the speed of {name}"
        if ours["peak_memory_bytes"] is not None and row["peak_memory_bytes"]:
            told += f", {ours['peak_memory_bytes'] / row['peak_memory_bytes']:.2f} of its peak memory"
        said.append(told)
    return said
