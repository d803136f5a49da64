"""Each run of a comparison in a process of its own, so that memory and compiled code of one touch no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from lightning_fp8.tools.compare import LOG_FILE, MEASURED_FILE
from lightning_fp8.tools.interrupts import held_interrupts
from lightning_fp8.tools.report import RUN_FILE
from lightning_fp8.tools.report.runs import CSV_FILE, HPARAMS_FILE

# what argparse and jsonargparse exit with
_USAGE = 2
_SECONDS_TO_END = 10


class UsageError(Exception):
    """A configuration or argument that is refused before anything runs; the message is the command line's own."""


def run(variant: str, folder: Path, steps: int, warmup: int, args: Sequence[str]) -> dict[str, Any]:
    """What a run measured, or ``{"error": why}`` in one line.

    Raises:
        UsageError: if the command line is refused, which then holds for every variant.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (MEASURED_FILE, LOG_FILE, CSV_FILE, HPARAMS_FILE, RUN_FILE):
        (folder / name).unlink(missing_ok=True)
    module, numbers = "lightning_fp8.tools.compare.run", (str(steps), str(warmup))
    command = [sys.executable, "-m", module, variant, str(folder), *numbers, *args]
    log = folder / LOG_FILE
    with log.open("w") as output:
        status = _run(command, output)
    path = folder / MEASURED_FILE
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if status == 0 and found:
        return found
    printed = log.read_text(errors="replace").strip()
    if status == _USAGE and not found:
        # behind the usage, which is long
        raise UsageError(printed.rpartition("\nerror: ")[2])
    said = printed.rpartition("\n")[2]
    why = found.get("error") or (f"ended by signal {-status}" if status < 0 else f"exit status {status}: {said}")
    return {"error": f"{why} (see {log})"}


def _run(command: Sequence[str], output: IO[str]) -> int:
    process: subprocess.Popen[bytes] | None = None
    try:
        with held_interrupts():
            # a group of its own, so that what it starts can be ended with it
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        return process.wait()
    except BaseException:
        if process is not None:
            _end(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS_TO_END)
            # what it started may still be there
            _end(process, signal.SIGKILL)
            process.wait()
        raise


def _end(process: subprocess.Popen[bytes], by: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, by)
