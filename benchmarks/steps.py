"""How steps of training are timed: by the wall clock, variants in turns, with the memory that each of them takes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

from lightning_fp8.tools import timing
from lightning_fp8.tools.timing import Times, Variant, percentiles

# how often each variant is created where only one is in memory at a time
TURNS = 3
# of a batch on a GPU at least: its device begins idle, as it does not in training, where the host is ahead
_BATCH_SECONDS = 0.1


class Measured(NamedTuple):
    """What the rows of a variant have.

    Attributes:
        times: per step.
        peak_memory_bytes: the most that torch's allocator held during timed steps, without what belongs to other
            variants; None on the CPU.
        saved_bytes: what one forward leaves for its backward.
    """

    times: Times
    peak_memory_bytes: int | None = None
    saved_bytes: int | None = None


def time_in_turns(variants: Sequence[Variant], rounds: int, device: torch.device, alone: bool) -> dict[str, Measured]:
    """By name, ``rounds`` batches of each variant, or a few more.

    Args:
        variants: in their order.
        rounds: a round has one batch of each.
        device: where they run.
        alone: only one variant is in memory at a time: each is created and warmed up ``TURNS`` times, in turns;
            otherwise all stay in memory from start to end, and their batches take turns.
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
        # what stays between steps is its own, all the rest there was before
        self.own = self._allocated() - before
        self.times: list[float] = []
        self.peaks: list[int] = []
        self.saved_bytes: int | None = None

    def batch(self) -> None:
        """Some steps, from an idle device on until it is idle again."""
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
        # also where this fails: compiled code and memory are for those who come next
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
