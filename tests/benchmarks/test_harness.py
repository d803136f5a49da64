"""The run of a suite: each runs on small sizes; what is checked, timed, compared and refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import harness, settings
from benchmarks.harness import Case, Run, Suite
from benchmarks.suites import SUITES
from benchmarks.timing import Measured, Time, Variant

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# the tokens of a step at the sizes for a CPU
TOKENS = {"linear": 64, "layer": 64, "experts": 48, "train": 256}


def written(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.slow
def test_every_suite_runs_and_each_result_is_right(suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # fp32 as the baseline, because bf16 is slow on many CPUs, and no torchao
    monkeypatch.setattr(settings, "emulates_bf16", lambda: True)
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    # what is compiled is the same
    before, part = torch.random.get_rng_state(), {"train": "x 32 tokens, eager", "layer": "eager"}.get(suite, "")
    options = ["--suite", suite, "--case", part, "--device", "cpu", "--rounds", "1"]
    harness.main([*options, "--out", str(tmp_path / "rows")], SUITES)
    assert torch.equal(torch.random.get_rng_state(), before)
    rows = {(row["case"], row["variant"]): row for row in written(tmp_path / "rows")}
    cases = [case.name for case in SUITES[suite].cases(CPU) if part in case.name]
    assert {case for case, _ in rows} == {*cases}
    for row in rows.values():
        assert row["checked"]
        assert 0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"]
        assert row["times_baseline"] == row["p50_us"] / rows[row["case"], row["baseline"]]["p50_us"]
        assert row["command"].startswith(f"python -m benchmarks --suite {suite}")
        assert re.fullmatch(r"([0-9a-f]{7,}(-dirty)?)?", row["commit"])
        if suite in TOKENS:
            assert row["tokens_per_s"] == pytest.approx(TOKENS[suite] / row["p50_us"] * 1e6)
            assert row["baseline"] == "32-true"
    for case in cases:
        assert (case, "lightning_fp8") in rows
        if suite in TOKENS:
            assert 0 < rows[case, "lightning_fp8"]["saved_bytes"] < rows[case, "32-true"]["saved_bytes"]


def variant(name: str, wrong: str | None = None, **options: Any) -> Variant:
    return Variant(name, lambda at: None, lambda: wrong, **options)


def measured(times: dict[str, float], made: Case, gpu: str | None = None, device: Any = CPU) -> Any:
    """The rows of a case whose variants take these microseconds, and the failures."""

    def time_in_turns(variants: list[Variant], *_: Any) -> dict[str, Measured]:
        return {one.name: Measured([Time(times[one.name], 3.0)] * 2, [5, 7], one.figures()) for one in variants}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "time_in_turns", time_in_turns)
        ran = Run("small", Suite(lambda device: [made], "device", ("theirs",)), device, 1, {"gpu": gpu})
        return ran.measure(made), ran.failures


def case(*variants: Variant, **options: Any) -> Case:
    return Case("a", lambda device: [*variants], **options)


@pytest.mark.parametrize("ours", ["lightning_fp8 same weights", "kernel"])
def test_a_wrong_result_of_ours_is_not_timed(ours: str) -> None:
    rows, (failure,) = measured({}, case(variant("theirs"), variant(ours, "another payload")))
    assert rows == []
    assert f"{ours} gave another payload" in failure


def test_plain_torch_is_never_timed_as_ours() -> None:
    made, times = case(variant("lightning_fp8"), is_served=lambda device: False), {"lightning_fp8": 1.0}
    rows, (failure,) = measured(times, made, device=GPU)
    assert rows == []
    assert "no kernel" in failure
    # on the CPU there are none
    assert len(measured(times, made)[0]) == 1


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
