"""The GEMM kernels from the host's side: operands, arguments and grids of a launch. Maths: ``gemm.cuh``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels_cuda.gemm_variants import SUM_SPLITS_COLUMNS, SUM_SPLITS_THREADS, Configuration
from kernels_cuda.launch import Kernel, address
from kernels_cuda.tensor_map import tensor_map

# rows of the FP8 operands and of the output start at multiples of this many bytes
ROW_BYTES = 16
# elements along K, and rows of a weight, that share a block scale
SCALE_ROWS = 128
# format of a bias in struct Gemm; 0 is none
_BIAS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


def b_scale_rows(scale_inv: Tensor, rows: int) -> int:
    """How many rows of b share a block scale, by the shape of ``scale_inv``: 1 or 128; 1 if b has a single row."""
    return 1 if len(scale_inv) == rows else SCALE_ROWS


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


def _launch(
    kernel: Kernel,
    configuration: Configuration,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    out_stride: int,
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
    splits: int,
) -> None:
    (m, k), n = a.shape, b.shape[0]
    block_m, block_n, cluster = configuration.block_m, configuration.block_n, configuration.cluster
    problem = (
        scales[0].data_ptr(),
        scales[1].data_ptr(),
        address(bias),
        out.data_ptr(),
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
    rows, of_out = m if splits == 1 else out.shape[0] * out.shape[1], (out.data_ptr(), out.dtype)
    # boxes of 64 rows of 128 bytes
    out_map = tensor_map(kernel.device, *of_out, rows, n, out_stride * out.itemsize, 64, 128 // out.itemsize)
    grid = min(clusters, kernel.multiprocessors // cluster) * cluster
    kernel(grid, a_map, b_map, out_map, *problem, *strides)
