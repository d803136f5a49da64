"""How variants are timed: in turns, over copies of their inputs that do not fit into the L2 cache together."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

# Least duration of a batch: of kernels, long compared with the resolution of events and the latency of a first launch;
# of training steps on a GPU, long because they start on an idle device here, while in training the host is ahead.
KERNELS_US, STEPS_US = 2000.0, 100_000.0
# how often each variant is created where only one is in memory at a time
TURNS = 3
# a stream queues about a thousand launches before the host has to wait, and a call may be ten launches
_MOST_CALLS = 100
# of a batch's calls, one in this many is timed on the host
_FIRST = 20
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
        around: context for the calls of a training step; what it creates is warm, and is released at its end.
        tokens: that a call processes, if it is a step of a model.
        figures: other columns of the row, measured after the times, inside ``around``.
    """

    name: str
    call: Callable[[int], Any]
    check: Callable[[], str | None]
    copies: int = 1
    refill: Callable[[], None] | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    tokens: int | None = None
    figures: Callable[[], dict[str, Any]] = dict


class Time(NamedTuple):
    """Microseconds per call of a batch: as the suite times it, and on the host, which does not wait for the device."""

    us: float
    host_us: float


@dataclass
class Measured:
    """The measurements of a variant.

    Attributes:
        times: of each batch.
        peaks: peak of torch's allocator during each batch, without the memory of other variants, in bytes.
        figures: what ``variant.figures`` gives.
    """

    times: list[Time] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


def time_in_turns(
    variants: Sequence[Variant], rounds: int, timed: str, device: torch.device, alone: bool = False
) -> dict[str, Measured]:
    """Measurements by name, from ``rounds`` batches of each variant, or a few more.

    Args:
        variants: in this order.
        rounds: number of batches of each variant.
        timed: see :func:`batch`.
        device: where they run.
        alone: whether only one variant is in memory at a time: each is created and warmed up ``TURNS`` times, in turns.
            Otherwise all stay in memory from start to end, and their batches take turns.
    """
    measurements = {variant.name: Measured() for variant in variants}
    turns = min(TURNS, rounds) if alone else 1
    for together in [[variant] for variant in variants] * turns if alone else [list(variants)]:
        with ExitStack() as stack:
            # also after a failure, so that compiled code and memory are released for the next one
            stack.callback(release)
            seats = [_Seat(variant, timed, device, stack) for variant in together]
            for _ in range(math.ceil(rounds / turns)):
                for seat in seats:
                    seat.measure(measurements[seat.variant.name])
            for seat in seats:
                measurements[seat.variant.name].figures = seat.variant.figures()
    return measurements


class _Seat:
    """One variant in memory."""

    def __init__(self, variant: Variant, timed: str, device: torch.device, stack: ExitStack) -> None:
        self.variant, self.timed, self.device = variant, timed, device
        before = self._allocated()
        stack.enter_context(variant.around())
        self.calls, self.host_us = calls_for(variant, timed, device)
        # memory that stays allocated between calls; the rest belongs to other variants
        self.own = self._allocated() - before

    def measure(self, measured: Measured) -> None:
        before = self._allocated()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        measured.times.append(batch(self.variant, self.calls, self.timed, self.device, self.host_us))
        if self.device.type == "cuda":
            measured.peaks.append(torch.cuda.max_memory_allocated(self.device) - before + self.own)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0


def calls_for(variant: Variant, timed: str, device: torch.device, least_us: float | None = None) -> tuple[int, float]:
    """Number of calls of a batch, and the host's microseconds per call.

    A batch takes at least ``least_us``, or has as many calls as there are copies, where a call uses one up.
    """
    if least_us is None:
        least_us = KERNELS_US if timed != "steps" else STEPS_US if device.type == "cuda" else 0.0
    if variant.refill is not None:
        return variant.copies, batch(variant, variant.copies, timed, device).host_us
    calls = 1
    # the first batch includes the latency of a launch to the device, so a second one may give another number
    while calls * (result := batch(variant, calls, timed, device)).us < least_us and calls < _MOST_CALLS:
        calls = min(_MOST_CALLS, math.ceil(1.2 * least_us / max(result.us, 1.0)))
    return calls, result.host_us


def batch(variant: Variant, calls: int, timed: str, device: torch.device, host_us: float = 0.0) -> Time:
    """Time some calls, from an idle device on.

    Args:
        variant: what to call.
        calls: number of calls.
        timed: ``"device"``: time between two CUDA events in eager code, where the device may wait for the host.
            ``"kernels"``: the same, but the device sleeps until about all calls are queued, for few launches: a small
            GEMM takes the device less time than the host takes to launch it. ``"steps"``: time on the wall clock until
            the device is idle again, for training steps. On the CPU all are the wall clock.
        device: where it runs.
        host_us: the host's expected microseconds per call.
    """
    results = _warmed_up(variant)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if _by_events(timed, device) else []
    synchronize()
    if timed == "kernels" and events:
        torch.cuda._sleep(int(_CYCLES * 2 * calls * host_us))
    for event in events[:1]:
        event.record()
    # the first calls tell the host's time: after many launches it may have to wait
    first = math.ceil(calls / _FIRST)
    start = time.perf_counter()
    _rotate(variant, range(first), results)
    on_host = time.perf_counter() - start
    _rotate(variant, range(first, calls), results)
    for event in events[1:]:
        event.record()
    synchronize()
    spent = time.perf_counter() - start
    if events:
        spent = 1e-3 * events[0].elapsed_time(events[1])
    return Time(1e6 * spent / calls, 1e6 * on_host / first)


def _rotate(variant: Variant, numbers: range, results: list[Any]) -> None:
    # results stay alive until the copy's next call, so that there are as many outputs in memory as inputs
    for number in numbers:
        at = number % variant.copies
        results[at] = variant.call(at)


def _by_events(timed: str, device: torch.device) -> bool:
    return device.type == "cuda" and timed in ("device", "kernels")


def _warmed_up(variant: Variant) -> list[Any]:
    """Run one call on each copy, so that the allocator holds the memory for the results of all copies."""
    results: list[Any] = [None] * variant.copies
    if variant.around is nullcontext:
        results = [variant.call(at) for at in range(variant.copies)]
    if variant.refill is not None:
        variant.refill()
    return results


def copies_for(bytes: int, device: torch.device) -> int:
    """Number of copies of inputs and outputs that exceeds twice the L2 cache, as memory allows; at least two."""
    if device.type != "cuda":
        return 2
    wanted = 2 * torch.cuda.get_device_properties(device).L2_cache_size // bytes + 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(2, min(wanted, free // (4 * bytes)))


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
