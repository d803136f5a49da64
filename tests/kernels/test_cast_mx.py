"""The MX casts from their own source on the CPU, bit for bit as their definition says, on every architecture's path."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from by_columns import padded, unpadded
from fp8_numpy import code_values
from host_kernels import Guarded, HostKernel
from mx_numpy import cast_in_mx, in_tiles, scale_exponents
from torch import Tensor

from kernels_cuda import block_casts, casts
from kernels_cuda.casts import SCALE_TILE, column_sum_tiles

INF, NAN = math.inf, math.nan
# two buffers per output, with different initial bytes: an element that differs afterwards was not written
POISONS = (0x11, 0xEE)
ALL = (True, True, True)
CANONICAL = np.where(np.isnan(code_values("e4m3")), 0x7F, np.arange(256)).astype(np.uint8)
# scales by integers, and by the conversion that sm_100 and later have
PATHS: dict[str, tuple[str, ...]] = {"integers": (), "instruction": ("CONVERTS_TO_E8M0=1",)}


def kernel(dtype: torch.dtype, path: str) -> HostKernel:
    defines = (*block_casts.variant(dtype), *PATHS[path])
    return HostKernel(("cast_mx", defines), block_casts.layout(defines), block_casts.THREADS, 0)


def weights_kernel(squares: bool, path: str) -> HostKernel:
    defines = (*casts.weights_variant(squares, mx=True), *PATHS[path])
    return HostKernel(("cast_weights", defines), casts.CAST_WEIGHTS_LAYOUT, block_casts.THREADS, 0)


class Made(NamedTuple):
    """Payloads, their scales in tiles, and column sums of tiles; None if not requested."""

    y: Tensor | None
    scales: Tensor | None
    y_t: Tensor | None
    scales_t: Tensor | None
    sums: Tensor | None


def tile_bytes(x: Tensor) -> int:
    return math.prod(-(-size // 128) for size in x.shape) * SCALE_TILE


def run(x: Tensor, path: str, outputs: tuple[bool, bool, bool] = ALL, offset: int = 0, amax: float = 0.0) -> Made:
    """One cast, run twice, with different initial bytes in all outputs and guards around them."""
    (rows, columns), results = x.shape, []
    by_rows, by_columns, with_sums = outputs
    for poison in POISONS:
        made = [
            Guarded(shape, dtype, poison, at) if requested else None
            for requested, shape, dtype, at in (
                (by_rows, (rows, columns), torch.uint8, offset),
                (by_rows, (tile_bytes(x),), torch.uint8, 0),
                (by_columns, (columns, padded(rows)), torch.uint8, offset),
                (by_columns, (tile_bytes(x),), torch.uint8, 0),
                (with_sums, (column_sum_tiles(rows), columns), torch.float32, 0),
            )
        ]
        of = [None if one is None else one.tensor for one in made]
        recorded = torch.tensor([0.25, amax, 0.25])
        result = block_casts.Result(
            (torch.tensor([1]), recorded),
            (of[0], of[1]) if by_rows else None,
            (of[2], of[3]) if by_columns else None,
            of[4],
        )
        block_casts.cast(kernel(x.dtype, path), x, result)
        assert all(one is None or one.unharmed() for one in made), "written outside of an output"
        largest = np.maximum(x.float().abs().max().item(), amax)
        np.testing.assert_equal(recorded.numpy(), np.float32([0.25, largest, 0.25]))
        results.append(Made(*of))
    for name, first, second in zip(Made._fields, *results, strict=True):
        # as bytes, where NaN equals itself
        same = first is None or first.numpy().tobytes() == second.numpy().tobytes()
        assert same, f"{name}: not all of it is written, or not the same each time"
    return results[0]


def check(x: Tensor, made: Made, squares: bool = False) -> None:
    """Codes, and scales to the last byte of their tiles; all NaN codes count as equal."""
    values = x.float().numpy()
    y_t = None if made.y_t is None else unpadded(made.y_t, len(x))
    for part, payload, tiles in ((values, made.y, made.scales), (values.T, y_t, made.scales_t)):
        if payload is not None:
            codes, scales = cast_in_mx(part, squares)
            np.testing.assert_array_equal(tiles.numpy(), in_tiles(scales))
            np.testing.assert_array_equal(CANONICAL[payload.numpy()], CANONICAL[codes])
    if made.sums is not None:
        for partial, tile in zip(made.sums, x.double().split(128), strict=True):
            bound = tile.abs().sum(0) * len(tile) * 2.0**-24
            assert ((partial.double() - tile.sum(0)).abs() <= bound).all()


def spread(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Blocks of all magnitudes of the dtype, by rows and by columns."""
    most = 3 if dtype == torch.float16 else 12
    factors = [2.0 ** torch.randint(-most, most, shape) for shape in ((rows, 1), (1, columns))]
    return (torch.randn(rows, columns) * factors[0] * factors[1]).to(dtype)


SHAPES = [(1, 1), (128, 128), (129, 127), (40, 300), (257, 16), (256, 384), (31, 33), (130, 70)]


@pytest.mark.parametrize(
    ("dtype", "path"),
    [
        (torch.float32, "integers"),
        (torch.float32, "instruction"),
        (torch.bfloat16, "integers"),
        (torch.float16, "instruction"),
    ],
)
def test_ragged_shapes_distances_and_addresses(dtype: torch.dtype, path: str) -> None:
    for number, (rows, columns) in enumerate(SHAPES):
        wider, shift, offset = [(0, 0, 0), (8, 0, 8), (7, 3, 1)][number % 3]
        storage = spread(rows + 1, columns + wider, dtype).flatten()
        x = storage[shift : shift + rows * (columns + wider)].view(rows, -1)[:, :columns]
        check(x, run(x, path, offset=offset))


def test_every_bf16_number() -> None:
    """In rows of neighbouring values, so that all but two rows are finite; their columns have inf and NaN."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    check(x, run(x, "integers")._replace(sums=None))


@pytest.mark.parametrize("path", PATHS)
def test_every_amax_around_a_power_of_two(path: str) -> None:
    """Those whose quotient by 448 is at, just above or just below a power of two, subnormal ones among them."""
    near = np.float32(448) * np.ldexp(np.float32(1), np.arange(-149, 120))
    amax = np.concatenate([near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(INF)), [3.4e38]])
    # in the first of 32 columns and in the 19th of the next ones
    x = torch.zeros(len(amax), 64)
    x[:, 0] = x[:, 50] = torch.from_numpy(amax.astype(np.float32))
    made = run(x, path)
    check(x, made._replace(sums=None))
    assert {*range(-127, 120)} <= {*scale_exponents(amax).tolist()}


@pytest.mark.parametrize("path", PATHS)
def test_special_blocks(path: str) -> None:
    """Each kind of block next to normal ones: zeros, inf, NaN, the smallest and the largest numbers."""
    for special in (0.0, -0.0, INF, -INF, NAN, 1e-45, 1e-38, 2.0**-127, 3.4e38):
        x = torch.randn(140, 260)
        x[:64, :64] = 0
        # also in a block that codes of zeros complete
        x[5, 7] = x[-1, -1] = special
        check(x, run(x, path, amax=2.0)._replace(sums=None))


@pytest.mark.parametrize("outputs", [one for one in itertools.product((False, True), repeat=3) if any(one[:2])])
def test_each_output_alone(outputs: tuple[bool, bool, bool]) -> None:
    x = spread(130, 140, torch.float32)
    made = run(x, "integers", outputs)
    check(x, made)
    assert [made.y is not None, made.y_t is not None] == list(outputs[:2])


@pytest.mark.parametrize("squares", [False, True])
def test_weights_of_every_dtype_in_one_launch(squares: bool) -> None:
    """Codes, scales, and what is noted of each; and of one that is cast alone, on the other path."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    xs = [spread(*shape, dtypes[number % 3]) for number, shape in enumerate(SHAPES)]
    xs[3][5, 7], xs[4][256, 3] = INF, NAN
    places = [int(place) for place in torch.randperm(len(xs))]
    outputs = [[Guarded(shape, torch.uint8, 0x11) for shape in (x.shape, (x.shape[1], padded(len(x))))] for x in xs]
    jobs = [
        casts.Weight(x, torch.tensor([place]), y.tensor, y_t.tensor)
        for x, place, (y, y_t) in zip(xs, places, outputs, strict=True)
    ]
    amax, scale = torch.full((len(xs),), 1e9), torch.zeros(len(xs))
    for some, path in ((jobs, "integers"), (jobs[-1:], "instruction")):
        table = casts.weight_table(some, squares, mx=True)
        casts.cast_weights(weights_kernel(squares, path), table, scale, amax)
        for (x, index, y, y_t), *tiles in zip(some, table.scale_inv, table.scale_inv_t, strict=True):
            check(x, Made(y, tiles[0], y_t, tiles[1], None), squares)
            largest = x.float().abs().max().numpy()
            np.testing.assert_equal(amax[index].item(), largest.item())
            # as for its largest block
            exponent = int(scale_exponents(largest))
            np.testing.assert_equal(scale[index].item(), NAN if exponent == 128 else 2.0**-exponent)
    assert all(guard.unharmed() for both in outputs for guard in both)
