"""The cast to FP8 by ``ml_dtypes``: a second oracle in addition to ``fp8_numpy``, independently written."""

from __future__ import annotations

import ml_dtypes
import numpy as np

_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def saturating_cast(x: np.ndarray, scale: np.float32, fmt: str) -> np.ndarray:
    """``sat(x * scale)`` as ``uint8`` codes, with any NaN code for NaN; product in fp32."""
    dtype = _DTYPES[fmt]
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x.astype(np.float32) * np.float32(scale)
        return np.clip(scaled, -largest, largest).astype(dtype).view(np.uint8)
