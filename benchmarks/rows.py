"""Rows of results, kept as lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def append(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Append the rows to a file of JSON lines, where there is one."""
    if path is not None:
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
