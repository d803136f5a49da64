"""The page: one HTML file that needs no network. It begins with the verdict; all else is folded below it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_fp8.tools.report import tables
from lightning_fp8.tools.report.charts import role_charts
from lightning_fp8.tools.report.figures import curve_chart, drawn, heat_map, line_chart
from lightning_fp8.tools.report.runs import Run
from lightning_fp8.tools.report.tensors import tensors_of
from lightning_fp8.tools.report.verdict import MOST_SHOWN, findings, headline

_FOLDER = Path(__file__).parent


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Write the report on one or more runs as HTML.

    Raises:
        ModuleNotFoundError: without plotly or jinja2.
    """
    from jinja2 import Environment, FileSystemLoader
    from plotly.offline import get_plotlyjs

    # names may hold anything, even `</script>`
    templates = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    curves = curve_chart(runs)
    page = templates.get_template("page.html").render(
        title="FP8 report: " + ", ".join(f"{run.name}, {headline(run)}" if run.health else run.name for run in runs),
        plotly=get_plotlyjs(),
        runs=[_of_run(run, number) for number, run in enumerate(runs)],
        curves=curves and drawn(curves, "curves-chart"),
        finals=tables.final_values(runs),
        environment=tables.environment(runs),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _of_run(run: Run, number: int) -> dict[str, Any]:
    """What the template shows of a run."""
    tensors, found = tensors_of(run), findings(run)
    charts = [
        drawn(line_chart(shown.chart, 220), f"finding-{number}-{place}") if shown.chart else ""
        for place, shown in enumerate(found[:MOST_SHOWN])
    ]
    about = [run.precision or "precision not recorded", run.note]
    if "run" in run.health:
        about.append(f"{run.health['run']} at step {run.health['steps']:,}")
    if run.scalars:
        about.append(f"logged up to step {max(series.steps[-1] for series in run.scalars.values()):,}")
    if "parameters" in run.record:
        about.append(f"{run.record['parameters']:,} parameters")
    return {
        "name": run.name,
        "about": [*about, run.folder],
        "verdict": headline(run),
        "status": run.health.get("status", "none"),
        "findings": list(zip(found, charts)),
        "more": len(found) - len(charts),
        "map": tensors and drawn(heat_map(tensors), f"map-{number}"),
        "lost": [
            (chart.title, drawn(line_chart(chart), f"lost-{number}-{quantity}"))
            for quantity, chart in role_charts(run).items()
        ],
        "worst": tables.worst_layers(tensors),
        "layers": tables.layers(run),
        "dtypes": tables.dtypes(run),
    }
