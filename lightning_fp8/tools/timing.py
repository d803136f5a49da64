"""Timing: variants take turns, over copies of their inputs that do not fit into the L2 cache together."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

# microseconds of one batch: long beside the events' own resolution and a first launch's way to the device
_BATCH_US = 2000.0
# of iterations: the device begins idle, as it does not in training, where the host is ahead
_ITERATIONS_US = 20000.0
_MOST_CALLS = 20000
# A stream takes about a thousand launches before it makes the host wait.
_MOST_WAITING = 400
# A call may be many launches, the more the longer it takes: for the host's time, one call of a batch that has few.
_HOST_SHARE, _MOST_HOST_CALLS = 20, 20

# of the device's clock in a microsecond, at the most
_CYCLES = 2000


@dataclass(frozen=True)
class Variant:
    """One way of doing a piece of work.

    Attributes:
        name: in rows and messages.
        call: does the work once, on this copy of the inputs, and gives what must not be freed at once.
        check: does it once more and gives None, or what is wrong.
        copies: of the inputs, which calls take in turn.
        refill: makes all copies fit for one more call each, where a call uses them up.
        around: entered before and left after the calls of a step of training; what is made there is gone afterwards.
        tokens: that a call trains on, where it is a step of training.
        saved_bytes: tells what one forward of it leaves for its backward.
    """

    name: str
    call: Callable[[int], Any]
    check: Callable[[], str | None]
    copies: int = 1
    refill: Callable[[], None] | None = None
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    tokens: int | None = None
    saved_bytes: Callable[[], int] | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is this package that is measured, and no baseline."""
        return self.name.startswith(("lightning_fp8", "auto", "Kernel"))


# a variant and a number of calls -> microseconds per call
Batch = Callable[[Variant, int], float]


class Times(NamedTuple):
    """Microseconds per call: percentiles over batches, and medians of what else was measured in each round.

    Attributes:
        p20_us: 20th percentile.
        p50_us: median.
        p80_us: 80th percentile.
        host_us: of the host alone, where calls do not wait for the device.
        events_us: between two CUDA events, where the percentiles are of the wall clock.
    """

    p20_us: float
    p50_us: float
    p80_us: float
    host_us: float | None
    events_us: float | None = None


class Clock(NamedTuple):
    """How the variants of a suite are timed: what :func:`time_in_turns` takes.

    Attributes:
        batch: whose times the percentiles are of.
        host: for ``host_us``, if any.
        events: for ``events_us``, if any.
        batch_us: microseconds that a batch is to take at least.
    """

    batch: Batch
    host: Batch | None = None
    events: Batch | None = None
    batch_us: float = _BATCH_US


def clock(timed: str, device: torch.device) -> Clock:
    """By what a suite times.

    Args:
        timed: ``"device"``: as eager code runs, where the device may have to wait for the host. ``"kernels"``: the
            device without such waits, of calls with few launches. ``"host"``: the host. ``"iterations"``: iterations of
            training, on the wall clock.
        device: where it runs; on the CPU all but ``"host"`` are one.
    """
    if timed == "host":
        return Clock(host_batch)
    if device.type != "cuda":
        return Clock(wall_batch)
    if timed == "iterations":
        return Clock(iteration_batch, host_batch, device_batch, _ITERATIONS_US)
    return Clock(queued_batch if timed == "kernels" else device_batch, host_batch)


def copies_for(bytes: int, device: torch.device) -> int:
    """So many copies of inputs and outputs that they exceed twice the L2 cache; two at least, as memory allows."""
    if device.type != "cuda":
        return 2
    wanted = 2 * torch.cuda.get_device_properties(device).L2_cache_size // bytes + 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(2, min(wanted, free // (4 * bytes)))


def time_in_turns(
    variants: Sequence[Variant],
    rounds: int,
    batch: Batch,
    host: Batch | None,
    events: Batch | None = None,
    batch_us: float = _BATCH_US,
) -> dict[str, Times]:
    """By name; a round has one batch of each variant. The arguments behind ``rounds`` are those of a :class:`Clock`."""
    calls = {variant.name: _calls_for(variant, batch, batch_us) for variant in variants}
    measured: dict[str, list[float]] = {variant.name: [] for variant in variants}
    on_host: dict[str, list[float]] = {variant.name: [] for variant in variants}
    between_events: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for _ in range(rounds):
        for variant in variants:
            measured[variant.name].append(batch(variant, calls[variant.name]))
            if host is not None:
                few = max(1, min(calls[variant.name] // _HOST_SHARE, _MOST_HOST_CALLS))
                on_host[variant.name].append(host(variant, few))
            if events is not None:
                between_events[variant.name].append(events(variant, calls[variant.name]))
    return {
        name: Times(*percentiles(times), _median(on_host[name]), _median(between_events[name]))
        for name, times in measured.items()
    }


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    p20, p50, p80 = statistics.quantiles(times, n=10, method="inclusive")[1::3]
    return p20, p50, p80


def _median(times: list[float]) -> float | None:
    return percentiles(times)[1] if times else None


def queued_batch(variant: Variant, calls: int) -> float:
    """Between two CUDA events, of calls that all wait when the device comes to the first; of fewer where they are many.

    A small GEMM takes the device less time than the host takes to launch it.
    """
    calls = min(calls, _MOST_WAITING)
    # twice what the host is expected to take
    head_start_us = 2 * calls * host_batch(variant, min(calls, _MOST_HOST_CALLS))
    return device_batch(variant, calls, head_start_us)


def device_batch(variant: Variant, calls: int, head_start_us: float = 0.0) -> float:
    """Between two CUDA events around the calls; the device idles before for as long as the head start is."""
    kept = _warmed_up(variant)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    synchronize()
    if head_start_us:
        torch.cuda._sleep(int(_CYCLES * head_start_us))
    start.record()
    _rotate(variant, calls, kept)
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / calls


def wall_batch(variant: Variant, calls: int) -> float:
    """On the CPU, where calls return when they are done."""
    kept = _warmed_up(variant)
    start = time.perf_counter()
    _rotate(variant, calls, kept)
    return 1e6 * (time.perf_counter() - start) / calls


def iteration_batch(variant: Variant, calls: int) -> float:
    """On the wall clock, from an idle device on until it is idle again."""
    kept = _warmed_up(variant)
    synchronize()
    start = time.perf_counter()
    _rotate(variant, calls, kept)
    synchronize()
    return 1e6 * (time.perf_counter() - start) / calls


def host_batch(variant: Variant, calls: int) -> float:
    """The host's time, from an idle device on, without waiting for it; of fewer calls where they are many."""
    calls = min(calls, _MOST_WAITING)
    kept = _warmed_up(variant)
    synchronize()
    start = time.perf_counter()
    _rotate(variant, calls, kept)
    spent = time.perf_counter() - start
    synchronize()
    return 1e6 * spent / calls


def synchronize() -> None:
    """Wait for all that has been launched."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release() -> None:
    """Give back what the last case had in memory."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _calls_for(variant: Variant, batch: Batch, batch_us: float) -> int:
    if variant.refill is not None:
        return variant.copies
    calls = 1
    # what the first batch says has a launch's whole way to the device in it, so a second one may say another number
    while (spent := calls * batch(variant, calls)) < batch_us and calls < _MOST_CALLS:
        calls = min(_MOST_CALLS, math.ceil(1.2 * calls * batch_us / max(spent, 1.0)))
    return calls


def _warmed_up(variant: Variant) -> list[Any]:
    """One call on each copy: the allocator then has what the results of all copies take."""
    kept: list[Any] = [None] * variant.copies
    _rotate(variant, variant.copies, kept)
    if variant.refill is not None:
        variant.refill()
    return kept


def _rotate(variant: Variant, calls: int, kept: list[Any]) -> None:
    # results stay alive for a turn, so that the outputs lie in as many places as the inputs
    for number in range(calls):
        at = number % variant.copies
        kept[at] = variant.call(at)
