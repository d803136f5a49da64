"""Plots of rows: the time of each variant relative to its suite's baseline, and tokens per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_fp8.tools.report.pictures import COLOURS

# inches: height of a bar, space around the bars of a suite, from the axis to the legend, and width of the figure
_BAR, _AROUND, _LEGEND, _WIDTH = 0.16, 1.1, 0.42, 10.0
Row = dict[str, Any]
# by case and variant: low end, middle and high end of a bar
Bars = dict[str, dict[str, tuple[float, float, float]]]


def draw(rows: Sequence[Row], baselines: Mapping[str, str], path: Path) -> bool:
    """Write a chart for each suite: a bar for each case and variant, p50 over the baseline's, with p20 and p80.

    A suite that counts tokens has a second chart, of tokens per second.

    Args:
        rows: as the suites make them.
        baselines: by suite, a prefix: the first variant whose name starts with it is the baseline. A case without one
            is left out.
        path: of the picture.

    Returns:
        Whether there was anything to draw.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.transforms import ScaledTranslation

    charts = [chart for suite, begins in baselines.items() for chart in _charts(rows, suite, begins)]
    if not charts:
        return False
    heights = [_AROUND + _BAR * sum(len(bars) + 1 for bars in chart.cases.values()) for chart in charts]
    # no formulas: names may have dollar signs
    with matplotlib.rc_context({"text.parse_math": False, "font.size": 8}):
        figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
        grid = figure.subplots(len(charts), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, chart in zip(grid, charts, strict=True):
            _bars(axes, chart.cases)
            if chart.line is not None:
                axes.axvline(chart.line, color="black", linewidth=0.8)
            # below the axis and its label, as bars fill the space above
            below = axes.transAxes + ScaledTranslation(0, -_LEGEND, figure.dpi_scale_trans)
            axes.legend(loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=below, ncols=4, fontsize=7)
            axes.set(xlabel=chart.label, title=chart.title)
        figure.savefig(path, dpi=150, bbox_inches="tight")
    return True


class _Chart(NamedTuple):
    title: str
    label: str
    cases: Bars
    line: float | None = None


def _charts(rows: Sequence[Row], suite: str, baseline: str) -> list[_Chart]:
    charts = []
    if times := relative(rows, suite, baseline):
        charts.append(_Chart(suite, f"p50 relative to {baseline}: lower is faster", times, line=1))
    if rates := tokens(rows, suite):
        charts.append(_Chart(f"{suite}, tokens/s", "tokens per second: higher is faster", rates))
    return charts


def tokens(rows: Sequence[Row], suite: str) -> Bars:
    """By case and variant: tokens per second at p80, at p50 and at p20."""
    cases: Bars = {}
    for row in rows:
        if row["suite"] == suite and row.get("tokens_per_s") is not None:
            # the ratio first: rounding cannot move it past 1
            low, high = (row["tokens_per_s"] * (row["p50_us"] / row[end]) for end in ("p80_us", "p20_us"))
            cases.setdefault(row["case"], {})[row["variant"]] = (low, row["tokens_per_s"], high)
    return cases


def relative(rows: Sequence[Row], suite: str, baseline: str) -> Bars:
    """By case and variant: p20, p50 and p80 over the p50 of the baseline."""
    cases: Bars = {}
    for row in rows:
        if row["suite"] == suite:
            cases.setdefault(row["case"], {})[row["variant"]] = (row["p20_us"], row["p50_us"], row["p80_us"])
    found = {}
    for case, variants in cases.items():
        base = next((times[1] for name, times in variants.items() if name.startswith(baseline)), None)
        if base is not None:
            found[case] = {name: (p20 / base, p50 / base, p80 / base) for name, (p20, p50, p80) in variants.items()}
    return found


def _bars(axes: Any, cases: Bars) -> None:
    names = list(dict.fromkeys(name for variants in cases.values() for name in variants))
    top, ticks = 0, []
    for variants in cases.values():
        for place, (name, (low, middle, high)) in enumerate(variants.items()):
            spread = [[middle - low], [high - middle]]
            axes.barh(top + place, middle, xerr=spread, error_kw={"elinewidth": 0.8}, height=0.9, **_look(names, name))
        ticks.append(top + (len(variants) - 1) / 2)
        top += len(variants) + 1
    for name in names:
        axes.barh(0, 0, label=name, **_look(names, name))
    axes.set_yticks(ticks, list(cases))
    axes.set_ylim(top - 1, -1)
    axes.grid(axis="x", alpha=0.25)


def _look(names: Sequence[str], name: str) -> dict[str, Any]:
    """A colour, and a pattern once all colours are used."""
    turn, number = divmod(names.index(name), len(COLOURS))
    return {"color": COLOURS[number], "hatch": "////" if turn else "", "edgecolor": "white"}
