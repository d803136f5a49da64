"""The setting ``min_features``: the smallest size of a linear layer that runs in FP8, given or measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from lightning_fp8.modules.base import Settings
from lightning_fp8.ops.cuda import gemm_table
from lightning_fp8.runtime.warn_once import warn_once

MinFeatures = int | Literal["auto"]
# Per token, FP8 saves 6 N K (1 / 790e12 - 1 / 1400e12) seconds of GEMMs at the FLOP/s that an H200 reaches in bf16 and
# in FP8, and its casts move 4 bytes for each of the K + N elements of x and dy at 4.3e12 bytes/s: square layers break
# even at 562 features. Launches and the weights' casts are not included, hence the margin.
ESTIMATE = 1024


class Sizes(NamedTuple):
    """The sizes of one GEMM weight.

    Attributes:
        inputs: K, the dimension that is summed over.
        outputs: N.
    """

    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.inputs} -> {self.outputs}"


def check_min_features(value: Any) -> None:
    """ValueError for a setting ``min_features`` that is neither ``"auto"`` nor an integer of at least 0."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not is_count and not (isinstance(value, str) and value == "auto"):
        raise ValueError(f"`min_features` must be an integer of at least 0 or 'auto', got {value!r}.")


def as_number(min_features: MinFeatures) -> int:
    """The setting as a number: ``"auto"`` is measured or estimated for the current CUDA device; 16 without one.

    It uses the current device, not the model's, because a model is converted before it is moved. An estimate warns
    once.

    Raises:
        ValueError: for a value that :func:`check_min_features` refuses.
    """
    check_min_features(min_features)
    if min_features != "auto":
        return min_features
    # on a CPU, FP8 is a reference implementation and not faster at any size
    if not torch.cuda.is_available():
        return Settings().min_features
    gpu = torch.cuda.get_device_name()
    measured = gemm_table.min_features(gpu)
    if measured is None:
        warn_once(
            f'`min_features="auto"` is {ESTIMATE} on {gpu}, an estimate from the speeds of an H200: the size from'
            " which FP8 is faster has not been measured on this GPU; `python -m lightning_fp8 tune --min-features`"
            " measures it."
        )
        return ESTIMATE
    return measured


def as_agreed_number(min_features: MinFeatures) -> int:
    """:func:`as_number`; for ``"auto"`` the largest over all processes, all of which must call it.

    Tables may differ between machines, but all must run the same layers in FP8.
    """
    number = as_number(min_features)
    if min_features != "auto" or not (dist.is_available() and dist.is_initialized()):
        return number
    numbers = [number] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return max(numbers)


def too_small(sizes: Sequence[Sizes], min_features: int) -> str | None:
    """Which of a layer's weights are too small for FP8, as a reason not to convert it; None if none are."""
    below = [str(one) for one in sizes if min(one) < min_features]
    if not below:
        return None
    return f"fewer than {min_features} features: {' and '.join(below)} (min_features={min_features})"
