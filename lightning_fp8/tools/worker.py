"""Jobs in another process: one that hangs or crashes affects nothing else."""

from __future__ import annotations

import ctypes
import json
import os
import queue
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


class Worker:
    """Runs jobs in another process, one after the other; a context manager.

    A process that ends early, or exceeds a job's time limit, is killed: the job has failed, and the next one gets a new
    process.

    Args:
        command: starts a process that answers as :func:`serve` does.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._child: _Child | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def answer(self, job: Job, limit_s: float) -> Answer:
        """The answer to a job within ``limit_s`` seconds, not counting the start of a process."""
        if self._child is None:
            with held_interrupts():
                self._child = _Child(self._command)
        found = self._child.answer(job, limit_s)
        if found.failure is not None:
            self._end()
        return found

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child = None


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


class _Child:
    """A process, and a thread that waits for its answers."""

    def __init__(self, command: Sequence[str]) -> None:
        # a file, not a pipe, which would block the process once it is full
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, start_new_session=True
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._is_ready = False

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def answer(self, job: Job, limit_s: float) -> Answer:
        """The answer to one job."""
        # a process that has ended does not read; the reason is returned below
        with suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.write(f"{json.dumps(job)}\n")
                self._process.stdin.flush()
        line: str | None = _READY
        try:
            if not self._is_ready:
                line = self._lines.get(timeout=_SECONDS_TO_START)
                self._is_ready = True
            if line == _READY:
                line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            rule = f"end within {limit_s:g} s" if self._is_ready else f"start within {_SECONDS_TO_START} s"
            return Answer(None, f"did not {rule}")
        if line is None:
            return Answer(None, self._why_it_ended())
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return Answer(found, None)
        return Answer(None, f"gave {line.strip()[:200]!r} in place of an answer")

    def _why_it_ended(self) -> str:
        try:
            status = self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            return "closed its output without an answer"
        self._said.seek(0)
        return why_it_ended(status, self._said.read().decode(errors="replace"))

    def end(self) -> None:
        """Kill it, and close what is open."""
        _end(self._process)
        self._reader.join(_SECONDS_TO_END)
        for pipe in (self._process.stdin, None if self._reader.is_alive() else self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._said.close()
