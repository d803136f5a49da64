"""Hopper's GEMMs compile without spills, into the intended instructions. Needs no GPU."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from changed_sources import Change
from gemm_cases import FORMAT_PAIRS
from sass import LINE, Family, compiled, count, instructions, name, program, resources, touching

from kernels_cuda import gemm_variants
from kernels_cuda.gemm_variants import Configuration, configurations

FAST, PROMOTED = (configurations((9, 0), promote) for promote in (False, True))
# the limits of a block on Hopper, and its registers at the start
SHARED_BYTES, REGISTERS = 227 << 10, 168
Chosen = tuple[Configuration, Family]


def plain(configuration: Configuration, a: str, b: str, output: torch.dtype, promote: bool) -> Chosen:
    return configuration, (configuration.family, gemm_variants.variant(configuration, a, b, output, promote))


def in_blocks(configuration: Configuration, output: torch.dtype, b_scale_rows: int) -> Chosen:
    defines = gemm_variants.variant(configuration, "e4m3", "e4m3", output, True, b_scale_rows)
    return configuration, (configuration.family, defines)


def in_groups(output: torch.dtype, promote: bool, grouped: str) -> Chosen:
    configuration = gemm_variants.grouped_configuration((9, 0), promote)
    assert configuration is not None
    defines = gemm_variants.variant(configuration, "e4m3", "e4m3", output, promote, grouped=grouped)
    return configuration, (configuration.family, defines)


BLOCKS = [
    in_blocks(one, output, rows)
    for one in PROMOTED
    for rows in (1, 128)
    for output in ((torch.float32,) if rows == 1 else (torch.bfloat16,))
]
# every configuration; every format and output with one of them, and some of those below promotion with fp32
EVERY = [
    *(plain(one, "e4m3", "e4m3", torch.bfloat16, False) for one in FAST),
    *(plain(one, "e5m2", "e4m3", torch.bfloat16, True) for one in PROMOTED),
    *(plain(FAST[0], *pair, out, False) for pair, out in zip(FORMAT_PAIRS[1:], (torch.float16, torch.float32))),
    *(plain(PROMOTED[0], *pair, torch.float16, True) for pair in FORMAT_PAIRS[:2]),
]
GROUPS = [
    in_groups(output, promote, grouped)
    for promote, grouped in ((False, "rows"), (True, "rows"), (True, "depth"))
    for output in gemm_variants.OUTPUTS
]


def named(chosen: Chosen) -> str:
    return name(chosen[1])


@pytest.mark.parametrize("chosen", EVERY + BLOCKS + GROUPS, ids=named)
def test_compiles_without_spills(chosen: Chosen) -> None:
    configuration, family = chosen
    registers, static_bytes = resources(compiled(family, "sm_90a")[1])
    # 384 threads start with an equal share of registers; the loading warpgroup gives its own away
    assert registers == REGISTERS
    assert static_bytes == 0
    assert configuration.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("output", gemm_variants.OUTPUTS)
def test_the_sum_of_splits_compiles(output: torch.dtype) -> None:
    registers, static_bytes = resources(compiled(("sum_splits", gemm_variants.sum_splits_variant(output)), "sm_90a")[1])
    assert registers <= 64
    assert static_bytes == 0


SHOWN = [plain(FAST[at], "e4m3", "e4m3", torch.bfloat16, False) for at in (0, 1, -1)]
SHOWN += [plain(PROMOTED[0], "e5m2", "e4m3", torch.float32, True)]


@pytest.mark.parametrize("chosen", SHOWN, ids=named)
def test_instructions(chosen: Chosen) -> None:
    configuration, family = chosen
    found = instructions(family, "sm_90a")
    settings = dict(define.split("=") for define in family[1])
    fp32 = settings["OUTPUT"] == "OutFp32"
    a, b = settings["A_FORMAT"].upper(), settings["B_FORMAT"].upper()
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


@pytest.mark.parametrize("chosen", EVERY + BLOCKS + GROUPS, ids=named)
def test_nothing_touches_sums_while_products_run(chosen: Chosen) -> None:
    assert touching(*program(chosen[1], "sm_90a")) == []


def test_what_touches_sums_while_products_run_is_found() -> None:
    fast, precise = (program(one[1], "sm_90a") for one in (EVERY[0], in_blocks(PROMOTED[0], torch.bfloat16, 128)))
    for lines, labels in (fast, precise):
        (*_, last) = (at for at, line in enumerate(lines) if "gsb0, 0x0" in line)
        # a wait that is not there, or is for all but one group, and sums that are stored or scaled
        for line in ("NOP", "WARPGROUP.DEPBAR.LE gsb0, 0x1"):
            found = touching([*lines[:last], f"        /*0000*/ {line} ;", *lines[last + 1 :]], labels)
            assert sum("FFMA" in one for one in found) >= 64
    # in the main loop of `fast`, where it replaces one that touches nothing: the products of two steps are under way
    lines, labels = fast
    at = next(at for at, line in enumerate(lines) if "gsb0, 0x1" in line) - 2
    for register, touched in ((23, False), (24, True), (151, True), (152, False)):
        moved = f"        /*0000*/              @!P0 FADD R152, R{register}, R152 ;"
        assert touching([*lines[:at], moved, *lines[at + 1 :]], labels) == [moved] * touched


@pytest.mark.parametrize(
    ("promote", "change"),
    [
        (False, Change("    mma_wait<0>();\n    release", "    release")),
        (False, Change("        mma_wait<1>();\n", "        sums[0].values[0] += 1.0f;\n        mma_wait<1>();\n")),
        (True, Change("            mma_wait<0>();\n", "")),
        (True, Change("            mma_wait<0>();\n", "            mma_wait<1>();\n")),
    ],
    ids=["no last wait", "sums touched in the loop", "no wait for a step", "no wait for the newest step"],
)
def test_what_touches_sums_in_a_source_is_found(promote: bool, change: Change) -> None:
    """ptxas waits by itself where the source does not, and says so; this costs most of the speed."""
    configuration = (FAST, PROMOTED)[promote][0]
    family = plain(configuration, "e4m3", "e4m3", torch.bfloat16, promote)[1]
    with pytest.raises(AssertionError, match="C75"):
        resources(compiled(family, "sm_90a", change)[1])


def steps(configuration: Configuration, family: Family) -> tuple[list[str], int]:
    """The instructions of a computing thread in the main loop, the shortest around products; and its steps of K."""
    lines, labels = program(family, "sm_90a")
    jumps = ((place, re.search(r"BRA.*`\((\.L_\w+)\)", line)) for place, line in enumerate(lines))
    loops = (lines[labels[jump[1]] : place + 1] for place, jump in jumps if jump)
    loop = min((loop for loop in loops if any("QGMMA" in line for line in loop)), key=len)
    return loop, sum("QGMMA" in line for line in loop) // (configuration.block_m // 128 * 4)


# by rows and columns of a tile, a little more than there are; kernels_cuda/README.md has the figures with block scales
FAST_STEP = {(128, 256): 50, (256, 128): 59, (128, 128): 49}
STEP = {
    (False, 0): FAST_STEP,
    (True, 0): {(256, 128): 190, (128, 128): 114},
    (True, 128): {(256, 128): 225, (128, 128): 129},
    (True, 1): {(256, 128): 395, (128, 128): 217},
}


@pytest.mark.parametrize("chosen", EVERY + BLOCKS + GROUPS, ids=named)
def test_a_step_costs_at_most(chosen: Chosen) -> None:
    configuration, family = chosen
    settings = dict(define.split("=") for define in family[1])
    promote, scale_rows = settings["PROMOTE"] == "1", int(settings.get("B_SCALE_ROWS", 0))
    loop, times = steps(*chosen)
    found = Counter(LINE.findall("\n".join(loop)))
    tile = configuration.block_m, configuration.block_n
    most = STEP[promote, scale_rows][tile]
    assert len(loop) <= most * times, found
    # two warps of each scheduler issue them while the tensor cores multiply, 4096 sums of products a cycle
    assert 2 * most < tile[0] * tile[1] * 128 // 4096
    if not promote:
        return
    pieces = configuration.block_m // 128
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


@pytest.mark.parametrize(
    "chosen", [plain(FAST[0], "e4m3", "e4m3", torch.bfloat16, False), *(one for one in BLOCKS[:2])], ids=named
)
def test_the_bias_is_loaded_while_products_run(chosen: Chosen) -> None:
    configuration, family = chosen
    lines, _ = program(family, "sm_90a")
    products = [place for place, line in enumerate(lines) if "QGMMA" in line]
    # nothing else is loaded in 16 bits; a bias in fp32 goes to the same register
    loads = [
        (place, found[1]) for place, line in enumerate(lines) if (found := re.search(r"LDG\.E\.U16 (R\d+),", line))
    ]
    assert len(loads) == configuration.block_n // 128
    for place, register in loads:
        used = (
            n for n, line in enumerate(lines) if n > place and re.search(rf"\b{register}\b", line) and "LDG" not in line
        )
        assert place < products[0] < products[-1] < next(used)


@pytest.mark.parametrize("chosen", GROUPS, ids=named)
def test_products_do_not_wait_for_the_scales_of_their_group(chosen: Chosen) -> None:
    lines, _ = program(chosen[1], "sm_90a")
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
    assert epilogue_instructions(plain(FAST[0], "e4m3", "e4m3", torch.bfloat16, False)[1]) <= 500
