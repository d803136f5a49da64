from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_rows import written
from host_kernels import HostKernel
from warm import run_warm

from benchmarks import baselines, cast, command, launch, rows
from benchmarks.case import Tolerance, difference
from benchmarks.clock import Clock, clock
from benchmarks.run import Run
from benchmarks.suites import SUITES
from benchmarks.whole_model import UpdateScales, Weights
from kernels_cuda import scales
from lightning_fp8 import ops
from lightning_fp8.ops.cuda import dispatch as cuda
from lightning_fp8.ops.cuda import kernels, plain
from lightning_fp8.ops.formats import E4M3
from lightning_fp8.runtime import environment
from lightning_fp8.runtime.cpu import cpu_name
from lightning_fp8.tools import timing
from lightning_fp8.tools.timing import Variant

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FIELDS = {
    *("suite", "case", "variant", "p20_us", "p50_us", "p80_us", "host_us", "events_us", "bytes", "gb_per_s"),
    *("sustained_us", "sm_clock_mhz", "power_w"),
    *(
        "flops",
        "tflops",
        "share_of_ceiling",
        "ceiling_gb_per_s",
        "ceiling_tflops",
        "tokens_per_s",
        "peak_memory_bytes",
        "saved_bytes",
        "checked",
        "wrong",
        "gpu",
        "driver",
        "cpu",
        "emulates_bf16",
        "threads",
        "torch",
        "cupy",
        "torchao",
        "commit",
        "command",
    ),
}
ONE = "200x136 bf16->e4m3 cast_transpose"


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """The rows and the output of the whole suite, run on the CPU as a user would."""
    out = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    arguments = ["--suite", "cast", "--device", "cpu", "--rounds", "2", "--out", str(out)]
    ran = run_warm("-m", "benchmarks", *arguments)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return written(out), ran.stdout


@pytest.mark.slow
def test_every_case_has_a_row_of_every_variant(suite: tuple[list[dict[str, Any]], str]) -> None:
    found = {(row["case"], row["variant"]) for row in suite[0]}
    assert len(found) == len(suite[0])
    for case in cast.cases(CPU):
        variants = {variant for name, variant in found if name == case.name}
        assert {"lightning_fp8", "torch", "torch.compile(aot_eager)", "copy"} <= variants
    assert len({name for name, _ in found}) == len(cast.cases(CPU)) + 1


def test_rows_are_whole_and_consistent(suite: tuple[list[dict[str, Any]], str]) -> None:
    ceiling = suite[0][0]
    assert (ceiling["variant"], ceiling["share_of_ceiling"]) == ("copy", 1)
    for row in suite[0]:
        assert set(row) == FIELDS
        assert 0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"]
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / (row["p50_us"] * 1e-6) / 1e9)
        assert row["share_of_ceiling"] == pytest.approx(row["gb_per_s"] / ceiling["gb_per_s"])
        assert row["ceiling_gb_per_s"] == ceiling["gb_per_s"]
        assert {row[key] for key in ("host_us", "events_us", "flops", "tflops", "ceiling_tflops")} == {None}
        assert {row[key] for key in ("tokens_per_s", "peak_memory_bytes", "saved_bytes")} == {None}
        assert {row[key] for key in ("sustained_us", "sm_clock_mhz", "power_w")} == {None}
        assert (row["suite"], row["checked"], row["gpu"], row["driver"]) == ("cast", True, None, None)
        assert (row["torch"], row["cpu"]) == (torch.__version__, cpu_name())
        assert row["command"].startswith("python -m benchmarks --suite cast --device cpu --rounds 2 --out ")
        assert re.fullmatch(r"([0-9a-f]{7,}(-dirty)?)?", row["commit"])


def test_tables_show_what_the_rows_have(suite: tuple[list[dict[str, Any]], str]) -> None:
    made, printed = suite
    ours = next(row for row in made if row["variant"] == "lightning_fp8")
    line = next(line for line in printed.split(ours["case"])[1].splitlines() if line.startswith("lightning_fp8 "))
    assert line.split()[1:4] == [f"{ours[key]:.2f}" for key in ("p20_us", "p50_us", "p80_us")]
    if environment.package_version("torchao") is None:
        assert "torchao is not installed" in printed
    # columns without a number are left out
    title = next(line for line in printed.splitlines() if line.startswith("variant"))
    assert title.split() == [*("variant", "p20", "us", "p50", "us", "p80", "us"), "GB/s", "of", "the", "ceiling"]


def run(path: Path, *arguments: str, suite: str = "cast", case: str = ONE) -> None:
    options = ["--device", "cpu", "--rounds", "2", "--case", case, "--out", str(path / "rows.jsonl")]
    command.main(["--suite", suite, *options, *arguments])


def changed(function: Callable[..., Any], change: Callable[..., None]) -> Callable[..., Any]:
    """A wrapper that applies ``change`` to the function's arguments and results after each call."""

    def wrong(*arguments: Any) -> Any:
        made = function(*arguments)
        change(arguments, made)
        return made

    return wrong


def flip(payload: torch.Tensor) -> None:
    payload.view(torch.uint8).view(-1)[7] ^= 1


def compiled_as(number: int) -> Callable[..., Any]:
    """A stand-in for the compiler: the function itself, with a wrong byte in one of its results."""

    def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        def change(arguments: Any, made: Any) -> None:
            flip(made[0][number] if isinstance(made, list) else made[number])

        return changed(function, change)

    return compiled


def other_amax(arguments: Any, made: Any) -> None:
    arguments[1].state.amax.mul_(1.01)


FLIPPED = [changed(ops.cast, lambda _, made, part=part: flip(made[part])) for part in (0, 1)]
OTHER_INVERSE = changed(ops.cast, lambda _, made: made[2].mul_(1 + 1e-6))
OTHER_SCALE = changed(ops.update_scales, lambda tensors, _: tensors[2].mul_(1 + 1e-6))
WRONG = {
    "payload": (ops, "cast", FLIPPED[0], ONE, "lightning_fp8 gave another payload"),
    "transposed": (ops, "cast", FLIPPED[1], ONE, "lightning_fp8 gave another transposed payload"),
    "amax": (ops, "cast", changed(ops.cast, other_amax), ONE, "lightning_fp8 gave another amax"),
    "scale_inv": (ops, "cast", OTHER_INVERSE, ONE, "lightning_fp8 gave another scale_inv"),
    "a scale": (ops, "update_scales", OTHER_SCALE, "update_scales", "lightning_fp8 gave another scale"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_result_of_ours_is_not_timed(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, function, case, words = WRONG[wrong]
    monkeypatch.setattr(module, name, function)
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, case=case)
    said = str(ended.value).splitlines()[-1]
    assert words in said
    assert case in said.partition(" gave ")[0]
    # except those of the ceiling, which is a separate case
    assert all("the ceiling" in row["case"] for row in written(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("part", "case", "words"),
    [(0, ONE, "another payload"), (1, "tiny model", "another transposed payload of tensor 0")],
)
def test_a_wrong_baseline_says_so_in_its_row(
    part: int,
    case: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(baselines, "compiled", compiled_as(part))
    # torchao's cast is compiled by the same function
    monkeypatch.setattr(baselines, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, case=case)
    assert str(ended.value).splitlines()[-1].endswith(f"torch.compile(aot_eager) gave {words}.")
    rows = {row["variant"]: row for row in written(tmp_path / "rows.jsonl") if case in row["case"]}
    assert {name: row["wrong"] for name, row in rows.items() if not row["checked"]} == {
        "torch.compile(aot_eager)": words
    }
    assert {"lightning_fp8", "torch"} <= {name for name, row in rows.items() if row["checked"]}
    assert rows["torch.compile(aot_eager)"]["p50_us"] > 0
    assert f"\ntorch.compile(aot_eager) gave {words}\n" in capsys.readouterr().out


def test_a_wrong_copy_is_no_ceiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = baselines.copy
    monkeypatch.setattr(baselines, "copy", lambda *given: replace(real(*given), check=lambda: "another copy"))
    with pytest.raises(SystemExit, match="copy gave another copy"):
        run(tmp_path, case=ONE)
    rows = written(tmp_path / "rows.jsonl")
    assert {row["variant"] for row in rows} >= {"copy", "lightning_fp8"}
    assert {row["share_of_ceiling"] for row in rows} == {None}


def test_nothing_is_lost_when_a_later_case_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def second_fails(*arguments: Any) -> Any:
        made = real(*arguments)
        if arguments[0].shape[1] == 136:
            flip(made[0])
        return made

    real = ops.cast
    monkeypatch.setattr(ops, "cast", second_fails)
    with pytest.raises(SystemExit, match=r"\n200x136 bf16->e4m3 cast_transpose: lightning_fp8 gave another payload"):
        run(tmp_path, case="bf16->e4m3 cast_transpose")
    assert {row["case"] for row in written(tmp_path / "rows.jsonl")[1:]} == {"256x256 bf16->e4m3 cast_transpose"}


def test_a_variant_that_does_not_run_costs_its_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*_: Any) -> Any:
        def refuse(*_: Any) -> Any:
            raise RuntimeError("no compiler here")

        return refuse

    monkeypatch.setattr(baselines, "compiled", compiled)
    with pytest.raises(SystemExit, match=r"torch\.compile\(aot_eager\): RuntimeError: no compiler here"):
        run(tmp_path)
    variants = {row["variant"] for row in written(tmp_path / "rows.jsonl")}
    assert {"lightning_fp8", "torch", "copy"} <= variants
    assert "torch.compile(aot_eager)" not in variants


BAD = {
    "an unknown suite": (["--suite", "gem"], r"invalid choice: 'gem' \(choose from .*cast.*gemm.*launch.*linear.*all"),
    "no suite": ([], "arguments are required: --suite"),
    "an unknown device": (["--suite", "cast", "--device", "tpu"], "invalid choice: 'tpu'"),
    "no rounds": (["--suite", "cast", "--rounds", "0"], "--rounds: must be an integer of at least 1, got '0'"),
    "an unknown case": (
        ["--suite", "cast", "--device", "cpu", "--case", "7x7"],
        r"--case: no name has '7x7' in it. There are:\n  256x256 bf16->e4m3 cast_transpose\n(.*\n)+  update_scales 30",
    ),
    "no folder": (
        ["--suite", "cast", "--device", "cpu", "--out", "nowhere/at/all.jsonl"],
        "there is no folder nowhere/at to write all.jsonl in",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_arguments(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, words = BAD[bad]
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code not in (0, None)
    assert re.search(words, f"{ended.value.code}\n{capsys.readouterr().err}")


def test_without_a_fitting_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rest = r"and none was found; `--device cpu` runs small sizes to try the command"
    with pytest.raises(SystemExit, match=rf"needs a CUDA GPU of compute capability 8\.9 or newer, {rest}"):
        command.main(["--suite", "cast"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an older GPU")
    with pytest.raises(SystemExit, match=r"8\.9 or newer, and an older GPU has 8\.0"):
        command.main(["--suite", "cast", "--device", "cuda"])


SERVED = {
    "cast": (cast.Cast(8, 8, "e4m3"), "cast_kernel", (GPU, torch.bfloat16, "e4m3", "none", False)),
    "gradient": (cast.Cast(8, 8, "e5m2", gradient=True), "cast_kernel", (GPU, torch.bfloat16, "e5m2", "none", False)),
    "gelu": (cast.Cast(8, 8, "e4m3", "gelu"), "cast_kernel", (GPU, torch.bfloat16, "e4m3", "gelu", False)),
    "gelu gradient": (
        cast.Cast(8, 8, "e5m2", "gelu", gradient=True), "cast_kernel", (GPU, torch.bfloat16, "e5m2", "gelu", True),
    ),
    "weights": (Weights("a model", ((8, 8),)), "weights_kernel", (GPU, False)),
    "scales": (UpdateScales(1, "3 tensors", 4), "update_kernel", (GPU,)),
    "launch": (launch.UpdateArguments(), "update_kernel", (GPU,)),
}  # fmt: skip


@pytest.mark.parametrize("served", SERVED)
def test_plain_torch_is_never_timed_as_ours(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, name, expected = SERVED[served]
    asked: list[tuple[Any, ...]] = []
    # `list.append` returns None, like the lookup of a missing kernel
    monkeypatch.setattr(kernels, name, lambda *arguments: asked.append(arguments))
    made = Run("cast", SUITES["cast"], GPU, 1, {})
    assert made.measure(case) == []
    assert made.failures[0].startswith(f"{case.name}: lightning_fp8 has no kernel for it on cuda:0")
    assert asked == [expected]
    monkeypatch.setattr(kernels, name, lambda *_: "a kernel")
    assert case.is_served(GPU)


def test_bytes_and_names_of_the_cases_for_a_gpu() -> None:
    found = {case.name: case.bytes for case in cast.cases(GPU)}
    # bf16 in, two payloads out
    assert found["1024x1024 bf16->e4m3 cast_transpose"] == 4 * 2**20
    assert found["8192x14336 bf16->e4m3 gelu + cast_transpose"] == 469762048
    # and 14336 column sums in fp32
    assert found["8192x14336 bf16->e5m2 cast_transpose + bias gradient"] == 469762048 + 57344
    # two bf16 tensors in
    assert found["8192x14336 bf16->e5m2 gelu gradient + cast_transpose + bias gradient"] == 704643072 + 57344
    # 16 * (6144 + 2048 + 8192 + 8192) * 2048 = 805306368 elements, fp32 in twice, two payloads out
    assert found["cast_weights fp32->e4m3, 64 weights of 1B"] == 10 * 805306368
    # 4 * (6144 + 4096 + 28672 + 14336) * 4096
    assert found["cast_weights fp32->e4m3, 16 weights of 1/8 of 8B"] == 10 * 872415232
    # 1002 tensors of 4 * 4 bytes, of which 668 have 1024 entries, read and written
    assert found["update_scales 1000 tensors, history 1024"] == 668 * 1024 * 8 + 1002 * 16
    assert [name.split()[0] for name in found if name.endswith("e4m3 cast_transpose")] == [
        *("1024x1024", "2048x2048", "4096x4096", "8192x8192", "16384x16384", "8200x8192"),
        *("8192x2048", "8192x4096", "8192x14336"),
    ]
    assert sum("cast_transpose + bias" in name for name in found) == 5
    assert len(found) == 18


def test_copies_exceed_twice_the_cache_and_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        L2_cache_size = 50_000_000

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**9, 10**9))
    assert timing.copies_for(4_000_000, GPU) == 26
    assert timing.copies_for(100_000_000, GPU) == 2
    assert timing.copies_for(100_000, GPU) == 1001
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**8, 10**9))
    assert timing.copies_for(4_000_000, GPU) == 6
    assert timing.copies_for(4_000_000, CPU) == 2


def test_variants_take_turns() -> None:
    order: list[str] = []
    times = {"a": iter([2500.0, 1.0, 5.0, 3.0]), "b": iter([3000.0, 10.0, 10.0, 40.0])}

    def batch(variant: Variant, calls: int) -> float:
        order.append(variant.name)
        assert calls == 1
        return next(times[variant.name])

    variants = [Variant(name, lambda at: None, lambda: None) for name in times]
    found = timing.time_in_turns(variants, 3, batch, None)
    assert order == ["a", "b"] + 3 * ["a", "b"]
    assert found["a"][:3] == pytest.approx((1.8, 3, 4.2))
    assert found["b"][1] == 10
    assert found["b"].host_us is None


def test_what_else_is_measured_in_a_round() -> None:
    calls: dict[str, list[int]] = {"batch": [], "host": [], "events": []}

    def measure(what: str, *spent: float) -> timing.Batch:
        times = iter(spent)

        def batch(variant: Variant, number: int) -> float:
            calls[what].append(number)
            return next(times)

        return batch

    variants = [Variant("a", lambda at: None, lambda: None)]
    clock = Clock(
        measure("batch", 10.0, 10.0, 1.0, 3.0, 2.0), measure("host", 4.0, 6.0, 5.0), measure("events", 7.0, 9.0, 8.0),
        batch_us=500.0,
    )  # fmt: skip
    times = timing.time_in_turns(variants, 3, *clock)["a"]
    assert times == pytest.approx((1.4, 2.0, 2.6, 5.0, 8.0))
    # 1.2 times the calls that fill 500 microseconds; host time is measured over a few calls
    assert calls == {"batch": [1, 60, 60, 60, 60], "host": [3, 3, 3], "events": [60, 60, 60]}


def test_the_clock_of_a_suite() -> None:
    assert clock("host", GPU) == clock("host", CPU) == (timing.host_batch, None, None, 2000)
    for timed in ("device", "kernels", "iterations"):
        assert clock(timed, CPU) == (timing.wall_batch, None, None, 2000)
    assert clock("device", GPU) == (timing.device_batch, timing.host_batch, None, 2000)
    assert clock("kernels", GPU) == (timing.queued_batch, timing.host_batch, None, 2000)
    expected = (timing.wall_batch, timing.host_batch, timing.device_batch, 20000)
    assert clock("iterations", GPU) == expected


@pytest.mark.parametrize("waits", [True, False])
def test_iterations_count_until_the_device_is_done(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(timing, "synchronize", lambda: events.append("wait"))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: events.append("clock") or float(len(events)))
    batch = timing.wall_batch if waits else timing.host_batch
    spent = batch(Variant("a", lambda at: events.append("call"), lambda: None), 2)
    counted = ["call", "call", "wait"] if waits else ["call", "call"]
    assert events == ["call", "wait", "clock", *counted, "clock", *([] if waits else ["wait"])]
    assert spent == pytest.approx(1e6 * (len(counted) + 1) / 2)


@pytest.mark.parametrize(("calls", "counted"), [(3, 3), (1000, 400)])
def test_kernels_wait_for_the_device(calls: int, counted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are queued behind a head start that is longer than their host time as ``host_batch`` gives it."""
    events: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            events.append("record")

        def synchronize(self) -> None:
            events.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 8.0

    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: events.append(cycles))
    monkeypatch.setattr(timing, "synchronize", lambda: events.append("idle"))
    monkeypatch.setattr(timing, "host_batch", lambda variant, number: asked.append(number) or 50.0)
    variant = Variant("a", lambda at: events.append("call"), lambda: None)
    assert timing.queued_batch(variant, calls) == pytest.approx(8000 / counted)
    assert asked == [min(calls, 20)]
    head_start = 2 * 50 * counted * 2000
    assert events == ["call", "idle", head_start, "record", *counted * ["call"], "record", "wait"]
    # and no head start if host time is part of the measurement
    events.clear()
    timing.device_batch(variant, 1)
    assert events == ["call", "idle", "record", "call", "record", "wait"]


def test_percentiles_stay_within_what_was_measured() -> None:
    assert timing.percentiles([7.0]) == (7.0, 7.0, 7.0)
    assert timing.percentiles([1.0, 2.0]) == pytest.approx((1.2, 1.5, 1.8))


def test_batches_are_long_enough() -> None:
    calls: list[int] = []

    def batch(variant: Variant, number: int) -> float:
        calls.append(number)
        # a first call takes longer
        return 100.0 if number == 1 else 10.0

    timing.time_in_turns([Variant("a", lambda at: None, lambda: None)], 1, batch, None)
    assert calls[-1] * 10 >= 2000
    assert calls[-1] < 1000


@pytest.mark.parametrize("batch", [timing.wall_batch, timing.host_batch])
def test_a_batch_goes_over_all_copies_and_fills_up_what_calls_use(batch: timing.Batch) -> None:
    fuel, met = [1, 1, 1], []

    def call(at: int) -> None:
        met.append((at, fuel[at]))
        fuel[at] = 0

    def refill() -> None:
        fuel[:] = [1, 1, 1]

    variant = Variant("a", call, lambda: None, copies=3, refill=refill)
    for _ in range(2):
        assert batch(variant, 3) > 0
        assert met[-3:] == [(0, 1), (1, 1), (2, 1)]
    timing.time_in_turns([variant], 4, batch, None)
    # nothing to calibrate: as many calls as copies
    assert len(met) == (2 + 4) * 6


def test_results_stay_alive_for_a_turn() -> None:
    alive, most = [0], [0]

    class Result:
        def __init__(self) -> None:
            alive[0] += 1
            most[0] = max(most[0], alive[0])

        def __del__(self) -> None:
            alive[0] -= 1

    timing.wall_batch(Variant("a", lambda at: Result(), lambda: None, copies=5), 20)
    # the new one is written before the old one is removed
    assert most == [6]
    assert alive == [0]


def test_what_counts_as_the_same() -> None:
    codes = torch.arange(100, dtype=torch.uint8)
    expected = {"payload": [codes.view(E4M3.dtype)], "column sums": [torch.ones(3)]}

    def compare(step: int, number: int, tolerance: Tolerance, sums: float = 0.0) -> str | None:
        other = codes.clone()
        other[50 : 50 + number] += step
        return difference(
            {"payload": [other.view(E4M3.dtype)], "column sums": [torch.ones(3) + sums]}, expected, tolerance
        )

    near = Tolerance(codes=0.02, absolute=(("column sums", 0.1),))
    assert compare(0, 0, Tolerance()) is None
    assert compare(1, 1, Tolerance()) == "another payload"
    assert compare(1, 2, near, 0.09) is None
    assert compare(1, 3, near) == "another payload"
    assert compare(2, 1, near) == "another payload"
    assert compare(0, 0, near, 0.11) == "another column sums"
    assert compare(0, 0, Tolerance(), 1e-6) == "another column sums"


def test_torchao_is_held_to_its_input() -> None:
    x = torch.randn(40, 24, dtype=torch.bfloat16)
    scale = 448 / x.abs().amax().float()
    payload = plain.saturating_cast(x, scale, E4M3)
    payload_t = payload.t().contiguous()
    compare = baselines._torchao_difference
    assert compare(x, payload.view(E4M3.dtype), payload_t.view(E4M3.dtype), scale) is None
    assert compare(x, payload.view(E4M3.dtype), payload_t.view(E4M3.dtype), scale * 1.1) is not None
    flip(payload_t)
    assert "transpose" in str(compare(x, payload.view(E4M3.dtype), payload_t.view(E4M3.dtype), scale))


def test_launch_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, suite="launch", case="update")
    (row,) = written(tmp_path / "rows.jsonl")
    assert set(row) == FIELDS
    assert row["variant"] == "Kernel(no driver)"
    assert 0 < row["p50_us"] < 100
    assert (row["bytes"], row["gb_per_s"], row["share_of_ceiling"]) == (None, None, None)
    monkeypatch.setattr(launch.WithoutDriver, "__call__", lambda *_: None)
    buffer, offset, _ = launch._packed.place
    buffer[offset] = b"\0"
    with pytest.raises(SystemExit, match=r"update_scales arguments: Kernel\(no driver\) gave other arguments"):
        run(tmp_path, suite="launch", case="update")


@pytest.mark.usefixtures("host_kernels")
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_the_kernels_own_way_for_gradients(activation: str) -> None:
    case = cast.Cast(136, 72, "e5m2", activation, gradient=True)
    dy, h = case._inputs(1, CPU, 1), case._inputs(1, CPU, 2) if activation != "none" else []
    ours, theirs = (case._on_gradients(way, dy, h).results() for way in (cuda.cast_gradient, plain.cast_gradient))
    assert set(ours) == {"payload", "transposed payload", "scale_inv", "column sums", "amax"}
    assert difference(ours, theirs, case._tolerance(0.01)) is None


def test_all_ways_to_launch_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithDriver(HostKernel):
        """A kernel that is launched by its pointer and also by CuPy."""

        _pointer = 11

        def _launch_kernel(self, pointer: int, *given: int) -> None:
            *sizes, stream, address, extra = given
            assert (pointer, sizes, stream, extra) == (11, [1, 1, 1, scales.THREADS, 1, 1, 0], 22, 0)
            place = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))[0]
            self._library.launch(ctypes.c_void_p(place), 1, scales.THREADS)

        def _load(self) -> None:
            super()._load()
            self._function = self._as_cupy

        def _as_cupy(self, grid: tuple[int], block: tuple[int], arguments: tuple[Any]) -> None:
            assert streams == [22]
            self._library.launch(ctypes.c_void_p(arguments[0].ctypes.data), *grid, *block)

    streams: list[int] = []

    class Cupy:
        class cuda:  # noqa: N801
            ExternalStream = staticmethod(lambda stream: nullcontext(streams.append(stream)))

    class Stream:
        cuda_stream = 22

    monkeypatch.setitem(sys.modules, "cupy", Cupy)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    tensors = launch._tensors(CPU)
    launches = launch._launches(WithDriver(("update_scales", ()), scales.LAYOUT, scales.THREADS, 0), tensors)
    assert list(launches) == ["Kernel", "RawKernel", "driver"]
    for way in launches.values():
        assert launch._difference(way, tensors) is None
        assert launch._difference(lambda at: None, tensors) == "another amax"


@pytest.mark.parametrize("script", ["attention_dtypes", "cpu_step", "precisions"])
def test_the_scripts_share_the_rows(script: str) -> None:
    module = import_module(f"benchmarks.{script}")
    assert module.environment is environment.environment
    assert module.append is rows.append
    if script != "attention_dtypes":
        times = [{"times": [5.0, 1.0, 3.0]}, {"times": [2.0, 4.0, 6.0]}]
        assert module.percentiles(times) == {"p20_ms": 2.0, "p50_ms": 3.5, "p80_ms": 5.0}
    found = module.environment("torchao")
    assert list(found) == ["cpu", "emulates_bf16", "threads", "torch", "torchao", "commit", "command"]


@pytest.mark.cuda
def test_small_cases_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    chosen = (("cast", "1024x1024"), ("cast", "update"), ("launch", "update"))
    for suite, case in (*chosen, ("gemm", "2048x1024x1024"), ("linear", "2048 tokens, 1024")):
        command.main(["--suite", suite, "--case", case, "--rounds", "3", "--out", str(out)])
    found = {(row["suite"], row["variant"]): row for row in written(out)}
    assert {("cast", "lightning_fp8"), ("cast", "torch.compile"), ("launch", "Kernel"), ("launch", "RawKernel")} <= set(
        found
    )
    for row in found.values():
        assert row["gpu"] == torch.cuda.get_device_name()
        assert row["p50_us"] > 0
        assert row["suite"] == "launch" or row["host_us"] > 0
        assert row["suite"] != "linear" or row["events_us"] > 0
        assert row["suite"] not in ("gemm", "linear") or row["tflops"] > 0
