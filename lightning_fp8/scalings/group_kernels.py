"""Products over groups of rows by our kernels, each in one launch. Nothing here synchronises."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_cuda import gemm as kernel_gemm
from lightning_fp8.ops.cuda.groups import required
from lightning_fp8.ops.operand import Fp8Tensor, Groups
from lightning_fp8.scalings.operand import Operand


def taken(operand: Operand) -> Fp8Tensor:
    """An operand as kernels take it, which know nothing of scalings."""
    return Fp8Tensor(operand.codes, operand.scale_inv, operand.scaling.format)


def both_taken(a: Operand, b: Operand) -> tuple[Fp8Tensor, Fp8Tensor]:
    """Those of a product."""
    return taken(a), taken(b)


def by_rows(a: Operand, b: Operand, bias: Tensor | None, groups: Groups, dtype: torch.dtype, fast: bool) -> Tensor:
    """a ``[P, K]``, b ``[E, N, K]``, bias ``[E, N]`` -> ``[P, N]``; rows of no group have any values."""
    device = a.codes.device
    kernel, configuration = required(device, "rows", a.scaling.format, b.scaling.format, dtype, not fast)
    out = torch.empty(len(a.codes), b.codes.shape[1], dtype=dtype, device=device)
    bias = None if bias is None else bias.contiguous()
    kernel_gemm.gemm_by_rows(kernel, configuration, a[:2], b[:2], groups.of_tile, out, bias)
    return out


def by_depth(a: Operand, b: Operand, groups: Groups, dtype: torch.dtype) -> Tensor:
    """a ``[M, P]``, b ``[N, P]`` -> ``[E, M, N]``, the sum over each group's part of P."""
    device = a.codes.device
    kernel, configuration = required(device, "depth", a.scaling.format, b.scaling.format, dtype, True)
    out = torch.empty(len(a.scale_inv), len(a.codes), len(b.codes), dtype=dtype, device=device)
    kernel_gemm.gemm_by_depth(kernel, configuration, a[:2], b[:2], groups.edges, out)
    return out
