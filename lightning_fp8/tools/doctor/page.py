"""The page as text: with rich where it is installed, else plain."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from importlib import import_module
from typing import Any, TextIO

from lightning_fp8.tools.doctor.diagnosis import Diagnosis, Section

_STATUS_STYLES = ("bold green", "bold yellow", "bold red")
# of a column that gives way to the others
_NARROWEST = 8


def show(diagnosis: Diagnosis, file: TextIO) -> None:
    """Write the page, no wider than the terminal; commands are left whole, to be copied."""
    try:
        console = import_module("rich.console").Console(file=file, highlight=False, markup=False, emoji=False)
        parts = _rich_parts(diagnosis)
    # not installed, or not a version that has all this
    except Exception:
        file.write(plain(diagnosis, shutil.get_terminal_size().columns))
        return
    for part, whole in parts:
        console.print(part, soft_wrap=whole)


def _rich_parts(diagnosis: Diagnosis) -> list[tuple[Any, bool]]:
    """What to print, and whether its lines are left as they are."""
    text, table_class, box = (
        import_module("rich.text").Text,
        import_module("rich.table").Table,
        import_module("rich.box"),
    )
    parts: list[tuple[Any, bool]] = []
    for section in diagnosis.sections:
        table = table_class(title=section.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for column in section.columns:
            table.add_column(column, overflow="fold")
        for row in section.rows:
            table.add_row(*map(text, row))
        parts.append((table, False))
    parts.append((text(_verdict(diagnosis), style=_STATUS_STYLES[diagnosis.status]), False))
    for number, problem in enumerate(diagnosis.problems, start=1):
        parts.append((text(f"\n{number}. {problem.what}", style=_STATUS_STYLES[problem.status]), False))
        parts.append((text(f"   -> {problem.do}"), True))
    return parts


def plain(diagnosis: Diagnosis, width: int) -> str:
    """The page without rich."""
    lines = [line for section in diagnosis.sections for line in _table(section, width)]
    lines += textwrap.wrap(_verdict(diagnosis), width)
    for number, problem in enumerate(diagnosis.problems, start=1):
        lines += ["", *textwrap.wrap(f"{number}. {problem.what}", width, break_on_hyphens=False)]
        lines.append(f"   -> {problem.do}")
    return "\n".join(lines) + "\n"


def _verdict(diagnosis: Diagnosis) -> str:
    return f"Status {diagnosis.status}: {diagnosis.verdict}"


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
    """The columns' widths: the widest give way, one place at a time, until two spaces between all fit too."""
    widths = list(wanted)
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return widths
