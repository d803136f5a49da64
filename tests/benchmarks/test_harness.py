"""The run of a suite: what is checked, timed, compared, written and refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_rows import written

from benchmarks import harness
from benchmarks.harness import Case, Run, Suite
from benchmarks.suites import SUITES
from benchmarks.timing import Measured, Time, Variant
from lightning_fp8.runtime.cpu import cpu_name

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FIELDS = """suite case variant p20_us p50_us p80_us host_us bytes gb_per_s flops tflops share_of_peak tokens_per_s
    peak_memory_bytes checked wrong baseline times_baseline gpu driver cpu emulates_bf16 threads torch cupy torchao
    commit command"""


def variant(name: str, wrong: str | None = None, **options: Any) -> Variant:
    return Variant(name, lambda at: torch.is_grad_enabled(), lambda: wrong, **options)


def case(name: str, *variants: Variant, **options: Any) -> Case:
    return Case(name, lambda device: list(variants or (variant("lightning_fp8"), variant("theirs"))), **options)


def suites(*cases: Case, timed: str = "device") -> dict[str, Suite]:
    return {
        "small": Suite(lambda device: list(cases), timed, ("theirs",)),
        "other": Suite(lambda device: [case("c")], "steps", ("nobody's",)),
    }


def run(made: dict[str, Suite], *arguments: str) -> None:
    harness.main(["--device", "cpu", "--rounds", "1", *arguments], made)


def measured(
    monkeypatch: pytest.MonkeyPatch, times: dict[str, float], made: Case, gpu: str | None = None, device: Any = CPU
) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a case whose variants take these microseconds, and the failures."""

    def time_in_turns(variants: list[Variant], *_: Any) -> dict[str, Measured]:
        return {one.name: Measured([Time(times[one.name], 3.0)] * 2, [5, 7], one.figures()) for one in variants}

    monkeypatch.setattr(harness, "time_in_turns", time_in_turns)
    ran = Run("small", Suite(lambda device: [made], "device", ("theirs", "others")), device, 1, {"gpu": gpu})
    return ran.measure(made), ran.failures


def test_all_suites_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(suites(case("a"), case("b")), "--suite", "all", "--out", str(tmp_path / "rows.jsonl"))
    rows = written(tmp_path)
    assert [(row["suite"], row["case"], row["variant"]) for row in rows] == [
        (suite, name, variant)
        for suite, names in (("small", "ab"), ("other", "c"))
        for name in names
        for variant in ("lightning_fp8", "theirs")
    ]
    for row in rows:
        assert set(row) == set(FIELDS.split())
        assert 0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"]
        assert (row["checked"], row["gpu"], row["driver"], row["host_us"]) == (True, None, None, None)
        assert (row["torch"], row["cpu"]) == (torch.__version__, cpu_name())
        assert row["command"].startswith("python -m benchmarks --device cpu --rounds 1 --suite all --out ")
        assert re.fullmatch(r"([0-9a-f]{7,}(-dirty)?)?", row["commit"])
    # columns without a number are left out
    titles = [line for line in capsys.readouterr().out.splitlines() if line.startswith("variant")]
    assert [title.split()[7:] for title in titles] == [["x", "baseline"], ["x", "baseline"], []]


def test_what_rows_are_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case("a", variant("auto", tokens=60), variant("theirs exactly"), flops=10**9, bytes=10**6)
    rows, _ = measured(monkeypatch, {"auto": 20.0, "theirs exactly": 10.0}, made, "NVIDIA H200")
    assert [(row["baseline"], row["times_baseline"]) for row in rows] == [("theirs exactly", 2), ("theirs exactly", 1)]
    # 10^9 FLOPs in 20 us, of 1979 TFLOP/s in the data sheet; 10^6 bytes
    assert (rows[0]["tflops"], rows[0]["gb_per_s"]) == pytest.approx((50, 50))
    assert rows[0]["share_of_peak"] == pytest.approx(50 / 1979)
    assert [row["tokens_per_s"] for row in rows] == [pytest.approx(3e6), None]
    rows, _ = measured(monkeypatch, {"auto": 20.0, "theirs exactly": 10.0}, made, "H20")
    assert rows[0]["share_of_peak"] is None


@pytest.mark.parametrize("ours", ["lightning_fp8 cublaslt", "auto"])
def test_a_wrong_result_of_ours_is_not_timed(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, failures = measured(monkeypatch, {}, case("a", variant("theirs"), variant(ours, "another payload")))
    assert (rows, failures) == ([], [f"a: {ours} gave another payload. Nothing of this case is timed."])


def test_steps_have_gradients_and_nothing_else_has() -> None:
    found: dict[str, set[bool]] = {"device": set(), "steps": set()}
    for timed, modes in found.items():
        watched = Variant("a", lambda at, modes=modes: modes.add(torch.is_grad_enabled()), lambda: None)
        run(suites(case("a", watched), timed=timed), "--suite", "small")
    assert found == {"device": {False}, "steps": {True}}


def test_plain_torch_is_never_timed_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case("a", is_served=lambda device: False)
    rows, failures = measured(monkeypatch, {"lightning_fp8": 1.0, "theirs": 1.0}, made, device=GPU)
    assert rows == []
    assert failures[0].startswith("a: lightning_fp8 has no kernel for it on cuda:0, and torch's own operators, which")
    # on the CPU there are none
    assert len(measured(monkeypatch, {"lightning_fp8": 1.0, "theirs": 1.0}, made)[0]) == 2


@pytest.mark.cuda
def test_small_cases_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    chosen = (("cast", "1024x1024"), ("cast", "update"), ("gemm", "2048x1024x1024"), ("linear", "2048 tokens, 1024"))
    for suite, part in chosen:
        harness.main(["--suite", suite, "--case", part, "--rounds", "3", "--out", str(out)], SUITES)
    for row in written(out):
        assert row["gpu"] == torch.cuda.get_device_name()
        assert row["p50_us"] > 0
        assert row["host_us"] > 0
        assert row["suite"] not in ("gemm", "linear") or row["tflops"] > 0
