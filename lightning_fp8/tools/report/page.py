"""The page: one HTML file that needs no network. It begins with the verdict; all else is folded below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_fp8.tools.report import tables
from lightning_fp8.tools.report.charts import role_charts
from lightning_fp8.tools.report.figures import Figure, curve_chart, drawn, heat_map, line_chart
from lightning_fp8.tools.report.runs import Run
from lightning_fp8.tools.report.tables import Table
from lightning_fp8.tools.report.tensors import tensors_of
from lightning_fp8.tools.report.verdict import MOST_SHOWN, Shown, findings, headline

_FOLDER = Path(__file__).parent
_NOTHING = "Nothing was logged about tensors: add lightning_fp8.{} to an FP8 run."


@dataclass
class Part:
    """A chart, as HTML, or a table, with its title."""

    title: str
    chart: str = ""
    table: Table | None = None


@dataclass
class Section:
    """What is folded under one title: a line of text, and parts."""

    name: str
    title: str
    parts: list[Part]
    note: str = ""


@dataclass
class Opening:
    """What a run opens with: its verdict, the findings with their charts, how many more there are, and what it is."""

    verdict: str
    status: str
    findings: list[tuple[Shown, str]]
    more: int
    name: str
    about: list[str]


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Write the report on one or more runs as HTML.

    Raises:
        ModuleNotFoundError: without plotly or jinja2.
    """
    from jinja2 import Environment, FileSystemLoader
    from plotly.offline import get_plotlyjs

    # names may hold anything, even `</script>`
    templates = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = templates.get_template("page.html").render(
        title="FP8 report: " + ", ".join(run.name for run in runs),
        plotly=get_plotlyjs(),
        openings=[_opening(run, number) for number, run in enumerate(runs)],
        sections=_sections(runs),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _opening(run: Run, number: int) -> Opening:
    found = findings(run)
    charts = [
        drawn(line_chart(shown.chart, 220), f"finding-{number}-{place}") if shown.chart else ""
        for place, shown in enumerate(found[:MOST_SHOWN])
    ]
    about = [run.precision or "precision not recorded", run.note]
    if run.scalars:
        about.append(f"logged up to step {max(series.steps[-1] for series in run.scalars.values()):,}")
    if "parameters" in run.record:
        about.append(f"{run.record['parameters']:,} parameters")
    status = run.health.get("status", "")
    return Opening(
        headline(run), status, [*zip(found, charts)], len(found) - len(charts), run.name, [*about, str(run.folder)]
    )


def _sections(runs: Sequence[Run]) -> list[Section]:
    tensors = [tensors_of(run) for run in runs]
    curves = curve_chart(runs)
    maps = [heat_map(some) if some else None for some in tensors]
    lost = [(run, quantity, chart) for run in runs for quantity, chart in role_charts(run).items()]
    worst = [tables.worst_layers(some) for some in tensors]
    dtypes = [(run, table) for run in runs for table in tables.dtypes(run) if table.rows or table.note]
    differs = "What differs is marked." if len(runs) > 1 else ""

    def titled(title: str, run: Run) -> str:
        return ": ".join(filter(None, (title, run.name if len(runs) > 1 else "")))

    def of_runs(name: str, parts: Iterable[tuple[Run, Figure | Table | None]]) -> list[Part]:
        return [
            Part(titled("", run), table=part)
            if isinstance(part, Table)
            else Part(titled("", run), drawn(part, f"{name}-{number}"))
            for number, (run, part) in enumerate(parts)
            if part is not None
        ]

    return [
        Section(
            "curves",
            "Curves and final values",
            [
                *([Part("", drawn(curves, "curves-chart"))] if curves else []),
                Part("Final values", table=tables.final_values(runs)),
            ],
        ),
        Section(
            "scales",
            "Scales and headroom, tensor by tensor",
            of_runs("map", zip(runs, maps)),
            "Inputs, weights and gradients in the order of the model."
            if any(maps)
            else _NOTHING.format("ScaleFactorLogger"),
        ),
        Section(
            "lost",
            "Lost numbers, by role",
            [
                Part(titled(chart.title, run), drawn(line_chart(chart), f"lost-{number}-{quantity}"))
                for number, (run, quantity, chart) in enumerate(lost)
            ],
            "Each role's median (solid) and worst tensor (dotted)." if lost else _NOTHING.format("Fp8Monitor"),
        ),
        Section("worst", "Worst values of each layer", of_runs("", zip(runs, worst))),
        Section("layers", "Which layers run in FP8", of_runs("", ((run, tables.layers(run)) for run in runs))),
        Section("dtypes", "Dtypes", of_runs("", dtypes)),
        Section("environment", "Environment", [Part("", table=tables.environment(runs))], differs),
    ]
