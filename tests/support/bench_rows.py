"""The rows that a suite of benchmarks has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def written(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, or of ``rows.jsonl`` in a folder; empty if it does not exist."""
    file = path / "rows.jsonl" if path.is_dir() else path
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
