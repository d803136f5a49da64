"""The GEMM kernels from the host's side: configurations, variants, argument structs, grids. Maths: ``gemm.cuh``."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from kernels_cuda.casts import ACTIVATIONS, Row
from kernels_cuda.launch import Kernel, address
from kernels_cuda.tensor_map import tensor_map

OUTPUTS = {torch.float32: "OutFp32", torch.bfloat16: "OutBf16", torch.float16: "OutFp16"}
# for linear - activation - linear in one kernel; not swiglu, whose halves lie in different tiles
CHAINED_ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
# rows of the FP8 operands and of the output start at multiples of this many bytes
ROW_BYTES = 16
# rows summed in one row of the column sums
COLUMN_SUM_ROWS = 64
# elements along K, and rows of a weight, that share a scale of blocks
SCALE_ROWS = 128
SUM_SPLITS_THREADS, SUM_SPLITS_COLUMNS = 256, 4
_MAP = "128s"
_GEMM = "PPPPqiiiii4x"
_CHAIN = "PPPPPPPPPi4x"
_STRIDES = "iiii"
_BLOCK_K = {"gemm_sm90": 128, "gemm_sm89": 64}
_CONSUMERS, _STAGING_BYTES = 2, 16384
# format of a bias in struct Gemm; 0 is none
_BIAS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_ROWS, _COLUMNS = 1, 2


class Configuration(NamedTuple):
    """How a GEMM is divided among blocks.

    Attributes:
        family: name of the ``.cu`` file and of its kernel.
        block_m: rows of the output that a block computes at a time.
        block_n: columns of the output that a block computes at a time.
        stages: pieces of K in shared memory at a time.
        cluster: blocks, neighbours along M, that load their share of B for each other.
        ping_pong: whether each of a block's two warpgroups computes its own tile, one storing while the other
            multiplies, instead of half of the rows of each tile. Hopper only.
    """

    family: str
    block_m: int
    block_n: int
    stages: int
    cluster: int = 1
    ping_pong: bool = False

    @property
    def name(self) -> str:
        """``"128x256 s4 c2"`` or ``"128x128 s6 c2 ping-pong"``, as tables and messages call it."""
        return f"{self.block_m}x{self.block_n} s{self.stages} c{self.cluster}{' ping-pong' * self.ping_pong}"

    @property
    def threads(self) -> int:
        """Of a block."""
        return 384 if self.family == "gemm_sm90" else 256

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        stages = self.stages * (self.block_m + self.block_n) * _BLOCK_K[self.family]
        if self.family == "gemm_sm89":
            return stages
        return stages + _CONSUMERS * (_STAGING_BYTES + 4 * self.block_n) + 16 * (self.stages + 1)

    @property
    def layout(self) -> str:
        """Of the argument struct."""
        return self._layout("")

    @property
    def blocks_layout(self) -> str:
        """Of the argument struct where blocks have scales."""
        return self._layout(_STRIDES)

    def _layout(self, strides: str) -> str:
        if self.family == "gemm_sm89":
            return f"PPqq{_GEMM}{strides}"
        layout = f"{3 * _MAP}{_GEMM}{_CHAIN}{strides}"
        # tensor maps, and so the struct, are aligned to 64 bytes
        return f"{layout}{-struct.calcsize(layout) % 64}x"


_SM90 = (
    Configuration("gemm_sm90", 128, 256, 4, 2),
    Configuration("gemm_sm90", 256, 128, 4, 2),
    Configuration("gemm_sm90", 128, 256, 4, 1),
    Configuration("gemm_sm90", 256, 128, 4, 1),
    Configuration("gemm_sm90", 128, 128, 6, 2, ping_pong=True),
    Configuration("gemm_sm90", 128, 128, 6, 1, ping_pong=True),
    Configuration("gemm_sm90", 128, 128, 6, 2),
    Configuration("gemm_sm90", 128, 128, 6, 1),
)
# two blocks without promotion, or one with, have 100 KB of shared memory
_SM89 = {False: (Configuration("gemm_sm89", 128, 128, 3),), True: (Configuration("gemm_sm89", 128, 128, 4),)}


def configurations(capability: tuple[int, int], promote: bool, in_blocks: bool = False) -> tuple[Configuration, ...]:
    """The configurations for a compute capability, possibly none; the first is the one for large shapes.

    Args:
        capability: major and minor.
        promote: whether partial sums are added up in fp32 registers every 128 along K.
        in_blocks: with ``promote``, whether each block of the operands has a scale of its own.
    """
    if capability == (9, 0):
        # two accumulators of 128 x 256 do not fit into a thread's registers
        fitting = (one for one in _SM90 if not (promote and one.block_n == 256))
        return tuple(one for one in fitting if not (in_blocks and one.ping_pong))
    # consumer GPUs of the two generations: Ada and Blackwell. sm_100 has FP8 in instructions of another kind
    return _SM89[promote] if capability == (8, 9) or capability[0] == 12 else ()


def variant(
    configuration: Configuration,
    a_format: str,
    b_format: str,
    output: torch.dtype,
    promote: bool,
    b_scale_rows: int = 0,
) -> tuple[str, ...]:
    """The definitions that make a family one kernel: the plain GEMM.

    ``b_scale_rows``, with ``promote``: a has a scale for every 128 elements of a row, and b for every 128 of 1 or 128
    rows; 0 where whole tensors have one.
    """
    shape = (f"BLOCK_M={configuration.block_m}", f"BLOCK_N={configuration.block_n}", f"STAGES={configuration.stages}")
    hopper = (f"CLUSTER={configuration.cluster}", f"PING_PONG={int(configuration.ping_pong)}")
    formats = (f"A_FORMAT={a_format}", f"B_FORMAT={b_format}", f"OUTPUT={OUTPUTS[output]}")
    blocks = (f"B_SCALE_ROWS={b_scale_rows}",) if b_scale_rows else ()
    kind = (*formats, f"PROMOTE={int(promote)}", *blocks)
    return (*shape, *(hopper if configuration.family == "gemm_sm90" else ()), *kind)


def b_scale_rows(scale_inv: Tensor, rows: int) -> int:
    """How many of b's rows share a scale of blocks, by the shape of ``scale_inv``: 1 or 128. One row alone has 1."""
    return 1 if len(scale_inv) == rows else SCALE_ROWS


def chained_variant(
    configuration: Configuration, a_format: str, output: torch.dtype, promote: bool, activation: str, format: str
) -> tuple[str, ...]:
    """The same, followed by a cast into the next GEMM's operand: of ``activation(h)``, or, if ``a`` is a gradient
    (``promote``), of the gradient of h. ``format`` is the format of that operand.
    """
    chain = (f"CHAIN={'BACKWARD' if promote else 'FORWARD'}", ACTIVATIONS[activation])
    return (*variant(configuration, a_format, "e4m3", output, promote), *chain, f"FORMAT={format.upper()}")


def column_sum_rows(rows: int) -> int:
    """Rows of ``column_sums`` of :func:`chained_gemm`."""
    return -(-rows // COLUMN_SUM_ROWS)


def gemm(
    kernel: Kernel,
    configuration: Configuration,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None = None,
    in_blocks: bool = False,
) -> None:
    """``out = (a @ b^T) * a_scale_inv * b_scale_inv + bias``.

    Args:
        kernel: of the configuration's family and :func:`variant`.
        configuration: how it is divided among blocks.
        a: ``[M, K] uint8``, contiguous, K a multiple of 16.
        b: ``[N, K] uint8``, contiguous.
        out: ``[M, N]`` of the variant's output dtype, its rows at multiples of 16 bytes; written.
        a_scale_inv: ``[] float32``; in blocks ``[M, ceil(K/128)]``, with any strides, each an element's distance.
        b_scale_inv: ``[] float32``; in blocks ``[N, ceil(K/128)]`` or ``[ceil(N/128), ceil(K/128)]``, as the variant
            says.
        bias: ``[N] float32, bfloat16 or float16``, rounded to the dtype of ``out`` before it is added.
        in_blocks: whether the kernel is one for blocks.
    """
    scales = a_scale_inv, b_scale_inv
    strides = _strides(scales) if in_blocks else ()
    _launch(kernel, configuration, a, b, out, out.stride(0), scales, bias, 1, strides=strides)


class Split(NamedTuple):
    """A GEMM whose K is divided among blocks, where the output is too small to fill the GPU.

    Attributes:
        count: parts of K, each of at least one step of 128.
        parts: ``[count, split_rows, N] float32``, rows at multiples of 16 bytes; each part's sums are written there.
        sum_kernel: of family ``sum_splits`` for the dtype of the output.
    """

    count: int  # type: ignore[assignment]
    parts: Tensor
    sum_kernel: Kernel


def split_rows(configuration: Configuration, rows: int) -> int:
    """Rows of one part in ``Split.parts``: those of the output, in whole tiles."""
    tile = configuration.block_m * configuration.cluster
    return -(-rows // tile) * tile


def split_gemm(
    kernel: Kernel,
    configuration: Configuration,
    split: Split,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None = None,
    in_blocks: bool = False,
) -> None:
    """What :func:`gemm` computes, by a kernel with fp32 output and the sum of its parts, always in the same order."""
    parts, scales = split.parts, (a_scale_inv, b_scale_inv)
    strides = _strides(scales) if in_blocks else ()
    _launch(kernel, configuration, a, b, parts, parts.stride(1), scales, None, split.count, strides=strides)
    sum_split_parts(split, out, bias)


def sum_split_parts(split: Split, out: Tensor, bias: Tensor | None = None) -> None:
    """The second half of :func:`split_gemm`."""
    parts, (rows, columns) = split.parts, out.shape
    threads = rows * -(-columns // SUM_SPLITS_COLUMNS)
    split.sum_kernel(
        -(-threads // SUM_SPLITS_THREADS),
        parts.data_ptr(),
        out.data_ptr(),
        address(bias),
        parts.stride(0),
        parts.stride(1),
        out.stride(0),
        rows,
        columns,
        split.count,
        0 if bias is None else _BIAS[bias.dtype],
    )


SUM_SPLITS_LAYOUT = "PPPqqqiiii"


def sum_splits_variant(output: torch.dtype) -> tuple[str, ...]:
    """The definitions that make ``sum_splits.cu`` one kernel."""
    return (f"OUTPUT={OUTPUTS[output]}",)


def chained_gemm(
    kernel: Kernel,
    configuration: Configuration,
    a: Tensor,
    b: Tensor,
    h: Tensor | None,
    y: Tensor,
    y_t: Tensor | None,
    row: Row,
    scale_inv: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None = None,
    column_sums: Tensor | None = None,
) -> None:
    """A GEMM that writes the next one's operand: no cast pass between them.

    Forward: ``h = (a @ b^T) * a_scale_inv * b_scale_inv + bias``, ``v = activation(h)``. Backward: ``da`` in place of
    h, and ``v`` the gradient of h. Both are rounded as in the separate operators; ``y = sat(v * scale)``.

    Args:
        kernel: of family ``gemm_sm90`` and :func:`chained_variant`.
        configuration: how it is divided among blocks.
        a: ``[M, K] uint8``, contiguous, K a multiple of 16.
        b: ``[N, K] uint8``, contiguous.
        h: ``[M, N]`` of the variant's output dtype, contiguous, N a multiple of 8. Forward: written, or None if
            it is not needed. Backward: read.
        y: ``[M, N] uint8``, written.
        y_t: ``[N, M] uint8``, written; or None.
        row: which scale, of a tensor that has a history, and where to record.
        scale_inv: ``[] float32``, written.
        a_scale_inv: ``[] float32``.
        b_scale_inv: ``[] float32``.
        bias: forward only, as of :func:`gemm`.
        column_sums: backward only, ``[column_sum_rows(M), N] float32``, written: sums of v over 64 rows each.
    """
    m, n = y.shape
    aligned = (_ROWS if n % 16 == 0 and y.data_ptr() % 16 == 0 else 0) | (
        _COLUMNS if y_t is not None and m % 16 == 0 and y_t.data_ptr() % 16 == 0 else 0
    )
    chain = (
        y.data_ptr(),
        address(y_t),
        address(column_sums),
        row.scale.data_ptr(),
        address(row.newest),
        row.index.data_ptr(),
        0,
        address(row.amax),
        scale_inv.data_ptr(),
        aligned,
    )
    scales = (a_scale_inv, b_scale_inv)
    _launch(kernel, configuration, a, b, h, n, scales, bias, 1, chain)


def _strides(scales: tuple[Tensor, Tensor]) -> tuple[int, ...]:
    return *scales[0].stride(), *scales[1].stride()


_NO_CHAIN = (0,) * 10
_NO_MAP = bytes(128)


def _launch(
    kernel: Kernel,
    configuration: Configuration,
    a: Tensor,
    b: Tensor,
    out: Tensor | None,
    out_stride: int,
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
    splits: int,
    chain: tuple[int, ...] = _NO_CHAIN,
    strides: tuple[int, ...] = (),
) -> None:
    (m, k), n = a.shape, b.shape[0]
    block_m, block_n, cluster = configuration.block_m, configuration.block_n, configuration.cluster
    problem = (
        scales[0].data_ptr(),
        scales[1].data_ptr(),
        address(bias),
        address(out),
        out_stride,
        m,
        n,
        k,
        0 if bias is None else _BIAS[bias.dtype],
        splits,
    )
    clusters = -(-m // (block_m * cluster)) * -(-n // block_n) * splits
    if configuration.family == "gemm_sm89":
        kernel(clusters, a.data_ptr(), b.data_ptr(), a.stride(0), b.stride(0), *problem, *strides)
        return
    a_map = tensor_map(kernel.device, a.data_ptr(), torch.uint8, m, k, a.stride(0), block_m, 128)
    b_map = tensor_map(kernel.device, b.data_ptr(), torch.uint8, n, k, b.stride(0), block_n // cluster, 128)
    out_map = _NO_MAP
    if out is not None:
        rows = m if splits == 1 else out.shape[0] * out.shape[1]
        # boxes of 64 rows of 128 bytes
        out_map = tensor_map(
            kernel.device, out.data_ptr(), out.dtype, rows, n, out_stride * out.itemsize, 64, 128 // out.itemsize
        )
    grid = min(clusters, kernel.multiprocessors // cluster) * cluster
    kernel(grid, a_map, b_map, out_map, *problem, *chain, *strides)
