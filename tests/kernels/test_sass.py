"""Every kernel compiles for every architecture, without spills, into the intended instructions. Needs no GPU."""

from __future__ import annotations

import re
import struct
from collections import Counter

import pytest
import torch
from host_kernels import VARIANTS
from sass import Family, compiled, count, instructions, listing, name, parameters, program, resources

from kernels_cuda import block_casts
from kernels_cuda.casts import INPUTS, variant, weights_variant
from kernels_cuda.launch import _ARGUMENT_BYTES
from lightning_fp8.ops.cuda import kernels

ARCHITECTURES = ("sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
REGISTERS_PER_MULTIPROCESSOR = 1 << 16


def casts(*chosen: object) -> Family:
    return "cast_transpose", variant(*chosen)  # type: ignore[arg-type]


WEIGHTS, SQUARES, MX_WEIGHTS, MX_SQUARES = (
    ("cast_weights", weights_variant(squares, mx)) for mx in (False, True) for squares in (False, True)
)
UPDATE: Family = ("update_scales", ())
EVERY_CAST = [casts(*chosen) for chosen in VARIANTS]
IN_BLOCKS: list[Family] = [
    (name, block_casts.variant(dtype)) for name in ("cast_blocks", "cast_mx") for dtype in INPUTS
]
BF16_BLOCKS, BF16_MX = (one for one in IN_BLOCKS if one[1] == block_casts.variant(torch.bfloat16))
# with an activation, and gradients
FUSED_BLOCKS: list[Family] = [
    (name, block_casts.variant(dtype, activation, backward))
    for name in ("cast_blocks", "cast_mx")
    for dtype in INPUTS
    for activation, backward in kernels._OF_ACTIVATIONS
    if activation != "none"
]
# one kernel of each structure, to be disassembled
CHOSEN = [
    casts(torch.bfloat16, "e4m3"),
    casts(torch.float32, "e5m2"),
    casts(torch.float16, "e4m3", "gelu"),
    casts(torch.bfloat16, "e5m2", "gelu_tanh", True),
    casts(torch.bfloat16, "e4m3", "swiglu"),
    casts(torch.float32, "e5m2", "swiglu", True),
    WEIGHTS,
    UPDATE,
]


def blocks_per_multiprocessor(family: Family) -> tuple[int, int]:
    """The numbers of blocks and threads that a kernel requests in its launch bounds."""
    if family == UPDATE:
        return 1, 1024
    if family in IN_BLOCKS or family in FUSED_BLOCKS:
        return 1 if {"INPUT=Fp32", "GATED=1", "BACKWARD=1"} & {*family[1]} else 2, 512
    if family in (SQUARES, MX_SQUARES):
        return 2, 512
    if family == MX_WEIGHTS:
        return 1, 512
    if family == WEIGHTS or "GATED=1" in family[1] or "BACKWARD=1" in family[1]:
        return 2, 256
    plain = "ACTIVATION=Identity" in family[1] or "ACTIVATION=Relu" in family[1]
    return 4 if plain and "INPUT=Fp32" not in family[1] else 3, 256


# each dtype in one format for one architecture, because a format only changes the name of one instruction; for the
# others the kernels with the most registers, in bf16; `doctor --compile` compiles all kernels for all architectures
UNFUSED = [WEIGHTS, SQUARES, MX_WEIGHTS, MX_SQUARES, *IN_BLOCKS, UPDATE]
EVERY = [*EVERY_CAST, *UNFUSED, *FUSED_BLOCKS]
LARGE = [
    one
    for one in EVERY
    if one in UNFUSED or {"GATED=1", "BACKWARD=1"} & {*one[1]}
    if not {"INPUT=Fp32", "INPUT=Fp16"} & {*one[1]}
]
COMPILED = [
    pytest.param(family, arch, id=f"{name(family)} {arch}")
    for arch in ARCHITECTURES
    # those are disassembled below
    if arch not in ("sm_103a", "sm_121a")
    for family in (EVERY if arch == "sm_90a" else LARGE)
    if "FORMAT=E5M2" not in family[1]
]


@pytest.mark.parametrize(("family", "arch"), COMPILED)
def test_compiles_without_spills(family: Family, arch: str) -> None:
    registers, static_bytes = resources(compiled(family, arch)[1])
    blocks, threads = blocks_per_multiprocessor(family)
    assert registers * blocks * threads <= REGISTERS_PER_MULTIPROCESSOR
    # more than 48 KB per block would need an opt-in; a multiprocessor has at least 100 KB
    assert static_bytes <= 48 << 10
    assert (static_bytes + 1024) * blocks <= 100 << 10


# --- the instructions -------------------------------------------------------------------------------------------------


ATOMIC = "(ATOM|ATOMG|RED|REDG)"
EACH = [
    pytest.param(family, arch, id=f"{name(family)} {arch}")
    for arch in ARCHITECTURES
    for family in CHOSEN
    if family in (CHOSEN[0], CHOSEN[5], WEIGHTS) or arch == "sm_90a"
]


@pytest.mark.parametrize(("family", "arch"), EACH)
def test_instructions(family: Family, arch: str) -> None:
    found = instructions(family, arch)
    assert not count(found, r"(LDL|STL)\b.*"), "local memory"
    # F2FP packs two bf16 or fp16 numbers at once, while F2F converts one
    assert not count(found, r"(F2F|DMUL|DADD|DFMA)\b.*"), "slow conversions, or arithmetic in fp64"
    if family == UPDATE:
        return
    # each thread reads four rows of eight elements, from one to three tensors; fp32 takes 8 words at once
    words = {"Fp32": 8, "Bf16": 4, "Fp16": 4}
    inputs = [word.removeprefix("INPUT=") for word in family[1] if word.startswith("INPUT=")] or list(words)
    gated, backward = "GATED=1" in family[1], "BACKWARD=1" in family[1]
    loads = sum(4 * words[one] // 4 for one in inputs) * (1 + gated + backward)
    assert count(found, r"LDG\.E\.NA\.128\.CONSTANT") == loads, found
    # cast_weights reads its addresses from a table, so the compiler does not know that they are in global memory
    store = r"ST\.E" if family == WEIGHTS else r"STG\.E"
    tiles = len(inputs) * (1 + (gated and backward))
    assert count(found, rf"{store}\.64") == 4 * tiles, found
    assert count(found, rf"{store}\.128") == 2 * tiles, found
    assert count(found, r"LDS\.128") >= 2 * tiles, found
    # two elements each, of 32 per thread
    fp8 = "E5M2" if "FORMAT=E5M2" in family[1] else "E4M3"
    assert count(found, rf"F2FP\.SATFINITE\.{fp8}\.F32\..*") == 16 * tiles, found
    assert count(found, r"F2FP\.SATFINITE\..*") == 16 * tiles, found
    assert count(found, r"C?REDUX\.MAX\b.*") >= 1, found
    # one maximum for each tensor that is cast: the gradients of gate and up have one each
    maxima = 1 + (gated and backward)
    assert count(found, rf"{ATOMIC}\.E\.MAX\..*") == count(found, rf"{ATOMIC}\..*") == maxima, found


@pytest.mark.parametrize(
    ("family", "most"),
    [
        *((casts(torch.bfloat16, "e4m3", *one), most) for *one, most in (("none", 13), ("gelu", 25), ("silu", 18))),
        # in blocks of 128 this thread computes no scale; in MX each does
        (BF16_BLOCKS, 15.7),
        (BF16_MX, 17.5),
    ],
    ids=lambda value: name(value) if isinstance(value, tuple) else None,
)
def test_a_cast_costs_an_element_at_most(family: Family, most: float) -> None:
    """Instructions per thread in a whole tile, with all outputs, if the scale is known; a thread casts 32 elements."""
    lines, labels = program(family, "sm_90a")
    passed, place = 0, 0
    # landmarks that only a whole tile passes, in order; between them the shortest path is taken
    landmarks = ["LDG.E.NA.128", "F2FP.SATFINITE", "STG.E.64", "STG.E.128", "REDUX", "EXIT"]
    if family in IN_BLOCKS:
        landmarks = ["LDG.E.NA.128", "SHFL", "BAR", "BAR", "STG.E.64", "STG.E.128", "EXIT"]
    for landmark in landmarks:
        place, between = shortest_way(lines, labels, place, landmark)
        passed += between
    assert passed / 32 <= most


def shortest_way(lines: list[str], labels: dict[str, int], start: int, landmark: str) -> tuple[int, int]:
    """The next instruction after ``start`` with the landmark, and the length of the shortest path to it."""
    steps = {start: 0}
    for place in (queue := [start]):
        line = lines[place]
        if place != start and re.search(landmark, line):
            return place, steps[place]
        jump = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
        following = [labels[jump[1]]] if jump else []
        if "@" in line or not (jump or re.search(r"\b(EXIT|RET)\b", line)):
            following.append(place + 1)
        for one in following:
            if one < len(lines) and one not in steps:
                steps[one] = steps[place] + 1
                queue.append(one)
    raise AssertionError(f"no way to {landmark}")


FUSED_TO_READ = [one for one in FUSED_BLOCKS if {"INPUT=Bf16"} < {*one[1]} and "ACTIVATION=Relu" not in one[1]]


@pytest.mark.parametrize(
    ("family", "arch"),
    [
        *((family, arch) for arch in ARCHITECTURES for family in (BF16_BLOCKS, BF16_MX)),
        *((family, "sm_90a") for family in FUSED_TO_READ),
    ],
    ids=lambda value: value if isinstance(value, str) else name(value),
)
def test_casts_in_blocks(family: Family, arch: str) -> None:
    found, in_mx, plain = instructions(family, arch), family[0] == "cast_mx", family not in FUSED_TO_READ
    gated, backward = "GATED=1" in family[1], "BACKWARD=1" in family[1]
    casts_of = 1 + (gated and backward)
    assert not count(found, r"(LDL|STL|F2F|DMUL|DADD|DFMA)\b.*"), found
    # bf16: four rows of eight elements per thread, 16 bytes at once, each tensor read once
    assert count(found, r"LDG\.E\.NA\.128\.CONSTANT") == 4 * (1 + gated + backward), found
    assert count(found, r"STG\.E\.64") == 4 * casts_of, found
    # in MX also the tiles of scales, by two warps at the same place
    assert count(found, r"STG\.E\.128") == (2 + in_mx) * casts_of, found
    # codes by rows and by columns differ
    codes = count(found, r"F2FP\.SATFINITE\.E4M3\.F32\..*")
    assert codes == 16 * 2 * casts_of, found
    assert count(found, rf"{ATOMIC}\..*") == casts_of, found
    # a result of an activation is rounded, two a word; what a gate multiplies is rounded by itself
    assert plain or count(found, r"F2FP\.BF16\.F32\.PACK_AB.*") >= 16 * casts_of, found
    if plain:
        assert count(found, r"F2FP\.SATFINITE\..*") == codes + scales_in_e8m0(found, arch, 2 * in_mx), found
        # maxima over a row in half a warp or four threads, and over two halves for columns, of two at once, their sums
        assert count(found, r"SHFL\.BFLY") == 4 * (2 if in_mx else 4) + 4 + 8, found
        assert count(found, r"HMNMX2\..*") >= 16, found


def scales_in_e8m0(found: Counter[str], arch: str, scales: int) -> int:
    """How many scales are converted in one instruction: all where the architecture has it, else none."""
    converted = count(found, r"F2FP\.SATFINITE\.E8\.F32\..*\.RP")
    assert converted == (scales if arch not in ("sm_89", "sm_90a") else 0), found
    return converted


@pytest.mark.parametrize("family", [SQUARES, MX_WEIGHTS, MX_SQUARES], ids=name)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_casts_of_weights_in_blocks(family: Family, arch: str) -> None:
    found, in_mx = instructions(family, arch), "MX=1" in family[1]
    assert not count(found, r"(LDL|STL|F2F|DMUL|DADD|DFMA)\b.*"), found
    # fp32, bf16 and fp16: 8 + 4 + 4 words of 16 bytes, read once; their addresses come from a table
    assert count(found, r"LDG\.E\.NA\.128\.CONSTANT") == 16, found
    assert count(found, r"ST\.E\.64") == 4 * 3, found
    assert count(found, r"ST\.E\.128") == (2 + in_mx) * 3, found
    # one code for both layouts, but for blocks of 1 x 32
    codes = 16 * 3 * (2 if family == MX_WEIGHTS else 1)
    assert count(found, r"F2FP\.SATFINITE\.E4M3\.F32\..*") == codes, found
    # of a row and of a column, or of a square; and of the weight as a whole, which the compiler makes once or thrice
    converted = count(found, r"F2FP\.SATFINITE\..*") - codes
    assert converted == scales_in_e8m0(found, arch, converted), found
    # a tile's maximum, which others see before the count of those that are done; the last one reads the weight's
    steps = re.findall(rf"\b{ATOMIC}\.\S*?(MAX|ADD)\b|\b(MEMBAR)\.", listing(family, arch))
    order = " ".join("".join(one[1:]) for one in steps)
    assert order.count("ADD") == order.count("MAX MEMBAR ADD") > 0, order


# --- the argument struct ----------------------------------------------------------------------------------------------


def structs(capability: tuple[int, int]) -> list[kernels.Variant]:
    """Of all variants one with each host's struct."""
    # bf16 last, as other tests compile that too
    variants = sorted(kernels.variants(capability, every=True), key=lambda one: "Bf16" in one.name)
    return [*{(one.family, one.layout): one for one in variants}.values()]


@pytest.mark.parametrize(
    ("one", "arch", "bank"),
    [
        pytest.param(one, arch, bank, id=f"{one.name} {arch}")
        for capability, arch, bank in (((8, 9), "sm_89", 0x160), ((9, 0), "sm_90a", 0x210))
        for one in structs(capability)
    ],
)
def test_the_parameter_is_the_hosts_struct(one: kernels.Variant, arch: str, bank: int) -> None:
    begins, together, ((offset, size),) = parameters((one.family, one.defines), arch)
    # C pads a struct to its alignment, Python's format does not
    assert size == -(-struct.calcsize(one.layout) // 8) * 8 <= _ARGUMENT_BYTES
    # tensor maps are aligned to 64 bytes, also on the device
    alignment = 64 if one.family == "gemm_sm90" else 8
    assert (begins, offset, together) == (bank, -bank % alignment, offset + size)
