"""The casts in blocks from their sources on the CPU, and what their results are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from by_columns import padded, unpadded
from fp8_numpy import cast_in_blocks, code_values
from host_kernels import Guarded, HostKernel
from mx_numpy import cast_in_mx, in_tiles
from torch import Tensor

from kernels_cuda import block_casts
from kernels_cuda.casts import SCALE_TILE, column_sum_tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# two buffers per output, with different initial bytes: an element that differs afterwards was not written
POISONS = (0x11, 0xEE)
ALL = (True, True, True)
# all NaN codes count as equal
CANONICAL = np.where(np.isnan(code_values("e4m3")), 0x7F, np.arange(256)).astype(np.uint8)


class Kind(NamedTuple):
    """Scales in fp32 for 1 x 128, also rounded down to powers of two, or in E8M0 for 1 x 32, by integers or by the
    conversion that sm_100 and later have.
    """

    family: str
    power_of_two: bool = False
    defines: tuple[str, ...] = ()

    @property
    def in_mx(self) -> bool:
        return self.family == "cast_mx"

    def kernel(self, dtype: torch.dtype, activation: str = "none", backward: bool = False) -> HostKernel:
        defines = (*block_casts.variant(dtype, activation, backward), *self.defines)
        return HostKernel((self.family, defines), block_casts.layout(defines), block_casts.THREADS, 0)

    def scale_shapes(self, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
        """Of scales by rows and by columns, the long dimension last."""
        down, across = -(-rows // 128), -(-columns // 128)
        return ((down * across * SCALE_TILE,),) * 2 if self.in_mx else ((across, rows), (down, columns))


KINDS = {
    "float32": Kind("cast_blocks"),
    "powers of 2": Kind("cast_blocks", True),
    "mx": Kind("cast_mx"),
    "mx by an instruction": Kind("cast_mx", defines=("CONVERTS_TO_E8M0=1",)),
}


class Inputs(NamedTuple):
    """What a variant takes."""

    x: Tensor
    up: Tensor | None = None
    dy: Tensor | None = None


class Made(NamedTuple):
    """One tensor's payloads, their scales, and the column sums of tiles; None if not requested."""

    y: Tensor | None
    scales: Tensor | None
    y_t: Tensor | None
    scales_t: Tensor | None
    sums: Tensor | None
    amax: float


def run(
    kind: Kind,
    inputs: Inputs,
    activation: str = "none",
    outputs: tuple[bool, bool, bool] = ALL,
    offset: int = 0,
    amax: float | None = 0.0,
    poisons: Sequence[int] = POISONS,
) -> list[Made]:
    """One launch, run once for each of the poisons: with different initial bytes in all outputs and guards around them.

    Args:
        kind: of the cast.
        inputs: of the variant, which follows from them.
        activation: of the variant.
        outputs: whether to write by rows, by columns, and column sums.
        offset: bytes by which payloads are off a 16-byte boundary.
        amax: what has been recorded for the second of three tensors; None to record nothing.
        poisons: the initial bytes.
    """
    (x, up, dy), results = inputs, []
    launch, (rows, columns) = kind.kernel(x.dtype, activation, dy is not None), x.shape
    by_rows, by_columns = kind.scale_shapes(rows, columns)
    dtype = torch.uint8 if kind.in_mx else torch.float32
    for poison in poisons:
        guards, given, amaxes = [], [], []
        for _ in range(1 if up is None or dy is None else 2):
            made = [
                Guarded(shape, its, poison, at) if outputs[of] else None
                for of, shape, its, at in (
                    (0, (rows, columns), torch.uint8, offset),
                    (0, by_rows, dtype, 0),
                    (1, (columns, padded(rows)), torch.uint8, offset),
                    (1, by_columns, dtype, 0),
                    (2, (column_sum_tiles(rows), columns), torch.float32, 0),
                )
            ]
            guards += [one for one in made if one is not None]
            y, scales, y_t, scales_t, sums = (None if one is None else one.tensor for one in made)
            # the long dimension is contiguous
            scales, scales_t = (one if one is None or one.dim() == 1 else one.t() for one in (scales, scales_t))
            amaxes.append(torch.tensor([0.25, amax or 0.0, 0.25]))
            recorded = None if amax is None else (torch.tensor([1]), amaxes[-1])
            pairs = (y, scales) if outputs[0] else None, (y_t, scales_t) if outputs[1] else None
            given.append(block_casts.Result(recorded, *pairs, sums))
        if up is None:
            block_casts.cast(launch, x, given[0], dy, power_of_two=kind.power_of_two)
        else:
            block_casts.cast_gated(launch, x, up, given[0], dy, None if dy is None else given[1], kind.power_of_two)
        assert all(one.unharmed() for one in guards), "written outside of an output"
        assert all(one[::2].tolist() == [0.25, 0.25] for one in amaxes)
        nothing = None, None
        results.append([
            Made(*(one.by_rows or nothing), *(one.by_columns or nothing), one.column_sums, its[1].item())
            for one, its in zip(given, amaxes, strict=True)
        ])  # fmt: skip
    for first, second in zip(results[0], results[-1], strict=True):
        for name, one, other in zip(Made._fields[:-1], first[:-1], second[:-1], strict=True):
            # as bytes, where NaN equals itself
            same = one is None or one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()
            assert same, f"{name}: not all of it is written, or not the same each time"
    return results[0]


def check(kind: Kind, values: Tensor, made: Made, squares: bool = False, canonical: np.ndarray = CANONICAL) -> None:
    """Codes, scales and sums of the requested outputs, bit for bit; those of a weight in squares or not."""
    v = values.float().numpy()
    y_t = None if made.y_t is None else unpadded(made.y_t, len(v))
    for part, payload, scales in ((v, made.y, made.scales), (v.T, y_t, made.scales_t)):
        if payload is None:
            continue
        if kind.in_mx:
            codes, inverse = cast_in_mx(part, squares)
            inverse = in_tiles(inverse)
        else:
            codes, inverse = cast_in_blocks(part, "e4m3", 128 if squares else 1, power_of_2=kind.power_of_two)
        np.testing.assert_array_equal(scales.numpy(), inverse)
        np.testing.assert_array_equal(canonical[payload.numpy()], canonical[codes])
    for partial, tile in zip(made.sums, values.double().split(128), strict=True) if made.sums is not None else ():
        bound = tile.abs().sum(0) * len(tile) * 2.0**-24
        assert ((partial.double() - tile.sum(0)).abs() <= bound).all()


def spread(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Blocks of all magnitudes of the dtype, by rows and by columns."""
    most = 3 if dtype == torch.float16 else 12
    factors = [2.0 ** torch.randint(-most, most, shape) for shape in ((rows, 1), (1, columns))]
    return (torch.randn(rows, columns) * factors[0] * factors[1]).to(dtype)
