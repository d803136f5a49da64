"""Large cases under load: what a call takes, and the GPU's clock and power, once the clocks have fallen.

A burst is over before a GPU that reaches its power limit lowers its clocks, which takes tens of milliseconds.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from threading import Thread
from typing import NamedTuple

import torch

from benchmarks.case import Case
from lightning_fp8.runtime.environment import output_of
from lightning_fp8.tools import timing
from lightning_fp8.tools.timing import Variant

# of load for each variant; only the second half counts, as `power.draw` is a mean over a second
SECONDS = 2.0
# long compared with the wait for the device at the end of each batch
_BATCH_US = 50_000.0
_LARGE_FLOPS, _LARGE_BYTES = 1e11, 2**28


class Sustained(NamedTuple):
    """Under sustained load; None where there was none, or where ``nvidia-smi`` did not answer in time.

    Attributes:
        sustained_us: microseconds per call, the median over batches.
        sm_clock_mhz: clock of the multiprocessors.
        power_w: power of the GPU in watts.
    """

    sustained_us: float | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None


def is_large(case: Case) -> bool:
    """Whether a call of the case occupies a whole GPU: 1e11 FLOPs, or 2^28 bytes read and written."""
    return (case.flops or 0) >= _LARGE_FLOPS or (case.bytes or 0) >= _LARGE_BYTES


def measure(variant: Variant, burst_us: float, device: torch.device) -> Sustained:
    """Run a variant for :data:`SECONDS`, and ask ``nvidia-smi`` in the middle.

    Args:
        variant: what to run.
        burst_us: microseconds per call, about.
        device: the GPU.
    """
    calls = math.ceil(_BATCH_US / burst_us)
    _batches(variant, calls)
    answers: list[str] = []
    Thread(target=lambda: answers.append(_ask(device)), daemon=True).start()
    times = _batches(variant, calls)
    # an answer that comes later is one of an idle GPU
    found = re.fullmatch(r"(\d+), (\d+\.\d+)", "".join(answers))
    return Sustained(statistics.median(times), *(map(float, found.groups()) if found else ()))


def _batches(variant: Variant, calls: int) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + SECONDS / 2
    while time.perf_counter() < end:
        times.append(timing.wall_batch(variant, calls))
    return times


def _ask(device: torch.device) -> str:
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ("--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits")
    return output_of("nvidia-smi", f"--id={gpu}", *query)
