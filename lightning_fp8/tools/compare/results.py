"""The rows of a comparison as a table, a picture and files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_fp8.tools.report.pictures import COLOURS, STYLE
from lightning_fp8.tools.tables import table

_MIB = 2**20
# title, unit and format
_COLUMNS: dict[str, tuple[str, float, str]] = {
    "tokens_per_s": ("tokens/s", 1.0, ",.0f"),
    "samples_per_s": ("samples/s", 1.0, ",.1f"),
    "p20_ms": ("p20 ms", 1.0, ",.2f"),
    "p50_ms": ("p50 ms", 1.0, ",.2f"),
    "p80_ms": ("p80 ms", 1.0, ",.2f"),
    "peak_bytes": ("peak MiB", _MIB, ",.0f"),
    "state_bytes": ("state MiB", _MIB, ",.1f"),
    "loss": ("loss", 1.0, ".4f"),
    "val_loss": ("val loss", 1.0, ".4f"),
}
Row = Mapping[str, Any]


def as_table(rows: Sequence[Row], markdown: bool = False) -> str:
    """The table; columns without any number are left out, and a run that failed has dashes."""
    columns = {key: about for key, about in _COLUMNS.items() if any(row.get(key) is not None for row in rows)}
    return table(
        [{"variant": row["variant"], **{key: row.get(key) for key in columns}} for row in rows], columns, markdown
    )


def failures(rows: Sequence[Row]) -> list[str]:
    """A line for each run that failed."""
    return [f"{row['variant']} failed: {row['error']}" for row in rows if row.get("error")]


def write(rows: Sequence[Row], advice: Sequence[str], folder: Path) -> list[Path]:
    """Write ``compare.jsonl``, ``compare.md`` and, with matplotlib, ``compare.png``, replacing earlier ones."""
    lines, page = folder / "compare.jsonl", folder / "compare.md"
    lines.write_text(
        "".join(json.dumps({key: value for key, value in row.items() if key != "losses"}) + "\n" for row in rows),
        encoding="utf-8",
    )
    said = "".join(f"- {line}\n" for line in [*failures(rows), *advice])
    page.write_text(f"{as_table(rows, markdown=True)}\n\n{said}", encoding="utf-8")
    picture = folder / "compare.png"
    picture.unlink(missing_ok=True)
    if find_spec("matplotlib") and any(not row.get("error") for row in rows):
        draw(rows, picture)
        return [lines, page, picture]
    return [lines, page]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw all loss curves, and bars of step times (lines from the 20th to the 80th percentile) and peak memory.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 4), layout="constrained")
        losses, times, memory = figure.subplots(1, 3, width_ratios=(1.6, 1, 1))
        for position, row in enumerate(rows):
            if row.get("error"):
                continue
            name, colour = row["variant"], COLOURS[position % len(COLOURS)]
            steps = range(1, len(row["losses"]) + 1)
            label = f"{name}, the baseline" if name == row.get("baseline") else name
            losses.plot(steps, row["losses"], color=colour, label=label, alpha=0.8, linewidth=1.3)
            spread = [[row["p50_ms"] - row["p20_ms"]], [row["p80_ms"] - row["p50_ms"]]]
            times.barh(name, row["p50_ms"], color=colour, xerr=spread, capsize=3)
            memory.barh(name, row["peak_bytes"] / _MIB, color=colour)
        on_cpu = not any(row.get("gpu") for row in rows)
        losses.set(xlabel="optimizer step", ylabel="training loss", title="Loss")
        losses.legend(fontsize=8)
        times.set(xlabel="ms", title="Step time on a CPU, not a GPU's" if on_cpu else "Step time")
        memory.set(xlabel="MiB", title="Peak memory of the process" if on_cpu else "Peak memory")
        memory.set_yticklabels([])
        for axes in (times, memory):
            axes.invert_yaxis()
        figure.savefig(path, dpi=150)
