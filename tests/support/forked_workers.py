"""Workers of ``lightning_fp8.tools.worker`` as forks: a new Python process would import torch first, for seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import IO, Any

import pytest
from processes import PROCESSES, start

from lightning_fp8.tools import worker


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    """From now on, a worker's command is a function that runs in a fork."""
    patch.setattr(worker, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Forked}))


class Forked:
    """The part of ``subprocess.Popen`` that ``worker`` uses."""

    def __init__(self, command: Sequence[Callable[[], None]], stderr: IO[bytes], **_: Any) -> None:
        (reads, given), (answers, writes) = PROCESSES.Pipe(duplex=False), PROCESSES.Pipe(duplex=False)
        said = Connection(os.dup(stderr.fileno()), readable=False)
        self._process = start(_run, command[0], dict(os.environ), reads, writes, said)
        self.pid = self._process.pid
        self.stdin, self.stdout = os.fdopen(os.dup(given.fileno()), "w"), os.fdopen(os.dup(answers.fileno()))
        for one in (reads, given, answers, writes, said):
            one.close()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0)
        return self._process.exitcode


def _run(program: Callable[[], None], environment: dict[str, str], *streams: Connection) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    # the standard input of a forked process is empty
    sys.stdin = os.fdopen(0)
    program()
