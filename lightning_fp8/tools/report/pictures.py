"""The report's charts as PNG files, for places that cannot show HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fp8.ops.formats import ROLES
from lightning_fp8.tools.report.curves import curve_keys, loss_keys, thinned
from lightning_fp8.tools.report.runs import Floats, Run, Series
from lightning_fp8.tools.report.tensors import Tensors, role_curves, tensors_of

# Okabe and Ito's colours, which most colour-blind people can tell apart; the page uses the same
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# names may have dollar signs, which must not start a formula
STYLE: dict[Any, Any] = {"text.parse_math": False, "font.size": 9, "axes.grid": True, "grid.alpha": 0.25}
_LABELLED_ROWS = 60


def write_pictures(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write a PNG for each chart that has data, and return the paths.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    import matplotlib

    found = [(run, tensors, role_curves(run, tensors)) for run in runs for tensors in [tensors_of(run)]]
    with_tensors = [(run, tensors) for run, tensors, _ in found if tensors is not None]
    with_roles = [(run, curves) for run, _, curves in found if curves]
    drawn: list[tuple[str, Callable[[], Any]]] = []
    if curve_keys(runs):
        drawn.append(("curves.png", lambda: _curves(runs)))
    if with_tensors:
        drawn.append(("log2_scale.png", lambda: _scales(with_tensors)))
    for name, quantities in {
        "saturation_underflow.png": ("saturated_fraction", "underflowed_fraction"),
        "headroom.png": ("headroom_bits",),
    }.items():
        if any(quantity in curves for _, curves in with_roles for quantity in quantities):
            drawn.append((name, lambda quantities=quantities: _roles(with_roles, quantities)))  # type: ignore[misc]
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, draw in drawn:
            draw().savefig(folder / name, dpi=150)
    return [folder / name for name, _ in drawn]


def _figure(width: float, height: float) -> Any:
    # not pyplot, which has process-wide state and looks for a display
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _shown(series: Series) -> Floats:
    """Values too large for float32 become gaps, as on the page, so that no axis extends to the end of float64."""
    return np.where(np.abs(series.values) <= np.finfo(np.float32).max, series.values, np.nan)


def _curves(runs: Sequence[Run]) -> Any:
    keys = loss_keys(curve_keys(runs))
    figure = _figure(9, 4.2)
    axes = figure.subplots()
    for position, run in enumerate(runs):
        for key, line in zip(keys, ("-", "--")):
            if key in run.scalars:
                series = thinned(run.scalars[key])
                marker = "o" if len(series.steps) < 20 else ""
                colour = COLOURS[position % len(COLOURS)]
                label = f"{run.name} {key} ({run.precision})"
                axes.plot(series.steps, _shown(series), line, color=colour, marker=marker, markersize=3, label=label)
    axes.set(xlabel="step", ylabel=", ".join(keys), title="Loss" if "loss" in keys[0] else keys[0])
    axes.legend(fontsize=8)
    return figure


def _scales(found: Sequence[tuple[Run, Tensors]]) -> Any:
    heights = [min(max(0.17 * len(tensors.names), 2.5), 9.0) + 0.8 for _, tensors in found]
    figure = _figure(10, sum(heights))
    rows = figure.subplots(len(found), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (run, tensors) in zip(rows, found, strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            exponents = np.log2(tensors.columns["scale"])
        known = np.ma.masked_invalid(exponents)
        image = axes.imshow(known, aspect="auto", interpolation="nearest", cmap="viridis")
        columns = np.unique(np.linspace(0, exponents.shape[1] - 1, 8).astype(int))
        axes.set_xticks(columns, [f"{step:,}" for step in tensors.steps[tensors.bounds][columns]])
        if len(tensors.names) <= _LABELLED_ROWS:
            axes.set_yticks(range(len(tensors.names)), tensors.names, fontsize=7)
        else:
            axes.set_ylabel(f"{len(tensors.names):,} tensors, in the order of the model")
        axes.grid(False)
        axes.set(xlabel="step", title=f"log2 of the scale: {run.name}")
        figure.colorbar(image, ax=axes, pad=0.01)
    return figure


def _roles(found: Sequence[tuple[Run, dict[str, Any]]], quantities: Sequence[str]) -> Any:
    figure = _figure(5.2 * len(quantities) + 1, 3.4 * len(found))
    grid = figure.subplots(len(found), len(quantities), squeeze=False)
    for row, (run, curves) in zip(grid, found, strict=True):
        for axes, quantity in zip(row, quantities, strict=True):
            extreme = "min" if quantity == "headroom_bits" else "max"
            for role, colour in zip(ROLES, COLOURS):
                for statistic, line in (("median", "-"), (extreme, ":")):
                    series = curves.get(quantity, {}).get(role, {}).get(statistic)
                    if series is not None:
                        some = thinned(series)
                        axes.plot(some.steps, _shown(some), line, color=colour, label=f"{role}, {statistic}")
            unit = "bits" if quantity == "headroom_bits" else "share"
            axes.set(xlabel="step", ylabel=unit, title=f"{quantity.replace('_', ' ')}: {run.name}")
            if axes.lines:
                axes.legend(fontsize=7)
            if unit == "share":
                axes.set_ylim(bottom=0)
    return figure
