"""The page: every number of the report in one HTML file that needs no network."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_fp8.tools.report import tables
from lightning_fp8.tools.report.curves import curve_keys, loss_keys, thinned
from lightning_fp8.tools.report.runs import Run, Series
from lightning_fp8.tools.report.tensors import PLANES, Tensors, role_curves, tensors_of

_FOLDER = Path(__file__).parent
_SCRIPTS = ("data.js", "tables.js", "charts.js", "heatmap.js", "page.js")


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Write the report on one or more runs as HTML.

    Raises:
        ModuleNotFoundError: without plotly.
    """
    from plotly.offline import get_plotlyjs

    title = "FP8 report: " + ", ".join(run.name for run in runs)
    # a name may hold anything, even `</script>`
    data = json.dumps(page_data(runs), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = Template(_text("page.html")).substitute(
        title=html.escape(title),
        style=_text("page.css"),
        plotly=get_plotlyjs(),
        data=data,
        script="\n".join(map(_text, _SCRIPTS)),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """What the page shows, as plain values: arrays are base64, see :func:`half` and :func:`single`."""
    keys = curve_keys(runs)
    return {
        "runs": [_run_data(run, keys) for run in runs],
        "keys": keys,
        "losses": loss_keys(keys),
        "tables": {
            "finals": tables.as_plain(tables.final_values(runs)),
            "environment": tables.as_plain(tables.environment(runs)),
        },
    }


def _run_data(run: Run, keys: Sequence[str]) -> dict[str, Any]:
    tensors = tensors_of(run)
    dtypes, violations = tables.dtypes(run)
    last = max(int(series.steps[-1]) for series in run.scalars.values() if len(series.steps))
    return {
        "name": run.name,
        "folder": str(run.folder),
        "about": _about(run, last),
        "precision": run.precision or "precision not recorded",
        "curves": {key: _curve(run.scalars[key]) for key in keys if key in run.scalars},
        "roles": {
            quantity: {
                role: {statistic: _curve(series) for statistic, series in found.items()}
                for role, found in roles.items()
            }
            for quantity, roles in role_curves(run, tensors).items()
        },
        "tensors": _tensor_data(tensors) if tensors else None,
        "worst": tables.as_plain(tables.worst_layers(run, tensors)),
        "watchdog": tables.as_plain(tables.watchdog(run)),
        "layers": tables.as_plain(tables.layers(run)),
        "dtypes": tables.as_plain(dtypes),
        "violations": tables.as_plain(violations),
    }


def _about(run: Run, last: int) -> list[str]:
    found = [f"logged up to step {last:,}", f"read from {run.source}"]
    if run.note:
        found.insert(0, run.note)
    if "parameters" in run.record:
        found.append(f"{run.record['parameters']:,} parameters")
    return found


def _curve(series: Series) -> dict[str, Any]:
    some = thinned(series)
    return {"steps": some.steps.tolist(), "values": single(some.values)}


def _tensor_data(tensors: Tensors) -> dict[str, Any]:
    ends = np.append(tensors.bounds[1:], len(tensors.steps)) - 1
    return {
        "names": tensors.names,
        "columns": [tensors.steps[tensors.bounds].tolist(), tensors.steps[ends].tolist()],
        "planes": {quantity: half(values) for quantity, values in tensors.columns.items()},
        "worst": {quantity: single(tensors.worst[quantity][0]) for quantity in PLANES},
        "sqnr": single(tensors.sqnr_db),
    }


def half(values: npt.NDArray[Any]) -> str:
    """Numbers as bfloat16 (at most 0.4% off, with float32's range), little endian, in base64."""
    halves = torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.int16).numpy()
    return base64.b64encode(halves.astype("<i2").tobytes()).decode()


def single(values: npt.NDArray[Any]) -> str:
    """float32 numbers, little endian, in base64."""
    with np.errstate(over="ignore"):
        return base64.b64encode(values.astype("<f4").tobytes()).decode()


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
