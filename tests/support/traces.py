"""What the threads of a GEMM kernel do to synchronise, noted as its own source runs on the CPU, also a changed one."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from changed_sources import Change, changed
from host_kernels import HostKernel, build_folder, compile_on_host, host_tensor_map

from kernels_cuda import gemm
from kernels_cuda.gemm_variants import Configuration, variant

SHIM = Path(__file__).parent / "trace_shim"
LAUNCH = """
static const Arguments* given;
extern "C" EXPORTED void launch(const void* arguments, unsigned grid, unsigned block) {
    given = static_cast<const Arguments*>(arguments);
    noted = 0;
    host::blocks = gridDim.x = grid;
    blockDim.x = block;
    for (host::current = 0; host::current < grid * block; ++host::current) {
        threadIdx.x = host::current % block;
        blockIdx.x = host::block();
        KERNEL(*given);
    }
}
void host::fail(const char*) { __builtin_trap(); }
extern "C" EXPORTED unsigned size_of_arguments() { return sizeof(Arguments); }
"""


@functools.cache
def _library(family: str, defines: tuple[str, ...], change: Change | None) -> ctypes.CDLL:
    files = {**changed(family, change), **{path.name: path.read_text(encoding="utf-8") for path in SHIM.iterdir()}}
    key = hashlib.sha256(repr((sorted(files.items()), defines, LAUNCH)).encode()).hexdigest()[:16]
    folder = build_folder() / f"trace-{key}"
    folder.mkdir(exist_ok=True)
    program = f'#include "trace.h"\n#include "{family}.cu"\n{LAUNCH.replace("KERNEL", family)}'
    for name, text in {**files, "program.cpp": program}.items():
        # another process may be compiling them
        part = folder / f"{name}.{os.getpid()}"
        part.write_text(text)
        part.replace(folder / name)
    options = ("-shared", "-Werror", "-Winvalid-pch", f"-I{build_folder()}", *(f"-D{define}" for define in defines))
    compile_on_host(f"{family} {defines}", folder / "trace.so", *options, str(folder / "program.cpp"))
    return ctypes.CDLL(str(folder / "trace.so"))


class Note(NamedTuple):
    """One act of a thread; the kinds are those of ``trace_shim``."""

    kind: str
    block: int
    place: int
    number: int
    barrier: int


class _Noting(HostKernel):
    """A kernel whose launch only notes."""

    def __init__(self, configuration: Configuration, defines: tuple[str, ...], layout: str, change: Change | None):
        self._change = change
        super().__init__((configuration.family, defines), layout, configuration.threads, 0)
        # one cluster, which has all tiles
        self.multiprocessors = configuration.cluster

    def _load(self) -> None:
        self._library = _library(*self._function, self._change)

    def threads(self) -> Iterator[list[Note]]:
        """The notes of each thread, block after block."""
        count, function = ctypes.c_int(), self._library.all_notes
        function.restype = ctypes.POINTER(ctypes.c_int)
        notes = np.ctypeslib.as_array(function(ctypes.byref(count)), (1 << 21, 6))[: count.value]
        ends = np.flatnonzero(np.diff(notes[:, 0])) + 1
        for its in np.split(notes, ends):
            yield [Note(chr(kind), *rest) for kind, *rest in its[:, 1:].tolist()]


class Program(NamedTuple):
    """What a process does, in order."""

    name: str
    block: int
    notes: list[Note]


class Problem(NamedTuple):
    """How many tiles a cluster has, one below the other, and steps of K."""

    tiles: int
    steps: int


def programs(
    configuration: Configuration,
    promote: bool,
    problem: Problem,
    b_scale_rows: int = 0,
    change: Change | None = None,
    groups: tuple[str, Sequence[int]] | None = None,
) -> list[Program]:
    """What the processes of a cluster do.

    ``groups``: how rows are grouped, and ``group_of_tile`` or ``edges``; all in one where there is no other kernel.
    """
    hopper = configuration.family == "gemm_sm90"
    m, n = configuration.block_m * configuration.cluster * problem.tiles, configuration.block_n
    k = (128 if hopper else 64) * problem.steps
    a, b = torch.zeros(m, k, dtype=torch.uint8), torch.zeros(n, k, dtype=torch.uint8)
    scales, layout = (torch.ones(()), torch.ones(())), configuration.layout
    if b_scale_rows:
        shapes, layout = ((m, -(-k // 128)), (n // b_scale_rows, -(-k // 128))), configuration.blocks_layout
        scales = torch.ones(shapes[0]), torch.ones(shapes[1])
    if not (groups or b_scale_rows or (hopper and promote)):
        groups = "rows", [0] * problem.tiles
    grouped, of_groups = groups or ("", ())
    layout = configuration.grouped_layout if groups else layout
    defines = variant(configuration, "e4m3", "e4m3", torch.float32, promote, b_scale_rows, grouped)
    kernel = _Noting(configuration, defines, layout, change)
    with mock.patch.object(gemm, "tensor_map", host_tensor_map):
        out, where = torch.empty(m, n), torch.tensor(of_groups, dtype=torch.int32)
        if grouped == "rows":
            count = max(of_groups) + 1
            b, each = b.expand(count, n, k).contiguous(), torch.ones(count)
            gemm.gemm_by_rows(kernel, configuration, (a, each), (b, each), where, out)
        elif grouped == "depth":
            each, out = torch.ones(len(of_groups) - 1), torch.empty(len(of_groups) - 1, m, n)
            gemm.gemm_by_depth(kernel, configuration, (a, each), (b, each), where, out)
        else:
            gemm.gemm(kernel, configuration, (a, scales[0]), (b, scales[1]), out)
    threads, size = [*kernel.threads()], 128 if hopper else 32
    if not hopper:
        stage_bytes = (configuration.block_m + configuration.block_n) * 64
        threads = [in_stages(thread, stage_bytes, index // size) for index, thread in enumerate(threads)]
    groups = [threads[first : first + size] for first in range(0, len(threads), size)]
    word, each = "warpgroup" if hopper else "warp", configuration.threads // size
    return [
        Program(f"{word} {index % each} of block {index // each}", index // each, merged(group))
        for index, group in enumerate(groups)
    ]


def in_stages(notes: list[Note], stage_bytes: int, warp: int) -> list[Note]:
    """Notes of Ada's kernel with whole stages in place of 16 bytes: what a warp copies of them, or all that is read."""
    stages: list[Note] = []
    for note in notes:
        if note.kind in "LR":
            start = note.place // stage_bytes * stage_bytes
            note = note._replace(place=start + (warp if note.kind == "L" else 0), number=1 if note.kind == "L" else 8)
        if not (note.kind in "LR" and stages and stages[-1] == note):
            stages.append(note)
    return stages


def merged(threads: list[list[Note]]) -> list[Note]:
    """What a warpgroup or warp does: the same in all threads, except that some of them arrive at barriers.

    Or that one thread loads, while the others wait at the barriers of all threads.
    """
    common = [note for note in threads[0] if note.kind != "A"]
    arrivals: list[list[Note]] = [[] for _ in range(len(common) + 1)]
    for notes in threads:
        its = [note for note in notes if note.kind != "A"]
        assert its == common or its == [note for note in common if note.kind == "S"], "threads go different ways"
        done = 0
        for note in notes:
            if note.kind == "A":
                arrivals[done].append(note)
            done += note.kind != "A"
    return [note for arrived, its in zip(arrivals, [*([note] for note in common), []]) for note in (*arrived, *its)]
