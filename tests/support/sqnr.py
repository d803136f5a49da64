"""The accuracy of a result compared with its reference."""

from __future__ import annotations

import math

from torch import Tensor


def sqnr(actual: Tensor, expected: Tensor) -> float:
    """Signal to quantization noise, in dB."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return 10 * math.log10(expected.square().sum() / (actual - expected).square().sum())
