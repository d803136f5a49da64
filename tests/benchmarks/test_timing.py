"""How variants are timed: in turns, with rotated copies, on a device whose clock and memory are simulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import Time, Variant
from lightning_fp8.tools.tables import percentiles

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Workplace:
    """Variants whose calls take given numbers of seconds, with a simulated clock and memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[str, float], own: dict[str, int]) -> None:
        self.events: list[str] = []
        self.now, self.allocated, self.peak = 0.0, 1000, 0
        self.times, self.own = times, own
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing, "synchronize", lambda: None)
        monkeypatch.setattr(timing, "release", lambda: self.events.append("release"))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(self, "peak", 0))

    def variants(self) -> list[Variant]:
        return [self._variant(name) for name in self.times]

    def _variant(self, name: str) -> Variant:
        @contextmanager
        def around() -> Iterator[None]:
            self.events.append(f"+{name}")
            self.allocated += self.own[name]
            yield
            self.allocated -= self.own[name]
            self.events.append(f"-{name}")

        def call(at: int) -> None:
            self.events.append(name)
            self.now += self.times[name]
            self.peak = max(self.peak, self.allocated + 10 * self.own[name])

        return Variant(name, call, lambda: None, around=around, figures=lambda: {"own": self.own[name]})


def test_variants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Workplace(monkeypatch, {"a": 0.5, "b": 0.25}, {"a": 7, "b": 5})
    found = timing.time_in_turns(place.variants(), 2, "steps", GPU)
    assert place.events == ["+a", "a", "+b", "b", "a", "b", "a", "b", "-b", "-a", "release"]
    assert found["a"].times == [Time(0.5e6, 0.5e6)] * 2
    assert found["b"].times[0].us == pytest.approx(0.25e6)
    # the memory held between steps plus the peak during a step, without that of the other variants
    assert {name: max(one.peaks) for name, one in found.items()} == {"a": 77, "b": 55}
    assert found["a"].figures == {"own": 7}


def test_variants_alone_begin_anew_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Workplace(monkeypatch, {"a": 0.5, "b": 0.25}, {"a": 7, "b": 5})
    found = timing.time_in_turns(place.variants(), 4, "steps", CPU, alone=True)
    assert place.events == 3 * ["+a", "a", "a", "a", "-a", "release", "+b", "b", "b", "b", "-b", "release"]
    assert found["a"].peaks == []


@pytest.mark.parametrize(
    ("device", "timed", "seconds", "calls"),
    [(GPU, "steps", 0.03, 4), (CPU, "steps", 0.03, 1), (CPU, "device", 1e-4, 24), (CPU, "device", 1e-9, 100)],
)
def test_batches_are_long_enough(
    device: torch.device, timed: str, seconds: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Workplace(monkeypatch, {"a": seconds}, {"a": 1})
    found = timing.time_in_turns(place.variants(), 1, timed, device)
    assert found["a"].times[0].us == pytest.approx(1e6 * seconds)
    # one call to begin with, and enough of them twice: to see whether they are, and for the only round
    assert place.events.count("a") == (1 + 2 * calls if calls > 1 else 2)


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


def test_results_stay_alive_for_a_turn() -> None:
    alive, most = [0], [0]

    class Result:
        def __init__(self) -> None:
            alive[0] += 1
            most[0] = max(most[0], alive[0])

        def __del__(self) -> None:
            alive[0] -= 1

    timing.batch(Variant("a", lambda at: Result(), lambda: None, copies=5), 20, "device", CPU)
    # the new one is written before the old one is removed
    assert (most, alive) == ([6], [0])


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
