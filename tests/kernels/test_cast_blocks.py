"""The block and MX casts from their own sources on the CPU, compared bit for bit with their definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from block_casts_on_host import DTYPES, KINDS, POISONS, Inputs, Kind, Made, check, run, spread
from by_columns import padded
from fp8_numpy import cast_in_blocks
from host_kernels import Guarded, HostKernel
from mx_numpy import scale_exponents
from torch import Tensor

from kernels_cuda import block_casts, casts

INF, NAN = math.inf, math.nan
SHAPES = [(1, 1), (128, 128), (129, 127), (40, 300), (257, 16), (256, 384), (31, 33), (130, 70)]
# the smallest and the largest numbers among them
SPECIAL = (0.0, -0.0, INF, -INF, NAN, 1e-45, 1e-38, 2.0**-127, float(np.finfo(np.float32).max))


def cast(kind: Kind, x: Tensor, offset: int = 0, amax: float = 0.0) -> Made:
    """All outputs, and the amax, combined with that of the step."""
    (made,) = run(kind, Inputs(x), offset=offset, amax=amax)
    np.testing.assert_equal(np.float32(made.amax), np.maximum(x.float().abs().max().numpy(), np.float32(amax)))
    return made


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("float32", torch.float32),
        ("powers of 2", torch.float32),
        ("float32", torch.bfloat16),
        ("powers of 2", torch.bfloat16),
        ("mx", torch.float32),
        ("mx by an instruction", torch.float32),
        ("mx", torch.bfloat16),
        ("mx by an instruction", torch.float16),
    ],
)
def test_ragged_shapes_distances_and_addresses(kind: str, dtype: torch.dtype) -> None:
    for number, (rows, columns) in enumerate(SHAPES):
        wider, shift, offset = [(0, 0, 0), (8, 0, 8), (7, 3, 1)][number % 3]
        storage = spread(rows + 1, columns + wider, dtype).flatten()
        x = storage[shift : shift + rows * (columns + wider)].view(rows, -1)[:, :columns]
        check(KINDS[kind], x, cast(KINDS[kind], x, offset))


@pytest.mark.parametrize("kind", ["float32", "mx"])
def test_every_bf16_number(kind: str) -> None:
    """In rows of neighbouring values, so that all but two rows are finite; their columns have inf and NaN."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    check(KINDS[kind], x, cast(KINDS[kind], x)._replace(sums=None))


@pytest.mark.parametrize("kind", ["mx", "mx by an instruction"])
def test_every_amax_around_a_power_of_two(kind: str) -> None:
    """Those whose quotient by 448 is at, just above or just below a power of two, subnormal ones among them."""
    near = np.float32(448) * np.ldexp(np.float32(1), np.arange(-149, 120))
    amax = np.concatenate([near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(INF)), [3.4e38]])
    # in the first of 32 columns and in the 19th of the next ones
    x = torch.zeros(len(amax), 64)
    x[:, 0] = x[:, 50] = torch.from_numpy(amax.astype(np.float32))
    check(KINDS[kind], x, cast(KINDS[kind], x)._replace(sums=None))
    assert {*range(-127, 120)} <= {*scale_exponents(amax).tolist()}


@pytest.mark.parametrize("kind", KINDS)
def test_special_blocks(kind: str) -> None:
    """Each kind of block next to normal ones, also one that codes of zeros complete."""
    for special in SPECIAL:
        x = torch.randn(140, 260)
        x[:128, :128] = 0
        x[5, 7] = x[-1, -1] = special
        check(KINDS[kind], x, cast(KINDS[kind], x, amax=2.0)._replace(sums=None))


@pytest.mark.parametrize("kind", ["float32", "mx"])
def test_each_output_alone(kind: str) -> None:
    x = spread(130, 140, torch.float32)
    for outputs in itertools.product((False, True), repeat=3):
        if any(outputs[:2]):
            (made,) = run(KINDS[kind], Inputs(x), outputs=outputs, amax=None)
            check(KINDS[kind], x, made)
            assert [one is not None for one in (made.y, made.y_t, made.sums)] == list(outputs)
            assert made.amax == 0


def weights_kernel(squares: bool, kind: Kind) -> HostKernel:
    defines = (*casts.weights_variant(squares, kind.in_mx), *kind.defines)
    return HostKernel(("cast_weights", defines), casts.CAST_WEIGHTS_LAYOUT, block_casts.THREADS, 0)


def inverse_of(largest: np.ndarray, kind: Kind) -> np.ndarray:
    """Of a weight as a whole: as for its largest block."""
    if not kind.in_mx:
        return cast_in_blocks(largest[None, None], "e4m3", 1, power_of_2=kind.power_of_two)[1].reshape(())
    exponent = int(scale_exponents(largest))
    return np.float32(NAN if exponent == 128 else 2.0**exponent)


@pytest.mark.parametrize(("kind", "squares"), [("float32", True), ("powers of 2", True), ("mx", False), ("mx", True)])
def test_weights_of_every_dtype_in_one_launch(kind: str, squares: bool) -> None:
    """Codes, scales, and what is noted of each; and of one that is cast alone, in MX by the instruction."""
    xs = [spread(*shape, DTYPES[number % 3]) for number, shape in enumerate(SHAPES)]
    for special in SPECIAL:
        xs.append(torch.randn(140, 260))
        xs[-1][:128, :128] = 0
        xs[-1][5, 7] = special
    places = [int(place) for place in torch.randperm(len(xs))]
    for poison in POISONS:
        shapes = [(x.shape, (x.shape[1], padded(len(x)))) for x in xs]
        outputs = [[Guarded(shape, torch.uint8, poison) for shape in both] for both in shapes]
        jobs = [
            casts.Weight(x, torch.tensor([place]), y.tensor, y_t.tensor)
            for x, place, (y, y_t) in zip(xs, places, outputs, strict=True)
        ]
        amax, scale = torch.full((len(xs),), 1e9), torch.zeros(len(xs))
        alone = KINDS["mx by an instruction"] if kind == "mx" else KINDS[kind]
        for some, its in ((jobs, KINDS[kind]), (jobs[3:4], alone)):
            table = casts.weight_table(some, squares, mx=its.in_mx)
            casts.cast_weights(weights_kernel(squares, its), table, scale, amax, its.power_of_two)
            for (x, index, y, y_t), *scales in zip(some, table.scale_inv, table.scale_inv_t, strict=True):
                check(its, x, Made(y, scales[0], y_t, scales[1], None, 0.0), squares)
                largest = x.float().abs().max().numpy()
                np.testing.assert_equal(amax[index].item(), largest.item())
                np.testing.assert_equal((1 / scale[index]).item(), inverse_of(largest, its).item())
        assert all(guard.unharmed() for both in outputs for guard in both)
