"""``python -m lightning_fp8 tune``: what is measured, in processes that may fail, and what is kept of it."""

from __future__ import annotations

import json
import os
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
from conftest import ROOT

from kernels_cuda.compile import KernelsUnavailable
from kernels_cuda.gemm import configurations
from lightning_fp8 import __main__ as entry
from lightning_fp8.bench import timing
from lightning_fp8.ops import gemm_table, kernels, plain
from lightning_fp8.ops.gemm_choice import Choice
from lightning_fp8.tune import child, command, search, trial
from lightning_fp8.tune.children import Answer, answers
from lightning_fp8.tune.shapes import LAYERS, Gemm, Layer, candidates, gemms_of, parse_layers

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

# answers each job with its own fields, its process and how many came before; does what the job says
CHILD = """
import json, os, subprocess, sys, time
for number, line in enumerate(sys.stdin):
    job = json.loads(line)
    if "pids" in job:
        below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(job["pids"], "w").write(f"{os.getpid()} {below.pid}")
    time.sleep(job.get("sleep", 0))
    if "signal" in job:
        os.kill(os.getpid(), job["signal"])
    if "status" in job:
        print("first line", "ValueError: no good", sep="\\n", file=sys.stderr)
        sys.exit(job["status"])
    if "close" in job:
        os.close(1)
        time.sleep(60)
    print(job.get("print") or json.dumps({"job": job, "pid": os.getpid(), "number": number}), flush=True)
"""
COMMAND = [sys.executable, "-c", CHILD]
LIMIT = 20.0


def ask(*jobs: dict[str, Any], limit: float = LIMIT) -> list[Answer]:
    return list(answers(COMMAND, jobs, lambda job: job.get("limit", limit)))


def test_one_process_answers_all_jobs_in_order() -> None:
    found = [answer.found for answer in ask(*({"at": at, "long": "x" * 100_000} for at in range(5)))]
    assert [one["job"]["at"] for one in found if one] == [0, 1, 2, 3, 4]
    assert [one["number"] for one in found if one] == [0, 1, 2, 3, 4]
    assert len({one["pid"] for one in found if one}) == 1
    assert ask() == []


@pytest.mark.parametrize(
    ("job", "failure"),
    [
        ({"sleep": 60, "limit": 3.0}, "did not end within 3 s"),
        ({"signal": 11}, "ended by signal 11"),
        ({"status": 1}, "ended with status 1: ValueError: no good"),
        ({"status": 0}, "ended with status 0: ValueError: no good"),
        ({"print": "hello"}, "gave 'hello' in place of an answer"),
        ({"print": "[3]"}, "gave '[3]' in place of an answer"),
    ],
)
def test_a_job_that_fails_costs_itself_only(job: dict[str, Any], failure: str) -> None:
    before, failed, after, last = ask({"at": 0}, job, {"at": 2}, {"at": 3})
    assert failed == Answer(None, failure)
    assert before.failure is after.failure is last.failure is None
    assert [answer.found["job"]["at"] for answer in (before, after, last) if answer.found] == [0, 2, 3]
    # a new process went on behind it
    assert before.found
    assert after.found
    assert last.found
    assert before.found["pid"] != after.found["pid"] == last.found["pid"]
    assert [after.found["number"], last.found["number"]] == [0, 1]


def test_the_limit_is_for_each_job() -> None:
    jobs = [{"sleep": 1.5} for _ in range(4)]
    assert [answer.failure for answer in ask(*jobs, limit=5.0)] == [None] * 4


def test_after_two_failures_in_a_row_the_rest_is_not_tried(tmp_path: Path) -> None:
    found = ask({"signal": 11}, {"at": 1}, {"signal": 11}, {"status": 3}, {"pids": str(tmp_path / "tried")}, {"at": 5})
    assert [answer.failure is None for answer in found] == [False, True, False, False, False, False]
    expected = "not tried, after 2 failures in a row, the last of which ended with status 3: ValueError: no good"
    assert [answer.failure for answer in found[4:]] == [expected] * 2
    assert not (tmp_path / "tried").exists()


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < until, pids
        time.sleep(0.05)


def test_what_hangs_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    (answer,) = ask({"pids": str(pids), "sleep": 60, "limit": 3.0})
    assert answer.failure == "did not end within 3 s"
    wait_until_gone([int(pid) for pid in pids.read_text().split()])


def test_nothing_is_left_behind_by_who_stops_asking(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    asking = answers(COMMAND, [{"pids": str(pids)}, {"sleep": 60}], lambda _: LIMIT)
    assert next(asking).failure is None
    asking.close()
    wait_until_gone([int(pid) for pid in pids.read_text().split()])


# one candidate


def run_plain(choice: Choice, *arguments: Any) -> torch.Tensor:
    *operands, output, promote = arguments
    return plain.scaled_mm(*operands, output, not promote)


@pytest.mark.parametrize("gemm", [FPROP, DGRAD, WGRAD])
def test_a_right_result_is_right(gemm: Gemm) -> None:
    assert trial.wrong(gemm, OURS, CPU, run_plain) is None


def of(change: Any, from_call: int = 0) -> trial.Run:
    """The right result with something done to it, from that call on."""
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


@pytest.mark.parametrize("part", range(7))
def test_each_argument_of_a_gemm_counts(part: int) -> None:
    """Operands, scales, formats: one that is taken for another one changes the result."""

    def run(choice: Choice, *arguments: Any) -> torch.Tensor:
        given = list(arguments)
        replaced = {0: given[0].flip(0), 1: given[1].flip(1), 2: given[3], 3: given[2], 5: "e4m3", 6: "e5m2"}
        given[part] = replaced.get(part, given[part])
        assert given[4] is None
        return run_plain(choice, *given)

    assert (trial.wrong(WGRAD, OURS, CPU, run) is None) == (part == 4)


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
    # three parts, of one cluster of two tiles each
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
    assert trial.unserved(DGRAD, Choice(one, 2), CPU) == "no kernel: none is to be had"

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
    """Batches that take what ``TIMES`` says, a little more from round to round; which ran, in order."""
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


def test_rows_are_rows_of_a_table(clock: list[str], tmp_path: Path) -> None:
    rows = [trial.timed(gemm, choices, 2, CPU, run_plain) for gemm, choices in ((WGRAD, CHOICES), (FPROP, []))]
    gemm_table.write(tmp_path / "table.json", {"gpu": NAME}, rows)
    assert gemm_table._checked((tmp_path / "table.json").read_text()) == rows


# all of it

# the child of the command, on the CPU and with torch in place of our kernels, some of which are broken
FAKE = """
import os, sys, time, types
# without Lightning, which takes seconds
package = sys.modules["lightning_fp8"] = types.ModuleType("lightning_fp8")
package.__path__ = ["lightning_fp8"]
import torch
from lightning_fp8.ops import kernels, plain
from lightning_fp8.tune import child

def run(choice, *arguments):
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
        time.sleep(0.02)
    if name == "128x128 s6 c2":
        time.sleep(0.01)
    return got

child._device = lambda: torch.device("cpu")
torch.cuda.get_device_capability = lambda _: (9, 0)
kernels.gemm_kernel = lambda device, one, *_: None if one.name == "256x128 s4 c2" else 1
child.run_choice = run
child.main(sys.argv[1:])
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An H200 as far as torch tells, whose kernels are ``FAKE``; a cache folder of its own."""
    properties = SimpleNamespace(name=NAME, major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: NAME)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(command, "_device", lambda: CPU)
    monkeypatch.setattr(child, "command", lambda kind: [sys.executable, "-c", FAKE, kind])
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)
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
    arguments = ["--shapes", "48x64x32", "--rounds", "2", "--time-limit", "20"]
    command.main(arguments)
    printed = capsys.readouterr().out
    fprop, dgrad, wgrad = (gemm.name for gemm in (FPROP, DGRAD, WGRAD))
    for line in (
        f"left out: 128x256 s4 c1 for {fprop}: did not end within 20 s",
        f"left out: 256x128 s4 c1 for {dgrad}: ended by signal 6",
        f"left out: 256x128 s4 c2 for {wgrad}: no kernel: none is to be had",
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
    """In place of processes: what came of trials and of timings."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failed: set[str]) -> None:
        self.limits: list[float] = []
        self.kinds: list[tuple[list[str], list[dict[str, Any]]]] = []
        self.failed = failed
        monkeypatch.setattr(search, "answers", self)

    def __call__(self, started: list[str], jobs: list[dict[str, Any]], limit_s: Any) -> Iterator[Answer]:
        self.kinds.append((started[-1:], jobs))
        self.limits += map(limit_s, jobs)
        for job in jobs:
            m, n, k, promote, output, *_ = job["gemm"]
            if started[-1] == "trial":
                yield Answer({"wrong": "gave rubbish" if job["choices"][0][0] in self.failed else None}, None)
            elif f"{m}" in self.failed:
                yield Answer(None, "did not end")
            else:
                key = {"m": m, "n": n, "k": k, "promote": promote, "output": output}
                (name, splits), *_ = [*job["choices"], (None, 1)]
                yield Answer(
                    {**key, "configuration": name, "splits": splits, "p50_us": 1.0, "cublaslt_p50_us": 2.0}, None
                )


def test_a_process_serves_one_configuration_and_kind(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, {"128x128 s6 c1"})
    command.main(["--shapes", "48x64x32,2048x1024x1024", "--time-limit", "7", "--rounds", "3"])
    trials = [jobs for (kind,), jobs in steps.kinds if kind == "trial"]
    assert len(trials) == len(FAST) + 2 * len(PROMOTED)
    for jobs in trials:
        assert len({(job["choices"][0][0], job["gemm"][3], job["gemm"][4]) for job in jobs}) == 1
    (timings,) = (jobs for (kind,), jobs in steps.kinds if kind == "timing")
    assert [Gemm.from_json(job["gemm"]) for job in timings] == [
        *Layer(48, 64, 32).gemms(),
        *Layer(2048, 1024, 1024).gemms(),
    ]
    assert all("128x128 s6 c1" not in dict(job["choices"]) for job in timings)
    assert len(timings[0]["choices"]) == len(FAST) - 1
    assert [splits for name, splits in timings[5]["choices"] if name == "256x128 s4 c2"] == [1, 2]
    assert {job["rounds"] for job in timings} == {3}
    assert steps.limits[: -len(timings)] == [7.0] * sum(map(len, trials))
    assert steps.limits[-len(timings) :] == [7.0 * (1 + len(job["choices"])) for job in timings]


def test_a_gemm_that_cannot_be_measured_is_named_and_the_others_kept(
    gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Steps(monkeypatch, {"32"})
    with pytest.raises(SystemExit, match=f"could not be measured:\n{WGRAD.name}: did not end"):
        command.main(["--shapes", "48x64x32", "--out", str(gpu / "table.json")])
    assert [row["m"] for row in json.loads((gpu / "table.json").read_text())["rows"]] == [48, 48]
    assert not gemm_table.own_path(NAME).exists()


def test_tuning_one_shape_keeps_the_others(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Steps(monkeypatch, set())
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
    ran = subprocess.run(
        [sys.executable, "-m", "lightning_fp8", "tune"], capture_output=True, text=True, check=False, cwd=ROOT
    )
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
    with pytest.raises(SystemExit, match=f"NVIDIA B200 has compute capability {dotted}, for which there are no GEMM"):
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
    monkeypatch.setattr(import_module("lightning_fp8.tune.command"), "main", given.append)
    monkeypatch.setattr(sys, "argv", ["lightning_fp8", "tune", "--rounds", "3"])
    entry.run()
    assert given == [["--rounds", "3"]]


def test_children_start_in_this_python() -> None:
    assert child.command("trial") == [sys.executable, "-m", "lightning_fp8.tune.child", "trial"]
    assert os.path.exists(import_module("lightning_fp8.tune.child").__file__ or "")
