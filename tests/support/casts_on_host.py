"""The cast kernels from their sources on the CPU, and what their results are compared with."""

from __future__ import annotations

import math
from typing import NamedTuple

import fp8_ml_dtypes
import numpy as np
import torch
from by_columns import padded, unpadded
from fp8_numpy import DEFINITIONS, code_values, saturating_cast
from host_kernels import Guarded, HostKernel
from torch import Tensor

from kernels_cuda import casts
from kernels_cuda.casts import Result, column_sum_tiles, variant
from lightning_fp8.ops import arithmetic
from lightning_fp8.ops.formats import FORMATS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT_MAX = torch.finfo(torch.float32).max
INF, NAN = math.inf, math.nan
NO_PAYLOAD = torch.empty(0, dtype=torch.uint8)
# two buffers per output, with different initial bytes: an element that differs afterwards was not written
POISONS = (0x11, 0xEE)


def cast_kernel(*chosen: object) -> HostKernel:
    defines = variant(*chosen)  # type: ignore[arg-type]
    return HostKernel(("cast_transpose", defines), casts.layout(defines), casts.THREADS, 0)


class Outputs(NamedTuple):
    y: Tensor | None
    y_t: Tensor | None
    sums: Tensor | None
    scale_inv: Tensor


def place(scale: Tensor, newest: Tensor, row: int, amax: Tensor | None, current: Tensor | None = None) -> Result:
    """A tensor in that row of the state, whose cast has no outputs yet."""
    return Result(scale, newest, torch.tensor([row]), amax, NO_PAYLOAD, NO_PAYLOAD, NO_PAYLOAD, None, current)


def run(
    x: Tensor,
    fmt: str,
    row: Result,
    activation: str = "none",
    dy: Tensor | None = None,
    outputs: tuple[bool, bool, bool] = (True, True, False),
    offset: int = 0,
) -> Outputs:
    """One variant over x, run twice, with different initial bytes in all outputs and guards around them.

    Args:
        x: the tensor to cast.
        fmt: the FP8 format.
        row: the place of x in the state, see :func:`place`.
        activation: of the variant.
        dy: for a backward variant.
        outputs: whether to write by rows, by columns, and column sums.
        offset: bytes by which both payloads are off a 16-byte boundary.
    """
    gated, backward = activation == "swiglu", dy is not None
    rows, width = x.shape[0], x.shape[1] // 2 if gated and not backward else x.shape[1]
    shapes = ((rows, width), (width, padded(rows)), (column_sum_tiles(rows), width))
    kernel, results = cast_kernel(x.dtype, fmt, activation, backward), []
    for poison in POISONS:
        y, y_t = (Guarded(shape, torch.uint8, poison, offset) if on else None for shape, on in zip(shapes, outputs[:2]))
        sums = Guarded(shapes[2], torch.float32, poison) if outputs[2] else None
        scale_inv = Guarded((), torch.float32, poison)
        tensors = [None if out is None else out.tensor for out in (y, y_t, sums, scale_inv)]
        written = dict(zip(("y", "y_t", "column_sums", "scale_inv"), tensors))
        if row.current_amax is not None:
            row.current_amax.zero_()
        casts.cast_transpose(kernel, x, row._replace(**written), dy, gated)
        assert all(out is None or out.unharmed() for out in (y, y_t, sums, scale_inv)), "written outside of an output"
        results.append(Outputs(*tensors))
    for name, first, second in zip(Outputs._fields, *results):
        # as bytes, where NaN equals itself
        same = first is None or first.numpy().tobytes() == second.numpy().tobytes()
        assert same, f"{name}: not all of it is written, or not the same each time"
    y, y_t, sums, scale_inv = results[0]
    return Outputs(y, None if y_t is None else unpadded(y_t, rows), sums, scale_inv)


def delayed(scale: float, amax: Tensor | None = None) -> Result:
    """The second of three tensors, which has a history; the others must not be read."""
    wrong = 1e-3
    return place(torch.tensor([wrong, scale, wrong]), torch.tensor([0.0, 1.0, 0.0]), 1, amax)


def assert_codes(payload: Tensor, x: Tensor, scale: float | Tensor, fmt: str) -> None:
    """Codes equal those of FP8's definition, by ``ml_dtypes``, and of the reference; all NaN codes count as equal."""
    canonical = torch.from_numpy(np.where(np.isnan(code_values(fmt)), 0x7F, np.arange(256)).astype(np.uint8))
    from_definition, by_ml_dtypes = (
        torch.from_numpy(oracle(x.float().numpy(), np.float32(scale), fmt))
        for oracle in (saturating_cast, fp8_ml_dtypes.saturating_cast)
    )
    of_reference = arithmetic.saturated(x, torch.as_tensor(scale, dtype=torch.float32), FORMATS[fmt])
    for expected in (from_definition, by_ml_dtypes, of_reference):
        torch.testing.assert_close(canonical[payload.int()], canonical[expected.int()], rtol=0, atol=0)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_sums(sums: Tensor, v: Tensor) -> None:
    """Each row of sums adds 128 rows of v in fp32: 127 additions, each with an error of at most half a unit."""
    for partial, block in zip(sums, v.double().split(casts.TILE_ROWS), strict=True):
        bound = block.abs().sum(0) * len(block) * 2.0**-24
        assert ((partial.double() - block.sum(0)).abs() <= bound).all()


def all_patterns(dtype: torch.dtype) -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)


def random_bits(rows: int, columns: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, (rows, columns)).to(torch.int32).view(torch.float32)


def first_scale(amax: Tensor, fmt: str) -> Tensor:
    """``FP8_MAX / amax``, rounded once; 1 for inf and NaN."""
    if not amax.isfinite():
        return torch.ones(())
    with np.errstate(divide="ignore", over="ignore"):
        quotient = np.float32(DEFINITIONS[fmt][3]) / np.float32(amax.item())
    return torch.tensor(min(quotient, np.float32(FLOAT_MAX)))
