"""The suites: the cases of each, and how they are timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks import blocks, cast, gemm, launch, layer, linear, train
from benchmarks.case import Case
from benchmarks.trainer_precisions import REFERENCE, summary


class Suite(NamedTuple):
    """A suite of cases, and how they are timed.

    Attributes:
        cases: gives all cases for a device; small ones on the CPU.
        timed: ``"device"``, ``"kernels"``, ``"host"`` or ``"iterations"``, see
            :func:`benchmarks.clock.clock`; ``"steps"`` or ``"steps alone"``, see
            :func:`benchmarks.steps.time_in_turns`. Iterations and steps run with gradients, the others do not.
        baseline: prefix of the name of the variant that a plot compares with.
        copy_is_ceiling: whether the ceiling is the bandwidth of one large copy.
        summary: all rows -> a last line, or None if there is nothing to summarize.
    """

    cases: Callable[[torch.device], list[Case]]
    timed: str
    baseline: str
    copy_is_ceiling: bool = False
    summary: Callable[[list[dict[str, Any]]], str | None] | None = None


SUITES = {
    "cast": Suite(cast.cases, "device", "torch.compile", copy_is_ceiling=True),
    "gemm": Suite(gemm.cases, "kernels", "cublaslt", summary=gemm.summary),
    "blocks": Suite(blocks.cases, "kernels", "torch"),
    "launch": Suite(launch.cases, "host", "driver"),
    "linear": Suite(linear.cases, "iterations", "bf16 autocast"),
    "layer": Suite(layer.cases, "steps", REFERENCE, summary=summary),
    "train": Suite(train.cases, "steps alone", REFERENCE, summary=summary),
}
