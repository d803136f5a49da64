"""Hopper's GEMM from its own source on the CPU: pipeline, tiles, every epilogue. No GPU is needed.

Copies and products happen as early or as late as a device may do them, see host_shim/instructions_sm90.cpp.
"""

from __future__ import annotations

import ctypes
import math
import signal
from collections.abc import Iterator

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
from host_kernels import Guarded, HostKernel, at_the_edge, ends_by, host_tensor_map
from torch import Tensor

from kernels_cuda import gemm, gemm_variants
from kernels_cuda.casts import Row
from kernels_cuda.gemm import Split
from kernels_cuda.gemm_variants import Configuration, configurations
from lightning_fp8.ops import reference
from lightning_fp8.ops.activations import activate, activation_gradient
from lightning_fp8.ops.cuda import kernels
from lightning_fp8.ops.cuda.self_test import same_codes
from lightning_fp8.ops.formats import FORMATS

FAST, PROMOTED = (configurations((9, 0), promote) for promote in (False, True))
LARGE, SMALL = FAST[0], FAST[-1]
PING_PONG = [one for one in FAST if one.ping_pong]
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
# NaN in every dtype: what is left unwritten is no number, and neither is what is made from it
POISON = 0xFF
INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def _maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "tensor_map", host_tensor_map)


@pytest.fixture(params=["early", "late"])
def late(request: pytest.FixtureRequest) -> Iterator[bool]:
    return request.param == "late"


def load(configuration: Configuration, defines: tuple[str, ...], late: bool = True) -> HostKernel:
    kernel = HostKernel(
        (configuration.family, defines), configuration.layout, configuration.threads, 0, configuration.shared_bytes
    )
    ctypes.c_int.in_dll(kernel._library, "late").value = late
    return kernel


def sum_kernel(output: torch.dtype) -> HostKernel:
    defines = gemm_variants.sum_splits_variant(output)
    return HostKernel(("sum_splits", defines), gemm_variants.SUM_SPLITS_LAYOUT, gemm_variants.SUM_SPLITS_THREADS, 0)


def run(
    case: Operands,
    configuration: Configuration,
    output: torch.dtype,
    promote: bool = False,
    bias: Tensor | None = None,
    splits: int = 1,
    late: bool = True,
    multiprocessors: int = 4,
) -> Tensor:
    """One GEMM, into poisoned memory between guards."""
    m, n = len(case.a), len(case.b)
    padded = -(-n * output.itemsize // 16) * 16 // output.itemsize
    made = torch.float32 if splits > 1 else output
    kernel = load(
        configuration, gemm_variants.variant(configuration, case.a_format, case.b_format, made, promote), late
    )
    kernel.multiprocessors = multiprocessors
    scales = case.a_scale_inv, case.b_scale_inv
    memory = Guarded((m, padded), output, POISON)
    out = memory.tensor[:, :n]
    if splits == 1:
        gemm.gemm(kernel, configuration, case.a, case.b, out, *scales, bias)
    else:
        rows = gemm.split_rows(configuration, m)
        parts = Guarded((splits, rows, -(-n // 4) * 4), torch.float32, POISON)
        split = Split(splits, parts.tensor, sum_kernel(output))
        gemm.split_gemm(kernel, configuration, split, case.a, case.b, out, *scales, bias)
        assert parts.unharmed()
    assert memory.unharmed()
    # the padding columns of a row must stay unchanged: the copy engine never writes outside the matrix
    assert (memory.tensor[:, n:].contiguous().view(torch.uint8) == POISON).all()
    return out.clone()


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


# one tile, so that one consumer has none; an odd number; a third turn; whole rounds of the ring, and ends inside one
@pytest.mark.parametrize("tiles", [1, 3, 7])
@pytest.mark.parametrize("steps", [1, 2, 6, 7])
@pytest.mark.parametrize("configuration", PING_PONG, ids=lambda one: one.name)
def test_consumers_take_turns(configuration: Configuration, steps: int, tiles: int, late: bool) -> None:
    cluster = configuration.cluster
    case = operands(128 * cluster * tiles - 40, 72, 128 * steps - 16)
    defines = gemm_variants.variant(configuration, "e4m3", "e4m3", torch.bfloat16, False)
    handovers = ctypes.c_int.in_dll(load(configuration, defines)._library, "handovers")
    handovers.value = 0
    check(case, configuration, late=late, multiprocessors=cluster)
    # each block switches consumers once per tile, except for the first
    assert handovers.value == cluster * (tiles - 1)


@pytest.mark.parametrize("n", [1, 8, 23, 129, 264])
@pytest.mark.parametrize("m", [1, 64, 65, 300])
def test_ragged_rows_and_columns(m: int, n: int) -> None:
    for configuration in (LARGE, SMALL, PING_PONG[0]):
        check(operands(m, n, 144), configuration)


def test_single_rows_one_element_apart() -> None:
    case = operands(1, 1, 144)
    case = case._replace(a=case.a[0][:, None].t(), b=case.b[0][:, None].t())
    assert case.a.stride(0) == case.b.stride(0) == 1
    check(case, SMALL)


@pytest.mark.parametrize("k", [16, 112, 128, 144, 768, 784])
def test_ragged_steps(k: int, late: bool) -> None:
    check(operands(130, 40, k), SMALL, late=late)
    check(operands(130, 40, k, "e5m2"), PROMOTED[-1], torch.float32, promote=True, late=late)


@pytest.mark.parametrize("multiprocessors", [2, 3, 7, 64])
def test_any_number_of_multiprocessors(multiprocessors: int) -> None:
    for configuration in (LARGE, PING_PONG[0]):
        check(operands(700, 300, 144), configuration, multiprocessors=multiprocessors)


def test_tiles_in_groups() -> None:
    # more rows of tiles than a group has, and an incomplete group
    check(operands(128 * 35, 130, 16), SMALL)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("dtype", OUTPUTS)
def test_bias(dtype: torch.dtype, output: torch.dtype) -> None:
    # of another magnitude than the sums: rounded by itself, and then together with them
    bias = (torch.randn(135) * 100).to(dtype)
    check(operands(70, 135, 48), SMALL, output, bias=bias)


@pytest.mark.parametrize(("splits", "output"), [*zip((2, 3, 7), OUTPUTS)])
def test_splits(splits: int, output: torch.dtype, late: bool) -> None:
    case = operands(140, 67, 8 * 128 - 48, "e5m2")
    check(case, PROMOTED[0], output, promote=True, splits=splits, late=late)
    # parts of different lengths: each consumer skips those of the other
    check(case, PING_PONG[0], output, promote=True, splits=splits, late=late, multiprocessors=2)
    check(case, PROMOTED[-1], output, torch.randn(67), promote=True, splits=splits, late=late)


def test_parts_are_those_of_their_steps() -> None:
    case, configuration = operands(64, 64, 5 * 128, "e5m2"), PROMOTED[-1]
    kernel = load(configuration, gemm_variants.variant(configuration, "e5m2", "e4m3", torch.float32, True))
    parts = torch.full((2, 128, 64), NAN)
    out, split = torch.empty(64, 64), Split(2, parts, sum_kernel(torch.float32))
    gemm.split_gemm(kernel, configuration, split, case.a, case.b, out, case.a_scale_inv, case.b_scale_inv)
    for part, steps in zip(parts, (slice(0, 256), slice(256, 640))):
        its = case._replace(a=case.a[:, steps], b=case.b[:, steps])
        assert_close(part[:64], its.product(), its.magnitude(), ACCUMULATION[True])
    assert torch.equal(out, parts[0, :64] + parts[1, :64])


def tensor_core_sums(case: Operands, promote: bool) -> Tensor:
    """Sums without the factors, fp64, by the model of host_shim/instructions_sm90.cpp: 13 bits below the largest term.

    Every 32 of K are added to the sum, with all terms truncated at the same bit, and then the result; with
    ``promote``, the sum starts anew every 128, and the partial sums are added in fp32.
    """
    a, b = case.values()
    a_exponents, b_exponents = exponents(a, case.a_format), exponents(b, case.b_format)
    total, sums = torch.zeros(len(a), len(b)), torch.zeros(len(a), len(b), dtype=torch.float64)
    for k in range(0, a.shape[1], 32):
        if promote and k % 128 == 0:
            total, sums = total + sums.float(), torch.zeros_like(sums)
        its = slice(k, k + 32)
        terms = torch.cat([a[:, None, its] * b[:, its], sums[..., None]], dim=2)
        aligned_by = a_exponents[:, None, its] + b_exponents[:, its]
        unit = torch.maximum(aligned_by.amax(dim=2), exponents(sums)).sub(13).exp2()
        fraction, exponent = torch.frexp((terms / unit[..., None]).trunc().sum(dim=2) * unit)
        sums = torch.ldexp((fraction * 2**14).trunc(), exponent - 14)
    return (total + sums.float()).double() if promote else sums


def exponents(values: Tensor, fmt: str = "") -> Tensor:
    """The exponent of the leading bit, for subnormals the format's smallest one; for zero less than any other."""
    smallest = {"e4m3": -6.0, "e5m2": -14.0, "": -126.0}[fmt]
    found = (torch.frexp(values).exponent - 1).double().clamp(min=smallest)
    return torch.where(values == 0, -500.0, found)


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids="-".join)
def test_sums_are_those_of_the_tensor_cores(pair: tuple[str, str]) -> None:
    case = operands(64, 64, 400, *pair)
    # subnormals too
    case.a.view(DTYPES[pair[0]])[::2].copy_(case.values()[0][::2] * 2.0**-5)
    factor = case.a_scale_inv * case.b_scale_inv
    fast, promoted = (tensor_core_sums(case, promote) for promote in (False, True))
    assert torch.equal(run(case, SMALL, torch.float32), fast.float() * factor)
    assert torch.equal(run(case, PROMOTED[-1], torch.float32, promote=True), promoted.float() * factor)
    # neither equals the exact sum rounded at the end
    a, b = case.values()
    assert not any(torch.equal(sums.float(), (a @ b.t()).float()) for sums in (fast, promoted))


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        # 2^13 leaves no bit after the binary point
        ([2.0**13, 1.5], 8193),
        ([2.0**13, -1.5], 8191),
        ([2.0**13, 0.5, 0.5], 8192),
        ([-(2.0**13), 0.5, -0.5], -8192),
        # and the sum loses its last bit where it needs one more
        ([2.0**13, 2.0**13, 1.0], 16384),
        # 1.5 * 1.5 is aligned like 1 * 1, not by its own leading bit: 2^-13 is kept
        ([2.25, 2.0**-13, 2.0**-13], 2.25 + 2.0**-12),
        ([2.0, 2.0**-13, 2.0**-13], 2.0),
        ([1.0, 2.0**-13], 1 + 2.0**-13),
        ([1.0, 2.0**-14, 2.0**-14], 1.0),
    ],
)
def test_what_the_tensor_cores_keep(terms: list[float], expected: float) -> None:
    a, b = torch.zeros(1, 32), torch.ones(1, 32)
    for place, term in enumerate(terms):
        a[0, place], b[0, place] = (1.5, 1.5) if term == 2.25 else (term, 1.0)
    codes = [a.to(torch.float8_e5m2), b.to(torch.float8_e4m3fn)]
    assert (codes[0].double() * codes[1].double())[0, : len(terms)].tolist() == terms
    case = Operands(*(code.view(torch.uint8) for code in codes), torch.tensor(1.0), torch.tensor(1.0), "e5m2", "e4m3")
    assert run(case, SMALL, torch.float32).item() == expected


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
        kernel = load(SMALL, gemm_variants.variant(SMALL, "e4m3", "e4m3", output, False))
        edges = at_the_edge(case.a), at_the_edge(case.b)
        gemm.gemm(kernel, SMALL, *edges, out[:, :n], case.a_scale_inv, case.b_scale_inv, bias)
        expected = case.product() + bias.to(output).double()
        assert_close(out[:, :n], expected, case.magnitude() + 10, ACCUMULATION[False])
    if n % 8 == 0:
        h = at_the_edge(torch.randn(m, n).bfloat16())
        kernel = load(
            PROMOTED[-1], gemm_variants.chained_variant(PROMOTED[-1], "e5m2", torch.bfloat16, True, "relu", "e5m2")
        )
        case = operands(*shape, "e5m2")
        edges = at_the_edge(case.a), at_the_edge(case.b)
        y, scale = torch.empty(m, n, dtype=torch.uint8), torch.ones(1)
        row = Row(scale, scale, torch.tensor([0]))
        gemm.chained_gemm(
            kernel, PROMOTED[-1], *edges, h, y, None, row, torch.empty(()), case.a_scale_inv, case.b_scale_inv
        )  # fmt: skip
        da = run(case, PROMOTED[-1], torch.bfloat16, promote=True)
        codes = reference.saturating_cast(activation_gradient(h, da, "relu"), scale[0], FORMATS["e5m2"])
        assert torch.equal(y, codes)


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


# --- the next GEMM's operand ------------------------------------------------------------------------------------------


class Chained:
    """The outputs of one chained GEMM."""

    def __init__(
        self,
        case: Operands,
        configuration: Configuration,
        activation: str,
        format: str,
        h: Tensor | None = None,
        bias: Tensor | None = None,
        wants_h: bool = True,
        wants_y_t: bool = True,
        output: torch.dtype = torch.bfloat16,
        late: bool = True,
    ) -> None:
        (m, _), n, backward = case.a.shape, len(case.b), h is not None
        defines = gemm_variants.chained_variant(configuration, case.a_format, output, backward, activation, format)
        made = (
            Guarded((m, n), output, POISON),
            Guarded((m, n), torch.uint8, POISON),
            Guarded((n, m), torch.uint8, POISON),
            Guarded((gemm.column_sum_rows(m), n), torch.float32, POISON),
            Guarded((), torch.float32, POISON),
        )
        self.h, self.y, self.y_t, self.sums, self.scale_inv = (one.tensor for one in made)
        if h is not None:
            self.h.copy_(h)
        self.amax = torch.tensor([0.0, 2.0**-20, 0.0])
        scale = torch.tensor([1.0, 11.5, 1.0])
        row = Row(scale, torch.ones(3), torch.tensor([1]), self.amax)
        gemm.chained_gemm(
            load(configuration, defines, late), configuration, case.a, case.b, self.h if wants_h or backward else None,
            self.y, self.y_t if wants_y_t else None, row, self.scale_inv, case.a_scale_inv, case.b_scale_inv, bias,
            self.sums if backward else None,
        )  # fmt: skip
        assert all(one.unharmed() for one in made)
        assert self.scale_inv == torch.tensor(11.5).reciprocal()
        assert self.amax[0] == self.amax[2] == 0
        self.format = format

    def check_codes(self, values: Tensor, exact: bool, neighbouring: float = 0.001) -> None:
        """y, y_t and amax of the tensor to be cast."""
        codes = reference.saturating_cast(values, torch.tensor(11.5), FORMATS[self.format])
        assert torch.equal(self.y_t.t(), self.y)
        dtype = FORMATS[self.format].dtype
        assert same_codes(self.y.view(dtype), codes.view(dtype), 0.0 if exact else neighbouring)
        torch.testing.assert_close(self.amax[1], values.abs().max().float(), rtol=0.0 if exact else 2**-7, atol=0)


# whole pieces; rows of y and y_t at any address; less than a piece
CHAINED_SHAPES = [(256, 256, 272), (201, 136, 400), (40, 24, 16)]
# one activation with exact values and one without; the casts' tests cover all activations, which use the same functions
FEW_ACTIVATIONS = ("relu", "gelu")


@pytest.mark.parametrize("shape", CHAINED_SHAPES)
@pytest.mark.parametrize("activation", FEW_ACTIVATIONS)
def test_forward_chain(activation: str, shape: tuple[int, int, int]) -> None:
    case, bias = operands(*shape), torch.randn(shape[1])
    configuration = LARGE if activation == "gelu" else SMALL
    one = Chained(case, configuration, activation, "e4m3", bias=bias)
    assert_close(one.h, case.product() + bias.bfloat16().double(), case.magnitude() + bias.abs(), ACCUMULATION[False])
    # from h as stored: only the activation is left in between
    one.check_codes(activate(one.h, activation), exact=activation == "relu")


@pytest.mark.parametrize("shape", CHAINED_SHAPES)
@pytest.mark.parametrize("activation", FEW_ACTIVATIONS)
def test_backward_chain(activation: str, shape: tuple[int, int, int]) -> None:
    case = operands(*shape, "e5m2")
    h = torch.randn(shape[:2]).bfloat16()
    configuration = PROMOTED[0] if activation == "gelu" else PROMOTED[-1]
    # the plain kernel's output is the intermediate rounded result
    da = run(case, configuration, torch.bfloat16, promote=True)
    values = activation_gradient(h, da, activation)
    one = Chained(case, configuration, activation, "e5m2", h=h)
    one.check_codes(values, exact=activation == "relu")
    assert torch.equal(one.h, h)
    for rows, sums in enumerate(one.sums):
        its = values[64 * rows : 64 * rows + 64].double()
        torch.testing.assert_close(sums.double(), its.sum(0), rtol=0, atol=1e-3 * its.abs().sum(0).max().item())
        if activation == "relu":
            assert ((sums.double() - its.sum(0)).abs() <= 64 * 2.0**-24 * its.abs().sum(0)).all()


@pytest.mark.parametrize("configuration", PING_PONG, ids=lambda one: one.name)
def test_forward_chain_of_each_consumer(configuration: Configuration, late: bool) -> None:
    case, bias = operands(5 * 128 * configuration.cluster - 55, 136, 400), torch.randn(136)
    one = Chained(case, configuration, "relu", "e4m3", bias=bias, late=late)
    assert_close(one.h, case.product() + bias.bfloat16().double(), case.magnitude() + bias.abs(), ACCUMULATION[False])
    one.check_codes(activate(one.h, "relu"), exact=True)


@pytest.mark.parametrize("configuration", [PROMOTED[0], PING_PONG[0], PROMOTED[-1]], ids=lambda one: one.name)
def test_stages_with_h_are_filled_again(configuration: Configuration, late: bool) -> None:
    # more tiles than blocks, and more steps than stages
    tiles = 4 // configuration.cluster + 1
    m, n, k = tiles * configuration.block_m * configuration.cluster, 72, 128 * configuration.stages
    case, h = operands(m, n, k, "e5m2"), torch.randn(m, n).bfloat16()
    da = run(case, configuration, torch.bfloat16, promote=True)
    one = Chained(case, configuration, "relu", "e5m2", h=h, late=late)
    one.check_codes(activation_gradient(h, da, "relu"), exact=True)


@pytest.mark.parametrize(("output", "fmt"), [(torch.bfloat16, "e5m2"), (torch.float16, "e4m3")])
def test_chains_in_both_16_bit_formats(output: torch.dtype, fmt: str, late: bool) -> None:
    case, bias = operands(130, 136, 144), torch.randn(136)
    one = Chained(case, SMALL, "relu", "e4m3", bias=bias, output=output, late=late)
    assert_close(one.h, case.product() + bias.to(output).double(), case.magnitude() + bias.abs(), ACCUMULATION[False])
    one.check_codes(activate(one.h, "relu"), exact=True)
    case, h = operands(130, 136, 144, fmt), torch.randn(130, 136).to(output)
    da = run(case, PROMOTED[-1], output, promote=True)
    backward = Chained(case, PROMOTED[-1], "relu", fmt, h=h, output=output, late=late)
    backward.check_codes(activation_gradient(h, da, "relu"), exact=True)


@pytest.mark.parametrize(("flag", "shape"), [(gemm._ROWS, (256, 136, 144)), (gemm._COLUMNS, (201, 256, 144))])
def test_a_flag_of_alignment_selects_stores_of_16_bytes(
    flag: int, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At addresses that are not aligned, such a store ends the process, here as on a GPU."""
    case = operands(*shape)
    Chained(case, SMALL, "relu", "e4m3")
    launch = gemm._launch
    monkeypatch.setattr(gemm, "_launch", lambda *given: launch(*given[:-1], (*given[-1][:-1], flag)))
    assert ends_by(lambda: Chained(case, SMALL, "relu", "e4m3")) == signal.SIGILL


def test_which_outputs_of_a_chain_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[int] = []
    launch = gemm._launch
    monkeypatch.setattr(gemm, "_launch", lambda *given: flags.append(given[-1][-1]) or launch(*given))
    for shape in ((256, 256, 144), (256, 136, 144), (201, 256, 144)):
        Chained(operands(*shape), SMALL, "relu", "e4m3")
    assert flags == [gemm._ROWS | gemm._COLUMNS, gemm._COLUMNS, gemm._ROWS]


def test_chains_leave_out_what_nobody_needs() -> None:
    case, bias = operands(130, 136, 144), torch.randn(136)
    whole = Chained(case, SMALL, "relu", "e4m3", bias=bias)
    without_h = Chained(case, SMALL, "relu", "e4m3", bias=bias, wants_h=False)
    without_y_t = Chained(case, SMALL, "relu", "e4m3", bias=bias, wants_y_t=False)
    assert torch.equal(whole.y, without_h.y)
    assert torch.equal(whole.y_t, without_h.y_t)
    assert torch.equal(whole.y, without_y_t.y)
    assert torch.equal(whole.h, without_y_t.h)
    assert (without_h.h.view(torch.uint8) == POISON).all()
    assert (without_y_t.y_t == POISON).all()


def test_no_amax_from_outside_of_the_matrix() -> None:
    # row 0 of a tile that exceeds the matrix: inside, all sums cancel the bias; outside, there is nothing to cancel
    case = operands(70, 24, 16)
    case.a.view(torch.float8_e4m3fn).fill_(1.0)
    case.b.view(torch.float8_e4m3fn).fill_(-1.0)
    bias = -case.product()[0].float()
    one = Chained(case, SMALL, "relu", "e4m3", bias=bias)
    assert one.amax[1] < 0.01 < bias.min()
    # nor NaN from b, multiplied by the zeros outside a
    case.b.view(torch.float8_e4m3fn)[3] = NAN
    backward = Chained(case._replace(a_format="e5m2"), PROMOTED[-1], "relu", "e5m2", h=torch.ones(70, 24).bfloat16())
    assert backward.amax[1].isnan()
    assert backward.sums[:, 3].isnan().all()
    assert backward.sums[:, [0, 1, 2, *range(4, 24)]].isfinite().all()


def test_an_amax_that_is_larger_stays() -> None:
    case = operands(70, 24, 16)
    defines = gemm_variants.chained_variant(SMALL, "e4m3", torch.bfloat16, False, "relu", "e4m3")
    for recorded, index in ((1e9, 0), (None, 0)):
        amax = None if recorded is None else torch.tensor([recorded])
        y, scale = torch.empty(70, 24, dtype=torch.uint8), torch.ones(1)
        gemm.chained_gemm(
            load(SMALL, defines), SMALL, case.a, case.b, None, y, None, Row(scale, scale, torch.tensor([index]), amax),
            torch.empty(()), case.a_scale_inv, case.b_scale_inv,
        )  # fmt: skip
        assert amax is None or amax.item() == torch.tensor(1e9)


# --- self-tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", kernels.variants((9, 0))[68::8], ids=lambda variant: variant.name)
def test_self_tests_pass(variant: kernels.Variant) -> None:
    kernel = HostKernel((variant.family, variant.defines), variant.layout, variant.block, 0, variant.shared_bytes)
    assert variant.self_test(torch.device("cpu"), kernel) is None
