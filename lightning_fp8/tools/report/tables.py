"""The tables of a report, as plain values: the text of each cell, and the value by which a column is sorted."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_fp8.tools.report.curves import curve_keys
from lightning_fp8.tools.report.runs import Run
from lightning_fp8.tools.report.tensors import Tensors, layer_of, sqnr_of

# title and format, with unit, of each quantity in the table of the worst values
_WORST = {
    "headroom_bits": ("lowest headroom", "{:.2f} bits"),
    "saturated_fraction": ("highest saturation", "{:.3%}"),
    "underflowed_fraction": ("highest underflow", "{:.3%}"),
}


class Cell(NamedTuple):
    """One cell: its text, its sort value, and whether it is marked."""

    text: str
    sort: float | None = None
    mark: bool = False


class Table(NamedTuple):
    """A table.

    Attributes:
        columns: titles. A trailing ``<`` or ``>`` is not shown: it says whether the lowest or highest comes first.
        rows: one cell per column; the first cell names the row.
        note: a line above the table; if there are no rows, it says how to get them.
        by_layer: whether the first cells are module paths.
    """

    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""
    by_layer: bool = False


def final_values(runs: Sequence[Run]) -> Table:
    """The last value of each curve in each run, and its relative difference from the first run's."""
    columns = [
        "metric",
        *(f"{run.name}<" for run in runs),
        *(f"{run.name} against {runs[0].name}<" for run in runs[1:]),
    ]
    rows = []
    for key in curve_keys(runs):
        last = [float(run.scalars[key].values[-1]) if key in run.scalars else None for run in runs]
        differences = [_difference(last[0], value) for value in last[1:]]
        rows.append([Cell(key), *map(_number, last), *(_formatted(value, "{:+.3%}") for value in differences)])
    return Table(columns, rows, _nonfinite_note(runs) if rows else "No metric has more than one step.")


def _nonfinite_note(runs: Sequence[Run]) -> str:
    found = [
        f"{key} of {run.name}: {lost} of {len(values)} values"
        for run in runs
        for key in curve_keys([run])
        if (lost := int((~np.isfinite(values := run.scalars[key].values)).sum()))
    ]
    return "Not finite, and gaps in the curves: " + "; ".join(found) + "." if found else ""


def worst_layers(run: Run, tensors: Tensors | None) -> Table:
    """The worst values of each layer over the run, and its newest signal-to-noise ratio."""
    sqnr = sqnr_of(run)
    if tensors is None and not sqnr:
        return Table([], [], "Nothing was logged about tensors: add lightning_fp8.ScaleFactorLogger to an FP8 run.")
    columns = ["layer", "SQNR, newest<"]
    columns += [f"{title}{'<' if quantity == 'headroom_bits' else '>'}" for quantity, (title, _) in _WORST.items()]
    members: dict[str, list[int]] = {}
    for row, name in enumerate(tensors.names if tensors else []):
        members.setdefault(layer_of(name, run, sqnr), []).append(row)
    members |= {path: [] for path in sqnr if path not in members}
    rows = [
        [Cell(path or "(root)"), _formatted(sqnr.get(path), "{:.1f} dB"), *_worst_cells(tensors, members[path])]
        for path in members
    ]
    missing = "" if sqnr else "No signal to noise ratios: add lightning_fp8.QuantizationProbe."
    if tensors is None:
        missing = "No headroom, saturation and underflow: add lightning_fp8.ScaleFactorLogger."
    by = 1 if sqnr else 2
    rows.sort(key=lambda cells: _last_without(cells[by].sort))
    return Table([*columns, "non-finite steps>"], rows, missing, by_layer=True)


def _worst_cells(tensors: Tensors | None, rows: list[int]) -> list[Cell]:
    if tensors is None or not rows:
        return [Cell("-")] * (len(_WORST) + 1)
    cells = []
    for quantity, (_, form) in _WORST.items():
        values, steps = tensors.worst[quantity]
        known = [row for row in rows if not math.isnan(values[row])]
        pick = min if quantity == "headroom_bits" else max
        if known:
            row = pick(known, key=lambda row: values[row])
            where = f"{tensors.roles[row]}, step {steps[row]}"
            cells.append(Cell(f"{_text(values[row], form)} ({where})", _known(values[row])))
        else:
            cells.append(Cell("-"))
    counts = [(tensors.nonfinite_steps[row], tensors.roles[row]) for row in rows]
    most, role = max(((count, role) for count, role in counts if count == count), default=(math.nan, ""))
    text = "-" if math.isnan(most) else f"{most:.0f}" + (f" ({role})" if most else "")
    return [*cells, Cell(text, _known(most), mark=most > 0)]


def watchdog(run: Run) -> Table:
    """What ``ScaleWatchdog`` counted."""
    rows = []
    for key, series in run.scalars.items():
        if key.startswith("fp8/watchdog/"):
            most = int(np.nanargmax(np.where(np.isnan(series.values), -1, series.values)))
            cells = [_number(float(series.values[most])), Cell(f"{series.steps[most]:,}", float(series.steps[most]))]
            name = Cell(key.removeprefix("fp8/watchdog/"), mark=series.values[most] > 0)
            rows.append([name, *cells, _number(float(series.values[-1]))])
    note = "" if rows else "Nothing was watched: add lightning_fp8.ScaleWatchdog."
    return Table(["tensors, and layers that fell back", "most>", "first at step<", "newest>"], rows, note)


def layers(run: Run) -> Table:
    """Which layers run in FP8, and why the others do not."""
    found = run.record.get("layers")
    if not run.record:
        return Table([], [], "Not recorded: add lightning_fp8.RunRecord.")
    if not found:
        return Table([], [], f"No layer runs in FP8 under precision {run.precision}.")
    rows = [
        [
            Cell(row["path"] or "(root)"),
            Cell(row["kind"]),
            Cell("FP8" if row["converted"] else "not FP8", mark=not row["converted"]),
            Cell(row["reason"]),
        ]
        for row in found
    ]
    known = [row["converted"] for row in found if row["kind"] != "Parameter"]
    note = f"{sum(known)} of {len(known)} layers ran in FP8 when the run started."
    return Table(["layer", "class", "runs in", "because"], rows, note, by_layer=True)


def dtypes(run: Run) -> tuple[Table, Table]:
    """A table of the dtypes of tensors by kind, and one of the tensors whose dtype is not the expected one."""
    if not run.dtypes:
        return Table([], [], "Not recorded: add lightning_fp8.DtypeAudit."), Table([], [])
    violations = {(row["kind"], row["name"]) for row in run.dtypes["violations"]}
    groups: dict[tuple[str, str, str | None, bool], list[int]] = {}
    for row in run.dtypes["rows"]:
        key = (row["kind"], row["actual"], row["expected"], (row["kind"], row["name"]) in violations)
        groups.setdefault(key, []).append(row["elements"])
    rows = []
    for (kind, actual, expected, is_wrong), elements in groups.items():
        verdict = "MISMATCH" if is_wrong else "ok" if expected else "-"
        count, total = len(elements), sum(elements)
        size = total * getattr(torch, actual).itemsize / 2**20
        sizes = [Cell(f"{count:,}", count), Cell(f"{total:,}", total), Cell(f"{size:,.2f}", size)]
        rows.append([Cell(kind), Cell(actual), Cell(expected or "-"), *sizes, Cell(verdict, mark=is_wrong)])
    wrong = [
        [Cell(row["name"]), Cell(row["kind"]), Cell(row["actual"], mark=True), Cell(row["expected"] or "-")]
        for row in run.dtypes["violations"]
    ]
    columns = ["what", "actual", "expected", "tensors>", "elements>", "MiB>", "verdict"]
    return Table(columns, rows), Table(["tensor", "what", "actual", "expected"], wrong)


def environment(runs: Sequence[Run]) -> Table:
    """What each run was made with; rows that differ are marked."""
    facts = [_facts(run) for run in runs]
    rows = []
    for name in dict.fromkeys(name for found in facts for name in found):
        values = [found.get(name, "-") for found in facts]
        differs = len(set(values)) > 1
        rows.append([Cell(name, mark=differs), *(Cell(value, mark=differs) for value in values)])
    missing = [run.name for run in runs if not run.record]
    note = f"No record of {', '.join(missing)}: add lightning_fp8.RunRecord." if missing else ""
    return Table(["", *(run.name for run in runs)], rows, note)


def _facts(run: Run) -> dict[str, str]:
    names = ("precision", "strategy", "accelerator", "world_size", "parameters")
    plain = {name.replace("_", " "): run.record[name] for name in names if name in run.record}
    recipe = {f"recipe: {name}": value for name, value in (run.record.get("recipe") or {}).items()}
    hparams = {f"hparams: {name}": value for name, value in run.hparams.items()}
    found = {**plain, **(run.record.get("environment") or {}), **recipe, **hparams}
    return {name: _fact(value) for name, value in found.items()}


def _fact(value: Any) -> str:
    return "-" if value in (None, "") else f"{value:,}" if isinstance(value, int) and value > 9999 else str(value)


def _last_without(sort: float | None) -> float:
    return math.inf if sort is None else sort


def _difference(first: float | None, value: float | None) -> float | None:
    return (value - first) / abs(first) if value is not None and first else None


def _number(value: float | None) -> Cell:
    return _formatted(value, "{:.5g}")


def _formatted(value: float | None, form: str) -> Cell:
    return Cell("-" if value is None else _text(value, form), _known(value))


def _text(value: float, form: str) -> str:
    """The formatted number, without a sign if it rounds to zero."""
    text = form.format(value)
    return text if re.search("[1-9a-z]", text.partition(" ")[0]) else text.lstrip("+-")


def _known(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def as_plain(table: Table) -> dict[str, Any]:
    """A table for JSON: a cell is its text, or text, sort value and mark."""

    def plain(cell: Cell) -> Any:
        return cell.text if cell.sort is None and not cell.mark else [cell.text, cell.sort, bool(cell.mark)]

    return {
        "columns": [title[:-1] if title.endswith(("<", ">")) else title for title in table.columns],
        "first": ["high" if title.endswith(">") else "low" for title in table.columns],
        "rows": [list(map(plain, cells)) for cells in table.rows],
        "note": table.note,
        "byLayer": table.by_layer,
    }
