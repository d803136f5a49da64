"""How training steps are timed: on the wall clock, variants in turns, with the memory that each of them takes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

from benchmarks.sustained import Sustained
from lightning_fp8.tools import timing
from lightning_fp8.tools.timing import Times, Variant, percentiles

# how often each variant is created where only one is in memory at a time
TURNS = 3
# least duration of a batch on a GPU: it starts on an idle device, unlike training, where the host is ahead
_BATCH_SECONDS = 0.1


class Measured(NamedTuple):
    """The measurements of a variant.

    Attributes:
        times: per step.
        peak_memory_bytes: peak of torch's allocator during timed steps, without the memory of other variants; None on
            the CPU.
        saved_bytes: bytes that one forward saves for backward.
        sustained: what a long run of a large case adds.
    """

    times: Times
    peak_memory_bytes: int | None = None
    saved_bytes: int | None = None
    sustained: Sustained = Sustained()


def time_in_turns(variants: Sequence[Variant], rounds: int, device: torch.device, alone: bool) -> dict[str, Measured]:
    """Measurements by name, from ``rounds`` batches of each variant, or a few more.

    Args:
        variants: in this order.
        rounds: number of batches of each variant.
        device: where they run.
        alone: whether only one variant is in memory at a time: each is created and warmed up ``TURNS`` times, in turns.
            Otherwise all stay in memory from start to end, and their batches take turns.
    """
    turns = min(TURNS, rounds)
    each = [([variant], math.ceil(rounds / turns)) for _ in range(turns) for variant in variants]
    sittings = each if alone else [(list(variants), rounds)]
    seats: dict[str, list[_Seat]] = {variant.name: [] for variant in variants}
    for together, count in sittings:
        for seat in _sit(together, count, device):
            seats[seat.variant.name].append(seat)
    return {name: _measured(found) for name, found in seats.items()}


class _Seat:
    """One variant in one sitting, with its measurements."""

    def __init__(self, variant: Variant, device: torch.device, stack: ExitStack) -> None:
        self.variant, self.device = variant, device
        before = self._allocated()
        stack.enter_context(variant.around())
        self.steps = 1
        spent = self._spent()
        if device.type == "cuda":
            self.steps = max(1, math.ceil(_BATCH_SECONDS / spent))
        # memory that stays allocated between steps; the rest belongs to other variants
        self.own = self._allocated() - before
        self.times: list[float] = []
        self.peaks: list[int] = []
        self.saved_bytes: int | None = None

    def batch(self) -> None:
        """Time some steps, from an idle device until it is idle again."""
        before = self._allocated()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.times.append(1e6 * self._spent() / self.steps)
        if self.device.type == "cuda":
            self.peaks.append(torch.cuda.max_memory_allocated(self.device) - before + self.own)

    def _spent(self) -> float:
        timing.synchronize()
        start = time.perf_counter()
        for _ in range(self.steps):
            self.variant.call(0)
        timing.synchronize()
        return time.perf_counter() - start

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0


def _sit(variants: Sequence[Variant], rounds: int, device: torch.device) -> list[_Seat]:
    with ExitStack() as stack:
        # also after a failure, so that compiled code and memory are released for the next sitting
        stack.callback(timing.release)
        seats = [_Seat(variant, device, stack) for variant in variants]
        for _ in range(rounds):
            for seat in seats:
                seat.batch()
        for seat in seats:
            if seat.variant.saved_bytes is not None:
                seat.saved_bytes = seat.variant.saved_bytes()
    return seats


def _measured(seats: list[_Seat]) -> Measured:
    times = Times(*percentiles([one for seat in seats for one in seat.times]), host_us=None)
    peaks = [peak for seat in seats for peak in seat.peaks]
    return Measured(times, max(peaks, default=None), seats[0].saved_bytes)
