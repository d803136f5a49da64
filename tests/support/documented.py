"""Reads the documentation's tables, and the rows that they show."""

from __future__ import annotations

import json
import re
from typing import Any

from repository import ROOT


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def table_of(page: str, *columns: str) -> list[dict[str, str]]:
    """The rows of the only table with these columns, as cells by column, without code and bold markup."""
    tables = []
    for table in re.findall(r"^(?:\|.*\|\n)+", text_of(page), re.MULTILINE):
        lines = [
            [re.sub(r"`|\*\*", "", cell).strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
        ]
        if set(columns) <= set(lines[0]):
            tables.append([dict(zip(lines[0], line, strict=True)) for line in lines[2:]])
    assert len(tables) == 1, f"{page} has {len(tables)} tables with the columns {columns}"
    return tables[0]


def measured(name: str) -> dict[str, dict[str, Any]]:
    """The rows of a file in ``docs/results``, by variant."""
    lines = (ROOT / "docs" / "results" / name).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["variant"]: row for row in rows}
