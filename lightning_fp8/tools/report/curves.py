"""Which of a run's metrics are curves, and curves with fewer points."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from lightning_fp8.tools.report.runs import Run, Series

MAX_POINTS = 2000
# Lightning's own counter, and what TensorBoardLogger writes for its table of hyperparameters
_NO_METRICS = ("epoch", "hp_metric")
_FIRST = ("train_loss", "val_loss")


def curve_keys(runs: Sequence[Run]) -> list[str]:
    """The user's metrics with more than one step in some run; losses first."""
    keys = {
        key
        for run in runs
        for key, series in run.scalars.items()
        if len(series.steps) > 1 and not key.startswith("fp8/") and key not in _NO_METRICS
    }
    return sorted(keys, key=lambda key: (_FIRST.index(key) if key in _FIRST else 2, "loss" not in key, key))


def loss_keys(keys: Sequence[str]) -> list[str]:
    """Keys shown at first: ``train_loss`` and ``val_loss``, or else the first of ``keys``."""
    return [key for key in keys if key in _FIRST] or list(keys[:1])


def thinned(series: Series, points: int = MAX_POINTS) -> Series:
    """At most ``points`` points: the lowest and highest of each stretch, to keep all peaks, and the first and last."""
    count = len(series.steps)
    if count <= points:
        return series
    kept = {0, count - 1}
    bounds = np.linspace(0, count, points // 2).astype(int)
    for start, end in pairwise(bounds):
        part = series.values[start:end]
        is_finite = np.isfinite(part)
        kept.add(int(start + np.where(is_finite, part, np.inf).argmin()))
        kept.add(int(start + np.where(is_finite, part, -np.inf).argmax()))
    rows = np.array(sorted(kept))
    return Series(series.steps[rows], series.values[rows])
