"""Percentiles of measured times, and numbers as a text table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentiles."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    p20, p50, p80 = statistics.quantiles(times, n=10, method="inclusive")[1::3]
    return p20, p50, p80


def table(rows: list[dict[str, Any]], columns: dict[str, tuple[str, float, str]]) -> str:
    """The rows, aligned; ``columns`` has the title, unit and format of each number. None is shown as ``-``."""
    cells = [["variant", *(title for title, _, _ in columns.values())]]
    for row in rows:
        numbers = [(row[key], unit, form) for key, (_, unit, form) in columns.items()]
        cells.append([row["variant"], *("-" if x is None else format(x / unit, form) for x, unit, form in numbers)])
    return "\n".join(map("  ".join, aligned(cells, words=1)))


def markdown_table(cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table with the first line as titles, the first column left-aligned and the others right-aligned."""
    first, *lines = aligned(cells, words=1)
    rule = ["-" * len(first[0]), *("-" * (len(title) - 1) + ":" for title in first[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (first, rule, *lines))


def aligned(lines: Sequence[Sequence[str]], words: int) -> list[list[str]]:
    """Cells padded to their column's width; the first ``words`` columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    sides = [str.ljust] * words + [str.rjust] * (len(widths) - words)
    return [[side(cell, width) for side, cell, width in zip(sides, line, widths)] for line in lines]
