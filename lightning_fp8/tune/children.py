"""Work in a process of its own, with a limit on its time: what hangs or crashes there costs no more than itself."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

Job = dict[str, Any]
# after so many jobs in a row that took their process with them the rest is not tried
_MOST_FAILURES = 2
_SECONDS_TO_END = 10


class Answer(NamedTuple):
    """What came of a job: ``found``, or in one line why there is nothing."""

    found: dict[str, Any] | None
    failure: str | None


def answers(command: Sequence[str], jobs: Sequence[Job], limit_s: Callable[[Job], float]) -> Iterator[Answer]:
    """Has a process work on the jobs, and gives an answer for each, in order.

    A process that ends early, or takes longer over a job than its limit, is killed; the job has failed, and a new
    process goes on with the next. After two such failures in a row the rest fails without being tried.

    Args:
        command: starts a process that reads jobs from its standard input, as lines of JSON, and writes one line of
            JSON, an object, for each of them to its standard output.
        jobs: what there is to do.
        limit_s: seconds that a job may take; the start of a process counts to its first job.
    """
    done = failures = 0
    failure: str | None = None
    while done < len(jobs) and failures < _MOST_FAILURES:
        child = _Child(command, jobs[done:])
        try:
            for job in jobs[done:]:
                found, failure = child.answer(limit_s(job))
                done += 1
                failures = 0 if failure is None else failures + 1
                yield Answer(found, failure)
                if failure is not None:
                    break
        finally:
            child.end()
    for _ in jobs[done:]:
        yield Answer(None, f"not tried, after {_MOST_FAILURES} failures in a row, the last of which {failure}")


class _Child:
    """A process, its jobs as its input, and a thread that waits for its answers."""

    def __init__(self, command: Sequence[str], jobs: Sequence[Job]) -> None:
        # files, not pipes: nobody need read or write for the process to go on
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        with tempfile.TemporaryFile("w+") as given:
            given.writelines(f"{json.dumps(job)}\n" for job in jobs)
            given.flush()
            given.seek(0)
            # a group of its own, so that what it starts can be ended with it
            self._process = subprocess.Popen(
                command, stdin=given, stdout=subprocess.PIPE, stderr=self._said, text=True, start_new_session=True
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def answer(self, limit_s: float) -> Answer:
        """The next one."""
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            return Answer(None, f"did not end within {limit_s:g} s")
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
        if status < 0:
            return f"ended by signal {-status}"
        self._said.seek(0)
        last = self._said.read().decode(errors="replace").strip().rpartition("\n")[2]
        return f"ended with status {status}: {last[:500]}"

    def end(self) -> None:
        """Kill it and what it has started. A driver may take its time to let go of it: that is not waited for long."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        self._reader.join(_SECONDS_TO_END)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()
        self._said.close()
