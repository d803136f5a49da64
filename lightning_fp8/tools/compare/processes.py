"""Each run of a comparison in a separate process, so that no run affects another's memory or compiled code."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_fp8.runtime.run_files import RUN_FILE
from lightning_fp8.tools import worker
from lightning_fp8.tools.compare import LOG_FILE, MEASURED_FILE
from lightning_fp8.tools.report.runs import CSV_FILE, HPARAMS_FILE

# what argparse and jsonargparse exit with
_USAGE = 2


class UsageError(Exception):
    """A configuration or argument that is refused before anything runs; the message is the command line's own."""


def run(variant: str, folder: Path, steps: int, warmup: int, args: Sequence[str]) -> dict[str, Any]:
    """What a run measured, or ``{"error": why}`` with one line.

    Raises:
        UsageError: if the command line is refused, as it then is for every variant.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (MEASURED_FILE, LOG_FILE, CSV_FILE, HPARAMS_FILE, RUN_FILE):
        (folder / name).unlink(missing_ok=True)
    module, numbers = "lightning_fp8.tools.compare.run", (str(steps), str(warmup))
    command = [sys.executable, "-m", module, variant, str(folder), *numbers, *args]
    log = folder / LOG_FILE
    with log.open("w") as output:
        status = worker.run(command, output)
    path = folder / MEASURED_FILE
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if status == 0 and found:
        return found
    printed = log.read_text(errors="replace").strip()
    if status == _USAGE and not found:
        # only the message after the long usage
        raise UsageError(printed.rpartition("\nerror: ")[2])
    why = found.get("error") or worker.why_it_ended(status, printed)
    return {"error": f"{why} (see {log})"}
