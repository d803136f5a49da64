"""Hopper's GEMMs compile without spills, into the intended instructions. Needs no GPU."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from changed_sources import Change
from gemm_cases import FORMAT_PAIRS
from gemm_on_host import Chosen
from sass import LINE, Family, compiled, count, instructions, name, program, resources, touching

from kernels_cuda.gemm_variants import configurations

LARGE, SMALL = configurations((9, 0))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# the limits of a block on Hopper, and its registers at the start
SHARED_BYTES, REGISTERS = 227 << 10, 168
# every configuration and format, and every output with one of them
PLAIN = [
    *(Chosen(LARGE, output, pair, promote=True) for pair, output in zip(FORMAT_PAIRS[1:], (FP16, FP32))),
    *(Chosen(one, BF16, FORMAT_PAIRS[1], promote=True) for one in (LARGE, SMALL)),
]
BLOCKS = [
    Chosen(one, output, promote=True, b_scale_rows=rows)
    for one in (LARGE, SMALL)
    for rows, output in ((1, FP32), (128, BF16))
]
GROUPS = [
    Chosen(SMALL, output, promote=promote, grouped=grouped)
    for promote, grouped in ((False, "rows"), (True, "rows"), (True, "depth"))
    for output in (BF16, FP32, FP16)
]
FAST = GROUPS[0]
EVERY = PLAIN + BLOCKS + GROUPS


def named(chosen: Chosen) -> str:
    return name(chosen.family)


@pytest.mark.parametrize("chosen", EVERY, ids=named)
def test_compiles_without_spills(chosen: Chosen) -> None:
    registers, static_bytes = resources(compiled(chosen.family, "sm_90a")[1])
    # 384 threads start with an equal share of registers; the loading warpgroup gives its own away
    assert registers == REGISTERS
    assert static_bytes == 0
    assert chosen.configuration.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("chosen", [*PLAIN[1:], FAST], ids=named)
def test_instructions(chosen: Chosen) -> None:
    configuration, fp32 = chosen.configuration, chosen.output == FP32
    found = instructions(chosen.family, "sm_90a")
    a, b = (fmt.upper() for fmt in chosen.formats)
    assert not count(found, r"(LDL|STL)\b.*"), "local memory"
    # products: 4 of 32 bytes per step and piece, in a loop that may be unrolled
    pieces = configuration.block_m // 128
    words = configuration.block_n // 8 * pieces
    products = count(found, rf"QGMMA\.64x{configuration.block_n}x32\.F32\.{a}\.{b}")
    assert products == count(found, r"QGMMA.*") > 0
    assert products % (4 * pieces) == 0
    # one wait per group of products; if they were serialised, one per product
    assert count(found, r"WARPGROUP\.DEPBAR.*") <= products // 4 + 1
    assert count(found, r"USETMAXREG.*") == 2
    # barriers: two per stage
    assert count(found, r"SYNCS\.EXCH\.64") == 2 * configuration.stages
    # loads: a by each block for itself, b for the cluster
    assert count(found, r"UTMALDG\.2D") > 0
    multicast = count(found, r"UTMALDG\.2D\.MULTICAST")
    assert multicast == (count(found, r"UTMALDG\.2D") if configuration.cluster > 1 else 0)
    # stores: two boxes per 256 bytes of a piece's rows
    assert count(found, r"UTMASTG\.2D") == pieces * configuration.block_n * (4 if fp32 else 2) // 128
    # four matrices hold 16 rows of 16 columns of 16 bits
    assert count(found, r"STSM\.16\.M88\.4") == (0 if fp32 else words // 2)
    # a full memory fence only at the end of a cluster; a single block has no cluster barriers
    clustered = configuration.cluster > 1
    assert count(found, r"MEMBAR\.\w+\.GPU") == clustered
    assert count(found, r"UCGABAR_ARV") == count(found, r"UCGABAR_WAIT") == 2 * clustered
    assert count(found, r"UTMACCTL\.PF") == 3
    assert not count(found, r"STG\..*|RED.*|ATOM.*")


@pytest.mark.parametrize("chosen", EVERY, ids=named)
def test_nothing_touches_sums_while_products_run(chosen: Chosen) -> None:
    assert touching(*program(chosen.family, "sm_90a")) == []


def test_what_touches_sums_while_products_run_is_found() -> None:
    fast, precise = (program(one.family, "sm_90a") for one in (FAST, BLOCKS[1]))
    for lines, labels in (fast, precise):
        (*_, last) = (at for at, line in enumerate(lines) if "gsb0, 0x0" in line)
        # a wait that is not there, or is for all but one group, and sums that are stored or scaled
        for line in ("NOP", "WARPGROUP.DEPBAR.LE gsb0, 0x1"):
            found = touching([*lines[:last], f"        /*0000*/ {line} ;", *lines[last + 1 :]], labels)
            assert sum("FFMA" in one for one in found) >= 64
    # in the main loop of `fast`, where it replaces one that touches nothing: the products of two steps are under way
    lines, labels = fast
    at = next(at for at, line in enumerate(lines) if "gsb0, 0x1" in line) - 2
    for register, touched in ((23, False), (24, True), (87, True), (88, False)):
        moved = f"        /*0000*/              @!P0 FADD R152, R{register}, R152 ;"
        assert touching([*lines[:at], moved, *lines[at + 1 :]], labels) == [moved] * touched


@pytest.mark.parametrize(
    ("chosen", "change"),
    [
        (FAST, Change("    mma_wait<0>();\n    release", "    release")),
        (FAST, Change("        mma_wait<1>();\n", "        sums[0].values[0] += 1.0f;\n        mma_wait<1>();\n")),
        (PLAIN[0], Change("            mma_wait<0>();\n", "")),
        (PLAIN[0], Change("            mma_wait<0>();\n", "            mma_wait<1>();\n")),
    ],
    ids=["no last wait", "sums touched in the loop", "no wait for a step", "no wait for the newest step"],
)
def test_what_touches_sums_in_a_source_is_found(chosen: Chosen, change: Change) -> None:
    """ptxas waits by itself where the source does not, and says so; this costs most of the speed."""
    with pytest.raises(AssertionError, match="C75"):
        resources(compiled(chosen.family, "sm_90a", change)[1])


def steps(chosen: Chosen) -> tuple[list[str], int]:
    """The instructions of a computing thread in the main loop, the shortest around products; and its steps of K."""
    lines, labels = program(chosen.family, "sm_90a")
    jumps = ((place, re.search(r"BRA.*`\((\.L_\w+)\)", line)) for place, line in enumerate(lines))
    loops = (lines[labels[jump[1]] : place + 1] for place, jump in jumps if jump)
    loop = min((loop for loop in loops if any("QGMMA" in line for line in loop)), key=len)
    return loop, sum("QGMMA" in line for line in loop) // (chosen.configuration.block_m // 128 * 4)


# by rows of a tile, a little more than there are; kernels_cuda/README.md has the figures with block scales
STEP = {
    (False, 0): {128: 49},
    (True, 0): {256: 190, 128: 114},
    (True, 128): {256: 225, 128: 129},
    (True, 1): {256: 395, 128: 217},
}


@pytest.mark.parametrize("chosen", EVERY, ids=named)
def test_a_step_costs_at_most(chosen: Chosen) -> None:
    promote, scale_rows, rows = chosen.promote, chosen.b_scale_rows, chosen.configuration.block_m
    loop, times = steps(chosen)
    found = Counter(LINE.findall("\n".join(loop)))
    most = STEP[promote, scale_rows][rows]
    assert len(loop) <= most * times, found
    # two warps of each scheduler issue them while the tensor cores multiply, 4096 sums of products a cycle
    assert 2 * most < rows * 128 * 128 // 4096
    if not promote:
        return
    pieces = rows // 128
    # 64 x 128 sums for each piece, 64 per thread, with an addition or a multiply-add each
    assert count(found, "FADD") == (0 if scale_rows else 64 * pieces), found
    assert count(found, "FFMA") == (64 * pieces if scale_rows else 0), found
    # scales of a thread's two rows of each piece and of one column, for the next step
    assert count(found, r"LDG\.E") == (2 * pieces + 1 if scale_rows else 0), found
    # one wait per piece's products; if they were serialised, one per product
    assert sum("DEPBAR" in line for line in loop) == pieces, found
    by_columns = scale_rows == 1
    assert count(found, r"LDS\..*") == (16 * pieces if by_columns else 0), found
    assert count(found, r"BAR\.SYNC.*") == (2 if by_columns else 0), found


@pytest.mark.parametrize("chosen", [FAST, PLAIN[2], *BLOCKS[:2]], ids=named)
def test_the_bias_is_loaded_while_products_run(chosen: Chosen) -> None:
    lines, _ = program(chosen.family, "sm_90a")
    products = [place for place, line in enumerate(lines) if "QGMMA" in line]
    # nothing else is loaded in 16 bits; a bias in fp32 goes to the same register
    loads = [
        (place, found[1]) for place, line in enumerate(lines) if (found := re.search(r"LDG\.E\.U16 (R\d+),", line))
    ]
    ((place, register),) = loads
    uses = (n for n, line in enumerate(lines) if re.search(rf"\b{register}\b", line) and "LDG" not in line)
    assert place < products[0] < products[-1] < next(use for use in uses if use > place)


@pytest.mark.parametrize("chosen", GROUPS, ids=named)
def test_products_do_not_wait_for_the_scales_of_their_group(chosen: Chosen) -> None:
    lines, _ = program(chosen.family, "sm_90a")
    *_, last = (place for place, line in enumerate(lines) if "QGMMA" in line)
    # nothing else is multiplied without an addition
    (place,) = (place for place, line in enumerate(lines) if re.search(r"\bFMUL\b", line))
    assert place > last


# --- cost of the epilogue -------------------------------------------------------------------------------------------


def epilogue_instructions(family: Family) -> int:
    """Instructions of a computing thread for a tile, from the last product of the main loop to the start of the next
    tile, including those that run only at the edges of a matrix.
    """
    lines, labels = program(family, "sm_90a")
    products = [place for place, line in enumerate(lines) if "QGMMA" in line]
    jumps = {
        place: labels[jump[1]] for place, line in enumerate(lines) if (jump := re.search(r"BRA.*`\((\.L_\w+)\)", line))
    }
    # the loop over tiles is the outermost loop around all products
    end = min((target, place) for place, target in jumps.items() if target < products[0] and place > products[-1])[1]
    return end - products[-1]


# README.md has this figure: at most so many per 128 sums of a thread
def test_an_epilogue_costs_at_most() -> None:
    assert epilogue_instructions(PLAIN[2].family) <= 430
