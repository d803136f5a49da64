"""Activations in the cast kernels, from their sources on the CPU: close to torch's, whose last bits differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_columns import padded, unpadded
from casts_on_host import (
    INF,
    all_patterns,
    assert_codes,
    cast_kernel,
    delayed,
    first_scale,
    place,
    random_bits,
    run,
)
from fp8_numpy import code_values, power_of_two_below
from host_kernels import FEW_VARIANTS, build_folder, library
from torch import Tensor

from kernels_cuda import casts
from kernels_cuda.casts import column_sum_tiles, variant
from lightning_fp8.ops.amaxes import max_abs
from lightning_fp8.ops.arithmetic import saturated
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.scalings.operand import Casting


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=1)
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "swiglu": swiglu,
}
# Codes per million that may differ, as the result is close to a rounding boundary; 310, 110, 0 and 0 were observed.
DIFFERENT = {"gelu": 500, "gelu_tanh": 250, "silu": 50, "swiglu": 50}


@pytest.fixture(scope="module")
def _activations_compiled() -> None:
    # the threads share it
    build_folder()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda chosen: library("cast_transpose", variant(*chosen)), FEW_VARIANTS))


@pytest.fixture
def _torch_formulas() -> Iterator[None]:
    """oneDNN's ``gelu`` on the CPU is NaN for inf and differs in the tail; torch's own uses the GPU's formula."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


def by_torch(x: Tensor, activation: str, dy: Tensor | None) -> Tensor:
    if dy is None:
        return ACTIVATIONS[activation](x)
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(ACTIVATIONS[activation](leaf), leaf, dy)[0]


def tolerance(x: Tensor, activation: str, dy: Tensor | None, like: Tensor) -> Tensor:
    """The error that an fp32 result may have before rounding, if it is the small difference of larger numbers."""
    gated = x.chunk(2, dim=1)[1].float().abs() if activation == "swiglu" else None
    if dy is None:
        return 2.0**-20 * (torch.ones(like.shape) if gated is None else gated)
    of_dy = 2.0**-18 * dy.float().abs()
    return of_dy if gated is None else torch.cat([of_dy * gated, of_dy], dim=1)


def in_order(codes: Tensor) -> Tensor:
    """Codes as integers in the order of their values; -0 and 0 are equal."""
    signed = codes.to(torch.int16)
    return torch.where(signed > 127, 128 - signed, signed)


def close_codes(got: Tensor, v: Tensor, slack: Tensor, scale: float, fmt: str, exact: Tensor | None = None) -> float:
    """Asserts that each code is that of a value within one unit in the last place of v's dtype, or ``slack``, of v; NaN
    for NaN. Returns the share of codes that differ from v's, and from those of ``exact``.
    """
    low, high = (torch.nextafter(v, torch.full((), limit, dtype=v.dtype)).float() for limit in (-INF, INF))
    low, high = torch.minimum(low, v.float() - slack), torch.maximum(high, v.float() + slack)
    wanted = (low, v, high, v if exact is None else exact)
    codes = [saturated(one, torch.tensor(scale), FORMATS[fmt]) for one in wanted]
    at_least, expected, at_most, exact_codes = map(in_order, codes)
    values, nan, code = torch.from_numpy(code_values(fmt))[got.int()], v.isnan(), in_order(got)
    assert torch.equal(values.isnan(), nan)
    assert ((at_least <= code) & (code <= at_most) | nan).all()
    return ((code != expected) & (code != exact_codes) & ~nan).double().mean().item()


@pytest.mark.usefixtures("_activations_compiled", "_torch_formulas")
@pytest.mark.parametrize(("dtype", "fmt", "activation", "backward"), FEW_VARIANTS)
def test_activations(dtype: torch.dtype, fmt: str, activation: str, backward: bool) -> None:
    patterns = random_bits(256, 256) if dtype == torch.float32 else all_patterns(dtype)
    x = torch.cat([patterns, (3 * torch.randn(256, 256)).to(dtype)])
    if activation == "swiglu":
        x = torch.cat([x, torch.randn(x.shape).to(dtype)], dim=1)
    dy = torch.randn(512, 256).to(dtype) if backward else None
    v = by_torch(x, activation, dy)
    slack = tolerance(x, activation, dy, v)
    # in the tails torch's fp32 formulas suffer from cancellation, ours less
    exact = by_torch(x.double(), activation, None if dy is None else dy.double()).to(dtype)
    for scale in (1.0, 3.7):
        y = run(x, fmt, delayed(scale), activation, dy, (True, False, False)).y
        if activation == "relu":
            assert_codes(y, v, scale, fmt)
            continue
        different = close_codes(y, v, slack, scale, fmt, exact)
        assert different <= DIFFERENT[activation] * 1e-6, f"{different:.1e} of the codes differ"


@pytest.mark.usefixtures("_activations_compiled", "_torch_formulas")
@pytest.mark.parametrize(("dtype", "fmt", "activation", "backward"), FEW_VARIANTS)
def test_outputs_of_activations(dtype: torch.dtype, fmt: str, activation: str, backward: bool) -> None:
    """Outputs by rows and by columns agree, with the amax, column sums and first scale of the activation's result."""
    gated = activation == "swiglu"
    # in the second shape rows begin at multiples of 16 bytes, but in swiglu's second half none does
    for rows, columns, wider in ((128, 64, 0), (128, 64 + 8 // dtype.itemsize, 0), (131, 77, 3)):
        x = (3 * torch.randn(rows, columns * (1 + gated) + wider)).to(dtype)[:, : columns * (1 + gated)]
        dy = torch.randn(rows, columns + wider).to(dtype)[:, :columns] if backward else None
        v = by_torch(x, activation, dy)
        amax, current = torch.zeros(1), torch.zeros(())
        row = place(torch.full((1,), 1e-3), torch.zeros(1), 0, amax, current)
        y, y_t, sums, scale_inv = run(x, fmt, row, activation, dy, (True, True, backward))
        assert torch.equal(y_t.t(), y)
        assert torch.equal(amax[0], current)
        # the largest value is at the same position, so its error is within that of any result
        slack = tolerance(x, activation, dy, v)
        atol = 0.0 if activation == "relu" else slack.max().item()
        torch.testing.assert_close(current, max_abs(v), rtol=torch.finfo(dtype).eps, atol=atol)
        scale = first_scale(current, fmt)
        assert torch.equal(scale_inv, scale.reciprocal())
        close_codes(y, v, slack, scale.item(), fmt)
        for partial, block in zip(sums, v.double().split(casts.TILE_ROWS), strict=True) if backward else ():
            torch.testing.assert_close(partial.double(), block.sum(0), rtol=0, atol=2 * torch.finfo(dtype).eps * 128)


@pytest.mark.parametrize("outputs", list(itertools.product((False, True), repeat=3)))
def test_outputs_of_two_halves_alone(outputs: tuple[bool, bool, bool]) -> None:
    """The halves of swiglu's gradient share a block's memory: the second waits until the first has been written."""
    x, dy = torch.randn(140, 140), torch.randn(140, 70)
    every = run(x, "e5m2", delayed(9.0), "swiglu", dy, (True, True, True))
    for chosen, alone, beside in zip(outputs, run(x, "e5m2", delayed(9.0), "swiglu", dy, outputs), every):
        assert torch.equal(alone, beside) if chosen else alone is None


@pytest.mark.parametrize(
    ("firsts", "casting"),
    [
        *(((gate, up), Casting.HISTORY) for gate in (False, True) for up in (False, True)),
        ((True, True), Casting.OWN_POWER_OF_2),
    ],
)
@pytest.mark.parametrize("columns", [64, 77])
def test_gate_and_up_of_two_tensors(columns: int, firsts: tuple[bool, bool], casting: Casting) -> None:
    """Each gradient has its own scale and place; codes, sums and amaxes equal those of the halves of one tensor."""
    rows, fmt = 140, "e5m2"
    gate, up, dy = (torch.randn(rows, columns) * factor for factor in (2, 30, 1))
    amax, kernel = torch.zeros(3), cast_kernel(torch.float32, fmt, "swiglu", True)
    newest, scale = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([5.0, 7.0, 1e-3])
    results, places = [], (1, 0)
    for at, first in zip(places, firsts):
        newest[at] = 0.0 if first and casting is Casting.HISTORY else 1.0
        # if every tensor has a history, nothing is measured
        row = place(scale, newest, at, amax, torch.zeros(()) if any(firsts) else None)
        row = row._replace(scale_from=int(casting))
        shapes = (rows, columns), (columns, padded(rows))
        y, y_t = (torch.full(shape, 0xA5, dtype=torch.uint8) for shape in shapes)
        sums = torch.full((column_sum_tiles(rows), columns), float("nan"))
        results.append(row._replace(scale_inv=torch.zeros(()), y=y, y_t=y_t, column_sums=sums))
    casts.cast_gated(kernel, gate, up, results[0], dy, results[1])
    for half, (result, at, first) in enumerate(zip(results, places, firsts)):
        exact = by_torch(torch.cat([gate, up], dim=1), "swiglu", dy).chunk(2, dim=1)[half]
        torch.testing.assert_close(amax[at], exact.abs().max(), rtol=1e-5, atol=0)
        used = first_scale(amax[at], fmt).item() if first else scale[at].item()
        if casting is Casting.OWN_POWER_OF_2:
            used = power_of_two_below(amax[at].item(), fmt)
        assert result.scale_inv.item() == np.float32(1) / np.float32(used)
        together = run(torch.cat([gate, up], dim=1), fmt, delayed(used), "swiglu", dy, (True, True, True))
        codes, sums = together.y.chunk(2, dim=1)[half], together.sums.chunk(2, dim=1)[half]
        assert torch.equal(result.y, codes)
        assert torch.equal(unpadded(result.y_t, rows), codes.t())
        assert torch.equal(result.column_sums, sums)
    assert amax[2] == 0
    inputs = run(torch.cat([gate, up], dim=1), "e4m3", delayed(9.0), "swiglu")
    payload, scale_inv = torch.empty(rows, columns, dtype=torch.uint8), torch.zeros(())
    forward = delayed(9.0)._replace(scale_inv=scale_inv, y=payload)
    casts.cast_gated(cast_kernel(torch.float32, "e4m3", "swiglu", False), gate, up, forward)
    assert torch.equal(payload, inputs.y)
