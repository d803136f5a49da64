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
from gemm_on_host import Chosen, load, sum_kernel
from host_kernels import HostKernel, at_the_edge, host_tensor_map
from tensor_cores import HOPPER
from torch import Tensor

from kernels_cuda import gemm
from kernels_cuda.gemm import Split
from kernels_cuda.gemm_variants import Configuration, configurations
from lightning_fp8.ops.cuda import kernels

FAST, PROMOTED = (configurations((9, 0), promote) for promote in (False, True))
LARGE, SMALL = FAST[0], FAST[-1]
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
    promote: bool = False,
    bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    chosen = Chosen(configuration, output, (case.a_format, case.b_format), promote)
    return gemm_on_host.run(case.scaled, chosen, bias, **options)


def check(
    case: Operands,
    configuration: Configuration,
    output: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    promote: bool = False,
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
    check(operands(200, 136, 400, *pair), PROMOTED[-1], output, promote=True)


@pytest.mark.parametrize(
    ("configuration", "promote"),
    [(one, False) for one in FAST] + [(one, True) for one in PROMOTED],
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
    check(operands(130, 40, k), SMALL, late=late)
    check(operands(130, 40, k, "e5m2"), PROMOTED[-1], torch.float32, promote=True, late=late)


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
    # tiles of 256 columns, one after the other in a cluster
    check(operands(70, 700, 144), LARGE, bias=torch.randn(700) * 100, late=late, multiprocessors=2)


@pytest.mark.parametrize(("splits", "output"), [*zip((2, 3, 7), OUTPUTS)])
def test_splits(splits: int, output: torch.dtype, late: bool) -> None:
    case = operands(140, 67, 8 * 128 - 48, "e5m2")
    check(case, PROMOTED[0], output, promote=True, splits=splits, late=late)
    check(case, PROMOTED[-1], output, torch.randn(67), promote=True, splits=splits, late=late)


def test_parts_are_those_of_their_steps() -> None:
    case, configuration = operands(64, 64, 5 * 128, "e5m2"), PROMOTED[-1]
    kernel = load(Chosen(configuration, torch.float32, ("e5m2", "e4m3"), True))
    parts = torch.full((2, 128, 64), NAN)
    out, split = torch.empty(64, 64), Split(2, parts, sum_kernel(torch.float32))
    gemm.gemm(kernel, configuration, *case.scaled, out, None, split)
    for part, steps in zip(parts, (slice(0, 256), slice(256, 640))):
        its = case._replace(a=case.a[:, steps], b=case.b[:, steps])
        assert_close(part[:64], its.product(), its.magnitude(), ACCUMULATION[True])
    assert torch.equal(out, parts[0, :64] + parts[1, :64])


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids="-".join)
def test_sums_are_those_of_the_tensor_cores(pair: tuple[str, str]) -> None:
    case = operands(64, 64, 400, *pair)
    # subnormals too
    case.a.view(DTYPES[pair[0]])[::2].copy_(case.values()[0][::2] * 2.0**-5)
    factor = case.a_scale_inv * case.b_scale_inv
    fast, promoted = (HOPPER.sums(*case.values(), pair, promote) for promote in (False, True))
    assert torch.equal(run(case, SMALL, torch.float32), fast.float() * factor)
    assert torch.equal(run(case, PROMOTED[-1], torch.float32, promote=True), promoted.float() * factor)
    # neither equals the exact sum rounded at the end
    a, b = case.values()
    assert not any(torch.equal(sums.float(), (a @ b.t()).float()) for sums in (fast, promoted))


# the cases of `tests/ops/test_cuda_gemm.py`, and those of them that do not take long here
PROBLEMS = [*random_problems(FAST, PROMOTED)]
SOME = [problem for problem in PROBLEMS if problem.m * problem.n * problem.k < 1e6]


@pytest.mark.parametrize(("number", "row", "column"), [(197, 156, 143), (90, 273, 893)])
def test_the_worst_sums(number: int, row: int, column: int) -> None:
    """Of all sums of the random shapes, with and without promotion; the tolerances of Hopper's GEMMs follow from it."""
    problem = next(problem for problem in PROBLEMS if problem.number == number)
    case = problem.case._replace(a=problem.case.a[row : row + 1], b=problem.case.b[column : column + 1])
    # the kernel makes no difference, see `test_sums_are_those_of_the_tensor_cores`
    result = run(case, PROMOTED[-1] if problem.promote else SMALL, torch.float32, problem.promote)
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
        kernel = load(Chosen(SMALL, output))
        edges = case._replace(a=at_the_edge(case.a), b=at_the_edge(case.b))
        gemm.gemm(kernel, SMALL, *edges.scaled, out[:, :n], bias)
        expected = case.product() + bias.to(output).double()
        assert_close(out[:, :n], expected, case.magnitude() + 10, ACCUMULATION[False])


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


# --- self-tests -------------------------------------------------------------------------------------------------------

IN_BLOCKS = [variant for variant in kernels.variants((9, 0), every=True) if "B_SCALE_ROWS" in variant.name]


@pytest.mark.parametrize(
    "variant", [*kernels.variants((9, 0))[68::9], IN_BLOCKS[0], IN_BLOCKS[-1]], ids=lambda variant: variant.name
)
def test_self_tests_pass(variant: kernels.Variant) -> None:
    kernel = HostKernel((variant.family, variant.defines), variant.layout, variant.block, 0, variant.shared_bytes)
    assert variant.self_test(torch.device("cpu"), kernel) is None
