"""Large cases run for two seconds on a GPU, and their rows have its clock and power."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import sustained
from benchmarks.clock import Clock
from benchmarks.run import Run
from benchmarks.suites import SUITES
from lightning_fp8.tools import timing
from lightning_fp8.tools.timing import Variant

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BURST_US, SUSTAINED_US = 1000.0, 1250.0


@dataclass
class Nothing:
    """A case whose two variants do no work."""

    name: str
    flops: int
    bytes = None

    def is_served(self, device: torch.device) -> bool:
        return True

    def variants(self, device: torch.device) -> list[Variant]:
        return [Variant(name, lambda at: None, lambda: None) for name in ("ours", "theirs")]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, float]]:
    """A GPU whose calls take a quarter longer under load: the batches with variant, calls and time in seconds."""
    batches: list[tuple[str, int, float]] = []

    def wall_batch(variant: Variant, calls: int) -> float:
        variant.call(0)
        batches.append((variant.name, calls, now[0]))
        now[0] += 1e-6 * calls * SUSTAINED_US
        return SUSTAINED_US

    class AtOnce(SimpleNamespace):
        def start(self) -> None:
            batches.append(("nvidia-smi", 0, now[0]))
            self.target()

    now = [100.0]
    monkeypatch.setattr(timing, "wall_batch", wall_batch)
    monkeypatch.setattr(sustained, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(sustained, "Thread", AtOnce)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"of-{device.index}"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    asked = "--id=GPU-of-0 --query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits"
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\n[ "$*" = "{asked}" ] && echo "1410, 698.27"\n')
    smi.chmod(0o755)
    return batches


def rows(case: Any, device: torch.device = GPU) -> list[dict[str, Any]]:
    run = Run("gemm", SUITES["gemm"], device, 1, {})
    run.clock = Clock(lambda variant, calls: BURST_US)
    return run.measure(case)


def found(rows: list[dict[str, Any]]) -> dict[str, tuple[float | None, ...]]:
    return {row["variant"]: (row["sustained_us"], row["sm_clock_mhz"], row["power_w"]) for row in rows}


def test_each_variant_is_under_load_for_two_seconds(load: list[tuple[str, int, float]]) -> None:
    made = rows(Nothing("large", 10**11))
    # the burst stays what it is
    assert [row["p50_us"] for row in made] == [BURST_US, BURST_US]
    assert found(made) == dict.fromkeys(("ours", "theirs"), (SUSTAINED_US, 1410.0, 698.27))
    began = 100.0
    for name in ("ours", "theirs"):
        times = [time for one, calls, time in load if (one, calls) == (name, 50)]
        # each batch has 50 ms of calls, as estimated from the burst
        assert times == pytest.approx([began + 0.0625 * number for number in range(2 * 16)])
        began = times[-1] + 0.0625
    assert began == pytest.approx(100.0 + 2 * sustained.SECONDS)
    assert [time for one, _, time in load if one == "nvidia-smi"] == pytest.approx([101.0, 103.0])


@pytest.mark.parametrize(("case", "device"), [(Nothing("small", 10**10), GPU), (Nothing("large", 10**12), CPU)])
def test_neither_small_cases_nor_those_on_the_cpu_are(case: Nothing, device: torch.device, load: list[Any]) -> None:
    assert found(rows(case, device)) == dict.fromkeys(("ours", "theirs"), (None, None, None))
    assert load == []


@pytest.mark.parametrize("answer", ["late", "echo '[N/A], [N/A]'", "echo No devices; exit 6"])
def test_without_an_answer_in_time_there_is_no_clock(
    answer: str, load: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of an idle GPU either."""
    if answer == "late":
        monkeypatch.setattr(sustained.Thread, "start", lambda self: None)
    else:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    assert found(rows(Nothing("large", 10**11))) == dict.fromkeys(("ours", "theirs"), (SUSTAINED_US, None, None))


def test_which_cases_are_large() -> None:
    small = {
        name: [case.name for case in suite.cases(GPU) if not sustained.is_large(case)] for name, suite in SUITES.items()
    }
    assert small["gemm"] == [
        f"{kind} (MxNxK)" for kind in ("fprop 2048x1024x1024", "dgrad 2048x1024x1024", "wgrad 1024x1024x2048")
    ]
    assert [name for name in small["linear"] if "8192 tokens, 4096" in name or "GELU" in name] == []
    assert not any("8192x8192" in name or "14336" in name or "cast_weights" in name for name in small["cast"])
    assert {"1024x1024 bf16->e4m3 cast_transpose", "update_scales 1000 tensors, history 1024"} <= set(small["cast"])
    for name in ("launch", "layer", "train"):
        assert len(small[name]) == len(SUITES[name].cases(GPU))
