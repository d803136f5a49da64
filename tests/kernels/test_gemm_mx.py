"""``gemm_sm89`` with scales in E8M0 for every 32 along K, from its own source on the CPU, and compiled for sm_120.

Codes are small integers where sums shall be exact, so that results are bit-identical with fp64's; else they equal those
of a model of sm_120's tensor cores. Stages, barriers and the epilogue are also covered by the tests without scales.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import NamedTuple

import gemm_on_host
import pytest
import torch
from fp8_numpy import code_values
from gemm_on_host import Chosen
from host_kernels import at_the_edge
from sass import compiled, count, instructions, program, resources
from tensor_cores import SM120
from torch import Tensor

from kernels_cuda.gemm_variants import OUTPUTS, mx_configuration

CONFIGURATION = mx_configuration((12, 0))
assert CONFIGURATION is not None
CHOSEN = {output: Chosen(CONFIGURATION, output, b_scale_rows=1) for output in OUTPUTS}
VALUES = torch.from_numpy(code_values("e4m3"))
NAN = 255


class Operands(NamedTuple):
    """Codes ``[M, K]`` and ``[N, K]``, and those of the scales of their blocks, ``[*, ceil(K/32)] uint8``."""

    a: Tensor
    b: Tensor
    a_scales: Tensor
    b_scales: Tensor

    def values(self) -> tuple[Tensor, Tensor]:
        """The operands in fp64, multiplied by their scales."""
        return scaled(self.a, self.a_scales), scaled(self.b, self.b_scales)

    def product(self) -> Tensor:
        """The product in fp64."""
        a, b = self.values()
        return a @ b.t()


def scaled(codes: Tensor, scales: Tensor) -> Tensor:
    exponents = scales.repeat_interleave(32, 1)[:, : codes.shape[1]].double() - 127
    return torch.where(exponents == NAN - 127, torch.nan, VALUES[codes.long()] * exponents.exp2())


def in_tiles(scales: Tensor) -> Tensor:
    """In the order of cuBLAS, "1D Block Scaling Factors Layout", up to a page. Padding rows are NaN, blocks 0."""
    down, across = -(-len(scales) // 128), -(-scales.shape[1] // 4)
    tiles = at_the_edge(torch.full((down * across * 512,), NAN, dtype=torch.uint8))
    for outer, row in enumerate(scales.tolist()):
        for inner, code in enumerate(row + [0] * (-len(row) % 4)):
            tile = outer // 128 * across + inner // 4
            tiles[tile * 512 + outer % 32 * 16 + outer % 128 // 32 * 4 + inner % 4] = code
    return tiles


def random_scales(rows: int, k: int, low: int, high: int, draw: torch.Generator) -> Tensor:
    return torch.randint(low, high + 1, (rows, -(-k // 32)), dtype=torch.uint8, generator=draw)


def exact(m: int, n: int, k: int) -> Operands:
    """Integers of at most 2, and scales from 1/8 to 8, whose sums have at most 23 bits."""
    draw = torch.Generator().manual_seed(m + 3 * n + 5 * k)
    codes = (
        torch.randint(-2, 3, (rows, k), generator=draw).to(torch.float8_e4m3fn).view(torch.uint8) for rows in (m, n)
    )
    return Operands(*codes, *(random_scales(rows, k, 124, 130, draw) for rows in (m, n)))


def run(case: Operands, output: torch.dtype, bias: Tensor | None = None, late: bool = True) -> Tensor:
    operands = (case.a, in_tiles(case.a_scales)), (case.b, in_tiles(case.b_scales))
    return gemm_on_host.run(operands, CHOSEN[output], bias, late, 2)


SIZES, DEPTHS = (1, 7, 33, 127, 128, 129, 257), (16, 32, 48, 96, 112, 128, 144, 256, 272, 400)


@pytest.mark.parametrize("late", [True, False], ids=["late", "at once"])
@pytest.mark.parametrize("m", SIZES)
def test_each_block_is_multiplied_by_its_scales(m: int, late: bool) -> None:
    for i, n in enumerate(SIZES):
        k = DEPTHS[(SIZES.index(m) + 3 * i + late) % len(DEPTHS)]
        case, output = exact(m, n, k), (torch.float32, torch.bfloat16)[(m + i) % 2]
        bias = torch.randint(-9, 9, (n,)).to(output)
        expected = (case.product() + bias.double()).to(output)
        assert torch.equal(run(case, output, bias, late=late), expected), (m, n, k)


@pytest.mark.parametrize("spread", [3, 20])
def test_sums_are_those_of_the_tensor_cores(spread: int) -> None:
    """All codes but NaN, subnormal ones too, at both ends of the scales' range; partial sums of any magnitude."""
    draw = torch.Generator().manual_seed(spread)
    for m, n, k, shift in ((17, 40, 400, 0), (40, 9, 144, 124 - spread), (9, 17, 272, spread - 124)):
        a, b = (torch.randint(127, (rows, k), dtype=torch.uint8, generator=draw) for rows in (m, n))
        a, b = (one + torch.randint(2, one.shape, generator=draw).to(torch.uint8) * 128 for one in (a, b))
        a_low, b_low = 127 + shift - spread, 127 - shift - spread
        scales = (
            random_scales(m, k, a_low, a_low + 2 * spread, draw),
            random_scales(n, k, b_low, b_low + 2 * spread, draw),
        )
        values, exponents = (VALUES[a.long()], VALUES[b.long()]), tuple(one.double() - 127 for one in scales)
        expected = SM120.sums(*values, ("e4m3", "e4m3"), False, exponents)  # type: ignore[arg-type]
        case = Operands(a, b, *scales)
        assert torch.equal(run(case, torch.float32), expected.float())
        size = case.values()[0].abs() @ case.values()[1].abs().t()
        assert ((expected - case.product()).abs() <= 2.0**-22 * (k / 32) * size).all()


def test_nan_stays_in_its_row_or_column() -> None:
    """Scales that are NaN, and codes; the padding of tiles, which is NaN too, has no effect."""
    case = exact(150, 140, 304)
    case.a_scales[3, 0] = case.a_scales[149, 9] = case.b_scales[5, 4] = case.b_scales[139, 9] = NAN
    case.a[70, 303], case.b[37, 0] = 0x7F, 0xFF
    expected = case.product().float()
    assert int(expected.isnan().sum()) == 3 * 140 + 3 * 150 - 9
    torch.testing.assert_close(run(case, torch.float32), expected, rtol=0, atol=0, equal_nan=True)


# --- for its GPUs -----------------------------------------------------------------------------------------------------

FAMILY = CHOSEN[torch.bfloat16].family


@pytest.mark.parametrize("output", CHOSEN)
def test_compiles_without_spills(output: torch.dtype) -> None:
    registers, static_bytes = resources(compiled(CHOSEN[output].family, "sm_120a")[1])
    # two blocks on a multiprocessor
    assert registers * CONFIGURATION.threads * 2 <= 1 << 16
    assert (CONFIGURATION.shared_bytes + static_bytes + 1024) * 2 <= 100 << 10


def test_instructions() -> None:
    found = instructions(FAMILY, "sm_120a")
    assert count(found, r"QMMA\.SF\.16832\.F32\.E4M3\.E4M3\.E8") == count(found, r".MMA\..*") == 32, found
    assert not count(found, r"(LDL|STL|CALL)\b.*"), "local memory"
    # of 128 along K, once before the loop and once in it
    assert count(found, r"LDG\.E\.64") == 2, found


@pytest.mark.parametrize("arch", ["sm_120a", "sm_121a"])
def test_each_mma_has_the_scales_of_its_rows(arch: str) -> None:
    """The last operand selects them: 2 bits for the byte of a, 1 for its lanes, 2 for the byte of b, 2 for its lane."""
    lines, labels = program(FAMILY, arch)
    constants, found = {"URZ": 0}, Counter[int]()
    for line in lines:
        if moved := re.search(r" UMOV (UR\d+), (0x[0-9a-f]+)", line):
            constants[moved[1]] = int(moved[2], 16)
        elif product := re.search(r"QMMA\.SF.* (UR\w+) ;", line):
            found[constants[product[1]]] += 1
    every = itertools.product((0, 1), (0, 1), range(4))
    # each twice: for two words of a; in a step of 64, a warp's 64 x 32 x 64 in mma of 16 x 8 x 32
    assert found == {byte | a_lanes << 2 | byte << 3 | b_lane << 5: 2 for byte, a_lanes, b_lane in every}
    jumps = ((place, re.search(r"BRA.*`\((\.L_\w+)\)", line)) for place, line in enumerate(lines))
    loops = (lines[labels[jump[1]] : place + 1] for place, jump in jumps if jump)
    # kernels_cuda/README.md has the figure
    assert min(len(loop) for loop in loops if sum("QMMA" in line for line in loop) == 32) <= 170
