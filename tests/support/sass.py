"""Kernels compiled for an architecture that need not be present: resources and instructions."""

from __future__ import annotations

import functools
import re
import shutil
import struct
import subprocess
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path

from changed_sources import Change, changed

from kernels_cuda.compile import compile_source, headers

Family = tuple[str, tuple[str, ...]]


def name(family: Family) -> str:
    return " ".join((family[0], *(define.partition("=")[2] for define in family[1])))


@functools.cache
def compiled(family: Family, arch: str, change: Change | None = None) -> tuple[bytes, str]:
    texts = headers() | changed(family[0], change)
    return compile_source(family[0], texts.pop(f"{family[0]}.cu"), arch, family[1], texts)


def resources(log: str) -> tuple[int, int]:
    """Registers per thread and static shared memory per block; asserts that nothing is spilled."""
    assert not re.search("warning|error|C75", log), log
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log) == [
        ("0", "0", "0")
    ], log
    used, static = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes smem", log)
    assert used is not None, log
    # registers are allocated to a thread in units of eight
    return -(-int(used[1]) // 8) * 8, 0 if static is None else int(static[1])


def parameters(family: Family, arch: str) -> tuple[int, int, list[tuple[int, int]]]:
    """A kernel's parameters in the constant bank 0, from its ELF file: where they begin, their bytes together, and the
    offset from there and the bytes of each.
    """
    cubin = compiled(family, arch)[0]
    (first,), (number, of_names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", cubin, first + 64 * at) for at in range(number)]
    places = {cubin[headers[of_names][4] + header[0] :].partition(b"\0")[0]: header[4:6] for header in headers}
    at, size = places[f".nv.info.{family[0]}".encode()]
    end, bank, extents = at + size, [], []
    while at < end:
        # a value of 16 bits, or in format 4 as many bytes behind it
        form, attribute, value = struct.unpack_from("<BBH", cubin, at)
        # EIATTR_PARAM_CBANK and EIATTR_KPARAM_INFO
        if attribute == 0x0A:
            bank += struct.unpack_from("<HH", cubin, at + 8)
        elif attribute == 0x17:
            offset, sizes = struct.unpack_from("<HI", cubin, at + 10)
            extents.append((offset, sizes >> 18))
        at += 4 + (value if form == 4 else 0)
    return (*bank, extents)  # type: ignore[return-value]


@functools.cache
def disassembler() -> str:
    wheels = Path(sysconfig.get_path("purelib"), "nvidia")
    path = shutil.which("nvdisasm") or next(map(str, sorted(wheels.glob("**/bin/nvdisasm"))), None)
    if path is None:
        raise RuntimeError("There is no nvdisasm to read SASS with. Run `pip install nvidia-cuda-nvdisasm`.")
    return path


@functools.cache
def listing(family: Family, arch: str) -> str:
    """SASS with one instruction or label per line."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(family, arch)[0])
        file.flush()
        # without the analysis of its data flow, which takes a third of the time and changes no line
        command = [disassembler(), "--print-code", "--no-dataflow", file.name]
        listed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert listed.returncode == 0, listed.stderr
    return listed.stdout


# "        /*0040*/              @P0 LDG.E R2, desc[UR4][R2.64] ;"
LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)", re.MULTILINE)


def program(family: Family, arch: str) -> tuple[list[str], dict[str, int]]:
    """The instructions in order, and the position of each label."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in listing(family, arch).splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(lines)
        elif LINE.match(line):
            lines.append(line)
    return lines, labels


def instructions(family: Family, arch: str) -> Counter[str]:
    """Counts of each instruction, including its modifiers."""
    counts = Counter(LINE.findall(listing(family, arch)))
    # the listing was parsed correctly
    assert counts["EXIT"] >= 1
    assert sum(counts.values()) > 100
    return counts


def count(counts: Counter[str], pattern: str) -> int:
    return sum(times for instruction, times in counts.items() if re.fullmatch(pattern, instruction))


# a register and its suffixes; not one of the uniform registers
REGISTER = re.compile(r"(?<![A-Z])R(\d+)((?:\.\w+)*)")
PRODUCT = re.compile(r"QGMMA\.64x(\d+)\S* R(\d+), ")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)")
# a jump, with its predicate and its target
JUMP = re.compile(r"\*/\s+(@\S+ )?\s*(?:BRA|EXIT|RET)\b[^`]*(?:`\((\.L_\w+)\))?")


def registers(line: str) -> set[int]:
    """The registers that an instruction reads or writes."""
    name = LINE.match(line)
    assert name is not None, line
    wide = 4 if re.search(r"\.128\b|8\.4\b", name[1]) else 2 if re.search(r"\.64\b|WIDE", name[1]) else 1
    numbers: set[int] = set()
    for place, operand in enumerate(line[name.end() :].split(",")):
        for number, suffixes in REGISTER.findall(operand):
            if "[" in operand:
                size = 2 if ".64" in suffixes else 1
            else:
                # the factors of a wide product are narrow
                size = 1 if "WIDE" in name[1] and place in (1, 2) else wide
            numbers.update(range(int(number), int(number) + size))
    return numbers


def touching(lines: list[str], labels: dict[str, int]) -> list[str]:
    """Instructions that some path reaches with a product under way in one of their registers."""
    positions: set[int] = set()
    # the next instruction; the registers of each committed group of products, and of the open one
    todo: list[tuple[int, tuple[frozenset[int], ...]]] = [(0, (frozenset(),))]
    seen = {*todo}
    while todo:
        at, groups = todo.pop()
        line = lines[at]
        if product := PRODUCT.search(line):
            sums = range(int(product[2]), int(product[2]) + int(product[1]) // 2)
            groups = (*groups[:-1], groups[-1] | frozenset(sums))
            if "gsb0" in line:
                groups = (*groups, frozenset())
        elif wait := WAIT.search(line):
            groups = groups[-1 - int(wait[1]) :]
        elif registers(line) & frozenset().union(*groups):
            positions.add(at)
        jump = JUMP.search(line)
        following = [at + 1] if jump is None or jump[1] else []
        if jump is not None and jump[2]:
            following.append(labels[jump[2]])
        for place in following:
            if place < len(lines) and (place, groups) not in seen:
                seen.add((place, groups))
                todo.append((place, groups))
    return [lines[at] for at in sorted(positions)]
