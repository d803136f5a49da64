"""Large cases under load: what a call takes, and the GPU's clock and power, once the clocks have fallen.

A burst is over before a GPU that reaches its power limit lowers its clocks, which takes tens of milliseconds.
"""

from __future__ import annotations

import re
import statistics
import time
from threading import Thread
from typing import Any

import torch

from benchmarks.timing import Variant, batch, calls_for
from lightning_fp8.runtime.environment import output_of

# of load for each variant; only the second half counts, as `power.draw` is a mean over a second
SECONDS = 2.0
# long compared with the wait for the device at the end of each batch
_BATCH_US = 50_000.0


def under_load(variant: Variant, device: torch.device) -> dict[str, Any]:
    """Run a variant for :data:`SECONDS`, and ask ``nvidia-smi`` in the middle.

    Returns:
        ``sustained_us`` per call, the median over batches; ``sm_clock_mhz`` and ``power_w`` of the GPU, or None where
        ``nvidia-smi`` did not answer in time.
    """
    calls, _ = calls_for(variant, "steps", device, _BATCH_US)
    _batches(variant, calls, device)
    answers: list[str] = []
    Thread(target=lambda: answers.append(_ask(device)), daemon=True).start()
    times = _batches(variant, calls, device)
    # an answer that comes later is one of an idle GPU
    match = re.fullmatch(r"(\d+), (\d+\.\d+)", "".join(answers))
    mhz, watts = map(float, match.groups()) if match else (None, None)
    return {"sustained_us": statistics.median(times), "sm_clock_mhz": mhz, "power_w": watts}


def _batches(variant: Variant, calls: int, device: torch.device) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + SECONDS / 2
    while time.perf_counter() < end:
        times.append(batch(variant, calls, "steps", device).us)
    return times


def _ask(device: torch.device) -> str:
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ("--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits")
    return output_of("nvidia-smi", f"--id={gpu}", *query)
