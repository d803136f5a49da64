"""Programs and jobs in another process: one that hangs or crashes affects nothing else."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, Any, NamedTuple

Job = dict[str, Any]
_SECONDS_TO_END = 10
# for importing Python and torch, also on a busy machine
_SECONDS_TO_START = 120
_READY = "ready\n"
_PR_SET_PDEATHSIG = 1


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], Any], *signals: signal.Signals) -> Iterator[None]:
    # other threads get no signals
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end: while a process is started, they would leave it running unnoticed."""
    came: list[int] = []
    try:
        with _handling(lambda number, _: came.append(number), signal.SIGINT, signal.SIGTERM):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


def run(command: Sequence[str], output: IO[str]) -> int:
    """Run a program to its end, with its output in ``output``, and return its status.

    On Ctrl-C or SIGTERM, a ``KeyboardInterrupt`` here, it first gets SIGTERM, so that it can end processes that it has
    started in other groups.
    """
    process: subprocess.Popen[bytes] | None = None
    with _handling(signal.default_int_handler, signal.SIGTERM):
        try:
            with held_interrupts():
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            return process.wait()
        except BaseException:
            if process is not None:
                with held_interrupts():
                    _end(process, signal.SIGTERM)
                    # processes that it started may still be there
                    _end(process)
            raise


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


class _NoAnswer(Exception):  # noqa: N818 - what became of a job, not a mistake
    """Says in one line why there is no answer."""


class Worker:
    """Runs jobs in another process, one after the other; a context manager.

    A process that ends early, or exceeds a job's time limit, is killed: the job has failed, and the next one gets a new
    process.

    Args:
        command: starts a process that answers as :func:`serve` does.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        # a file, not a pipe, which would block the process once it is full
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._printed.close()

    def answer(self, job: Job, limit_s: float) -> Answer:
        """The answer to a job within ``limit_s`` seconds, not counting the start of a process."""
        try:
            process = self._process
            if process is None:
                process = self._start()
                if self._line(process, _SECONDS_TO_START, "start") != _READY:
                    raise _NoAnswer("did not start as a worker")
            # a process that has ended does not read; the reason follows from its output
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.write(f"{json.dumps(job)}\n")
                    process.stdin.flush()
            line = self._line(process, limit_s, "end")
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return Answer(found, None)
            raise _NoAnswer(f"gave {line.strip()[:200]!r} in place of an answer")
        except _NoAnswer as reason:
            self._kill()
            return Answer(None, str(reason))

    def _start(self) -> subprocess.Popen[str]:
        self._printed.seek(0)
        self._printed.truncate()
        with held_interrupts():
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                text=True,
                start_new_session=True,
            )
        return self._process

    def _line(self, process: subprocess.Popen[str], limit_s: float, what: str) -> str:
        """The next line of its output, of which there is one for each job."""
        if process.stdout is None or not select.select([process.stdout], [], [], limit_s)[0]:
            raise _NoAnswer(f"did not {what} within {limit_s:g} s")
        line = process.stdout.readline()
        if line:
            return line
        try:
            status = process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            raise _NoAnswer("closed its output without an answer") from None
        self._printed.seek(0)
        raise _NoAnswer(why_it_ended(status, self._printed.read().decode(errors="replace")))

    def _kill(self) -> None:
        if self._process is None:
            return
        _end(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process = None


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
