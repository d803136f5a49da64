"""``python -m lightning_fp8 tune``: what is measured, in processes that may fail, and what is saved of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_workers import fork_workers
from repository import ROOT
from warm import run_warm

from kernels_cuda.compile import KernelsUnavailable
from kernels_cuda.gemm_variants import configurations
from lightning_fp8 import __main__ as entry
from lightning_fp8.ops.cuda import gemm_table, kernels, plain
from lightning_fp8.ops.cuda.gemm_choice import Choice
from lightning_fp8.tools import timing
from lightning_fp8.tools.tune import child, command, search, trial
from lightning_fp8.tools.tune.shapes import LAYERS, Gemm, Layer, candidates, gemms_of, parse_layers
from lightning_fp8.tools.worker import Answer, Worker, serve

CPU, HOPPER, NAME = torch.device("cpu"), (9, 0), "NVIDIA H200"
FAST = {one.name: one for one in configurations(HOPPER, promote=False)}
PROMOTED = {one.name: one for one in configurations(HOPPER, promote=True)}
FPROP, DGRAD, WGRAD = Layer(48, 64, 32).gemms()
OURS = Choice(FAST["128x256 s4 c2"])


# shapes


def test_gemms_of_a_layer() -> None:
    assert Layer(8192, 1024, 4096).gemms() == [
        (8192, 4096, 1024, False, torch.bfloat16, "e4m3", "e4m3"),
        (8192, 1024, 4096, True, torch.bfloat16, "e5m2", "e4m3"),
        (4096, 1024, 8192, True, torch.float32, "e5m2", "e4m3"),
    ]
    assert WGRAD.name == "32x64x48 promoted float32"
    assert FPROP.name == "48x32x64 fast bfloat16"


def test_layers_of_training() -> None:
    assert len(LAYERS) == len(set(LAYERS)) == 36
    for tokens in (2048, 8192, 32768):
        for hidden in (1024, 4096, 8192):
            projections = {(i, o) for t, i, o in LAYERS if t == tokens and hidden in (i, o)}
            ours = {(hidden, hidden), (hidden, 3 * hidden), (hidden, 4 * hidden), (4 * hidden, hidden)}
            assert ours <= projections
    # what an interrupted run must have: the feed-forward of the middle size
    assert LAYERS[:2] == (Layer(8192, 4096, 16384), Layer(8192, 16384, 4096))
    gemms = gemms_of(LAYERS)
    assert len(gemms) == len(set(gemms))
    assert set(gemms) == {gemm for layer in LAYERS for gemm in layer.gemms()}


def test_layers_from_the_command_line() -> None:
    assert parse_layers("8192x4096x16384, 1x2x3") == (Layer(8192, 4096, 16384), Layer(1, 2, 3))


@pytest.mark.parametrize("text", ["", "64", "64x64", "64x64x64x64", "64x0x64", "64x-1x64", "64xax64", "64x64x64,"])
def test_other_layers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"TOKENSxINxOUT.*got"):
        parse_layers(text)


@pytest.mark.parametrize("gemm", [FPROP, DGRAD, WGRAD])
def test_gemms_come_back_from_json(gemm: Gemm) -> None:
    assert Gemm.from_json(json.loads(json.dumps(gemm.as_json()))) == gemm


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # 32 tiles of 256x128, 64 of 128x128
        ((1024, 1024, 8192), {"256x128 s4 c2": [1, 2, 4], "128x128 s6 c1": [1, 2]}),
        # six tiles and twelve; 8 parts of 8 steps
        ((256, 768, 8192), {"256x128 s4 c1": [1, 2, 4, 8], "128x128 s6 c2": [1, 2, 4, 8]}),
        # 20 and 40 fit six and three times
        ((1280, 512, 8192), {"256x128 s4 c1": [1, 2, 4, 6], "128x128 s6 c2": [1, 2, 3]}),
        ((1024, 1024, 15 * 128), {"256x128 s4 c2": [1], "128x128 s6 c1": [1]}),
        ((8192, 8192, 8192), {"256x128 s4 c2": [1], "128x128 s6 c1": [1]}),
    ],
)
def test_candidates_split_k_as_long_as_all_parts_fit(
    sizes: tuple[int, int, int], expected: dict[str, list[int]]
) -> None:
    made = candidates(Gemm(*sizes, True, torch.float32, "e5m2", "e4m3"), tuple(PROMOTED.values()), 132)
    assert len(made) == len(set(made))
    assert {choice.configuration for choice in made} == set(PROMOTED.values())
    for name, splits in expected.items():
        assert [choice.splits for choice in made if choice.configuration == PROMOTED[name]] == splits


def test_fast_candidates_are_the_configurations() -> None:
    made = candidates(Gemm(256, 256, 8192, False, torch.bfloat16, "e4m3", "e4m3"), tuple(FAST.values()), 132)
    assert made == [Choice(one) for one in FAST.values()]


# processes

# answers each job with the job's own fields, the process and its number of earlier jobs; does what the job says
CHILD = """
import os, subprocess, sys, time, types
# without Lightning, which takes seconds
package = sys.modules["lightning_fp8"] = types.ModuleType("lightning_fp8")
package.__path__ = ["lightning_fp8"]
from lightning_fp8.tools.worker import serve
number = -1

def work(job):
    global number
    number += 1
    print("what libraries print")
    if "pids" in job:
        below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(job["pids"], "w").write(f"{os.getpid()} {below.pid}")
    time.sleep(job.get("sleep", 0))
    if "signal" in job:
        os.kill(os.getpid(), job["signal"])
    if "status" in job:
        print("first line", "ValueError: no good", sep="\\n", file=sys.stderr)
        sys.exit(job["status"])
    return job["give"] if "give" in job else {"job": job, "pid": os.getpid(), "number": number}

serve(work)
"""
COMMAND = [sys.executable, "-c", CHILD]
LIMIT = 60.0


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.chdir(ROOT)
    with Worker(COMMAND) as made:
        yield made


def test_one_process_answers_all_jobs_in_order(worker: Worker) -> None:
    found = [worker.answer({"at": at, "long": "x" * 20_000}, LIMIT).found for at in range(5)]
    assert [one["job"]["at"] for one in found if one] == [0, 1, 2, 3, 4]
    assert [one["number"] for one in found if one] == [0, 1, 2, 3, 4]
    assert len({one["pid"] for one in found if one}) == 1


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
    before = worker.answer({"at": 0}, LIMIT)
    began = time.monotonic()
    failed = worker.answer(job, 3.0)
    # the limit, plus the delay on a busy machine
    assert time.monotonic() - began < 40
    after, last = worker.answer({"at": 2}, LIMIT), worker.answer({"at": 3}, LIMIT)
    assert failed == Answer(None, failure)
    assert before.failure is after.failure is last.failure is None
    assert [answer.found["job"]["at"] for answer in (before, after, last) if answer.found] == [0, 2, 3]
    # a new process continued after it
    assert before.found
    assert after.found
    assert last.found
    assert before.found["pid"] != after.found["pid"] == last.found["pid"]
    assert [after.found["number"], last.found["number"]] == [0, 1]


def test_a_process_that_has_ended_between_jobs_is_said(worker: Worker) -> None:
    found = worker.answer({"at": 0}, LIMIT).found
    assert found
    os.kill(found["pid"], signal.SIGKILL)
    wait_until_gone([found["pid"]])
    assert worker.answer({"at": 1}, LIMIT) == Answer(None, "ended by signal 9")
    assert worker.answer({"at": 2}, LIMIT).failure is None


@pytest.mark.slow
def test_what_is_no_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fp8.tools.worker._SECONDS_TO_END", 1)
    with Worker([sys.executable, "-c", "print('hello', flush=True); input()"]) as worker:
        assert worker.answer({}, LIMIT) == Answer(None, "gave 'hello' in place of an answer")
    with Worker([sys.executable, "-c", "import os, time; os.close(1); time.sleep(60)"]) as worker:
        assert worker.answer({}, LIMIT) == Answer(None, "closed its output without an answer")


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < until, pids
        time.sleep(0.05)


def test_what_hangs_is_killed_with_what_it_has_started(worker: Worker, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    assert worker.answer({"pids": str(pids), "sleep": 60}, 3.0).failure == "did not end within 3 s"
    wait_until_gone([int(pid) for pid in pids.read_text().split()])


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    pids = tmp_path / "pids"
    with Worker(COMMAND) as worker:
        assert worker.answer({"pids": str(pids)}, LIMIT).failure is None
    wait_until_gone([int(pid) for pid in pids.read_text().split()])


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end it")
def test_what_hangs_ends_with_who_asked_even_by_a_signal(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    asking = f"""
import sys, types
package = sys.modules["lightning_fp8"] = types.ModuleType("lightning_fp8")
package.__path__ = ["lightning_fp8"]
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


# one candidate


def run_plain(choice: Choice, *arguments: Any) -> torch.Tensor:
    *operands, output, promote = arguments
    return plain.scaled_mm(*operands, output, not promote)


@pytest.mark.parametrize("gemm", [FPROP, DGRAD, WGRAD])
def test_a_right_result_is_right(gemm: Gemm) -> None:
    assert trial.wrong(gemm, OURS, CPU, run_plain) is None


def of(change: Any, from_call: int = 0) -> trial.Run:
    """The correct result until a given call, and from then on with a change."""
    calls = iter(range(100))

    def run(choice: Choice, *arguments: Any) -> torch.Tensor:
        got = run_plain(choice, *arguments)
        return change(got) if next(calls) >= from_call else got

    return run


def poked(got: torch.Tensor, value: float) -> torch.Tensor:
    got[-1, -1] = value
    return got


@pytest.mark.parametrize("gemm", [FPROP, WGRAD])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda got: poked(got, 1e4), "gave 1 wrong elements of"),
        (lambda got: poked(got, float("nan")), "gave 1 wrong elements of"),
        (lambda got: got * 2, "wrong elements of"),
        (lambda got: got.half(), "gave float16 ("),
        (lambda got: got[:, :-1], "gave "),
    ],
)
def test_a_wrong_result_is_said_to_be_wrong(gemm: Gemm, change: Any, said: str) -> None:
    for from_call in (0, 2):
        found = trial.wrong(gemm, OURS, CPU, of(change, from_call))
        assert found is not None
        assert said in found
    assert trial.wrong(gemm, OURS, CPU, of(change, from_call=3)) is None


@pytest.mark.parametrize("part", ["payload", "scale_inv", "format"])
@pytest.mark.parametrize("which", [0, 1])
def test_each_part_of_an_operand_counts(which: int, part: str) -> None:
    """A wrong payload, scale or format changes the result."""

    def run(choice: Choice, *arguments: Any) -> torch.Tensor:
        operands, rest = list(arguments[:2]), arguments[2:]
        assert rest[0] is None
        one, other = operands[which], operands[1 - which]
        value = one.payload.flip(which) if part == "payload" else getattr(other, part)
        operands[which] = one._replace(**{part: value})
        return run_plain(choice, *operands, *rest)

    assert trial.wrong(WGRAD, OURS, CPU, run) is not None


def test_outputs_lie_where_poison_lay(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[tuple[tuple[int, ...], torch.dtype]] = []
    full = torch.full

    def recorded(size: tuple[int, ...], value: float, **options: Any) -> torch.Tensor:
        assert value != value
        filled.append((size, options.get("dtype", torch.float32)))
        return full(size, value, **options)

    monkeypatch.setattr(torch, "full", recorded)
    trial.wrong(DGRAD, Choice(PROMOTED["256x128 s4 c2"]), CPU, run_plain)
    assert filled == [((48, 64), torch.bfloat16)] * 3
    filled.clear()
    trial.wrong(DGRAD, Choice(PROMOTED["256x128 s4 c2"], 3), CPU, run_plain)
    # three splits of one cluster of two tiles each
    assert filled == [((48, 64), torch.bfloat16), ((3 * 512, 64), torch.float32)] * 3


def test_a_candidate_without_a_kernel_is_not_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def kernel(*arguments: Any) -> str:
        asked.append(arguments)
        return "kernel"

    monkeypatch.setattr(kernels, "gemm_kernel", kernel)
    monkeypatch.setattr(kernels, "sum_splits_kernel", kernel)
    one = PROMOTED["256x128 s4 c2"]
    assert trial.unserved(DGRAD, Choice(None), CPU) is None
    assert asked == []
    assert trial.unserved(DGRAD, Choice(one), CPU) is None
    assert asked == [(CPU, one, "e5m2", "e4m3", torch.bfloat16, True)]
    assert trial.unserved(DGRAD, Choice(one, 2), CPU) is None
    assert asked[1:] == [(CPU, one, "e5m2", "e4m3", torch.float32, True), (CPU, torch.bfloat16)]
    monkeypatch.setattr(kernels, "sum_splits_kernel", lambda *_: None)
    assert trial.unserved(DGRAD, Choice(one), CPU) is None
    assert trial.unserved(DGRAD, Choice(one, 2), CPU) == "no kernel: none is available"

    def failing(*_: Any) -> None:
        import warnings

        warnings.warn("its self-test gave other numbers", stacklevel=1)

    monkeypatch.setattr(kernels, "gemm_kernel", failing)
    assert trial.unserved(DGRAD, Choice(one), CPU) == "no kernel: its self-test gave other numbers"


# times

TIMES = {"256x128 s4 c2": 30.0, "256x128 s4 c2, K in 2": 20.0, "128x128 s6 c1": 25.0, "cuBLASLt": 22.0}
CHOICES = [Choice(PROMOTED["256x128 s4 c2"]), Choice(PROMOTED["256x128 s4 c2"], 2), Choice(PROMOTED["128x128 s6 c1"])]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Batches that take the times of ``TIMES``, a little more in each round; and those that ran, in order."""
    ran: list[str] = []

    def batch(variant: timing.Variant, calls: int) -> float:
        ran.append(variant.name)
        assert variant.copies >= 2
        for at in range(variant.copies):
            assert variant.call(at).isfinite().all()
        return TIMES[variant.name] + 0.1 * ran.count(variant.name)

    monkeypatch.setattr(timing, "wall_batch", batch)
    monkeypatch.setattr(timing, "_calls_for", lambda *_: 1)
    return ran


def test_the_fastest_is_kept_beside_torch(clock: list[str]) -> None:
    row = trial.timed(WGRAD, CHOICES, 5, CPU, run_plain)
    assert row == {
        **{"m": 32, "n": 64, "k": 48, "promote": True, "output": "float32"},
        **{"configuration": "256x128 s4 c2", "splits": 2},
        **{"p20_us": pytest.approx(20.18), "p50_us": pytest.approx(20.3), "p80_us": pytest.approx(20.42)},
        "cublaslt_p20_us": pytest.approx(22.18),
        "cublaslt_p50_us": pytest.approx(22.3),
        "cublaslt_p80_us": pytest.approx(22.42),
    }
    # in turns
    assert clock == [choice.name for choice in (*CHOICES, Choice(None))] * 5


def test_calls_run_their_own_choice_on_every_copy(clock: list[str]) -> None:
    ran: list[tuple[str, int]] = []

    def run(choice: Choice, *arguments: Any) -> torch.Tensor:
        ran.append((choice.name, arguments[0].data_ptr()))
        return run_plain(choice, *arguments)

    trial.timed(WGRAD, CHOICES, 1, CPU, run)
    assert {name for name, _ in ran} == set(TIMES)
    assert all(len({at for name, at in ran if name == one}) == 2 for one in TIMES)


def test_torch_that_refuses_has_no_time(clock: list[str]) -> None:
    def run(choice: Choice, *arguments: Any) -> torch.Tensor:
        if choice.configuration is None:
            raise RuntimeError("not supported")
        return run_plain(choice, *arguments)

    row = trial.timed(WGRAD, CHOICES, 2, CPU, run)
    assert (row["configuration"], row["cublaslt_p50_us"]) == ("256x128 s4 c2", None)
    assert "cuBLASLt" not in clock


def test_memory_that_is_too_small_is_no_refusal(clock: list[str]) -> None:
    def run(choice: Choice, *arguments: Any) -> torch.Tensor:
        if choice.configuration is None:
            raise torch.OutOfMemoryError("too small")
        return run_plain(choice, *arguments)

    with pytest.raises(torch.OutOfMemoryError):
        trial.timed(WGRAD, CHOICES, 2, CPU, run)


def test_without_a_right_candidate_torch_is_timed_alone(clock: list[str]) -> None:
    row = trial.timed(FPROP, [], 2, CPU, run_plain)
    assert (row["configuration"], row["splits"], row["p50_us"]) == (None, 1, None)
    assert row["cublaslt_p50_us"] == pytest.approx(22.15)


class Device:
    """A host that needs 50 microseconds per call, and a device that needs 10 for the work of one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.done = 0.0
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                pass

            def record(self) -> None:
                self.at = max(device.done, device.now)

            def synchronize(self) -> None:
                device.now = max(device.now, self.at)

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) / 1e3

        def sleep(cycles: int) -> None:
            self.launch(1.0, cycles / 2000)

        def synchronize() -> None:
            self.now = max(self.now, self.done)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", sleep)
        monkeypatch.setattr(timing, "synchronize", synchronize)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now / 1e6)

    def launch(self, host_us: float, device_us: float) -> None:
        self.now += host_us
        self.done = max(self.done, self.now) + device_us


def test_a_gemm_shorter_than_its_call_is_not_the_hosts_time(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    made = trial.operands
    monkeypatch.setattr(trial, "operands", lambda gemm, *_: made(gemm, CPU))
    monkeypatch.setattr(timing, "copies_for", lambda *_: 2)

    def run(choice: Choice, *_: Any) -> torch.Tensor:
        device.launch(50.0, 10.0 if choice.configuration is None else 7.0)
        return torch.zeros(1)

    row = trial.timed(DGRAD, CHOICES[:1], 3, torch.device("cuda"), run)
    assert (row["p50_us"], row["cublaslt_p50_us"]) == (pytest.approx(7.0), pytest.approx(10.0))


def test_rows_are_rows_of_a_table(clock: list[str], tmp_path: Path) -> None:
    rows = [trial.timed(gemm, choices, 2, CPU, run_plain) for gemm, choices in ((WGRAD, CHOICES), (FPROP, []))]
    gemm_table.write(tmp_path / "table.json", {"gpu": NAME}, rows)
    assert gemm_table._checked((tmp_path / "table.json").read_text()) == rows


# the whole command


# the child of the command, on the CPU and with torch in place of our kernels, some of which are broken
def serve_fakes() -> None:
    def run(choice: Choice, *arguments: Any) -> torch.Tensor:
        *operands, output, promote = arguments
        got = plain.scaled_mm(*operands, output, not promote)
        name = choice.name
        os.write(1, b"libraries print this and that")
        if name == "128x256 s4 c1":
            time.sleep(600)
        if name == "256x128 s4 c1":
            os.abort()
        if name == "128x128 s6 c1":
            got[0, 0] += 1
        if name == "cuBLASLt":
            time.sleep(0.1)
        if name == "128x128 s6 c2":
            time.sleep(0.01)
        return got

    child._device = lambda: CPU  # type: ignore[attr-defined]
    torch.cuda.get_device_capability = lambda _: (9, 0)  # type: ignore[assignment]
    kernels.gemm_kernel = lambda device, one, *_: None if one.name == "256x128 s4 c2" else 1  # type: ignore[assignment]
    child.run_choice = run  # type: ignore[attr-defined]
    serve(child.work)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An H200 as far as torch can tell, whose kernels are :func:`serve_fakes`; with a separate cache folder."""
    properties = SimpleNamespace(name=NAME, major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: NAME)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(command, "_device", lambda: CPU)
    fork_workers(monkeypatch)
    monkeypatch.setattr(child, "command", lambda: [serve_fakes])
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path / "cache"))
    gemm_table.rows.cache_clear()
    yield tmp_path
    gemm_table.rows.cache_clear()


@pytest.mark.slow
def test_tune_leaves_out_what_is_broken_and_keeps_the_fastest(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"256x128 s4 c1": DGRAD, "128x128 s6 c1": FPROP, "128x256 s4 c1": FPROP, "256x128 s4 c2": WGRAD}
    right = {FPROP: ["128x256 s4 c2"], DGRAD: ["128x128 s6 c2"], WGRAD: ["128x128 s6 c2"]}
    ways = {
        gemm: [Choice(FAST[name]) for name in (*(one for one in broken if broken[one] == gemm), *names)]
        for gemm, names in right.items()
    }
    monkeypatch.setattr(command, "_ways", lambda *_: ways)
    own = gemm_table.own_path(NAME)
    arguments = ["--shapes", "48x64x32", "--rounds", "2", "--time-limit", "5"]
    command.main(arguments)
    printed = capsys.readouterr().out
    fprop, dgrad, wgrad = (gemm.name for gemm in (FPROP, DGRAD, WGRAD))
    for line in (
        f"left out: 128x256 s4 c1 for {fprop}: did not end within 5 s",
        f"left out: 256x128 s4 c1 for {dgrad}: ended by signal 6",
        f"left out: 256x128 s4 c2 for {wgrad}: no kernel: none is available",
        f"left out: 128x128 s6 c1 for {fprop}: gave 1 wrong elements of {48 * 32}",
        f"Written: {own}",
    ):
        assert line in printed
    rows = gemm_table.rows(NAME, HOPPER)
    assert [(row.m, row.n, row.k, row.promote, row.output, row.splits) for row in rows] == [
        (32, 64, 48, True, torch.float32, 1),
        (48, 32, 64, False, torch.bfloat16, 1),
        (48, 64, 32, True, torch.bfloat16, 1),
    ]
    assert [row.configuration and row.configuration.name for row in rows] == [
        "128x128 s6 c2",
        "128x256 s4 c2",
        "128x128 s6 c2",
    ]
    assert all(row.is_faster for row in rows)
    table = json.loads(own.read_text())
    assert table["command"] == "python -m lightning_fp8 tune " + " ".join(arguments)
    assert table["versions"]["torch"] == torch.__version__
    line = next(line for line in printed.splitlines()[::-1] if line.startswith(wgrad))
    ours, theirs = rows[0].p50_us, rows[0].cublaslt_p50_us
    assert ours
    assert theirs
    assert line.split()[-4:] == [f"{ours:.1f}", "0", "0", f"{theirs / ours:.3f}"]


def test_figures_of_the_table() -> None:
    row = {"configuration": "256x128 s4 c2", "splits": 2, "p50_us": 1000.0, "cublaslt_p50_us": 1500.0}
    gemm = Gemm(8192, 4096, 16384, True, torch.float32, "e5m2", "e4m3")
    assert command._cells(gemm, row)[1:] == ("256x128 s4 c2, K in 2", "1000.0", "1100", "733", "1.500")
    none = {"configuration": None, "splits": 1, "p50_us": None, "cublaslt_p50_us": None}
    assert command._cells(gemm, none)[1:] == ("none", "-", "-", "-", "-")


class Steps:
    """Replaces a worker: gives the outcomes of trials and timings.

    Attributes:
        wrong: configurations with wrong results.
        lost: configurations that end the process, and values of M whose timing does.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, wrong: set[str] = frozenset(), lost: set[str] = frozenset()
    ) -> None:  # type: ignore[assignment]
        self.asked: list[tuple[dict[str, Any], float]] = []
        self.wrong, self.lost = wrong, lost
        monkeypatch.setattr(search, "Worker", lambda command: self)

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def jobs(self, kind: str) -> list[dict[str, Any]]:
        return [job for job, _ in self.asked if job["kind"] == kind]

    def answer(self, job: dict[str, Any], limit_s: float) -> Answer:
        self.asked.append((job, limit_s))
        m, n, k, promote, output, *_ = job["gemm"]
        (name, splits), *_ = [*job["choices"], (None, 1)]
        what = {"trial": name, "timing": f"{m}"}[job["kind"]]
        if what in self.lost:
            return Answer(None, "did not end")
        if job["kind"] == "timing":
            key = {"m": m, "n": n, "k": k, "promote": promote, "output": output}
            best = {"configuration": name, "splits": splits, "p50_us": name and 2.0, "cublaslt_p50_us": 3.0}
            return Answer({**key, **best}, None)
        return Answer({"wrong": "gave rubbish" if what in self.wrong else None}, None)


def test_a_gemm_is_done_before_the_next_is_begun(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And whenever the run ends, the table has the results so far."""
    steps = Steps(monkeypatch, {"128x128 s6 c1"})
    rows_then: list[int] = []
    answer = steps.answer

    def looking(job: dict[str, Any], limit_s: float) -> Answer:
        own = gemm_table.own_path(NAME)
        rows_then.append(len(json.loads(own.read_text())["rows"]) if own.exists() else 0)
        return answer(job, limit_s)

    monkeypatch.setattr(steps, "answer", looking)
    command.main(["--shapes", "48x64x32,2048x1024x1024", "--time-limit", "7", "--rounds", "3"])
    gemms = [*Layer(48, 64, 32).gemms(), *Layer(2048, 1024, 1024).gemms()]
    assert list(dict.fromkeys(Gemm.from_json(job["gemm"]) for job, _ in steps.asked)) == gemms
    of_each = [[job["kind"] for job, _ in steps.asked if job["gemm"] == gemm.as_json()] for gemm in gemms]
    assert all(kinds == sorted(kinds, key=["trial", "timing"].index) for kinds in of_each)
    assert [len(list(jobs)) for jobs in of_each][:3] == [len(FAST) + 1, len(PROMOTED) + 1, len(PROMOTED) + 1]
    assert rows_then == [at for at, kinds in enumerate(of_each) for _ in kinds]
    timings = steps.jobs("timing")
    assert all("128x128 s6 c1" not in dict(job["choices"]) for job in timings)
    assert len(timings[0]["choices"]) == len(FAST) - 1
    assert [splits for name, splits in timings[5]["choices"] if name == "256x128 s4 c2"] == [1, 2]
    assert {job["rounds"] for job in timings} == {3}
    for job, limit in steps.asked:
        assert limit == 7.0 * {"trial": 1, "timing": 1 + len(job["choices"])}[job["kind"]]


def test_what_was_lost_twice_is_not_tried_again(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps(monkeypatch, lost={"256x128 s4 c1"})
    command.main(["--shapes", "48x64x32,16x16x16"])
    tried = [job["gemm"][3] for job in steps.jobs("trial") if job["choices"][0][0] == "256x128 s4 c1"]
    # by kind of GEMM: twice without promotion, and two of four with
    assert tried == [False, True, True, False]
    printed = capsys.readouterr().out
    assert printed.count("left out: 256x128 s4 c1 for") == 6
    assert printed.count("not tried again, after 2 crashes or timeouts") == 2


def test_a_gemm_that_cannot_be_measured_is_named_and_the_others_kept(
    gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Steps(monkeypatch, lost={"32"})
    with pytest.raises(SystemExit, match=f"could not be measured:\n{WGRAD.name}: did not end"):
        command.main(["--shapes", "48x64x32", "--out", str(gpu / "table.json")])
    assert [row["m"] for row in json.loads((gpu / "table.json").read_text())["rows"]] == [48, 48]
    assert not gemm_table.own_path(NAME).exists()


def test_tuning_one_shape_keeps_the_others(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Steps(monkeypatch)
    command.main(["--shapes", "48x64x32"])
    command.main(["--shapes", "16x16x16"])
    assert len(gemm_table.rows(NAME, HOPPER)) == 6


def test_there_must_be_a_folder_for_the_table(gpu: Path) -> None:
    with pytest.raises(SystemExit, match="--out: there is no folder"):
        command.main(["--out", str(gpu / "nowhere" / "table.json")])
    (gpu / "cache").write_text("")
    with pytest.raises(SystemExit, match=r"the table cannot be written.*LIGHTNING_FP8_CACHE_DIR"):
        command.main([])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shapes", "64x64"], "TOKENSxINxOUT"),
        (["--rounds", "0"], "an integer of at least 1, got '0'"),
        (["--time-limit", "x"], "an integer of at least 1, got 'x'"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said where there is no GPU")
def test_without_a_gpu_it_says_so_and_fails() -> None:
    ran = run_warm("-m", "lightning_fp8", "tune")
    assert ran.returncode == 1
    assert "needs a CUDA GPU" in ran.stderr or "on a CUDA GPU of compute capability 8.9 or newer" in ran.stderr
    assert "Traceback" not in ran.stderr


def with_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA B200")


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_a_gpu_without_kernels_is_named(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    with_capability(monkeypatch, capability)
    dotted = ".".join(map(str, capability))
    with pytest.raises(SystemExit, match=f"NVIDIA B200 has compute capability {dotted}, which has no GEMM"):
        command.main([])


def test_without_kernels_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    with_capability(monkeypatch, HOPPER)
    monkeypatch.setattr(kernels, "backend", lambda: "reference")
    with pytest.raises(SystemExit, match="LIGHTNING_FP8_BACKEND=reference"):
        command.main([])
    monkeypatch.setattr(kernels, "backend", lambda: "auto")

    def missing() -> None:
        raise KernelsUnavailable("Run `pip install cupy-cuda13x`.")

    monkeypatch.setattr(command, "nvrtc_version", missing)
    with pytest.raises(SystemExit, match="Run `pip install cupy-cuda13x`"):
        command.main([])


def test_entry_point_hands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(import_module("lightning_fp8.tools.tune.command"), "main", given.append)
    monkeypatch.setattr(sys, "argv", ["lightning_fp8", "tune", "--rounds", "3"])
    entry.run()
    assert given == [["--rounds", "3"]]


def test_children_start_in_this_python() -> None:
    assert child.command() == [sys.executable, "-m", "lightning_fp8.tools.tune.child"]
    assert os.path.exists(import_module("lightning_fp8.tools.tune.child").__file__ or "")
