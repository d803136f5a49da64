"""Hopper's GEMM from its own source on the CPU: pipeline, tiles, every epilogue. No GPU is needed.

Copies and products happen as early or as late as a device may do them, see host_shim/instructions_sm90.cpp.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import gemm_on_host
import pytest
import torch
from gemm_cases import (
    ACCUMULATION,
    DTYPES,
    FORMAT_PAIRS,
    LARGEST,
    Operands,
    Problem,
    assert_close,
    operands,
    random_problems,
)
from gemm_on_host import Chosen, load, multiply
from host_kernels import HostKernel, at_the_edge, host_tensor_map
from tensor_cores import HOPPER
from torch import Tensor

from kernels_cuda import gemm
from kernels_cuda.gemm_variants import Configuration, configurations
from lightning_fp8.ops.cuda import kernels

LARGE, SMALL = configurations((9, 0))
# what is not promoted is computed as a single group of rows
EVERY = [(LARGE, True), (SMALL, True), (SMALL, False)]
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def _maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "tensor_map", host_tensor_map)


@pytest.fixture(params=["early", "late"])
def late(request: pytest.FixtureRequest) -> Iterator[bool]:
    return request.param == "late"


def run(
    case: Operands,
    configuration: Configuration,
    output: torch.dtype,
    promote: bool = True,
    bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    grouped = "" if promote else "rows"
    chosen = Chosen(configuration, output, (case.a_format, case.b_format), promote, grouped=grouped)
    return gemm_on_host.run(case.scaled, chosen, bias, **options)


def check(
    case: Operands,
    configuration: Configuration,
    output: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    promote: bool = True,
    **options: bool | int,
) -> None:
    result = run(case, configuration, output, promote, bias, **options)  # type: ignore[arg-type]
    expected, magnitude = case.product(), case.magnitude()
    if bias is not None:
        expected, magnitude = expected + bias.to(output).double(), magnitude + bias.to(output).double().abs()
    assert_close(result, expected, magnitude, ACCUMULATION[promote])


# formats are read where products start, and outputs are written where they end: each value of both is enough
@pytest.mark.parametrize(("pair", "output"), [*zip(FORMAT_PAIRS, (torch.float16, torch.bfloat16, torch.float32))])
def test_formats_and_outputs(pair: tuple[str, str], output: torch.dtype) -> None:
    check(operands(200, 136, 400, *pair), SMALL, output)


@pytest.mark.parametrize(
    ("configuration", "promote"),
    EVERY,
    ids=lambda value: value.name if isinstance(value, Configuration) else "promoted" if value else "fast",
)
def test_every_configuration(configuration: Configuration, promote: bool, late: bool) -> None:
    # more tiles than blocks, more steps than stages, ragged on all sides
    m, n = configuration.block_m * configuration.cluster + 72, configuration.block_n + 16
    pair = ("e5m2", "e4m3") if promote else ("e4m3", "e4m3")
    case = operands(m, n, 128 * configuration.stages + 144, *pair)
    check(case, configuration, promote=promote, late=late, multiprocessors=2)


@pytest.mark.parametrize("n", [1, 8, 23, 129, 264])
@pytest.mark.parametrize("m", [1, 64, 65, 300])
def test_ragged_rows_and_columns(m: int, n: int) -> None:
    for configuration in (LARGE, SMALL):
        check(operands(m, n, 144), configuration)


@pytest.mark.parametrize("k", [16, 112, 128, 144, 768, 784])
def test_ragged_steps(k: int, late: bool) -> None:
    check(operands(130, 40, k), SMALL, promote=False, late=late)
    check(operands(130, 40, k, "e5m2"), SMALL, torch.float32, late=late)


@pytest.mark.parametrize("multiprocessors", [2, 3, 64])
def test_any_number_of_multiprocessors(multiprocessors: int) -> None:
    check(operands(700, 300, 144), LARGE, multiprocessors=multiprocessors)
    # more rows of tiles than a group has, and an incomplete group
    check(operands(128 * 35, 130, 16), SMALL, multiprocessors=multiprocessors)


@pytest.mark.parametrize(("dtype", "output"), [*itertools.product(OUTPUTS, OUTPUTS)])
def test_bias(dtype: torch.dtype, output: torch.dtype) -> None:
    # of another magnitude than the sums: rounded by itself, and then together with them
    bias = (torch.randn(135) * 100).to(dtype)
    check(operands(70, 135, 48), SMALL, output, bias=bias)


def test_each_tile_of_a_block_has_its_own_bias(late: bool) -> None:
    # tiles one after the other in a cluster
    check(operands(70, 700, 144), LARGE, bias=torch.randn(700) * 100, late=late, multiprocessors=2)


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids="-".join)
def test_sums_are_those_of_the_tensor_cores(pair: tuple[str, str]) -> None:
    case = operands(64, 64, 400, *pair)
    # subnormals too
    case.a.view(DTYPES[pair[0]])[::2].copy_(case.values()[0][::2] * 2.0**-5)
    factor = case.a_scale_inv * case.b_scale_inv
    fast, promoted = (HOPPER.sums(*case.values(), pair, promote) for promote in (False, True))
    assert torch.equal(run(case, SMALL, torch.float32, promote=False), fast.float() * factor)
    assert torch.equal(run(case, SMALL, torch.float32), promoted.float() * factor)
    # neither equals the exact sum rounded at the end
    a, b = case.values()
    assert not any(torch.equal(sums.float(), (a @ b.t()).float()) for sums in (fast, promoted))


# the cases of `tests/ops/test_cuda_gemm.py`, and those of them that do not take long here
PROBLEMS = [*random_problems([SMALL], [LARGE, SMALL])]
SOME = [problem for problem in PROBLEMS if problem.m * problem.n * problem.k < 1e6]


@pytest.mark.parametrize(("number", "row", "column"), [(197, 156, 143), (90, 273, 893)])
def test_the_worst_sums(number: int, row: int, column: int) -> None:
    """Of all sums of the random shapes, with and without promotion; the tolerances of Hopper's GEMMs follow from it."""
    problem = next(problem for problem in PROBLEMS if problem.number == number)
    case = problem.case._replace(a=problem.case.a[row : row + 1], b=problem.case.b[column : column + 1])
    # the kernel makes no difference, see `test_sums_are_those_of_the_tensor_cores`
    result = run(case, SMALL, torch.float32, problem.promote)
    error = ((result.double() - case.product()).abs() / case.magnitude()).item()
    assert error == pytest.approx(LARGEST[problem.promote], rel=0.005)


@pytest.mark.parametrize("problem", SOME, ids=lambda problem: str(problem.number))
def test_random_shapes(problem: Problem) -> None:
    bias = torch.randn(problem.n) if problem.number % 3 == 0 else None
    # the variants of `test_every_configuration`
    case = problem._replace(pair=FORMAT_PAIRS[problem.promote]).case
    check(case, problem.configuration, bias=bias, promote=problem.promote)


@pytest.mark.parametrize("shape", [(70, 40, 48), (129, 135, 16)])
def test_reads_nothing_behind_its_tensors(shape: tuple[int, int, int]) -> None:
    case = operands(*shape)
    m, n = shape[:2]
    bias, width = at_the_edge(torch.randn(n)), -(-n // 8) * 8
    for output in (torch.bfloat16, torch.float32):
        out = at_the_edge(torch.empty(m, width, dtype=output))
        chosen = Chosen(SMALL, output, promote=True)
        edges = case._replace(a=at_the_edge(case.a), b=at_the_edge(case.b))
        multiply(load(chosen), chosen, *edges.scaled, out[:, :n], bias)
        expected = case.product() + bias.to(output).double()
        assert_close(out[:, :n], expected, case.magnitude() + 10, ACCUMULATION[True])


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_what_is_not_finite_stays_in_its_row_and_column(value: float) -> None:
    case = operands(130, 70, 144, "e5m2")
    case.a.view(torch.float8_e5m2)[129, 143] = value
    case.b.view(torch.float8_e4m3fn)[69, 143] = 0.0
    case.b.view(torch.float8_e4m3fn)[:69, 143] = 1.0
    result, expected = run(case, SMALL, torch.float32), case.product()
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf())
    assert result[:129].isfinite().all()


# --- the check at first use -------------------------------------------------------------------------------------------


def structure(variant: kernels.Variant) -> tuple[str, ...]:
    return variant.layout, *(one for one in variant.defines if not one.startswith(("A_FORMAT", "B_FORMAT", "OUTPUT")))


GEMMS = [one for capability in ((9, 0), (8, 9)) for one in kernels.variants(capability, every=True) if one.shared_bytes]


@pytest.mark.parametrize("variant", {structure(one): one for one in GEMMS}.values(), ids=lambda variant: variant.name)
def test_kernels_pass_their_check(variant: kernels.Variant) -> None:
    """One of each structure, Ada's too."""
    kernel = HostKernel((variant.family, variant.defines), variant.layout, variant.block, 0, variant.shared_bytes)
    assert variant.check(torch.device("cpu"), kernel) is None
