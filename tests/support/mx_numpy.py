"""MX blocks from their definition, in fp64: 32 numbers with a scale that is a power of two."""

from __future__ import annotations

import numpy as np
from fp8_numpy import code_values, saturating_cast
from torch import Tensor


def scale_exponents(amax: np.ndarray) -> np.ndarray:
    """``ceil(log2(amax * fp32(1/448)))``, at least -127; 128, which is NaN, where that is not finite."""
    with np.errstate(under="ignore", invalid="ignore"):
        mantissas, exponents = np.frexp(amax.astype(np.float32) * np.float32(1 / 448))
    finite = np.where(mantissas == 0, -127, np.maximum(exponents - (mantissas == 0.5), -127))
    return np.where(np.isfinite(amax), finite, 128)


def cast_in_mx(values: np.ndarray, squares: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The codes of ``float32`` numbers cast along their rows or in squares, and the E8M0 codes of the blocks of each
    row, also of rows that complete a square."""
    (rows, columns), down = values.shape, 32 if squares else 1
    padded = np.zeros((-(-rows // down) * down, -(-columns // 32) * 32), np.float32)
    padded[:rows, :columns] = values
    blocks = np.abs(padded).reshape(len(padded) // down, down, padded.shape[1] // 32, 32).max((1, 3))
    exponents = scale_exponents(blocks).repeat(down, 0)
    of_elements = exponents.repeat(32, 1)[:rows, :columns]
    # by a power of two, which rounds nothing that fp32 holds and that is not cast to zero
    with np.errstate(under="ignore", invalid="ignore"):
        scaled = np.ldexp(values.astype(np.float64), -of_elements).astype(np.float32)
    scaled = np.where(of_elements == 128, np.float32("nan"), scaled)
    return saturating_cast(scaled, np.float32(1), "e4m3"), (exponents + 127).astype(np.uint8)


def in_tiles(scales: np.ndarray) -> np.ndarray:
    """Scales ``[rows, blocks]`` in the order of the hardware, as cuBLAS documents it."""
    across = -(-scales.shape[1] // 4)
    tiles = np.zeros(-(-len(scales) // 128) * across * 512, np.uint8)
    r, c = np.indices(scales.shape)
    tiles[512 * (r // 128 * across + c // 4) + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales
    return tiles


def in_mx(x: Tensor, squares: bool = False) -> np.ndarray:
    """A finite tensor quantized along its rows, or in squares, in fp64."""
    codes, scales = cast_in_mx(x.detach().float().numpy(), squares)
    exponents = scales[: len(codes)].astype(np.int64).repeat(32, 1)[:, : codes.shape[1]] - 127
    return np.ldexp(code_values("e4m3")[codes], exponents)
