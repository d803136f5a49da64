"""A GEMM from its own source on the CPU, into poisoned memory between guards."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from host_kernels import Guarded, HostKernel
from torch import Tensor

from kernels_cuda import gemm, gemm_variants
from kernels_cuda.gemm import Operand
from kernels_cuda.gemm_variants import Configuration

# NaN in every dtype: what is left unwritten is no number, and neither is what is made from it
POISON = 0xFF


class Chosen(NamedTuple):
    """A kernel: its configuration, the formats of its operands, and what else makes it a variant."""

    configuration: Configuration
    output: torch.dtype
    formats: tuple[str, str] = ("e4m3", "e4m3")
    promote: bool = False
    b_scale_rows: int = 0
    grouped: str = ""

    @property
    def family(self) -> tuple[str, tuple[str, ...]]:
        """The kernel family and its definitions."""
        configuration, output, formats, *rest = self
        return configuration.family, gemm_variants.variant(configuration, *formats, output, *rest)


def load(chosen: Chosen, late: bool = True) -> HostKernel:
    """Copies, on Hopper products too, happen as late as a device may do them, or as early."""
    config, in_blocks = chosen.configuration, chosen.b_scale_rows and chosen.promote
    layout = config.grouped_layout if chosen.grouped else config.blocks_layout if in_blocks else config.layout
    kernel = HostKernel(chosen.family, layout, config.threads, 0, config.shared_bytes)
    ctypes.c_int.in_dll(kernel._library, "late").value = late
    return kernel


def multiply(
    kernel: HostKernel, chosen: Chosen, a: Operand, b: Operand, out: Tensor, bias: Tensor | None = None
) -> None:
    """Also by a kernel for groups of rows: all of them, which need not be whole tiles, are in one."""
    if chosen.grouped:
        of_tile = torch.zeros(-(-len(out) // 128), dtype=torch.int32)
        gemm.gemm_by_rows(kernel, chosen.configuration, a, (b[0][None], b[1]), of_tile, out, bias)
    else:
        gemm.gemm(kernel, chosen.configuration, a, b, out, bias)


def run(
    operands: tuple[Operand, Operand],
    chosen: Chosen,
    bias: Tensor | None = None,
    late: bool = True,
    multiprocessors: int = 4,
) -> Tensor:
    """The product; only its elements are written."""
    (m, n), output = (len(payload) for payload, _ in operands), chosen.output
    kernel = load(chosen, late)
    kernel.multiprocessors = multiprocessors
    memory = Guarded((m, -(-n * output.itemsize // 16) * 16 // output.itemsize), output, POISON)
    multiply(kernel, chosen, *operands, memory.tensor[:, :n], bias)
    assert memory.unharmed()
    # the padding columns of a row must stay unchanged: the copy engine never writes outside the matrix
    if chosen.configuration.family == "gemm_sm90":
        assert (memory.tensor[:, n:].contiguous().view(torch.uint8) == POISON).all()
    return memory.tensor[:, :n].clone()
