"""The page: every number of the report in one HTML file that needs no network."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

import numpy.typing as npt
import torch

from lightning_fp8.tools.report import tables
from lightning_fp8.tools.report.charts import as_numbers, curve_keys, curves, loss_keys, role_charts
from lightning_fp8.tools.report.runs import Run
from lightning_fp8.tools.report.tensors import Tensors, sqnr_of, tensors_of

_FOLDER = Path(__file__).parent
_SCRIPTS = ("data.js", "tables.js", "charts.js", "heatmap.js", "page.js")


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Write the report on one or more runs as HTML.

    Raises:
        ModuleNotFoundError: without plotly.
    """
    from plotly.offline import get_plotlyjs

    title = "FP8 report: " + ", ".join(run.name for run in runs)
    page = Template(_text("page.html")).substitute(
        title=html.escape(title),
        style=_text("page.css"),
        plotly=get_plotlyjs(),
        data=page_json(runs),
        script="\n".join(map(_text, _SCRIPTS)),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def page_json(runs: Sequence[Run]) -> str:
    """What the page shows, as JSON that can be part of HTML."""
    keys = curve_keys(runs)
    data = {
        "runs": [_run_data(run) for run in runs],
        "curves": {key: curves(runs, [key]) for key in keys},
        "losses": loss_keys(keys),
        "finals": tables.final_values(runs),
        "environment": tables.environment(runs),
    }
    # tables and charts as objects; a name may hold anything, even `</script>`
    return json.dumps(data, default=vars, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _run_data(run: Run) -> dict[str, Any]:
    tensors = tensors_of(run)
    last = max(series.steps[-1] for series in run.scalars.values())
    about = [run.note, f"logged up to step {last:,}"]
    if "parameters" in run.record:
        about.append(f"{run.record['parameters']:,} parameters")
    return {
        "name": run.name,
        "folder": str(run.folder),
        "about": " · ".join(about),
        "precision": run.precision or "precision not recorded",
        "roles": role_charts(run),
        "tensors": tensors and _tensor_data(run, tensors),
        "worst": tables.worst_layers(run, tensors),
        "watchdog": tables.watchdog(run),
        "layers": tables.layers(run),
        "dtypes": tables.dtypes(run),
    }


def _tensor_data(run: Run, tensors: Tensors) -> dict[str, Any]:
    sqnr = sqnr_of(run)
    return {
        "names": tensors.names,
        "columns": tensors.steps[tensors.bounds].tolist(),
        "planes": {quantity: half(values) for quantity, values in tensors.columns.items()},
        "worst": {quantity: as_numbers(values) for quantity, (values, _) in tensors.worst.items()}
        | {"sqnr": as_numbers([sqnr.get(layer, math.nan) for layer in tensors.layers])},
    }


def half(values: npt.NDArray[Any]) -> str:
    """Numbers as bfloat16 (at most 0.4% off, with float32's range), little endian, in base64."""
    halves = torch.from_numpy(values).bfloat16().view(torch.int16).numpy()
    return base64.b64encode(halves.astype("<i2").tobytes()).decode()


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
