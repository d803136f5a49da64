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

# of one batch: long compared with the resolution of events and the latency of a first launch
BATCH_US = 2000.0
# of a batch of iterations, which begins on an idle device; in training the host runs ahead
ITERATIONS_US = 20_000.0
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


def kernel_batch(device: torch.device) -> Batch:
    """Times calls with few launches by what the device takes for them; on the CPU by the wall clock."""
    return queued_batch if device.type == "cuda" else wall_batch


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
    host: Batch | None = None,
    events: Batch | None = None,
    batch_us: float = BATCH_US,
) -> dict[str, Times]:
    """Times by name; each round runs one batch of each variant.

    Args:
        variants: in their order.
        rounds: batches of each.
        batch: what the percentiles are of.
        host: for ``host_us``, if any.
        events: for ``events_us``, if any.
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
    """The 20th, 50th and 80th."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    p20, p50, p80 = statistics.quantiles(times, n=10, method="inclusive")[1::3]
    return p20, p50, p80


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
    """On the wall clock, from an idle device until it is idle again; on the CPU calls return when they are done."""
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
