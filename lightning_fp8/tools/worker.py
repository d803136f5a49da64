"""Jobs in another process: one that hangs or crashes affects nothing else."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple

Job = dict[str, Any]
_SECONDS_TO_END = 10
# for importing Python and torch, also on a busy machine
_SECONDS_TO_START = 120
_READY = "ready\n"
_PR_SET_PDEATHSIG = 1


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


class Answer(NamedTuple):
    """The result of a job, or one line that says why there is none."""

    found: dict[str, Any] | None
    failure: str | None


class _NoAnswerError(Exception):
    """The reason why a job has no answer."""


class Worker:
    """Runs jobs in another process, one after the other; a context manager.

    A process that ends early, or exceeds a job's time limit, is killed: the job has failed, and the next one gets a new
    process.

    Args:
        command: starts a process that answers as :func:`serve` does.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        # a `Popen` with pipes, while one runs, and a file with what it prints
        self._process: Any = None
        self._said: IO[bytes]

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            _end(self._process)
            for stream in (self._process.stdin, self._process.stdout, self._said):
                # of what the process has not read
                with suppress(BrokenPipeError):
                    stream.close()
            self._process = None

    def answer(self, job: Job, limit_s: float) -> Answer:
        """The answer to a job within ``limit_s`` seconds, not counting the start of a process."""
        try:
            if self._process is None:
                self._start()
            # a process that has ended does not read; the reason is returned below
            with suppress(BrokenPipeError):
                print(json.dumps(job), file=self._process.stdin, flush=True)
            line = self._line(limit_s, "end")
            with suppress(ValueError):
                result = json.loads(line)
                if isinstance(result, dict):
                    return Answer(result, None)
            raise _NoAnswerError(f"gave {line.strip()[:200]!r} in place of an answer")
        except _NoAnswerError as reason:
            self.__exit__()
            return Answer(None, str(reason))

    def _start(self) -> None:
        # a file, not a pipe, which would block the process once it is full
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=self._said, text=True, start_new_session=True
        )
        line = self._line(_SECONDS_TO_START, "start")
        if line != _READY:
            raise _NoAnswerError(f"gave {line.strip()[:200]!r} in place of an answer")

    def _line(self, limit_s: float, action: str) -> str:
        """The next line: none is waiting in the buffer, as each follows a job or the start."""
        output = self._process.stdout
        if not select.select([output], [], [], limit_s)[0]:
            raise _NoAnswerError(f"did not {action} within {limit_s:g} s")
        line = output.readline()
        if not line:
            raise _NoAnswerError(self._why_it_ended())
        return str(line)

    def _why_it_ended(self) -> str:
        try:
            status = self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            return "closed its output without an answer"
        self._said.seek(0)
        return why_it_ended(status, self._said.read().decode(errors="replace"))


def serve(work: Callable[[Job], dict[str, Any]]) -> None:
    """Run in the worker's process: answer each line of JSON on standard input with one on standard output.

    On Linux the process ends with its parent, however the parent ends.
    """
    if sys.platform == "linux":
        # otherwise a kernel that hangs would occupy the device forever
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # only answers go to standard output; what libraries print goes to standard error
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        output.write(_READY)
        output.flush()
        for line in sys.stdin:
            output.write(f"{json.dumps(work(json.loads(line)))}\n")
            output.flush()
