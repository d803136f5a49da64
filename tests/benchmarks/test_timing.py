"""How variants are timed: in turns, with rotated copies, on a device whose clock and memory are simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import Variant
from lightning_fp8.tools.tables import percentiles

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("timed", ["device", "kernels"])
def test_events_are_around_the_calls(timed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are queued behind a head start of twice their host time."""
    events: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            events.append("record")

        def elapsed_time(self, end: Event) -> float:
            return 8.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", events.append)
    monkeypatch.setattr(timing, "synchronize", lambda: events.append("idle"))
    variant = Variant("a", lambda at: events.append("call"), lambda: None)
    found = timing.batch(variant, 40, timed, GPU, host_us=50.0)
    assert found.us == pytest.approx(8000 / 40)
    head_start = [2 * 50 * 40 * 2000] if timed == "kernels" else []
    assert events == ["call", "idle", *head_start, "record", *40 * ["call"], "record", "idle"]


def test_the_host_is_timed_over_the_first_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits = [0.0], [0]

    def call(at: int) -> None:
        # the third call waits for the device
        waits[0] += 1
        clock[0] += 1e-6 if waits[0] <= 3 else 1e-3

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    found = timing.batch(Variant("a", call, lambda: None), 40, "steps", CPU)
    assert found.host_us == pytest.approx(1)
    assert found.us == pytest.approx((2 + 38 * 1000) / 40)


def test_a_batch_goes_over_all_copies_and_fills_up_what_calls_use() -> None:
    fuel, met = [1, 1, 1], []

    def call(at: int) -> None:
        met.append((at, fuel[at]))
        fuel[at] = 0

    def refill() -> None:
        fuel[:] = [1, 1, 1]

    variant = Variant("a", call, lambda: None, copies=3, refill=refill)
    timing.time_in_turns([variant], 4, "device", CPU)
    # nothing to calibrate: as many calls as copies
    assert len(met) == (1 + 4) * 6
    assert all(met[start + 3 : start + 6] == [(0, 1), (1, 1), (2, 1)] for start in range(0, len(met), 6))


def test_copies_exceed_twice_the_cache_and_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        L2_cache_size = 50_000_000

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**9, 10**9))
    sizes = (4_000_000, 100_000_000, 100_000)
    assert [timing.copies_for(size, GPU) for size in sizes] == [26, 2, 1001]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**8, 10**9))
    assert timing.copies_for(4_000_000, GPU) == 6
    assert timing.copies_for(4_000_000, CPU) == 2


def test_percentiles_stay_within_what_was_measured() -> None:
    assert percentiles([7.0]) == (7.0, 7.0, 7.0)
    assert percentiles([1.0, 2.0]) == pytest.approx((1.2, 1.5, 1.8))
