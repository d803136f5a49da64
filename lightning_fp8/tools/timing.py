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

# duration of a batch: long compared with the resolution of events and the latency of the first launch
BATCH_US = 2000.0
# duration of a batch of iterations: longer, as it starts on an idle device, while in training the host runs ahead
ITERATIONS_US = 20_000.0
_MOST_CALLS = 20000
# A stream queues about a thousand launches before the host has to wait.
_MOST_WAITING = 400
# A long call may be many launches, so host time is measured over a 20th of a batch's calls, and at most 20.
_HOST_SHARE, _MOST_HOST_CALLS = 20, 20

# cycles of the device's clock per microsecond, at most
_CYCLES = 2000


@dataclass(frozen=True)
class Variant:
    """One way of doing a piece of work.

    Attributes:
        name: in rows and messages.
        call: does the work once, on the copy of the inputs with this number, and returns what must stay allocated.
        check: does the work once and returns None, or what is wrong with the result.
        copies: number of copies of the inputs, which calls use in turn.
        refill: prepares all copies for one more call each, if a call uses them up.
        around: context for the calls of a training step; what it creates is released at its end.
        tokens: that a call trains on, if it is a training step.
        saved_bytes: gives the bytes that one forward saves for backward.
    """

    name: str
    call: Callable[[int], Any]
    check: Callable[[], str | None]
    copies: int = 1
    refill: Callable[[], None] | None = None
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    tokens: int | None = None
    saved_bytes: Callable[[], int] | None = None


# a variant and a number of calls -> microseconds per call
Batch = Callable[[Variant, int], float]


class Times(NamedTuple):
    """Microseconds per call: percentiles over batches, and medians of the other times measured in each round.

    Attributes:
        p20_us: 20th percentile.
        p50_us: median.
        p80_us: 80th percentile.
        host_us: time on the host alone, for calls that do not wait for the device.
        events_us: time between two CUDA events, if the percentiles are of the wall clock.
    """

    p20_us: float
    p50_us: float
    p80_us: float
    host_us: float | None
    events_us: float | None = None


def kernel_batch(device: torch.device) -> Batch:
    """The batch function for calls with few launches: times the device; on the CPU the wall clock."""
    return queued_batch if device.type == "cuda" else wall_batch


def copies_for(bytes: int, device: torch.device) -> int:
    """Number of copies of inputs and outputs that exceeds twice the L2 cache, as memory allows; at least two."""
    if device.type != "cuda":
        return 2
    wanted = 2 * torch.cuda.get_device_properties(device).L2_cache_size // bytes + 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(2, min(wanted, free // (4 * bytes)))


def time_in_turns(
    variants: Sequence[Variant],
    rounds: int,
    batch: Batch,
    host: Batch | None = None,
    events: Batch | None = None,
    batch_us: float = BATCH_US,
) -> dict[str, Times]:
    """Times by name; each round runs one batch of each variant.

    Args:
        variants: in this order.
        rounds: batches of each.
        batch: times a batch, for the percentiles.
        host: times a batch for ``host_us``, if any.
        events: times a batch for ``events_us``, if any.
        batch_us: a batch has enough calls to take at least this many microseconds.
    """
    calls = {variant.name: _calls_for(variant, batch, batch_us) for variant in variants}
    few = {name: max(1, min(number // _HOST_SHARE, _MOST_HOST_CALLS)) for name, number in calls.items()}
    clocks = ((batch, calls), (host, few), (events, calls))
    measured: dict[str, list[list[float]]] = {variant.name: [[], [], []] for variant in variants}
    for _ in range(rounds):
        for variant in variants:
            for times, (of, numbers) in zip(measured[variant.name], clocks):
                if of is not None:
                    times.append(of(variant, numbers[variant.name]))
    return {
        name: Times(*percentiles(times), *(percentiles(other)[1] if other else None for other in others))
        for name, (times, *others) in measured.items()
    }


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentiles."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    p20, p50, p80 = statistics.quantiles(times, n=10, method="inclusive")[1::3]
    return p20, p50, p80


def queued_batch(variant: Variant, calls: int) -> float:
    """Time between two CUDA events around at most ``_MOST_WAITING`` calls, all queued before the device starts.

    A small GEMM takes the device less time than the host takes to launch it.
    """
    calls = min(calls, _MOST_WAITING)
    # twice the expected host time
    head_start_us = 2 * calls * host_batch(variant, min(calls, _MOST_HOST_CALLS))
    return device_batch(variant, calls, head_start_us)


def device_batch(variant: Variant, calls: int, head_start_us: float = 0.0) -> float:
    """Time between two CUDA events around the calls; before them the device sleeps for ``head_start_us``."""
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
    """Wall-clock time from an idle device until it is idle again; on the CPU calls return when they are done."""
    kept = _warmed_up(variant)
    synchronize()
    start = time.perf_counter()
    _rotate(variant, calls, kept)
    synchronize()
    return 1e6 * (time.perf_counter() - start) / calls


def host_batch(variant: Variant, calls: int) -> float:
    """Host time of at most ``_MOST_WAITING`` calls, from an idle device on, without waiting for the device."""
    calls = min(calls, _MOST_WAITING)
    kept = _warmed_up(variant)
    synchronize()
    start = time.perf_counter()
    _rotate(variant, calls, kept)
    spent = time.perf_counter() - start
    synchronize()
    return 1e6 * spent / calls


def synchronize() -> None:
    """Wait until all launched work is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release() -> None:
    """Release the memory and the compiled code of the last case."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _calls_for(variant: Variant, batch: Batch, batch_us: float) -> int:
    if variant.refill is not None:
        return variant.copies
    calls = 1
    # the first batch includes the latency of a launch to the device, so a second one may give another number
    while (spent := calls * batch(variant, calls)) < batch_us and calls < _MOST_CALLS:
        calls = min(_MOST_CALLS, math.ceil(1.2 * calls * batch_us / max(spent, 1.0)))
    return calls


def _warmed_up(variant: Variant) -> list[Any]:
    """Run one call on each copy, so that the allocator holds the memory for the results of all copies."""
    kept: list[Any] = [None] * variant.copies
    _rotate(variant, variant.copies, kept)
    if variant.refill is not None:
        variant.refill()
    return kept


def _rotate(variant: Variant, calls: int, kept: list[Any]) -> None:
    # results stay alive until the copy's next call, so that there are as many outputs in memory as inputs
    for number in range(calls):
        at = number % variant.copies
        kept[at] = variant.call(at)
