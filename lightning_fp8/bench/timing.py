"""Timing: variants take turns, over copies of their inputs that do not fit into the L2 cache together."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lightning_fp8.bench.case import Variant
from lightning_fp8.bench.rows import percentiles

# microseconds of one batch: long beside the events' own resolution and a first launch's way to the device
_BATCH_US = 2000.0
_MOST_CALLS = 20000
# A stream takes about a thousand launches before it makes the host wait.
_MOST_WAITING = 400
# A call may be many launches, the more the longer it takes: for the host's time, one call of a batch that has few.
_HOST_SHARE, _MOST_HOST_CALLS = 20, 20

# a variant and a number of calls -> microseconds per call
Batch = Callable[[Variant, int], float]


class Times(NamedTuple):
    """Microseconds per call: percentiles over batches, and the host's share where calls do not wait for the device."""

    p20_us: float
    p50_us: float
    p80_us: float
    host_us: float | None


def copies_for(bytes: int, device: torch.device) -> int:
    """So many copies of inputs and outputs that they exceed twice the L2 cache; two at least, as memory allows."""
    if device.type != "cuda":
        return 2
    wanted = 2 * torch.cuda.get_device_properties(device).L2_cache_size // bytes + 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(2, min(wanted, free // (4 * bytes)))


def time_in_turns(variants: Sequence[Variant], rounds: int, batch: Batch, host: Batch | None) -> dict[str, Times]:
    """By name; a round has one batch of each variant."""
    calls = {variant.name: _calls_for(variant, batch) for variant in variants}
    on_device: dict[str, list[float]] = {variant.name: [] for variant in variants}
    on_host: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for _ in range(rounds):
        for variant in variants:
            on_device[variant.name].append(batch(variant, calls[variant.name]))
            if host is not None:
                few = max(1, min(calls[variant.name] // _HOST_SHARE, _MOST_HOST_CALLS))
                on_host[variant.name].append(host(variant, few))
    return {
        name: Times(*percentiles(times), percentiles(on_host[name])[1] if host is not None else None)
        for name, times in on_device.items()
    }


def device_batch(variant: Variant, calls: int) -> float:
    """Between two CUDA events around the calls."""
    kept = _warmed_up(variant)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    synchronize()
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


def _calls_for(variant: Variant, batch: Batch) -> int:
    if variant.refill is not None:
        return variant.copies
    calls = 1
    # what the first batch says has a launch's whole way to the device in it, so a second one may say another number
    while (spent := calls * batch(variant, calls)) < _BATCH_US and calls < _MOST_CALLS:
        calls = min(_MOST_CALLS, math.ceil(1.2 * calls * _BATCH_US / max(spent, 1.0)))
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
