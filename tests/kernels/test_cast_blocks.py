"""The block casts from their own source on the CPU, compared bit for bit with FP8's definition."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from by_columns import padded, unpadded
from fp8_numpy import cast_in_blocks, code_values
from host_kernels import Guarded, HostKernel
from torch import Tensor

from kernels_cuda import block_casts, casts
from kernels_cuda.block_casts import BLOCK
from kernels_cuda.casts import column_sum_tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT_MAX = np.finfo(np.float32).max
INF, NAN = math.inf, math.nan
# two buffers per output, with different initial bytes: an element that differs afterwards was not written
POISONS = (0x11, 0xEE)
ALL = (True, True, True)


def kernel(dtype: torch.dtype) -> HostKernel:
    defines = block_casts.variant(dtype)
    return HostKernel(("cast_blocks", defines), block_casts.layout(defines), block_casts.THREADS, 0)


def square_kernel() -> HostKernel:
    family = ("cast_weights", casts.weights_variant(True))
    return HostKernel(family, casts.CAST_WEIGHTS_LAYOUT, block_casts.THREADS, 0)


class Recorded(NamedTuple):
    """Index and arenas; the scale of squares only."""

    index: Tensor  # type: ignore[assignment]
    amax: Tensor
    scale: Tensor


class Blocks(NamedTuple):
    """Payloads, their scale_inv, and column sums of tiles; None if not requested."""

    y: Tensor | None
    scale_inv: Tensor | None
    y_t: Tensor | None
    scale_inv_t: Tensor | None
    sums: Tensor | None


def recorded(amax: float = 0.0) -> Recorded:
    """The second of three tensors; nothing else is touched."""
    return Recorded(torch.tensor([1]), torch.tensor([0.25, amax, 0.25]), torch.tensor([7.0, 7.0, 7.0]))


def run(
    x: Tensor,
    record: Recorded | None = None,
    power_of_two: bool = False,
    square: bool = False,
    outputs: tuple[bool, bool, bool] = ALL,
    offset: int = 0,
) -> Blocks:
    """One cast, run twice, with different initial bytes in all outputs and guards around them."""
    (rows, columns), results = x.shape, []
    across, down = -(-columns // BLOCK), -(-rows // BLOCK)
    by_rows, by_columns, sums = outputs
    shapes = {
        "y": (rows, columns) if by_rows else None,
        # the long dimension is contiguous
        "scale_inv": (across, rows) if by_rows and not square else None,
        "y_t": (columns, padded(rows)) if by_columns else None,
        "scale_inv_t": (down, columns) if by_columns and not square else None,
        "sums": (column_sum_tiles(rows), columns) if sums and not square else None,
    }
    for poison in POISONS:
        made = {
            name: None
            if shape is None
            else Guarded(shape, *(((torch.uint8, poison, offset)) if name.startswith("y") else (torch.float32, poison)))
            for name, shape in shapes.items()
        }
        of = {name: None if one is None else one.tensor for name, one in made.items()}
        again = None if record is None else Recorded(*(tensor.clone() for tensor in record))
        if square:
            index, amax, scale = again or (None, None, None)
            table = casts.weight_table([casts.Weight(x, index, of["y"], of["y_t"])], squares=True)
            casts.cast_weights(square_kernel(), table, scale, amax, power_of_two)
            of["scale_inv"], of["scale_inv_t"] = table.scale_inv[0], table.scale_inv[0].t()
        else:
            of["scale_inv"], of["scale_inv_t"] = (
                None if one is None else one.t() for one in (of["scale_inv"], of["scale_inv_t"])
            )
            result = block_casts.Result(
                None if again is None else again[:2],
                (of["y"], of["scale_inv"]),
                (of["y_t"], of["scale_inv_t"]),
                of["sums"],
            )
            block_casts.cast(kernel(x.dtype), x, result, power_of_two=power_of_two)
        assert all(one is None or one.unharmed() for one in made.values()), "written outside of an output"
        results.append((Blocks(**of), again))
    for name, first, second in zip(Blocks._fields, *(result for result, _ in results), strict=True):
        # as bytes, where NaN equals itself
        same = first is None or first.numpy().tobytes() == second.numpy().tobytes()
        assert same, f"{name}: not all of it is written, or not the same each time"
    if record is not None:
        for tensor, made_of_it in zip(record, results[0][1], strict=True):
            tensor.copy_(made_of_it)
    made = results[0][0]
    return made._replace(y_t=None if made.y_t is None else unpadded(made.y_t, rows))


CANONICAL = np.where(np.isnan(code_values("e4m3")), 0x7F, np.arange(256)).astype(np.uint8)


def check(x: Tensor, blocks: Blocks, power_of_two: bool = False, square: bool = False) -> None:
    """Codes and scales of the requested outputs, bit for bit; all NaN codes count as equal."""
    values = x.float().numpy()
    one = cast_in_blocks(values, "e4m3", BLOCK if square else 1, power_of_2=power_of_two)
    # the payload by columns is a separate cast, except for squares
    other = tuple(part.T for part in one) if square else cast_in_blocks(values.T, "e4m3", 1, power_of_2=power_of_two)
    for (codes, scale_inv), payload, inverse in (
        (one, blocks.y, blocks.scale_inv),
        (other, blocks.y_t, blocks.scale_inv_t),
    ):
        if payload is not None:
            np.testing.assert_array_equal(CANONICAL[payload.numpy()], CANONICAL[codes])
            np.testing.assert_array_equal(inverse.numpy(), scale_inv)
    if blocks.sums is not None:
        for partial, tile in zip(blocks.sums, x.double().split(BLOCK), strict=True):
            bound = tile.abs().sum(0) * len(tile) * 2.0**-24
            assert ((partial.double() - tile.sum(0)).abs() <= bound).all()


def spread(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Blocks of all magnitudes of the dtype, by rows and by columns."""
    most = 3 if dtype == torch.float16 else 12
    factors = [2.0 ** torch.randint(-most, most, shape) for shape in ((rows, 1), (1, columns))]
    return (torch.randn(rows, columns) * factors[0] * factors[1]).to(dtype)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("square", [False, True])
def test_ragged_shapes_distances_and_addresses(square: bool, power_of_two: bool) -> None:
    shapes = [(1, 1), (128, 128), (129, 127), (40, 300), (257, 16), (256, 384)]
    for number, (rows, columns) in enumerate(shapes):
        # fp32 in both kinds, bf16 in one and fp16 in the other, because each variant takes long to compile
        dtype = DTYPES[2 * (number % 2) if square else number % 2]
        wider, shift, offset = [(0, 0, 0), (8, 0, 8), (7, 3, 1)][number % 3]
        storage = spread(rows + 1, columns + wider, dtype).flatten()
        x = storage[shift : shift + rows * (columns + wider)].view(rows, -1)[:, :columns]
        record = recorded()
        check(x, run(x, record, power_of_two, square, offset=offset), power_of_two, square)
        largest = x.float().abs().max()
        assert record.amax.tolist() == [0.25, largest.item(), 0.25]
        # the scale of the weight as a whole; the others have none
        whole = cast_in_blocks(largest.numpy()[None, None], "e4m3", 1, power_of_2=power_of_two)[1].item()
        assert 1 / record.scale[1] == (whole if square else np.float32(1) / 7)


def test_every_bf16_number() -> None:
    """In rows of neighbouring values, so that all but two rows are finite; their columns have inf and NaN."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    blocks = run(x)
    check(x, blocks._replace(sums=None))


@pytest.mark.parametrize("square", [False, True])
def test_special_blocks(square: bool) -> None:
    """Each kind of block next to a normal one: zeros, inf, NaN, the smallest and the largest numbers."""
    for special in (0.0, -0.0, INF, -INF, NAN, 1e-45, 1e-38, float(FLOAT_MAX)):
        for power_of_two in (False, True)[: 1 + (special == 0)]:
            x = torch.randn(140, 260)
            x[:128, :128] = 0
            x[5, 7] = special
            record = recorded(amax=2.0)
            blocks = run(x, record, power_of_two, square)
            check(x, blocks._replace(sums=None), power_of_two, square)
            largest = np.abs(x.numpy()).max()
            # an input's maximum is combined with that of the step, a weight's is its current one
            np.testing.assert_equal(
                record.amax[1].item(), largest.item() if square else np.maximum(largest, 2.0).item()
            )


@pytest.mark.parametrize("outputs", [one for one in itertools.product((False, True), repeat=3) if any(one[:2])])
def test_each_output_alone(outputs: tuple[bool, bool, bool]) -> None:
    for square in (False, True):
        x = spread(130, 140, torch.float32)
        blocks = run(x, None, square=square, outputs=outputs)
        check(x, blocks, square=square)
        assert [blocks.y is not None, blocks.y_t is not None] == list(outputs[:2])


@pytest.mark.parametrize("power_of_two", [False, True])
def test_squares_of_many_weights_in_one_launch(power_of_two: bool) -> None:
    """Each as if alone: codes, scales, and what is noted."""
    shapes = [(1, 1), (128, 128), (129, 257), (40, 300), (300, 16), (256, 384)]
    xs = [spread(*shape, DTYPES[number % 3]) for number, shape in enumerate(shapes)]
    xs[3][5, 7], xs[4][299, 3] = INF, NAN
    places = [int(place) for place in torch.randperm(len(xs))]
    made = [[Guarded(shape, torch.uint8, 0x11) for shape in (x.shape, (x.shape[1], padded(len(x))))] for x in xs]
    weights = [
        casts.Weight(x, torch.tensor([place]), y.tensor, y_t.tensor)
        for x, place, (y, y_t) in zip(xs, places, made, strict=True)
    ]
    table = casts.weight_table(weights, squares=True)
    amax, scale = torch.full((len(xs),), 1e9), torch.zeros(len(xs))
    casts.cast_weights(square_kernel(), table, scale, amax, power_of_two)
    for x, place, weight, inverse, guards in zip(xs, places, weights, table.scale_inv, made, strict=True):
        assert all(guard.unharmed() for guard in guards)
        y_t = unpadded(weight.y_t, len(x))
        check(x, Blocks(weight.y, inverse, y_t, inverse.t(), None), power_of_two, square=True)
        alone = recorded()
        run(x, alone, power_of_two, square=True)
        np.testing.assert_equal([amax[place].item(), scale[place].item()], [one[1].item() for one in alone[1:]])
