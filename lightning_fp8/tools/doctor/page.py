"""The output page as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from lightning_fp8.tools.doctor.diagnosis import Diagnosis, Section

# no column is made narrower than this
_NARROWEST = 8


def page(diagnosis: Diagnosis, width: int) -> str:
    """The page, at most ``width`` characters wide; commands stay on one line, so that they can be copied."""
    lines = [line for section in diagnosis.sections for line in _table(section, width)]
    lines += textwrap.wrap(f"Status {diagnosis.status}: {diagnosis.verdict}", width)
    for number, problem in enumerate(diagnosis.problems, start=1):
        lines += ["", *textwrap.wrap(f"{number}. {problem.what}", width, break_on_hyphens=False)]
        lines.append(f"   -> {problem.do}")
    return "\n".join(lines)


def _table(section: Section, width: int) -> list[str]:
    cells = [section.columns, *section.rows]
    widths = _widths([max(map(len, column)) for column in zip(*cells)], width)
    lines = [section.title, "-" * min(len(section.title), width)]
    for row in cells:
        wrapped = [textwrap.wrap(cell, room, break_on_hyphens=False) or [""] for cell, room in zip(row, widths)]
        for index in range(max(map(len, wrapped))):
            parts = (cell[index] if index < len(cell) else "" for cell in wrapped)
            lines.append("  ".join(part.ljust(room) for part, room in zip(parts, widths)).rstrip())
    return [*lines, ""]


def _widths(wanted: Sequence[int], width: int) -> list[int]:
    """Column widths: the widest shrink, one character at a time, until all fit with two spaces in between."""
    widths = list(wanted)
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return widths
