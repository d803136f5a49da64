"""The setting ``min_features``: the smallest size of a linear layer that runs in FP8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


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
    """ValueError for a setting ``min_features`` that is not an integer of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"`min_features` must be an integer of at least 0, got {value!r}.")


def too_small(sizes: Sequence[Sizes], min_features: int) -> str | None:
    """Which of a layer's weights are too small for FP8, as a reason not to convert it; None if none are."""
    below = [str(one) for one in sizes if min(one) < min_features]
    if not below:
        return None
    return f"fewer than {min_features} features: {' and '.join(below)} (min_features={min_features})"
