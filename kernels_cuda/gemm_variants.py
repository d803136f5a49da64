"""The available GEMM kernels: configurations, the definitions that make a family one kernel, argument structs."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

OUTPUTS = {torch.float32: "OutFp32", torch.bfloat16: "OutBf16", torch.float16: "OutFp16"}
_MAP = "128s"
_GEMM = "PPPPqiiiii4x"
_STRIDES, _GROUPS = "iiii", "P"
# definition GROUPED of gemm.cuh
_GROUPED = {"rows": 1, "depth": 2}
_BLOCK_K = {"gemm_sm90": 128, "gemm_sm89": 64}
_CONSUMERS, _STAGING_BYTES = 2, 16384


class Configuration(NamedTuple):
    """How a GEMM is divided among blocks.

    Attributes:
        family: name of the ``.cu`` file and of its kernel.
        block_m: rows of the output that a block computes at a time.
        block_n: columns of the output that a block computes at a time.
        stages: pieces of K in shared memory at a time.
        cluster: number of blocks, neighbours along M, that each load a share of B for all of them.
    """

    family: str
    block_m: int
    block_n: int
    stages: int
    cluster: int = 1

    @property
    def name(self) -> str:
        """``"256x128 s4 c2"``, as tables and messages call it."""
        return f"{self.block_m}x{self.block_n} s{self.stages} c{self.cluster}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 384 if self.family == "gemm_sm90" else 256

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        stages = self.stages * (self.block_m + self.block_n) * _BLOCK_K[self.family]
        if self.family == "gemm_sm89":
            return stages
        return stages + _CONSUMERS * (_STAGING_BYTES + 4 * self.block_n) + 16 * self.stages

    @property
    def layout(self) -> str:
        """The layout of the argument struct."""
        return self._layout("")

    @property
    def blocks_layout(self) -> str:
        """The layout of the argument struct where blocks have scales in fp32."""
        return self._layout(_STRIDES)

    @property
    def grouped_layout(self) -> str:
        """The layout of the argument struct where rows are in groups."""
        return self._layout(_GROUPS)

    def _layout(self, more: str) -> str:
        if self.family == "gemm_sm89":
            return f"PPqq{_GEMM}{more}"
        layout = f"{3 * _MAP}{_GEMM}{more}"
        # tensor maps, and so the struct, are aligned to 64 bytes
        return f"{layout}{-struct.calcsize(layout) % 64}x"


# for large products, and for small ones and groups
_SM90 = Configuration("gemm_sm90", 256, 128, 4, 2), Configuration("gemm_sm90", 128, 128, 6, 1)
# 100 KB of shared memory have room for two blocks without promotion, or for one with it
_SM89 = {False: Configuration("gemm_sm89", 128, 128, 3), True: Configuration("gemm_sm89", 128, 128, 4)}


def _is_sm89(capability: tuple[int, int]) -> bool:
    """Ada and the consumer GPUs of Blackwell; those of the data centre have other FP8 instructions."""
    return capability == (8, 9) or capability[0] == 12


def configurations(capability: tuple[int, int], in_blocks: bool = False) -> tuple[Configuration, ...]:
    """The configurations for a compute capability, large tiles first, possibly none; all of them promote.

    With ``in_blocks``, every 128 along K have scales in fp32; else each operand has one, for which cuBLASLt's kernels
    are as fast on all GPUs but Hopper.
    """
    if capability == (9, 0):
        return _SM90
    return (_SM89[True],) if in_blocks and _is_sm89(capability) else ()


def mx_configuration(capability: tuple[int, int]) -> Configuration | None:
    """The configuration for operands with scales in E8M0 for every 32 along K, or None: the consumer GPUs of Blackwell
    multiply by such scales in an ``mma``, those of the data centre in other instructions, which cuBLASLt has.
    """
    return _SM89[False] if capability[0] == 12 else None


def grouped_configuration(capability: tuple[int, int], promote: bool) -> Configuration | None:
    """The configuration for rows in groups, each with a scale: a tile of 128 rows is in one of them; or None."""
    if capability == (9, 0):
        return _SM90[-1]
    return _SM89[promote] if _is_sm89(capability) else None


def variant(
    configuration: Configuration,
    a_format: str,
    b_format: str,
    output: torch.dtype,
    promote: bool,
    b_scale_rows: int = 0,
    grouped: str = "",
) -> tuple[str, ...]:
    """The definitions that make a family one kernel.

    ``b_scale_rows``, with ``promote``: the rows of b that share a scale, 1 or 128, where a and b have scales for every
    128 elements along K; 0 where whole tensors have one scale. Without ``promote``, 1: every 32 elements have scales in
    E8M0, of e4m3 only.
    ``grouped``, for a :func:`grouped_configuration` and without ``b_scale_rows``: "rows" for
    :func:`kernels_cuda.gemm.gemm_by_rows`; with ``promote`` "depth" for :func:`kernels_cuda.gemm.gemm_by_depth`.
    """
    shape = (f"BLOCK_M={configuration.block_m}", f"BLOCK_N={configuration.block_n}", f"STAGES={configuration.stages}")
    cluster = (f"CLUSTER={configuration.cluster}",) if configuration.family == "gemm_sm90" else ()
    formats = (f"A_FORMAT={a_format}", f"B_FORMAT={b_format}", f"OUTPUT={OUTPUTS[output]}")
    blocks = (f"B_SCALE_ROWS={b_scale_rows}",) if b_scale_rows else ()
    groups = (f"GROUPED={_GROUPED[grouped]}",) if grouped else ()
    return (*shape, *cluster, *formats, f"PROMOTE={int(promote)}", *blocks, *groups)
