"""Files that callbacks write next to a run's logs, for the tools to read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# written by `RunRecord`, `DtypeAudit` and `Fp8Monitor`
RUN_FILE = "fp8_run.json"
DTYPES_FILE = "fp8_dtypes.json"
HEALTH_FILE = "fp8_health.json"


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically: a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
