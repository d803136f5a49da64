"""How the variants of a suite are timed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_fp8.tools import timing
from lightning_fp8.tools.timing import Batch


class Clock(NamedTuple):
    """The arguments of :func:`lightning_fp8.tools.timing.time_in_turns` after ``rounds``."""

    batch: Batch
    host: Batch | None = None
    events: Batch | None = None
    batch_us: float = timing.BATCH_US


def clock(timed: str, device: torch.device) -> Clock:
    """The clock of a suite.

    Args:
        timed: ``"device"``: time on the device in eager code, where it may wait for the host. ``"kernels"``: time on
            the device without such waits, for calls with few launches. ``"host"``: time on the host.
            ``"iterations"``: training iterations on the wall clock.
        device: where the suite runs; on the CPU all but ``"host"`` are the same.
    """
    if timed == "host":
        return Clock(timing.host_batch)
    if device.type != "cuda":
        return Clock(timing.wall_batch)
    if timed == "iterations":
        return Clock(timing.wall_batch, timing.host_batch, timing.device_batch, timing.ITERATIONS_US)
    return Clock(timing.queued_batch if timed == "kernels" else timing.device_batch, timing.host_batch)
