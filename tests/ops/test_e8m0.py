"""The scales of MX blocks and their order in memory, against their definition and torchao."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.utils import to_blocked

from lightning_fp8.ops import e8m0
from lightning_fp8.ops.formats import E4M3

# every non-negative bf16 number, infinity and NaN
BF16 = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def rounded_up(amax: float) -> int:
    """The least code whose value is at least ``amax * fp32(1/448)``, that product rounded to fp32."""
    if not math.isfinite(amax):
        return 255
    with np.errstate(under="ignore"):
        mantissa, exponent = math.frexp(float(np.float32(amax) * np.float32(1 / 448)))
    # the number is mantissa * 2**exponent, with a mantissa of 0.5 to 1
    return max(0, 127 + exponent - (mantissa == 0.5)) if mantissa else 0


def codes_of_torchao(amax: Tensor) -> Tensor:
    x = torch.zeros(len(amax), 32, dtype=amax.dtype)
    x[:, 7] = amax
    return to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)[0].view(torch.uint8).flatten()


def test_worked_cases() -> None:
    amax = torch.tensor([448.0, 449.0, 150.0, 0.0, float("inf"), float("nan")])
    assert e8m0.codes_of(amax, E4M3).tolist() == [127, 128, 126, 0, 255, 255]


def test_every_bf16_amax() -> None:
    codes = e8m0.codes_of(BF16.float(), E4M3)
    assert codes.tolist() == [rounded_up(amax) for amax in BF16.tolist()]
    # torchao makes the scale of a block with an infinity 2**127, so that its other values become zeros
    assert BF16[codes != codes_of_torchao(BF16)].tolist() == [float("inf")]


def test_around_every_power_of_2() -> None:
    """Neighbours of ``448 * 2**exponent`` and of ``2**exponent`` in fp32, subnormal ones among them."""
    for exponent in range(-149, 128):
        near = np.float32([2.0**exponent, min(448 * 2.0**exponent, 3.4e38)])
        amax = np.concatenate([near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(3.4e38))])
        codes = e8m0.codes_of(torch.from_numpy(amax), E4M3)
        assert codes.tolist() == [rounded_up(float(one)) for one in amax], exponent


def test_values_and_multipliers() -> None:
    codes = torch.arange(256).to(torch.uint8)
    values, multipliers = e8m0.values_of(codes).double(), e8m0.multipliers_of(codes).double()
    exponents = torch.arange(255, dtype=torch.float64) - 127
    assert torch.equal(values[:-1], 2.0**exponents)
    assert torch.equal(multipliers[:-1], 2.0**-exponents)
    assert values[-1].isnan()
    assert multipliers[-1].isnan()


@pytest.mark.parametrize("shape", [(1, 1), (31, 3), (128, 4), (129, 4), (300, 13), (0, 4), (5, 0)])
def test_tiles(shape: tuple[int, int]) -> None:
    rows, blocks = shape
    codes = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tiles = e8m0.to_tiles(codes)
    assert torch.equal(e8m0.from_tiles(tiles, *shape), codes)
    assert tiles.shape == (-(-rows // 128) * 128 * -(-blocks // 4) * 4,)
    if codes.numel():
        assert torch.equal(tiles, to_blocked(codes))
    across = -(-blocks // 4)
    for r in range(0, rows, 7):
        for c in range(blocks):
            tile = 512 * (r // 128 * across + c // 4)
            assert tiles[tile + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] == codes[r, c]
