"""The line charts, as the page and the pictures draw them: which metrics are curves, and curves with fewer points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from lightning_fp8.ops.formats import ROLES
from lightning_fp8.tools.report.runs import Run, Series

# Okabe and Ito's colours, which most colour-blind people can tell apart
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MAX_POINTS = 2000
_LARGEST = float(np.finfo(np.float32).max)
SCHEDULE = "fp8/schedule"
# Lightning's own counter, and what TensorBoardLogger writes for its table of hyperparameters
_NO_METRICS = ("epoch", "hp_metric")
_FIRST = ("train_loss", "val_loss")
# by quantity: the title, and the statistic of the worst tensor
_OF_ROLES = {
    "headroom_bits": ("Headroom, bits", "min"),
    "saturated_fraction": ("Saturated share", "max"),
    "underflowed_fraction": ("Underflowed share", "max"),
    "sqnr_db": ("Signal to noise, dB", "min"),
}
# where summaries are logged: by `ScaleFactorLogger` and by `Fp8Monitor`
_SUMMARIES = ("fp8/{}/{}/{}", "fp8/health/{}/{}/{}")


@dataclass
class Line:
    """A line: a number for its colour, and for its style: solid, dashed or dotted. None is a gap."""

    name: str
    colour: int
    style: int
    steps: list[int]
    values: list[float | None]


@dataclass
class Switch:
    """A step to be marked: the first one logged after a run has changed its precision, and what to."""

    step: int
    label: str
    colour: int


@dataclass
class Chart:
    """Lines over steps; a share begins at 0 and is shown in percent."""

    title: str
    is_share: bool
    lines: list[Line]
    switches: list[Switch] = field(default_factory=list)
    is_log: bool = False


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


def curves(runs: Sequence[Run], keys: Sequence[str]) -> Chart:
    """The metrics of all runs: a colour for each run, a style for each metric."""
    lines = [
        line(f"{run.name} {key}", position, style, run.scalars[key])
        for position, run in enumerate(runs)
        for style, key in enumerate(keys)
        if key in run.scalars
    ]
    return Chart(", ".join(keys), False, lines, switches(runs))


def switches(runs: Sequence[Run]) -> list[Switch]:
    """What ``PrecisionSchedule`` did, by the entries that it logged and by those in the record."""
    changes = []
    for position, run in enumerate(runs):
        series, labels = run.scalars.get(SCHEDULE), run.record.get("schedule") or []
        entries = zip([0.0, *series.values], series.steps, series.values) if series is not None else ()
        for before, step, entry in entries:
            if entry != before and math.isfinite(entry):
                number = int(entry)
                label = labels[number - 1] if 0 < number <= len(labels) else f"schedule {number}"
                changes.append(Switch(int(step), label, position))
    return changes


def role_charts(run: Run) -> dict[str, Chart]:
    """The median and the worst tensor of each role, by quantity, as far as they were logged."""
    charts = {}
    for quantity, (title, worst) in _OF_ROLES.items():
        lines = [
            line(f"{role}, {statistic}", colour, style, series)
            for colour, role in enumerate((*ROLES, "product"))
            for statistic, style in (("median", 0), (worst, 2))
            if (series := summary(run, role, quantity, statistic)) is not None
        ]
        if lines:
            charts[quantity] = Chart(title, quantity.endswith("fraction"), lines)
    return charts


def summary(run: Run, role: str, quantity: str, statistic: str) -> Series | None:
    """A statistic of a quantity over the tensors of a role, from the first callback that logged it."""
    keys = (key.format(role, quantity, statistic) for key in _SUMMARIES)
    return next((run.scalars[key] for key in keys if key in run.scalars), None)


def line(name: str, colour: int, style: int, series: Series) -> Line:
    """A line of a chart, with at most ``MAX_POINTS`` points."""
    some = thinned(series)
    return Line(name, colour, style, some.steps.tolist(), as_numbers(some.values))


def as_numbers(values: Sequence[float] | np.ndarray, digits: int = 7) -> list[float | None]:
    """Some digits of each number; None if it is not finite in float32, so that no axis extends to float64's end."""
    return [float(f"{value:.{digits}g}") if abs(value) <= _LARGEST else None for value in values]


def thinned(series: Series, points: int = MAX_POINTS) -> Series:
    """At most ``points`` points: the lowest and highest of each stretch, to keep all peaks, and the first and last."""
    count = len(series.steps)
    if count <= points:
        return series
    indices = {0, count - 1}
    bounds = np.linspace(0, count, points // 2).astype(int)
    for start, end in pairwise(bounds):
        part = series.values[start:end]
        is_finite = np.isfinite(part)
        indices.add(int(start + np.where(is_finite, part, np.inf).argmin()))
        indices.add(int(start + np.where(is_finite, part, -np.inf).argmax()))
    rows = np.array(sorted(indices))
    return Series(series.steps[rows], series.values[rows])
