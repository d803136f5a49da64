"""Kernels compiled from their own ``.cu`` sources as host C++, with the interface of ``kernels_cuda.launch.Kernel``."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import itertools
import math
import mmap
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

import torch
from repository import ROOT

import kernels_cuda
from kernels_cuda import casts
from kernels_cuda.launch import Kernel, _packed
from lightning_fp8.ops.activations import ACTIVATIONS
from lightning_fp8.ops.cuda.kernels import Variant

# dtype, format, activation and whether it is its gradient: every variant of `cast_transpose`
VARIANTS = [
    (dtype, format, activation, backward)
    for dtype in casts.INPUTS
    for format in casts.FORMATS
    for activation in ("none", *ACTIVATIONS)
    for backward in (False, True)
    if not (backward and activation == "none")
]
# of these, each activation and each gradient in bf16, as in training, and in another dtype with the other format:
# the code before an activation, and the cast after it, are shared
FEW_VARIANTS = [
    (dtype, tuple(casts.FORMATS)[hybrid == backward], activation, backward)
    for number, (activation, backward) in enumerate(itertools.product(ACTIVATIONS, (False, True)))
    for dtype, hybrid in ((torch.bfloat16, True), ((torch.float32, torch.float16)[(number + number // 2) % 2], False))
]
SHIM = Path(__file__).parent / "host_shim"
SOURCES = Path(kernels_cuda.__file__).parent
LAUNCH = """
#ifdef CLUSTER
#define CLUSTER_BLOCKS CLUSTER
#else
#define CLUSTER_BLOCKS 1
#endif
static const Arguments* host_arguments;
static void host_kernel() { KERNEL(*host_arguments); }
extern "C" EXPORTED void launch(const void* arguments, unsigned grid, unsigned block) {
    host_arguments = static_cast<const Arguments*>(arguments);
    host::launch(grid, block, host_kernel, CLUSTER_BLOCKS);
}
extern "C" EXPORTED unsigned size_of_arguments() { return sizeof(Arguments); }
"""


OPTIONS = (
    "-Og",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    # products and sums are rounded separately, as by torch's operators
    "-ffp-contract=off",
    # these checks would report a jump to another fiber's stack as an error
    "-U_FORTIFY_SOURCE",
    "-fsanitize=bounds,alignment",
    "-fsanitize-undefined-trap-on-error",
)
# compiled from what all variants share
OPTIMISED = "-O3"


def compile_on_host(title: str, out: Path, *arguments: str) -> None:
    """The compiled file appears only when it is complete; concurrent callers wait for it."""
    with out.with_name(f"{out.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if out.exists():
            return
        part = out.with_name(f"{out.name}.part")
        command = ["g++", *OPTIONS, "-o", str(part), *arguments]
        compiled = subprocess.run(command, capture_output=True, text=True, check=False)
        if compiled.returncode:
            raise RuntimeError(f"{title} does not compile as host C++:\n{compiled.stderr[:4000]}")
        part.replace(out)


@functools.cache
def build_folder() -> Path:
    """The unchanged sources and software versions of the instructions: a quoted include looks in its own folder first.

    The folder's name follows from everything that determines a library, and the folder is kept: other processes and
    later runs compile nothing again.
    """
    if shutil.which("g++") is None:
        raise RuntimeError("The kernels' sources run on the CPU as g++ compiles them, and there is no g++: install it.")
    # the shim has its own instructions in files of the same names
    files = {file.name: file.read_bytes() for file in (*SOURCES.glob("*.cu*"), *SHIM.iterdir())}
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256(repr((version, OPTIONS, OPTIMISED, LAUNCH, sorted(files.items()))).encode()).hexdigest()[:16]
    folder = ROOT / ".pytest_cache" / "host_kernels" / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    for other in folder.parent.iterdir():
        # another run may be using it
        if time.time() - other.stat().st_mtime > 24 * 3600:
            shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    header = folder / "cuda_on_host.h"
    for name, content in files.items():
        part = folder / f"{name}.{os.getpid()}"
        part.write_bytes(content)
        part.replace(folder / name)
    # what all variants share is compiled and read once, as it would take most of a variant's time
    for file in SHIM.glob("*.cpp"):
        machine = folder / file.name
        compile_on_host(machine.name, machine.with_suffix(".o"), OPTIMISED, "-Werror", "-c", str(machine))
    # last, because g++ crashes if it reads a header with other optimisations than it was compiled with
    compile_on_host(header.name, header.with_name(f"{header.name}.gch"), "-x", "c++-header", str(header))
    return folder


@functools.cache
def library(family: str, defines: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The kernel family as a shared library."""
    name = f"{family}-{hashlib.sha256(' '.join(defines).encode()).hexdigest()[:12]}"
    compiled = build_folder() / f"{name}.so"
    program = f'#include "cuda_on_host.h"\n#include "{family}.cu"\n{LAUNCH.replace("KERNEL", family)}'
    machines = ["cuda_on_host.o"]
    if family.startswith("gemm_"):
        machines.append(f"instructions_{family.removeprefix('gemm_')}.o")
    source = compiled.with_name(f"{name}.{os.getpid()}.cpp")
    if not compiled.exists():
        source.write_text(program)
        options = ["-Werror", "-Winvalid-pch", "-shared", *(f"-D{define}" for define in defines)]
        parts = [source, *(build_folder() / machine for machine in machines)]
        compile_on_host(f"{family} {defines}", compiled, *options, *map(str, parts))
        source.unlink()
    return ctypes.CDLL(str(compiled))


class HostKernel(Kernel):
    """Runs immediately, on tensors in the CPU's memory."""

    # few, so that blocks of a persistent kernel take several tiles
    multiprocessors = 4

    def _load(self) -> None:
        self.resources = {"registers": 64, "local_bytes": 0, "shared_bytes": 8448 + self._shared_bytes}
        family, defines = self._function
        self._library = library(family, defines)
        if family.startswith("gemm_"):
            ctypes.c_int.in_dll(self._library, "dynamic_bytes").value = self._shared_bytes
        size = self._library.size_of_arguments()
        # C pads a struct to its alignment, Python's format does not
        assert -(-self._layout.size // 8) * 8 == size, (self._layout.size, size)

    def __call__(self, grid: int, *arguments: int | float | bytes) -> None:
        buffer, offset, address = _packed.place
        self._layout.pack_into(buffer, offset, *arguments)
        pointers = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))
        self._library.launch(ctypes.c_void_p(pointers[0]), grid, self._block)


def on_host(variant: Variant, kind: type[HostKernel] = HostKernel) -> HostKernel:
    return kind((variant.family, variant.defines), variant.layout, variant.block, 0, variant.shared_bytes)


def at_the_edge(tensor: torch.Tensor, begins: bool = False) -> torch.Tensor:
    """A copy that ends right before an inaccessible page, so that reading past it crashes; or that ``begins`` right
    behind one. Never freed.
    """
    size = tensor.numel() * tensor.itemsize
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    closed, first = (start, mmap.PAGESIZE) if begins else (start + pages, pages - size)
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(closed), mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    bytes_ = (ctypes.c_uint8 * size).from_buffer(memory, first)
    copy = torch.frombuffer(bytes_, dtype=tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def host_tensor_map(
    device: int,
    address: int,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    row_bytes: int,
    box_rows: int,
    box_columns: int,
) -> bytes:
    """Replaces ``kernels_cuda.tensor_map.tensor_map``: what host_shim/instructions_sm90.cpp reads as a map."""
    # the requirements of `kernels_cuda.tensor_map.tensor_map`
    assert address % 16 == 0
    assert rows == 1 or row_bytes % 16 == 0
    assert box_rows <= 256
    assert box_columns * dtype.itemsize == 128
    fields = (address, rows, columns, row_bytes, box_rows, box_columns, dtype.itemsize)
    return struct.pack("Pqqqiii", *fields).ljust(128, b"\0")


class Guarded:
    """A tensor for a kernel to write: filled with poison, between guard bytes that must not change.

    Args:
        shape: of ``tensor``.
        dtype: of ``tensor``.
        poison: a byte; what a kernel leaves unwritten differs between runs with different ones.
        offset: bytes between a 16-byte boundary and the tensor.
    """

    # wide enough to catch a tile's rows if a kernel ignores its bounds
    _GUARD, _CANARY = 1 << 15, 0xC5

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, poison: int, offset: int = 0) -> None:
        size, start = math.prod(shape) * dtype.itemsize, self._GUARD + offset
        self._buffer = torch.full((start + size + self._GUARD,), self._CANARY, dtype=torch.uint8)
        assert self._buffer.data_ptr() % 16 == 0
        payload = self._buffer[start : start + size].fill_(poison)
        self._outside = (self._buffer[:start], self._buffer[start + size :])
        self.tensor = payload.view(dtype).view(shape)

    def unharmed(self) -> bool:
        """Whether all guard bytes before and after the tensor are unchanged."""
        return all(bool((guard == self._CANARY).all()) for guard in self._outside)
