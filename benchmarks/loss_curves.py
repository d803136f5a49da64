"""The losses of a comparison, without its times: a row for each variant as JSON, and a picture of the curves.

Reads the folder that ``python -m lightning_fp8 compare`` wrote, and writes ``OUT.jsonl`` and ``OUT.png``. Rows of other
variants that are already in ``OUT.jsonl`` stay.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Row
from lightning_fp8.tools.compare.variants import MEASURED_FILE
from lightning_fp8.tools.report.pictures import COLOURS, STYLE

# times and memory, which depend on the machine and its load
_LEFT_OUT = ("_ms", "_per_s", "_bytes", "wall_s")


def rows_of(file: Path) -> list[Row]:
    """The rows of a file, if it exists."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def losses_of(folder: Path) -> list[Row]:
    """The rows of a comparison's folder, with ``losses``, the training loss of each step, and without times."""
    rows = []
    for row in rows_of(folder / "compare.jsonl"):
        measured = json.loads((folder / row["variant"] / MEASURED_FILE).read_text(encoding="utf-8"))
        fields = {key: value for key, value in row.items() if not key.endswith(_LEFT_OUT)}
        rows.append({**fields, "losses": [round(loss, 4) for loss in measured["losses"]]})
    return rows


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a picture of all curves; all but the first are dashed, so that curves below them stay visible."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        axes = figure.subplots()
        for position, row in enumerate(rows):
            style, width = ((0, (3, 2)), 1.6) if position else ("-", 2.4)
            label = f"{row['variant']}: {row['loss']:.3f} at the end, validation {row['val_loss']:.3f}"
            steps, colour = range(1, len(row["losses"]) + 1), COLOURS[position % len(COLOURS)]
            axes.plot(steps, row["losses"], color=colour, label=label, linestyle=style, linewidth=width)
        axes.set(xlabel="optimizer step", ylabel="training loss, nats per byte")
        axes.legend()
        figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the folder, write both files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss_curves", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the comparison, such as runs/compare/tiny_gpt_fp8")
    parser.add_argument("--out", type=Path, required=True, help="path of the files, without .jsonl and .png")
    parser.add_argument("--draw", nargs="+", metavar="VARIANT", help="in the picture; all by default")
    options = parser.parse_args(arguments)
    file = options.out.with_suffix(".jsonl")
    rows = [*{row["variant"]: row for row in [*rows_of(file), *losses_of(options.folder)]}.values()]
    drawn = [row for row in rows if options.draw is None or row["variant"] in options.draw]
    if options.draw is not None and len(drawn) != len(set(options.draw)):
        parser.error(
            f"--draw: the rows are those of {', '.join(row['variant'] for row in rows)}, got {', '.join(options.draw)}"
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    draw(drawn, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
