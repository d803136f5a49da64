"""MX blocks from their definition, in fp64: 32 numbers with a scale that is a power of two."""

from __future__ import annotations

import numpy as np
from fp8_numpy import code_values, saturating_cast
from torch import Tensor


def scale_exponents(amax: np.ndarray) -> np.ndarray:
    """``ceil(log2(amax * fp32(1/448)))``, at least -127; of amaxes that are finite, ``float32``."""
    with np.errstate(under="ignore"):
        mantissas, exponents = np.frexp(amax.astype(np.float32) * np.float32(1 / 448))
    return np.where(mantissas == 0, -127, np.maximum(exponents - (mantissas == 0.5), -127))


def in_mx(x: Tensor, squares: bool = False) -> np.ndarray:
    """A finite tensor quantized along its rows, or in squares, in fp64."""
    values = x.detach().float().numpy()
    (rows, columns), down = values.shape, 32 if squares else 1
    padded = np.zeros((-(-rows // down) * down, -(-columns // 32) * 32), np.float32)
    padded[:rows, :columns] = values
    blocks = np.abs(padded).reshape(len(padded) // down, down, padded.shape[1] // 32, 32).max((1, 3))
    exponents = scale_exponents(blocks).repeat(down, 0).repeat(32, 1)[:rows, :columns]
    # by a power of two, which rounds nothing that fp32 holds
    scaled = np.ldexp(values.astype(np.float64), -exponents).astype(np.float32)
    return np.ldexp(code_values("e4m3")[saturating_cast(scaled, np.float32(1), "e4m3")], exponents)
