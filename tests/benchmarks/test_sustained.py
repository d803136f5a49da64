"""Large cases under load, on a GPU whose calls take a quarter longer once its clocks have fallen."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import sustained
from benchmarks.timing import Time, Variant

GPU = torch.device("cuda", 0)
SUSTAINED_US = 1250.0
NOTHING = Variant("ours", lambda at: None, lambda: None)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, float]]:
    """What runs: batches with their calls and time in seconds, and the question."""
    batches: list[tuple[str, int, float]] = []

    def batch(variant: Variant, calls: int, timed: str, device: torch.device) -> Time:
        assert (timed, device) == ("steps", GPU)
        batches.append((variant.name, calls, now[0]))
        now[0] += 1e-6 * calls * SUSTAINED_US
        return Time(SUSTAINED_US, 1.0)

    class AtOnce(SimpleNamespace):
        def start(self) -> None:
            batches.append(("nvidia-smi", 0, now[0]))
            self.target()

    now = [100.0]
    monkeypatch.setattr(sustained, "batch", batch)
    monkeypatch.setattr(sustained, "calls_for", lambda variant, timed, device, least_us: (int(least_us / 1000), 1.0))
    monkeypatch.setattr(sustained, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(sustained, "Thread", AtOnce)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"of-{device.index}"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    asked = "--id=GPU-of-0 --query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits"
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\n[ "$*" = "{asked}" ] && echo "1410, 698.27"\n')
    smi.chmod(0o755)
    return batches


def test_a_variant_is_under_load_for_two_seconds(load: list[tuple[str, int, float]]) -> None:
    found = sustained.under_load(NOTHING, GPU)
    assert found == {"sustained_us": SUSTAINED_US, "sm_clock_mhz": 1410.0, "power_w": 698.27}
    times = [time for name, calls, time in load if (name, calls) == ("ours", 50)]
    assert times == pytest.approx([100 + 0.0625 * number for number in range(2 * 16)])
    # asked in the middle
    assert [time for name, _, time in load if name == "nvidia-smi"] == pytest.approx([101.0])


@pytest.mark.parametrize("answer", ["late", "echo '[N/A], [N/A]'", "echo No devices; exit 6"])
def test_without_an_answer_in_time_there_is_no_clock(
    answer: str, load: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of an idle GPU either."""
    if answer == "late":
        monkeypatch.setattr(sustained.Thread, "start", lambda self: None)
    else:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    found = sustained.under_load(NOTHING, GPU)
    assert found == {"sustained_us": SUSTAINED_US, "sm_clock_mhz": None, "power_w": None}
