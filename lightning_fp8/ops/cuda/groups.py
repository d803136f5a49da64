"""Casts and products over groups of rows on a CUDA device, each in one launch. Nothing here synchronises."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from kernels_cuda import casts
from kernels_cuda import gemm as kernel_gemm
from kernels_cuda.gemm_variants import Configuration, grouped_configuration
from kernels_cuda.launch import Kernel
from lightning_fp8.ops.cuda.dispatch import new_result
from lightning_fp8.ops.cuda.kernels import cast_kernel, gemm_kernel
from lightning_fp8.ops.operand import ALIGNMENT, Fp8Tensor, Groups, Slot
from lightning_fp8.runtime.device import gpu_of

# rows of a group's wgrad that Hopper's copy engine stores at a time
_STORED_ROWS = 64


class Products(NamedTuple):
    """How groups are cast and multiplied.

    Attributes:
        cast: the results of the operator ``lightning_fp8::cast_groups``, and with ``sums`` the sum of each group's
            rows, ``[E, K] float32``.
        by_rows: a ``[P, K]``, b ``[E, N, K]``, bias ``[E, N]`` or None, groups, dtype of the output, whether sums stay
            in the tensor cores -> ``[P, N]``, of each group's rows with its matrix of b; others have any values.
        by_depth: a ``[M, P]``, b ``[N, P]``, groups, dtype -> ``[E, M, N]``, the sum over each group's part of P.
    """

    cast: Callable[[Tensor, Slot, Groups, str, bool], tuple[Tensor, Tensor, Tensor, Tensor]]
    by_rows: Callable[[Fp8Tensor, Fp8Tensor, Tensor | None, Groups, torch.dtype, bool], Tensor]
    by_depth: Callable[[Fp8Tensor, Fp8Tensor, Groups, torch.dtype], Tensor]


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; (0, 0) of another device."""
    gpu = gpu_of(device)
    return (0, 0) if gpu is None else gpu.capability


# dynamo calls this instead of tracing it: it compiles and tests kernels
@torch.compiler.assume_constant_result
def has_kernels(
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    formats: tuple[str, str],
    sizes: tuple[int, int],
) -> bool:
    """Whether a linear layer of groups runs on this device: all of its kernels are available and take its sizes.

    Args:
        device: of all tensors.
        dtypes: of x, of the output and of the weight.
        formats: of inputs and weights, and of gradients.
        sizes: K and N, in this order, of ``wgrad``'s output as it is stored.
    """
    if grouped_configuration(capability(device), True) is None:
        return False
    multiple = _STORED_ROWS if capability(device)[0] == 9 else ALIGNMENT
    if sizes[0] % multiple or sizes[1] % ALIGNMENT:
        return False
    return _kernels(device, dtypes, formats)


@functools.cache
def _kernels(
    device: torch.device, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], formats: tuple[str, str]
) -> bool:
    of_x, of_y, of_weight = dtypes
    fmt, of_dy = formats
    gemms = (
        ("rows", fmt, fmt, of_y, False),
        ("rows", of_dy, fmt, of_x, True),
        ("depth", of_dy, fmt, of_weight, True),
        ("depth", fmt, of_dy, of_weight, True),
    )
    casting = (cast_kernel(device, dtype, target, "none", False) for dtype, target in ((of_x, fmt), (of_y, of_dy)))
    return None not in (*(_gemm(device, *gemm) for gemm in gemms), *casting)


def _gemm(
    device: torch.device, grouped: str, a_format: str, b_format: str, output: torch.dtype, promote: bool
) -> tuple[Kernel, Configuration] | None:
    configuration = grouped_configuration(capability(device), promote)
    if configuration is None:
        return None
    kernel = gemm_kernel(device, configuration, a_format, b_format, output, promote, grouped=grouped)
    return None if kernel is None else (kernel, configuration)


def _required(
    device: torch.device, grouped: str, a_format: str, b_format: str, output: torch.dtype, promote: bool
) -> tuple[Kernel, Configuration]:
    plan = _gemm(device, grouped, a_format, b_format, output, promote)
    if plan is None:
        raise RuntimeError(f"There is no GEMM over groups by {grouped} with an output in {output} on {device}.")
    return plan


def placed(x: Tensor, groups: Groups) -> Tensor:
    """x ``[T, K]`` -> ``[P, K]``, zeros between."""
    return x.new_zeros(groups.padded_rows, x.shape[1]).index_copy_(0, groups.position, x)


def _cast(x: Tensor, slot: Slot, groups: Groups, layout: str, sums: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernel = cast(Kernel, cast_kernel(x.device, x.dtype, slot.format, "none", False))
    x = placed(x, groups)
    rows, columns = x.shape
    result = new_result(slot, rows, columns, layout, sums, groups)
    casts.cast_transpose(kernel, x, result)
    partial, count = result.column_sums, len(slot.index)
    if partial is None:
        return result.y, result.y_t, result.scale_inv, x.new_empty(0, columns, dtype=torch.float32)
    # those of tiles that belong to no group come after all others
    tiles = torch.div(groups.edges, casts.TILE_ROWS, rounding_mode="floor").long()
    of_groups = torch.segment_reduce(partial, "sum", offsets=tiles, axis=0, unsafe=True, initial=0.0)
    return result.y, result.y_t, result.scale_inv, of_groups.view(count, -1)


def _by_rows(
    a: Fp8Tensor, b: Fp8Tensor, bias: Tensor | None, groups: Groups, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    device = a.payload.device
    kernel, configuration = _required(device, "rows", a.format, b.format, out_dtype, not fast)
    out = torch.empty(len(a.payload), b.payload.shape[1], dtype=out_dtype, device=device)
    bias = None if bias is None else bias.contiguous()
    operands = (a.payload, a.scale_inv), (b.payload, b.scale_inv)
    kernel_gemm.gemm_by_rows(kernel, configuration, *operands, groups.of_tile, out, bias)
    return out


def _by_depth(a: Fp8Tensor, b: Fp8Tensor, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    device = a.payload.device
    kernel, configuration = _required(device, "depth", a.format, b.format, out_dtype, True)
    shape = len(a.scale_inv), len(a.payload), len(b.payload)
    out = torch.empty(shape, dtype=out_dtype, device=device)
    operands = (a.payload, a.scale_inv), (b.payload, b.scale_inv)
    kernel_gemm.gemm_by_depth(kernel, configuration, *operands, groups.edges, out)
    return out


PRODUCTS = Products(_cast, _by_rows, _by_depth)
