"""FP8 from its definition, in numpy and independent of torch: every code's value, and rounding to the nearest value."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

# exponent bits, mantissa bits, bias, largest finite value, and whether the top exponent holds inf and NaN as in IEEE
DEFINITIONS = {"e4m3": (4, 3, 7, 448.0, False), "e5m2": (5, 2, 15, 57344.0, True)}


def code_values(fmt: str) -> np.ndarray:
    """The values of the 256 codes, ``[256] float64``, NaN and inf included."""
    exponent_bits, mantissa_bits, bias, _, ieee = DEFINITIONS[fmt]
    values = np.empty(256)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code & 0x7F) >> mantissa_bits
        mantissa = code & ((1 << mantissa_bits) - 1)
        top = exponent == (1 << exponent_bits) - 1
        if ieee and top:
            values[code] = sign * np.inf if mantissa == 0 else np.nan
        elif not ieee and top and mantissa == (1 << mantissa_bits) - 1:
            values[code] = np.nan
        elif exponent == 0:
            values[code] = sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            values[code] = sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
    return values


def cast_in_blocks(
    x: np.ndarray, fmt: str, rows: int, columns: int = 128, power_of_2: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``uint8`` and inverse scales ``float32``, ``[ceil(M / rows), ceil(K / columns)]``: each block is scaled by
    the format's largest value over its own, or by 1 if it holds inf or NaN.
    """
    scales = np.ones((-(-x.shape[0] // rows), -(-x.shape[1] // columns)), np.float32)
    for i, j in np.ndindex(*scales.shape):
        at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        amax = np.abs(x[at]).max().astype(np.float32)
        if np.isfinite(amax):
            with np.errstate(divide="ignore", over="ignore"):
                scales[i, j] = np.minimum(np.float32(DEFINITIONS[fmt][3]) / amax, np.finfo(np.float32).max)
    if power_of_2:
        scales = np.ldexp(np.float32(1), np.frexp(scales)[1] - 1)
    of_elements = scales.repeat(rows, 0).repeat(columns, 1)[: x.shape[0], : x.shape[1]]
    return saturating_cast(x, of_elements, fmt), np.float32(1) / scales


def saturating_cast(x: np.ndarray, scale: np.float32 | np.ndarray, fmt: str) -> np.ndarray:
    """``sat(x * scale)`` as ``uint8`` codes: product in fp32, nearest value, ties to the even code; NaN is 0x7F."""
    maximum = DEFINITIONS[fmt][3]
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x.astype(np.float32) * np.float32(scale)
    magnitude = np.minimum(np.abs(scaled), np.float32(maximum)).astype(np.float64)
    positive = code_values(fmt)[:128]
    finite = positive[np.isfinite(positive)]  # in ascending order, so that the index is the code
    upper = np.clip(np.searchsorted(finite, np.nan_to_num(magnitude)), 0, len(finite) - 1)
    lower = np.maximum(upper - 1, 0)
    to_upper, to_lower = finite[upper] - magnitude, magnitude - finite[lower]
    codes = np.where((to_upper < to_lower) | ((to_upper == to_lower) & (upper % 2 == 0)), upper, lower)
    codes = np.where(magnitude == finite[upper], upper, codes).astype(np.uint8)
    codes = codes | (np.signbit(scaled).astype(np.uint8) << 7)
    return np.where(np.isnan(scaled), 0x7F, codes).astype(np.uint8)


def power_of_two_below(amax: float, fmt: str) -> float:
    """The largest power of two that amax times is at most FP8_MAX, exactly; at most 2^127, and 1 for 0, inf and NaN."""
    if not amax or not math.isfinite(amax):
        return 1.0
    quotient = Fraction(float(DEFINITIONS[fmt][3])) / Fraction(amax)
    exponent = quotient.numerator.bit_length() - quotient.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > quotient
    return 2.0 ** min(exponent, 127)
