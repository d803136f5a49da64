"""E8M0, the format of MX scales: a power of two in one byte. In torch's own integer operations, on any device.

A code is a biased exponent: its value is ``2**(code - 127)``, and 255 is NaN. Nothing here depends on how a device
rounds or on whether it flushes subnormal numbers to zero.

Sources: OCP Microscaling Formats (MX) Specification 1.0; Mishra et al., "Recipes for Pre-training LLMs with MXFP8",
arXiv 2506.08027, for the rounding; NVIDIA, cuBLAS, "1D Block Scaling Factors Layout", for the tiles.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.ops.formats import Fp8Format

NAN = 255
# elements along K that share a scale
BLOCK = 32
# the bits of 2**-127, which is subnormal in fp32
_SMALLEST = 0x400000
_MANTISSA = 0x7FFFFF
_INFINITE = 0xFF
# a tile has the scales of this many rows and blocks, as the hardware reads them
TILE_ROWS, TILE_BLOCKS = 128, 4


def codes_of(amax: Tensor, fmt: Fp8Format) -> Tensor:
    """The scale_inv of blocks with these amaxes, ``[*] float32`` -> ``[*] uint8``: ``amax / FP8_MAX`` rounded up.

    Rounding up never clips: the block's largest value is at most ``FP8_MAX`` times the scale. 0 for an amax of 0, NaN
    for a non-finite amax.
    """
    bits = (amax * (1.0 / fmt.max)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & _MANTISSA
    code = exponent + (mantissa > torch.where(exponent == 0, _SMALLEST, 0)).int()
    return torch.where((amax.view(torch.int32) >> 23 & _INFINITE) == _INFINITE, NAN, code).to(torch.uint8)


def values_of(codes: Tensor) -> Tensor:
    """``2**(code - 127)``, ``float32``."""
    return _power_of_2(codes.int())


def multipliers_of(codes: Tensor) -> Tensor:
    """``2**(127 - code)``, ``float32``: what values are multiplied by before they are rounded to FP8."""
    codes = codes.int()
    return _power_of_2(torch.where(codes == NAN, NAN, 254 - codes))


def _power_of_2(codes: Tensor) -> Tensor:
    bits = torch.where(codes == 0, _SMALLEST, codes << 23)
    return torch.where(codes == NAN, bits | _SMALLEST, bits).view(torch.float32)


def size_of_tiles(rows: int, columns: int) -> int:
    """How many bytes the scales of a payload ``[rows, columns]`` take."""
    return _tiles(rows, TILE_ROWS) * _tiles(columns, TILE_BLOCKS * BLOCK) * TILE_ROWS * TILE_BLOCKS


def _tiles(size: int, of: int) -> int:
    return -(-size // of)


def to_tiles(codes: Tensor) -> Tensor:
    """Codes ``[rows, blocks]`` in the order in which the hardware reads them, ``[*] uint8``.

    This is how an operand carries its scales, on every device. Rows are padded to 128 and blocks to 4, with zeros.
    Tiles of 128 x 4 follow each other by rows; within one, the scale of row r and block c is at
    ``(r % 32) * 16 + (r // 32) * 4 + c``.
    """
    rows, blocks = codes.shape
    padded = F.pad(codes, (0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS))
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(3, (-1, TILE_BLOCKS))
    # tile of rows, quarter, row of the quarter, tile of blocks, block
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def from_tiles(tiles: Tensor, rows: int, blocks: int) -> Tensor:
    """The codes ``[rows, blocks]`` of :func:`to_tiles`."""
    down, across = _tiles(rows, TILE_ROWS), _tiles(blocks, TILE_BLOCKS)
    codes = tiles.unflatten(0, (down, across, 32, 4, TILE_BLOCKS)).permute(0, 3, 2, 1, 4)
    return codes.flatten(0, 2).flatten(1)[:rows, :blocks]


def codes_of_powers(values: Tensor) -> Tensor:
    """The codes of powers of two, ``[*] float32``, of at least ``2**-127``. 0 counts as ``2**-127``, because a device
    may flush that value to 0."""
    return (values.view(torch.int32) >> 23).to(torch.uint8)


def squares_to_tiles(codes: Tensor) -> Tensor:
    """:func:`to_tiles` for squares ``[ceil(rows/32), blocks]``, where each code serves 32 rows."""
    return to_tiles(codes.repeat_interleave(BLOCK, 0))


def of_rows(codes: Tensor, rows: int) -> Tensor:
    """Codes for each row, ``[*, rows, blocks]``, from codes for rows or for squares ``[*, ceil(rows/32), blocks]``."""
    return codes if codes.shape[-2] == rows else codes.repeat_interleave(BLOCK, -2)[..., :rows, :]


def of_squares(codes: Tensor) -> Tensor:
    """Codes ``[*, rows, blocks]`` as codes of squares ``[*, ceil(rows/32), blocks]``; unchanged if a square has two.

    Squares have the same codes in both orders of a weight. Waits for a GPU.
    """
    first = codes[..., ::BLOCK, :].contiguous()
    return first if torch.equal(of_rows(first, codes.shape[-2]), codes) else codes


def are_along_rows(scale_inv: Tensor, payload: Tensor) -> bool:
    """Whether a product can sum over the rows of this payload in blocks: not with codes ``[K/32, N]`` of ``[K, N]``."""
    is_matrix = scale_inv.dtype == torch.uint8 and scale_inv.dim() > 1
    return not is_matrix or scale_inv.shape[-1] == _tiles(payload.shape[-1], BLOCK)
