"""The GEMM kernels from the host's side: operands, arguments and grids of a launch. Maths: ``gemm.cuh``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels_cuda.casts import Row
from kernels_cuda.gemm_variants import SUM_SPLITS_COLUMNS, SUM_SPLITS_THREADS, Configuration
from kernels_cuda.launch import Kernel, address
from kernels_cuda.tensor_map import tensor_map

# rows of the FP8 operands and of the output start at multiples of this many bytes
ROW_BYTES = 16
# rows that are summed into one row of the column sums
COLUMN_SUM_ROWS = 64
# elements along K, and rows of a weight, that share a block scale
SCALE_ROWS = 128
# format of a bias in struct Gemm; 0 is none
_BIAS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_ROWS, _COLUMNS = 1, 2


def b_scale_rows(scale_inv: Tensor, rows: int) -> int:
    """How many rows of b share a block scale, by the shape of ``scale_inv``: 1 or 128; 1 if b has a single row."""
    return 1 if len(scale_inv) == rows else SCALE_ROWS


def column_sum_rows(rows: int) -> int:
    """The number of rows of ``column_sums`` of :func:`chained_gemm`, for an output with this many rows."""
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
) -> None:
    """``out = (a @ b^T) * a_scale_inv * b_scale_inv + bias``.

    Args:
        kernel: of the configuration's family and :func:`kernels_cuda.gemm_variants.variant`.
        configuration: how it is divided among blocks.
        a: ``[M, K] uint8``, contiguous, K a multiple of 16.
        b: ``[N, K] uint8``, contiguous.
        out: ``[M, N]`` of the variant's output dtype, its rows at multiples of 16 bytes; written.
        a_scale_inv: ``[] float32``; in blocks ``[M, ceil(K/128)]``, with any strides.
        b_scale_inv: ``[] float32``; in blocks ``[N, ceil(K/128)]`` or ``[ceil(N/128), ceil(K/128)]``, as the variant
            says.
        bias: ``[N] float32, bfloat16 or float16``, rounded to the dtype of ``out`` before it is added.
    """
    _launch(kernel, configuration, a, b, out, out.stride(0), (a_scale_inv, b_scale_inv), bias, 1)


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
) -> None:
    """:func:`gemm` by a kernel that writes fp32 parts, followed by their sum, always in the same order."""
    parts, scales = split.parts, (a_scale_inv, b_scale_inv)
    _launch(kernel, configuration, a, b, parts, parts.stride(1), scales, None, split.count)
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

    Forward: ``h = (a @ b^T) * a_scale_inv * b_scale_inv + bias``, ``v = activation(h)``. Backward: the GEMM gives
    ``da`` instead, and ``v`` is the gradient of h. Both are rounded as in the separate operators;
    ``y = sat(v * scale)``.

    Args:
        kernel: of family ``gemm_sm90`` and :func:`kernels_cuda.gemm_variants.chained_variant`.
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
        bias: forward only, as for :func:`gemm`.
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
    # of block scales; a single scale has none
    strides = (*scales[0].stride(), *scales[1].stride())
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
