"""``gemm_sm89`` from its own source as host C++ against fp64, and compiled for its GPUs. Needs no GPU.

Its asynchronous copies are made as late as the kernel's waits allow, and in another run as early as possible: see
``host_shim/instructions_sm89.cuh``. Sums are those of sm_120's tensor cores where they show more, else Ada's. All rows
are in one group: for operands with one scale each there is no kernel.
"""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch
from fp8_numpy import code_values, saturating_cast
from gemm_cases import FORMAT_PAIRS as PAIRS
from gemm_on_host import POISON, Chosen, load, multiply
from host_kernels import Guarded, HostKernel, at_the_edge
from pairwise import pairwise
from sass import compiled, count, instructions, name, resources
from tensor_cores import ADA, SM120, TensorCores
from torch import Tensor

from kernels_cuda.gemm import Operand
from kernels_cuda.gemm_variants import Configuration, grouped_configuration

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# formats are read where products start, and outputs are written where they end: each value of both is enough
OUTPUT_OF = dict(zip(PAIRS, DTYPES, strict=True))
NAN_CODE = 0x7F
INF, NAN = np.inf, np.nan
# for normally distributed operands; not powers of two, so that scaling rounds
A_SCALE, B_SCALE = 37.0, 13.0


def configuration_of(promote: bool) -> Configuration:
    configuration = grouped_configuration((8, 9), promote)
    assert configuration is not None
    return configuration


def chosen(formats: tuple[str, str], output: torch.dtype, promote: bool) -> Chosen:
    return Chosen(configuration_of(promote), output, formats, promote, grouped="rows")


def host_kernel(one: Chosen, late: bool = True, cores: TensorCores = SM120) -> HostKernel:
    kernel = load(one, late)
    ctypes.c_int.in_dll(kernel._library, "fraction_bits").value = cores.bits
    return kernel


def placed(codes: np.ndarray, apart: int) -> Tensor:
    """The codes up to a page, with NaN between rows that are ``apart`` bytes apart."""
    rows, k = codes.shape
    buffer = at_the_edge(torch.full(((rows - 1) * (k + apart) + k,), NAN_CODE, dtype=torch.uint8))
    return buffer.as_strided((rows, k), (k + apart, 1)).copy_(torch.from_numpy(codes))


class Problem:
    """Normally distributed operands, and their results in fp64."""

    def __init__(self, m: int, n: int, k: int, formats: tuple[str, str], apart: int = 0) -> None:
        draw = np.random.default_rng([m, n, k])
        self.formats = formats
        self.a_codes = saturating_cast(draw.standard_normal((m, k)), np.float32(A_SCALE), formats[0])
        self.b_codes = saturating_cast(draw.standard_normal((n, k)), np.float32(B_SCALE), formats[1])
        self.apart = apart
        self.place()

    def place(self) -> None:
        """Copies codes into memory, and gives their values."""
        self.a, self.b = placed(self.a_codes, self.apart), placed(self.b_codes, 2 * self.apart)
        self.scales = torch.tensor(1 / A_SCALE), torch.tensor(1 / B_SCALE)
        self.a_values = code_values(self.formats[0])[self.a_codes]
        self.b_values = code_values(self.formats[1])[self.b_codes]

    @property
    def scaled(self) -> tuple[Operand, Operand]:
        """Both operands with their scales."""
        return (self.a, self.scales[0]), (self.b, self.scales[1])

    def run(
        self,
        output: torch.dtype,
        promote: bool,
        bias: Tensor | None = None,
        late: bool = True,
        cores: TensorCores = SM120,
    ) -> Tensor:
        """The kernel's result."""
        its = chosen(self.formats, output, promote)
        kernel = host_kernel(its, late, cores)
        # the next multiple of 16 bytes, and 16 more
        stride = -(-len(self.b) * output.itemsize // 16) * 16 // output.itemsize + 16 // output.itemsize
        guarded = Guarded((len(self.a), stride), output, POISON)
        out = guarded.tensor[:, : len(self.b)]
        multiply(kernel, its, *self.scaled, out, bias)
        assert guarded.unharmed(), "written outside of out"
        assert (guarded.tensor[:, len(self.b) :].contiguous().view(torch.uint8) == POISON).all(), "written beside it"
        return out.contiguous()

    def sums(self, cores: TensorCores, promote: bool) -> Tensor:
        """The sums that these tensor cores make, without scales."""
        values = torch.from_numpy(self.a_values), torch.from_numpy(self.b_values)
        return cores.sums(*values, self.formats, promote).float()

    def check(self, out: Tensor, bias: Tensor | None = None) -> None:
        """``out`` is the fp64 result, up to truncated fp32 sums and one rounding to its dtype."""
        a, b = self.a_values, self.b_values
        scale = float(self.scales[0].double() * self.scales[1].double())
        addends = [torch.zeros(())] if bias is None else [bias.to(out.dtype)]
        addends = [one.double().numpy() for one in addends]
        exact = a @ b.T * scale + sum(addends)
        terms = np.abs(a) @ np.abs(b).T * scale + sum(map(np.abs, addends))
        # an mma adds 32 products, promotion adds four mma; scales and bias take one operation each
        additions = a.shape[1] / 32 + a.shape[1] / 128 + 6
        in_fp32 = additions * 2.0**-23 * terms
        info = torch.finfo(out.dtype)
        bound = in_fp32 + info.eps / 2 * (np.abs(exact) + in_fp32) + info.smallest_normal * info.eps / 2
        assert (np.abs(out.double().numpy() - exact) <= bound).all()


# --- shapes and variants ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("formats", "promote", "late"), pairwise(PAIRS, [False, True], [False, True]))
def test_every_format_and_output(formats: tuple[str, str], promote: bool, late: bool) -> None:
    problem = Problem(150, 140, 400, formats)
    problem.check(problem.run(OUTPUT_OF[formats], promote, late=late))


ROWS, DEPTHS = (1, 7, 64, 129, 200), (16, 48, 128, 144, 400)


@pytest.mark.parametrize("m", ROWS)
def test_ragged_shapes(m: int) -> None:
    """All pairs of sizes, each with three depths; copies are late or at once by turns."""
    for i, n in enumerate(ROWS):
        for j in range(3):
            k = DEPTHS[(ROWS.index(m) + 2 * i + j) % len(DEPTHS)]
            problem = Problem(m, n, k, PAIRS[j], apart=16 * (i % 2))
            problem.check(problem.run(OUTPUT_OF[PAIRS[j]], (i + j) % 2 == 1, late=(m + i // 2 + j) % 2 == 0))


def test_tiles_in_groups_of_rows_of_tiles() -> None:
    """Seventeen rows of tiles: two whole groups, and one with a single row."""
    for m in (16 * 128 + 1, 8 * 128):
        problem = Problem(m, 258, 16, PAIRS[0])
        problem.check(problem.run(torch.float32, False))


# --- sums -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cores", [ADA, SM120], ids=["Ada", "sm_120"])
@pytest.mark.parametrize("formats", PAIRS)
@pytest.mark.parametrize("promote", [False, True])
def test_sums_are_those_of_the_tensor_cores(promote: bool, formats: tuple[str, str], cores: TensorCores) -> None:
    for k in (112, 144, 720):
        problem = Problem(17, 9, k, formats)
        # subnormals too
        problem.a_codes[::2] &= 0x9F
        problem.place()
        out = problem.run(torch.float32, promote, cores=cores)
        expected, other = problem.sums(cores, promote), problem.sums(cores, not promote)
        assert torch.equal(out, expected * (problem.scales[0] * problem.scales[1]))
        # with few bits, the two modes differ as soon as there are two partial sums
        assert (k <= 128) == torch.equal(expected, other) or cores is SM120


# --- the epilogue -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", DTYPES)
def test_epilogue_is_exact(output: torch.dtype) -> None:
    """With a single mma every operation and rounding is known, so results are bit-identical, with even and odd n."""
    for n, bias_dtype in itertools.product((140, 141), (None, *DTYPES)):
        problem = Problem(150, n, 32, PAIRS[0])
        # as large as the products: if they cancel, an unrounded bias shows
        bias = None if bias_dtype is None else (5 * torch.randn(n)).to(bias_dtype)
        out = problem.run(output, False, bias)
        problem.check(out, bias)
        expected = problem.sums(SM120, False) * (problem.scales[0] * problem.scales[1])
        if bias is not None:
            expected = expected + bias.to(output).float()
        assert torch.equal(out, expected.to(output))


def test_nothing_behind_out_and_bias_is_read() -> None:
    for n, output in itertools.product((7, 8), DTYPES):
        problem = Problem(5, n, 32, PAIRS[0])
        its = chosen(problem.formats, output, False)
        out = at_the_edge(torch.empty(5, 8, dtype=output))[:, :n]
        bias = at_the_edge(torch.empty(n, dtype=output))
        bias.copy_(torch.randn(n))
        multiply(host_kernel(its), its, *problem.scaled, out, bias)
        problem.check(out, bias)


def test_scales_of_a_finite_product() -> None:
    """Scales are multiplied with each other first: the sums times one of them would overflow fp32."""
    problem = Problem(3, 3, 16, PAIRS[0])
    problem.scales = torch.tensor(2.0**125), torch.tensor(2.0**-125)
    problem.check(problem.run(torch.float32, False))


SPECIAL = {"e4m3": (0x7F, 0xFF), "e5m2": (0x7C, 0xFC, 0x7D, 0xFF)}


@pytest.mark.parametrize(("formats", "promote", "k"), pairwise(PAIRS, [False, True], [48, 144]))
def test_nan_and_inf_stay_in_their_rows_and_columns(formats: tuple[str, str], promote: bool, k: int) -> None:
    """As in fp64. Their neighbours, the padding of K and the memory between rows have no effect."""
    problem = Problem(150, 140, k, formats, apart=32)
    for codes, format, first in ((problem.a_codes, formats[0], 0), (problem.b_codes, formats[1], 5)):
        for i, code in enumerate(SPECIAL[format]):
            for row, column in ((first + 3 * i, 0), (first + 3 * i + 40, k - 1), (first + 3 * i + 120, k // 2)):
                codes[row, column] = code
        codes[first + 80, : k // 2] = SPECIAL[format][0]
        codes[first + 80, k // 2 :] = SPECIAL[format][1]
    problem.b_codes[20:30] = 0
    problem.place()
    out = problem.run(OUTPUT_OF[formats], promote).double().numpy()
    with np.errstate(invalid="ignore"):
        exact = (problem.a_values[:, None] * problem.b_values[None]).sum(2)
    assert np.isnan(exact).any()
    assert formats == PAIRS[0] or (exact == INF).any()
    for special in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(special(out), special(exact))
    finite = np.isfinite(exact)
    np.testing.assert_allclose(out[finite] * A_SCALE * B_SCALE, exact[finite], rtol=2.0**-7, atol=1e-3)


# --- for its GPUs -----------------------------------------------------------------------------------------------------

ARCHITECTURES = ("sm_89", "sm_120a", "sm_121a")
# registers depend on the output and on promotion; a format changes the name of one instruction
IN_GROUPS = [
    Chosen(configuration_of(promote), output, formats, promote, grouped=grouped)
    for promote, grouped in ((False, "rows"), (True, "rows"), (True, "depth"))
    for formats, output in OUTPUT_OF.items()
]
# the epilogue is the same as in the others
IN_BLOCKS = [Chosen(configuration_of(True), torch.float32, PAIRS[0], True, rows) for rows in (1, 128)]
REGISTERS, SHARED_BYTES = 1 << 16, 100 << 10


def named(value: Chosen | str) -> str:
    return value if isinstance(value, str) else name(value.family)


# sm_121a has the instructions and the registers of sm_120a
EACH = [(one, arch) for arch in ARCHITECTURES for one in IN_GROUPS + IN_BLOCKS if arch != "sm_121a" or one.promote]


@pytest.mark.parametrize(("one", "arch"), EACH, ids=named)
def test_compiles_without_spills(one: Chosen, arch: str) -> None:
    registers, static_bytes = resources(compiled(one.family, arch)[1])
    # two blocks per multiprocessor, with PROMOTE one; 1 KB of a block's shared memory is reserved by the system
    blocks = 1 if one.promote else 2
    assert registers * one.configuration.threads * blocks <= REGISTERS
    assert (one.configuration.shared_bytes + static_bytes + 1024) * blocks <= SHARED_BYTES


@pytest.mark.parametrize(("one", "arch"), [one for one in EACH if one[0] in IN_GROUPS[::2]], ids=named)
def test_instructions(one: Chosen, arch: str) -> None:
    a_format, b_format = one.formats
    found = instructions(one.family, arch)
    # a warp's 64 x 32 x 64 in mma of 16 x 8 x 32, times the unrolling of the main loop
    products = count(found, rf"QMMA\.16832\.F32\.{a_format.upper()}\.{b_format.upper()}")
    assert products > 0, found
    assert products % 32 == 0, found
    assert count(found, r"QMMA\..*") == products, found
    assert not count(found, r"(HMMA|LDL|STL|CALL)\b.*"), "emulated, or local memory"
    # 64 x 64 bytes of a and 32 x 64 of b, 512 at once
    assert count(found, r"LDSM\.16\.M(T)?88\.4") == count(found, r"LDSM\..*") == products // 32 * 12, found
    # past L1 and the registers, 16 bytes of four rows per thread
    copies = count(found, r"LDGSTS\.E\.BYPASS\.LTC128B\.128")
    assert copies > 0, found
    assert copies % 4 == 0, found
    assert copies == count(found, r"LDGSTS\..*"), found
    assert not count(found, r"STS\b.*"), "stores to shared memory"
    wide = r"STG\.E\.64" if one.output == torch.float32 else r"STG\.E"
    assert count(found, wide) >= 32, found
