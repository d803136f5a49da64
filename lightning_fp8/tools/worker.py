"""A program run to its end, which ends with this one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

_SECONDS_TO_END = 10


def run(command: Sequence[str], output: IO[str]) -> int:
    """Run a program to its end, with its output in ``output``, and return its status; in the main thread.

    On Ctrl-C or SIGTERM, a ``KeyboardInterrupt`` here, it first gets SIGTERM, so that it can end processes that it has
    started in other groups.
    """
    came: list[int] = []
    # while the process is started, an exception would leave it running unnoticed
    before = {number: signal.signal(number, lambda *_: came.append(1)) for number in (signal.SIGINT, signal.SIGTERM)}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        for number in before:
            signal.signal(number, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt
        return process.wait()
    except BaseException:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        _end(process, signal.SIGTERM)
        # processes that it started may still be there
        _end(process)
        raise
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def why_it_ended(status: int, printed: str) -> str:
    """One line with the signal, or with the status and the last line that was printed."""
    last = printed.strip().rpartition("\n")[2]
    return f"ended by signal {-status}" if status < 0 else f"ended with status {status}: {last[:500]}"


def _end(process: subprocess.Popen[Any], by: signal.Signals = signal.SIGKILL) -> None:
    """Signal the process and its children: each process is the leader of a process group.

    The wait for its end is limited, as a driver may take long to release a process.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, by)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_END)
