"""The GEMM kernels from the host's side: operands, arguments and grids of a launch. Maths: ``gemm.cuh``."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_cuda.gemm_variants import Configuration
from kernels_cuda.launch import Kernel, address
from kernels_cuda.tensor_map import tensor_map

# rows of the FP8 operands and of the output start at multiples of this many bytes
ROW_BYTES = 16
# elements along K, and rows of a weight, that share a block scale
SCALE_ROWS = 128
# format of a bias in struct Gemm; 0 is none
_BIAS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
# a payload and its scale_inv
Operand = tuple[Tensor, Tensor]


def scale_rows(scale_inv: Tensor, rows: int) -> int:
    """How many rows share a block scale, by the shape of ``scale_inv``: 1 or 128; 1 if there is a single row."""
    return 1 if len(scale_inv) == rows else SCALE_ROWS


def gemm(
    kernel: Kernel,
    configuration: Configuration,
    a: Operand,
    b: Operand,
    out: Tensor,
    bias: Tensor | None = None,
) -> None:
    """``out = (a @ b^T) * a_scale_inv * b_scale_inv + bias``.

    Args:
        kernel: of the configuration's family and :func:`kernels_cuda.gemm_variants.variant`.
        configuration: how it is divided among blocks.
        a: ``[M, K] uint8``, contiguous, K a multiple of 16; its scale_inv ``[] float32``, in blocks
            ``[M, ceil(K/128)]`` with any strides, or in E8M0 ``[ceil(M/128) * ceil(K/128) * 512] uint8`` in the order
            of ``gemm.cuh``, at a multiple of 8 bytes.
        b: ``[N, K] uint8``, contiguous; its scale_inv ``[] float32``, in blocks ``[N, ceil(K/128)]`` or
            ``[ceil(N/128), ceil(K/128)]``, as the variant says, or in E8M0 as that of a.
        out: ``[M, N]`` of the variant's output dtype, its rows at multiples of 16 bytes; written.
        bias: ``[N] float32, bfloat16 or float16``, rounded to the dtype of ``out`` before it is added.
    """
    m, n = a[0].shape[0], b[0].shape[0]
    # strides of block scales; a single scale has none, and those in E8M0 have an order of their own
    strides = [stride for _, scales in (a, b) if scales.dim() == 2 for stride in scales.stride()]
    _launch(kernel, configuration, a, b, out, (m, n), bias, 1, *strides)


def gemm_by_rows(
    kernel: Kernel,
    configuration: Configuration,
    a: Operand,
    b: Operand,
    group_of_tile: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
) -> None:
    """``out = (a @ b[group]^T) * a_scale_inv[group] * b_scale_inv[group] + bias[group]`` for each 128 rows of a.

    Args:
        kernel: of the configuration's family and its variant grouped by "rows".
        configuration: :func:`kernels_cuda.gemm_variants.grouped_configuration`.
        a: ``[P, K] uint8``, row-contiguous, P a multiple of 128, K a multiple of 16; its scale_inv ``[E] float32``.
        b: ``[E, N, K] uint8``, contiguous; its scale_inv ``[E] float32``.
        group_of_tile: ``[P / 128] int32``, the group of each 128 rows, or -1: these rows of ``out`` are not written.
        out: ``[P, N]`` of the variant's output dtype, its rows at multiples of 16 bytes; written.
        bias: ``[E, N] float32, bfloat16 or float16``, contiguous, rounded to the dtype of ``out`` before it is added.
    """
    matrix, shape = (b[0].view(-1, b[0].shape[-1]), b[1]), (len(a[0]), b[0].shape[1])
    _launch(kernel, configuration, a, matrix, out, shape, bias, 1, group_of_tile.data_ptr())


def gemm_by_depth(
    kernel: Kernel, configuration: Configuration, a: Operand, b: Operand, edges: Tensor, out: Tensor
) -> None:
    """``out[g] = (a[:, part] @ b[:, part]^T) * a_scale_inv[g] * b_scale_inv[g]``, part from ``edges[g]`` to the next.

    Args:
        kernel: of the configuration's family and its variant grouped by "depth".
        configuration: :func:`kernels_cuda.gemm_variants.grouped_configuration` with ``promote``.
        a: ``[M, P] uint8``, row-contiguous, on Hopper M a multiple of 64; its scale_inv ``[E] float32``.
        b: ``[N, P] uint8``, row-contiguous; its scale_inv ``[E] float32``.
        edges: ``[E + 1] int32``, multiples of 128 that do not decrease, at most P.
        out: ``[E, M, N]`` of the variant's output dtype, contiguous, its rows at multiples of 16 bytes; written, with
            zeros where a group's part is empty.
    """
    shape = len(a[0]), len(b[0])
    _launch(kernel, configuration, a, b, out.view(-1, shape[1]), shape, None, len(out), edges.data_ptr())


def _launch(
    kernel: Kernel,
    configuration: Configuration,
    a: Operand,
    b: Operand,
    out: Tensor,
    shape: tuple[int, int],
    bias: Tensor | None,
    parts: int,
    *rest: int,
) -> None:
    """Of each of the ``parts``, ``shape``, M and N. All that is written is one matrix, and so is all of b."""
    (a_codes, a_scale_inv), (b_codes, b_scale_inv) = a, b
    (m, n), k, size = shape, a_codes.shape[1], out.itemsize
    block_m, block_n, cluster = configuration.block_m, configuration.block_n, configuration.cluster
    problem = (
        a_scale_inv.data_ptr(),
        b_scale_inv.data_ptr(),
        address(bias),
        out.data_ptr(),
        out.stride(0),
        m,
        n,
        k,
        0 if bias is None else _BIAS[bias.dtype],
        parts,
        *rest,
    )
    clusters = -(-m // (block_m * cluster)) * -(-n // block_n) * parts
    if configuration.family == "gemm_sm89":
        kernel(clusters, a_codes.data_ptr(), b_codes.data_ptr(), a_codes.stride(0), b_codes.stride(0), *problem)
        return
    a_map, b_map = (
        tensor_map(kernel.device, codes.data_ptr(), torch.uint8, len(codes), k, codes.stride(0), box, 128)
        for codes, box in ((a_codes, block_m), (b_codes, block_n // cluster))
    )
    # boxes of 64 rows of 128 bytes
    out_map = tensor_map(kernel.device, out.data_ptr(), out.dtype, len(out), n, out.stride(0) * size, 64, 128 // size)
    kernel(min(clusters, kernel.multiprocessors // cluster) * cluster, a_map, b_map, out_map, *problem)
