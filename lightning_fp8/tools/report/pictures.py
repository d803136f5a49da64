"""The report's charts as PNG files, for places that cannot show HTML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fp8.tools.report.charts import COLOURS, Chart, curve_keys, curves, loss_keys, role_charts
from lightning_fp8.tools.report.runs import Run
from lightning_fp8.tools.report.tensors import tensors_of

# names may have dollar signs, which must not start a formula
STYLE: dict[Any, Any] = {"text.parse_math": False, "font.size": 9, "axes.grid": True, "grid.alpha": 0.25}
_LINES = ("-", "--", ":")
_LABELLED_ROWS = 60


def write_pictures(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write a PNG for each chart that has data, and return the paths.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    import matplotlib

    keys = loss_keys(curve_keys(runs))
    roles = {run.name: role_charts(run) for run in runs}
    lost, headroom = ("saturated_fraction", "underflowed_fraction"), ("headroom_bits",)
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figures = {
            "curves.png": _lines({"": [curves(runs, keys)]} if keys else {}, 9, 4.2),
            "log2_scale.png": _scales(runs),
            "saturation_underflow.png": _lines(_with(lost, roles), 5.7, 3.4),
            "headroom.png": _lines(_with(headroom, roles), 6.2, 3.4),
        }
        drawn = {folder / name: figure for name, figure in figures.items() if figure is not None}
        for path, figure in drawn.items():
            figure.savefig(path, dpi=150)
    return list(drawn)


def _with(quantities: Sequence[str], roles: dict[str, dict[str, Chart]]) -> dict[str, list[Chart]]:
    """The charts of these quantities, by run."""
    by_run = {run: [charts[quantity] for quantity in quantities if quantity in charts] for run, charts in roles.items()}
    return {run: charts for run, charts in by_run.items() if charts}


def _figure(width: float, height: float) -> Any:
    # not pyplot, which has process-wide state and looks for a display
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _lines(rows: dict[str, list[Chart]], width: float, height: float) -> Any:
    """A row of charts, ``width`` x ``height`` inches each, for each run."""
    if not rows:
        return None
    columns = max(map(len, rows.values()))
    figure = _figure(width * columns, height * len(rows))
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line_of_axes, (run, charts) in zip(grid, rows.items(), strict=True):
        for axes, chart in zip(line_of_axes, charts):
            for line in chart.lines:
                style = {"color": COLOURS[line.colour % len(COLOURS)], "label": line.name, "markersize": 3}
                marker = "o" if len(line.steps) < 20 else ""
                axes.plot(line.steps, np.array(line.values, float), _LINES[line.style], marker=marker, **style)
            for switch in chart.switches:
                colour = COLOURS[switch.colour % len(COLOURS)]
                axes.axvline(switch.step, color=colour, linestyle=":", linewidth=1)
                place = {"rotation": 90, "ha": "right", "va": "top", "transform": axes.get_xaxis_transform()}
                axes.text(switch.step, 0.98, switch.label, color=colour, fontsize=7, **place)
            axes.set(xlabel="step", title=f"{chart.title}: {run}" if run else chart.title)
            axes.legend(fontsize=8)
            if chart.is_share:
                axes.set_ylim(bottom=0)
    return figure


def _scales(runs: Sequence[Run]) -> Any:
    pairs = [(run, tensors) for run in runs if (tensors := tensors_of(run)) is not None]
    if not pairs:
        return None
    heights = [min(max(0.17 * len(tensors.names), 2.5), 9.0) + 0.8 for _, tensors in pairs]
    figure = _figure(10, sum(heights))
    rows = figure.subplots(len(pairs), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (run, tensors) in zip(rows, pairs, strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            exponents = np.log2(tensors.columns["scale"])
        image = axes.imshow(np.ma.masked_invalid(exponents), aspect="auto", interpolation="nearest", cmap="viridis")
        columns = np.unique(np.linspace(0, exponents.shape[1] - 1, 8).astype(int))
        axes.set_xticks(columns, [f"{step:,}" for step in tensors.steps[tensors.bounds[0, columns]]])
        if len(tensors.names) <= _LABELLED_ROWS:
            axes.set_yticks(range(len(tensors.names)), tensors.names, fontsize=7)
        else:
            axes.set_ylabel(f"{len(tensors.names):,} tensors, in the order of the model")
        axes.grid(False)
        axes.set(xlabel="step", title=f"log2 of the scale: {run.name}")
        figure.colorbar(image, ax=axes, pad=0.01)
    return figure
