"""Hopper's GEMMs compile without spills, into the instructions that were meant. Needs no GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from gemm_cases import FORMAT_PAIRS
from test_sass import LINE, Family, compiled, count, instructions, listing, name, resources

from kernels_cuda import gemm
from kernels_cuda.gemm import Configuration, configurations

FAST, PROMOTED = (configurations((9, 0), promote) for promote in (False, True))
# what a block may have on a Hopper, and the registers it has at its start
SHARED_BYTES, REGISTERS = 227 << 10, 168
Chosen = tuple[Configuration, Family]


def plain(configuration: Configuration, a: str, b: str, output: torch.dtype, promote: bool) -> Chosen:
    return configuration, (configuration.family, gemm.variant(configuration, a, b, output, promote))


def chained(configuration: Configuration, output: torch.dtype, promote: bool, activation: str, fmt: str) -> Chosen:
    return configuration, (
        configuration.family,
        gemm.chained_variant(configuration, fmt, output, promote, activation, fmt),
    )


# every configuration with each end of a tile; every format, output and activation with one of them
EVERY = [
    *(plain(one, "e4m3", "e4m3", torch.bfloat16, False) for one in FAST),
    *(plain(one, "e5m2", "e4m3", output, True) for one in PROMOTED for output in (torch.bfloat16, torch.float32)),
    *(plain(FAST[0], *pair, output, False) for pair in FORMAT_PAIRS[1:] for output in (torch.float16, torch.float32)),
    *(plain(PROMOTED[0], *pair, torch.float16, True) for pair in FORMAT_PAIRS),
    *(chained(one, torch.bfloat16, False, "gelu", "e4m3") for one in FAST),
    *(chained(one, torch.bfloat16, True, "gelu", "e5m2") for one in PROMOTED),
    *(chained(FAST[0], torch.float16, False, a, "e4m3") for a in gemm.CHAINED_ACTIVATIONS),
    *(chained(PROMOTED[0], torch.float16, True, a, "e4m3") for a in gemm.CHAINED_ACTIVATIONS),
]
SUMS: list[Family] = [("sum_splits", gemm.sum_splits_variant(output)) for output in gemm.OUTPUTS]


def named(chosen: Chosen) -> str:
    return name(chosen[1])


@pytest.mark.parametrize("chosen", EVERY, ids=named)
def test_compiles_without_spills(chosen: Chosen) -> None:
    configuration, family = chosen
    registers, static_bytes = resources(compiled(family, "sm_90a")[1])
    # 384 threads start with what they divide evenly; the loading ones give theirs away
    assert registers == REGISTERS
    assert static_bytes == 0
    assert configuration.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("family", SUMS, ids=name)
def test_the_sum_of_splits_compiles(family: Family) -> None:
    registers, static_bytes = resources(compiled(family, "sm_90a")[1])
    assert registers <= 64
    assert static_bytes == 0


SHOWN = [EVERY[0], EVERY[1], EVERY[5]]
SHOWN += [EVERY[7]]
SHOWN += [chained(FAST[0], torch.bfloat16, False, "gelu", "e4m3")]
SHOWN += [chained(PROMOTED[0], torch.bfloat16, True, "gelu", "e5m2")]


@pytest.mark.parametrize("chosen", SHOWN, ids=named)
def test_instructions(chosen: Chosen, tmp_path: Path) -> None:
    configuration, family = chosen
    found = instructions(family, "sm_90a", tmp_path)
    settings = dict(define.split("=") for define in family[1])
    chain, fp32 = settings.get("CHAIN"), settings["OUTPUT"] == "OutFp32"
    a, b = settings["A_FORMAT"].upper(), settings["B_FORMAT"].upper()
    assert not count(found, r"(LDL|STL)\b.*"), "local memory"
    # products: 4 of 32 bytes a step and piece, in a loop that may be unrolled
    pieces = configuration.block_m // 128
    products = count(found, rf"QGMMA\.64x{configuration.block_n}x32\.F32\.{a}\.{b}")
    assert products == count(found, r"QGMMA.*") > 0
    assert products % (4 * pieces) == 0
    # a wait for each group of products: were they serialised, for each product
    assert count(found, r"WARPGROUP\.DEPBAR.*") <= products // 4 + 1
    assert count(found, r"USETMAXREG.*") == 2
    # loads: of a by each block for itself, of b for the cluster
    assert count(found, r"UTMALDG\.2D") > 0
    multicast = count(found, r"UTMALDG\.2D\.MULTICAST")
    assert multicast == (count(found, r"UTMALDG\.2D") if configuration.cluster > 1 else 0)
    # stores: two boxes for every 256 bytes of a piece's rows
    stored = 0 if chain == "BACKWARD" else pieces * configuration.block_n * (4 if fp32 else 2) // 128
    assert count(found, r"UTMASTG\.2D") == stored
    words = configuration.block_n // 8 * pieces
    # four matrices hold 16 rows of 16 columns of 16 bits, or of 32 columns of codes
    matrices = (0 if fp32 or chain == "BACKWARD" else words // 2) + (0 if chain is None else words // 4)
    assert count(found, r"STSM\.16\.M88\.4") == matrices
    # the whole device is waited for where the cluster starts and ends, nowhere else
    assert count(found, r"MEMBAR\.\w+\.GPU") == 2
    if chain is None:
        assert not count(found, r"STG\..*|RED.*|ATOM.*")
        return
    assert count(found, r"STSM\.16\.MT88\.4") == words // 4
    assert count(found, rf"F2FP\.SATFINITE\.{settings['FORMAT']}\.F32\..*") == 2 * words
    # 16 codes at once, by rows and by columns
    assert count(found, r"STG\.E\.128") == words // 2
    assert count(found, r"(REDG|ATOMG)\.E\.MAX\..*") == 1


# --- what the end of a tile costs ------------------------------------------------------------------------------------


def epilogue_instructions(family: Family, folder: Path) -> int:
    """Of a thread that computes, for a tile: from the last product of the main loop to where the next tile begins, with
    all that lies in between, such as what is done only at the edges of a matrix."""
    lines = listing(family, "sm_90a", folder).splitlines()
    products = [place for place, line in enumerate(lines) if "QGMMA" in line]
    labels = {label[1]: place for place, line in enumerate(lines) if (label := re.match(r"(\.L_\w+):", line))}
    jumps = {
        place: labels[jump[1]] for place, line in enumerate(lines) if (jump := re.search(r"BRA.*`\((\.L_\w+)\)", line))
    }
    # the loop over tiles is the outermost one around all products
    end = min((target, place) for place, target in jumps.items() if target < products[0] and place > products[-1])[1]
    return sum(LINE.match(line) is not None for line in lines[products[-1] + 1 : end + 1])


# README.md has these figures: at most, for 128 sums of a thread
COSTS = {
    "plain": (plain(FAST[0], "e4m3", "e4m3", torch.bfloat16, False), 500),
    **{
        f"{activation} forward": (chained(FAST[0], torch.bfloat16, False, activation, "e4m3"), most)
        for activation, most in (("relu", 3000), ("gelu", 6700), ("gelu_tanh", 6700), ("silu", 6350))
    },
    **{
        f"{activation} backward": (chained(PROMOTED[0], torch.bfloat16, True, activation, "e5m2"), most)
        for activation, most in (("relu", 3500), ("gelu", 9500), ("gelu_tanh", 9500), ("silu", 7900))
    },
}


@pytest.mark.parametrize("which", COSTS)
def test_an_epilogue_costs_at_most(which: str, tmp_path: Path) -> None:
    (_, family), most = COSTS[which]
    assert epilogue_instructions(family, tmp_path) <= most
