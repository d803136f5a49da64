"""The tables of a report, as plain values: the text of each cell, and the value by which a column is sorted."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_fp8.tools.report.charts import curve_keys
from lightning_fp8.tools.report.runs import Run
from lightning_fp8.tools.report.tensors import Tensors

# title, and format with unit, of each quantity in the table of the worst values
_WORST = {
    "headroom_bits": ("lowest headroom", "{:.2f} bits"),
    "saturated_fraction": ("highest saturation", "{:.3%}"),
    "underflowed_fraction": ("highest underflow", "{:.3%}"),
}


_NO_RECORD = "Not recorded: add lightning_fp8.RunRecord."


class Cell(NamedTuple):
    """One cell: its text, its sort value, and its style: ``""``, ``"mark"``, or ``"wrong"``, in red."""

    text: str
    sort: float | None = None
    style: str = ""


@dataclass
class Table:
    """A table.

    Attributes:
        columns: titles.
        rows: one cell per column; the first cell names the row.
        note: a line above the table; if there are no rows, it says how to get them.
    """

    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""


def final_values(runs: Sequence[Run]) -> Table:
    """The last value of each curve in each run, and its relative difference from the first run's."""
    names = [run.name for run in runs]
    columns = ["metric", *names, *(f"{name} against {names[0]}" for name in names[1:])]
    rows, gaps = [], []
    for key in curve_keys(runs):
        curves = [run.scalars[key].values if key in run.scalars else np.array([]) for run in runs]
        first, *rest = [float(values[-1]) if len(values) else None for values in curves]
        differences = [(x - first) / abs(first) if x is not None and first else None for x in rest]
        rows.append([Cell(key), *map(_number, (first, *rest)), *(_number(x, "{:+.3%}") for x in differences)])
        lost = [np.count_nonzero(~np.isfinite(values)) for values in curves]
        gaps += [f"{key} of {name}: {n} of {len(x)} values" for name, n, x in zip(names, lost, curves) if n]
    note = f"Not finite, and gaps in the curves: {'; '.join(gaps)}." if gaps else ""
    return Table(columns, rows, note if rows else "No metric has more than one step.")


def worst_layers(tensors: Tensors | None) -> Table:
    """The worst values of each layer over the run."""
    if tensors is None:
        return Table([], [], "Nothing was logged about tensors: add lightning_fp8.ScaleFactorLogger to an FP8 run.")
    members: dict[str, list[int]] = {}
    for row, layer in enumerate(tensors.layers):
        members.setdefault(layer, []).append(row)
    rows = [[Cell(path or "(root)"), *_worst_cells(tensors, members[path])] for path in members]
    rows.sort(key=lambda cells: math.inf if (value := cells[1].sort) is None else value)
    return Table(["layer", *(title for title, _ in _WORST.values()), "non-finite steps"], rows)


def _worst_cells(tensors: Tensors, rows: list[int]) -> list[Cell]:
    roles = {row: tensors.names[row].rpartition(".")[2] for row in rows}
    cells = []
    for quantity, (title, form) in _WORST.items():
        values, steps = tensors.worst[quantity]
        pairs = [(float(values[row]), row) for row in rows if not math.isnan(values[row])]
        # the first of equal ones
        pick = min if title.startswith("lowest") else max
        value, row = pick(pairs, key=lambda pair: pair[0], default=(None, 0))
        cells.append(_number(value, f"{form} ({roles.get(row)}, step {steps[row]})"))
    counts = [(count, role) for row, role in roles.items() if not math.isnan(count := tensors.nonfinite_steps[row])]
    most, role = max(counts, default=(None, ""))
    return [*cells, _number(most, f"{{:.0f}} ({role})" if most else "{:.0f}", "wrong" if most else "")]


def layers(run: Run) -> Table:
    """Which layers run in FP8, and why the others do not."""
    entries = run.record.get("layers")
    if not entries:
        why = f"No layer runs in FP8 under precision {run.precision}." if run.record else _NO_RECORD
        return Table([], [], why)
    rows = []
    for row in entries:
        runs_in = Cell("FP8" if row["converted"] else "not FP8")
        rows.append([Cell(row["path"] or "(root)"), Cell(row["kind"]), runs_in, Cell(row["reason"])])
    flags = [row["converted"] for row in entries if row["kind"] != "Parameter"]
    note = f"{sum(flags)} of {len(flags)} layers ran in FP8 when the run started."
    return Table(["layer", "class", "runs in", "because"], rows, note)


def dtypes(run: Run) -> tuple[Table, Table]:
    """A table of the dtypes of tensors by kind, and one of the tensors whose dtype is not the expected one."""
    if not run.dtypes:
        return Table([], [], "Not recorded: add lightning_fp8.DtypeAudit."), Table([], [])
    wrong = {(row["kind"], row["name"]) for row in run.dtypes["violations"]}
    groups: dict[tuple[str, str, str, bool], list[int]] = {}
    for row in run.dtypes["rows"]:
        key = (row["kind"], row["actual"], row.get("expected") or "-", (row["kind"], row["name"]) in wrong)
        groups.setdefault(key, []).append(row["elements"])
    rows = []
    for (kind, actual, expected, is_wrong), elements in groups.items():
        verdict = Cell("MISMATCH", style="mark") if is_wrong else Cell("-" if expected == "-" else "ok")
        mib = sum(elements) * getattr(torch, actual).itemsize / 2**20
        numbers = [_number(len(elements), "{:,}"), _number(sum(elements), "{:,}"), _number(mib, "{:,.2f}")]
        rows.append([Cell(kind), Cell(actual), Cell(expected), *numbers, verdict])
    violations = [
        [Cell(row["name"]), Cell(row["kind"]), Cell(row["actual"], style="mark"), Cell(row.get("expected") or "-")]
        for row in run.dtypes["violations"]
    ]
    columns = ["what", "actual", "expected", "tensors", "elements", "MiB", "verdict"]
    return Table(columns, rows), Table(["tensor", "what", "actual", "expected"], violations)


def environment(runs: Sequence[Run]) -> Table:
    """What each run was made with; rows that differ are marked."""
    facts = [_facts(run) for run in runs]
    rows = []
    for name in dict.fromkeys(name for run_facts in facts for name in run_facts):
        values = [run_facts.get(name, "-") for run_facts in facts]
        style = "mark" if len(set(values)) > 1 else ""
        rows.append([Cell(value, style=style) for value in (name, *values)])
    missing = [run.name for run in runs if not run.record]
    note = f"No record of {', '.join(missing)}: add lightning_fp8.RunRecord." if missing else ""
    return Table(["", *(run.name for run in runs)], rows, note)


def _facts(run: Run) -> dict[str, str]:
    names = ("precision", "strategy", "accelerator", "world_size", "parameters")
    facts = {
        **{name.replace("_", " "): run.record[name] for name in names if name in run.record},
        **(run.record.get("environment") or {}),
        **{f"recipe: {name}": value for name, value in (run.record.get("recipe") or {}).items()},
        **{f"hparams: {name}": value for name, value in run.hparams.items()},
    }
    return {name: _fact(value) for name, value in facts.items()}


def _fact(value: Any) -> str:
    return "-" if value in (None, "") else f"{value:,}" if isinstance(value, int) and value > 9999 else str(value)


def _number(value: float | None, form: str = "{:.5g}", style: str = "") -> Cell:
    if value is None:
        return Cell("-")
    # without a sign where it rounds to zero
    text = re.sub(r"^[-+](?=[0.]+(?![\d.]))", "", form.format(value))
    return Cell(text, float(value) if math.isfinite(value) else None, style)
