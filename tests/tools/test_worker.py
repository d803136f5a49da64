"""Jobs in another process: each is answered or fails alone, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from lightning_fp8.tools.worker import Answer, Worker

# without Lightning, which takes seconds
WITHOUT_LIGHTNING = """
import os, subprocess, sys, time, types
package = sys.modules["lightning_fp8"] = types.ModuleType("lightning_fp8")
package.__path__ = ["lightning_fp8"]
"""
# answers each job with the job's own fields, the process and its number of earlier jobs; does what the job says
CHILD = f"""{WITHOUT_LIGHTNING}
from lightning_fp8.tools.worker import serve
number = -1

def work(job):
    global number
    number += 1
    print("what libraries print")
    if "pids" in job:
        below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(job["pids"], "w").write(f"{{os.getpid()}} {{below.pid}}")
    time.sleep(job.get("sleep", 0))
    if "signal" in job:
        os.kill(os.getpid(), job["signal"])
    if "status" in job:
        print("first line", "ValueError: no good", sep="\\n", file=sys.stderr)
        sys.exit(job["status"])
    return job["give"] if "give" in job else {{"job": job, "pid": os.getpid(), "number": number}}

serve(work)
"""
COMMAND = [sys.executable, "-c", CHILD]
LIMIT = 60.0


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.chdir(ROOT)
    with Worker(COMMAND) as made:
        yield made


def found_by(worker: Worker, job: dict[str, Any]) -> dict[str, Any]:
    answer = worker.answer(job, LIMIT)
    assert answer.failure is None
    assert answer.found is not None
    assert answer.found["job"] == job
    return answer.found


@pytest.mark.parametrize(
    ("job", "failure"),
    [
        ({"sleep": 60}, "did not end within 3 s"),
        ({"signal": 11}, "ended by signal 11"),
        ({"status": 1}, "ended with status 1: ValueError: no good"),
        ({"status": 0}, "ended with status 0: ValueError: no good"),
        ({"give": [3]}, "gave '[3]' in place of an answer"),
    ],
)
def test_a_job_that_fails_costs_itself_only(worker: Worker, job: dict[str, Any], failure: str) -> None:
    before = [found_by(worker, {"at": at, "long": "x" * 20_000}) for at in range(2)]
    began = time.monotonic()
    assert worker.answer(job, 3.0) == Answer(None, failure)
    # the limit, plus the delay on a busy machine
    assert time.monotonic() - began < 40
    after = [found_by(worker, {"at": at}) for at in range(2)]
    # one process before it and a new one after
    assert [one["number"] for one in (*before, *after)] == [0, 1, 0, 1]
    assert len({one["pid"] for one in before}) == len({one["pid"] for one in after}) == 1
    assert before[0]["pid"] != after[0]["pid"]


def test_a_process_that_has_ended_between_jobs_is_said(worker: Worker) -> None:
    pid = found_by(worker, {"at": 0})["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until_gone([pid])
    assert worker.answer({"at": 1}, LIMIT) == Answer(None, "ended by signal 9")
    found_by(worker, {"at": 2})


@pytest.mark.slow
def test_what_is_no_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fp8.tools.worker._SECONDS_TO_END", 1)
    closes = "import os, time; print('ready', flush=True); os.close(1); time.sleep(60)"
    for program, failure in (
        ("print('hello', flush=True); input()", "gave 'hello' in place of an answer"),
        (closes, "closed its output without an answer"),
    ):
        with Worker([sys.executable, "-c", program]) as worker:
            assert worker.answer({}, LIMIT) == Answer(None, failure)


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < until, pids
        time.sleep(0.05)


@pytest.mark.parametrize("sleep", [0, 60])
def test_what_it_has_started_ends_with_it(tmp_path: Path, sleep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    pids = tmp_path / "pids"
    with Worker(COMMAND) as worker:
        failure = worker.answer({"pids": str(pids), "sleep": sleep}, 3.0 if sleep else LIMIT).failure
        assert failure == ("did not end within 3 s" if sleep else None)
        if sleep:
            wait_until_gone([*map(int, pids.read_text().split())])
    wait_until_gone([*map(int, pids.read_text().split())])


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end it")
def test_what_hangs_ends_with_who_asked_even_by_a_signal(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    asking = f"""{WITHOUT_LIGHTNING}
from lightning_fp8.tools.worker import Worker
Worker({COMMAND!r}).answer({{"pids": {str(pids)!r}, "sleep": 600}}, 600)
"""
    asker = subprocess.Popen([sys.executable, "-c", asking], cwd=ROOT)
    until = time.monotonic() + 60
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert time.monotonic() < until
        time.sleep(0.05)
    asker.kill()
    asker.wait()
    child_pid, below = map(int, pids.read_text().split())
    wait_until_gone([child_pid])
    os.kill(below, signal.SIGKILL)
