"""Logs of a run: metrics of a made-up model's tensors, as Lightning's CSVLogger writes them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

LAYERS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
ROLES = ("input", "weight", "grad_output")


def write_metrics(folder: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """A file as Lightning's CSVLogger writes it: columns in alphabetical order, empty where nothing was logged."""
    rows = list(rows)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({key for row in rows for key in row}))
        writer.writeheader()
        writer.writerows(rows)
    return folder


def tensor_names(count: int) -> list[str]:
    """In a model's order: ``blocks.0.attention.qkv.input``, ``blocks.0.attention.qkv.weight``, ..."""
    blocks = range(count // (len(LAYERS) * len(ROLES)) + 1)
    return [f"blocks.{block}.{layer}.{role}" for block in blocks for layer in LAYERS for role in ROLES][:count]


def tensor_metrics(names: list[str], steps: int) -> list[dict[str, Any]]:
    """Scales and counts of the tensors: reproducible numbers of the sizes in real runs."""
    generator = np.random.default_rng(0)
    exponents = generator.uniform(2, 20, len(names)) + np.cumsum(generator.normal(0, 0.3, (steps, len(names))), axis=0)
    rows = []
    for step in range(steps):
        values = {
            "scale": 2.0 ** exponents[step],
            "headroom_bits": generator.uniform(-1, 4, len(names)),
            "saturated_fraction": generator.exponential(1e-4, len(names)),
            "underflowed_fraction": generator.exponential(1e-2, len(names)),
        }
        metrics: dict[str, Any] = {"step": 10 * step + 9}
        for quantity, numbers in values.items():
            metrics |= {f"fp8/{name}/{quantity}": float(number) for name, number in zip(names, numbers)}
        rows += [metrics, {"step": 10 * step + 9, "train_loss": 5.0 * 0.99**step}]
    return rows


def rows_of(logger: Any) -> list[dict[str, str]]:
    """The rows that a CSVLogger has written."""
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))
