"""Numbers as a table of text."""

from __future__ import annotations

from typing import Any


def table(rows: list[dict[str, Any]], columns: dict[str, tuple[str, float, str]], markdown: bool = False) -> str:
    """The rows, aligned; ``columns`` has title, unit and format of each number, None becomes ``-``."""
    cells = [["variant", *(title for title, _, _ in columns.values())]]
    for row in rows:
        numbers = [(row[key], unit, form) for key, (_, unit, form) in columns.items()]
        cells.append([row["variant"], *("-" if x is None else format(x / unit, form) for x, unit, form in numbers)])
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in cells]
    if not markdown:
        return "\n".join("  ".join(line) for line in lines)
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
