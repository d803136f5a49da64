"""FP8 GEMMs on a CUDA device: our kernels where chosen and available, else cuBLASLt.

Nothing here synchronises, except that ``gemm="auto"`` may measure a product when it first runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels_cuda import gemm as kernel_gemm
from kernels_cuda.gemm import ROW_BYTES, Split
from kernels_cuda.gemm_variants import Configuration
from kernels_cuda.launch import Kernel
from lightning_fp8.ops.cuda import gemm_choice, kernels, plain
from lightning_fp8.ops.cuda.gemm_table import Choice

# elements of K in a step; each part of a split has at least one step
_STEP = 128


def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    a_format: str,
    b_format: str,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    gemm: str = "auto",
) -> Tensor:
    """See the operator ``lightning_fp8::scaled_mm``."""
    if a_scale_inv.dim():
        return _in_blocks(a, b, a_scale_inv, b_scale_inv, bias, a_format, b_format, out_dtype, gemm)
    promote = not fast_accumulation
    (m, k), (n, b_k) = a.shape, b.shape
    choice = gemm_choice.choose(a.device, gemm, m, n, k, promote, out_dtype, run_choice)
    # the usual case takes a short path, because every call adds to the host time of a layer
    if choice.configuration is None and not (n | k | b_k) % plain.ALIGNMENT and m and n and k:
        return plain.aligned_mm(a, b, a_scale_inv, b_scale_inv, bias, a_format, b_format, out_dtype, fast_accumulation)
    return run_choice(choice, a, b, a_scale_inv, b_scale_inv, bias, a_format, b_format, out_dtype, promote)


def scaled_mm_add_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    a_format: str,
    b_format: str,
    fast_accumulation: bool,
    gemm: str = "auto",
) -> None:
    """See the operator ``lightning_fp8::scaled_mm_add_``."""
    operands = (a, b, a_scale_inv, b_scale_inv)
    out.add_(scaled_mm(*operands, None, a_format, b_format, torch.float32, fast_accumulation, gemm))


def run_choice(
    choice: Choice,
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    a_format: str,
    b_format: str,
    output: torch.dtype,
    promote: bool,
) -> Tensor:
    """``(a @ b^T) * a_scale_inv * b_scale_inv + bias`` as chosen.

    Uses cuBLASLt if a kernel is not available. Sizes that a kernel does not support are padded.

    Args:
        choice: the GEMM to run.
        a: ``[M, K] uint8``.
        b: ``[N, K] uint8``.
        a_scale_inv: ``[] float32``.
        b_scale_inv: ``[] float32``.
        bias: ``[N] float32, bfloat16 or float16``, or None.
        a_format: ``"e4m3"`` or ``"e5m2"``.
        b_format: the same for b.
        output: dtype of the result.
        promote: whether partial sums are added up in fp32 registers every 128 along K.

    Returns:
        ``[M, N]``, contiguous.
    """
    operands = (a, b, a_scale_inv, b_scale_inv)
    (m, k), n = a.shape, b.shape[0]
    found = None
    if choice.configuration is not None and m and n and k:
        choice = choice._replace(splits=min(choice.splits, -(-k // _STEP)))
        found = kernels_of(choice, a.device, a_format, b_format, output, promote)
    if found is None:
        return plain.scaled_mm(*operands, bias, a_format, b_format, output, not promote)
    out = _output(m, n, output, a.device)
    _launch(found, out, *operands, bias)
    return out.contiguous()


def _in_blocks(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    a_format: str,
    b_format: str,
    output: torch.dtype,
    gemm: str,
) -> Tensor:
    """:func:`scaled_mm` where each block has a scale. Our kernels do not support squares in a, and always promote."""
    operands = (a, b, a_scale_inv, b_scale_inv)
    (m, k), n = a.shape, b.shape[0]
    choice = gemm_choice.choose_in_blocks(a.device, gemm, m, n, k) if len(a_scale_inv) == m else Choice(None)
    b_scale_rows = kernel_gemm.b_scale_rows(b_scale_inv, n)
    found = kernels_of(choice, a.device, a_format, b_format, output, True, b_scale_rows)
    if found is None:
        return plain.scaled_mm_in_blocks(*operands, bias, a_format, b_format, output)
    out = _output(m, n, output, a.device)
    _launch(found, out, *operands, bias)
    return out.contiguous()


class Found(NamedTuple):
    """The kernels of a choice: the GEMM and, where K is split, the sum of the parts."""

    configuration: Configuration
    kernel: Kernel
    splits: int
    sum_kernel: Kernel | None


def kernels_of(
    choice: Choice,
    device: torch.device,
    a_format: str,
    b_format: str,
    output: torch.dtype,
    promote: bool,
    b_scale_rows: int = 0,
) -> Found | None:
    """The kernels for a choice; None for cuBLASLt, or if a kernel is not available. ``b_scale_rows``: see
    :func:`kernels_cuda.gemm_variants.variant`."""
    if choice.configuration is None:
        return None
    # parts of a sum are in fp32
    stored = output if choice.splits == 1 else torch.float32
    variant = (device, choice.configuration, a_format, b_format, stored)
    if b_scale_rows:
        kernel = kernels.block_gemm_kernel(*variant, b_scale_rows)
    else:
        kernel = kernels.gemm_kernel(*variant, promote)
    if kernel is None:
        return None
    sum_kernel = kernels.sum_splits_kernel(device, output) if choice.splits > 1 else None
    if choice.splits > 1 and sum_kernel is None:
        return None
    return Found(choice.configuration, kernel, choice.splits, sum_kernel)


def _launch(
    found: Found,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
) -> None:
    bias = None if bias is None else bias.contiguous()
    operands = (_as_operand(a), _as_operand(b), out, a_scale_inv, b_scale_inv, bias)
    configuration, kernel, splits, sum_kernel = found
    if sum_kernel is None:
        kernel_gemm.gemm(kernel, configuration, *operands)
        return
    (m, n), per_row = out.shape, ROW_BYTES // torch.float32.itemsize
    shape = (splits, kernel_gemm.split_rows(configuration, m), _up_to(per_row, n))
    parts = torch.empty(shape, dtype=torch.float32, device=a.device)
    kernel_gemm.split_gemm(kernel, configuration, Split(splits, parts, sum_kernel), *operands)


def _as_operand(payload: Tensor) -> Tensor:
    """``[rows, K] uint8`` as the kernels take it: K padded with zeros, rows at multiples of 16 bytes."""
    payload = plain.padded(payload)
    return payload if payload.data_ptr() % ROW_BYTES == 0 else payload.clone()


def _output(m: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[m, n]``, not initialised, with the row alignment that the kernels need."""
    columns = _up_to(ROW_BYTES // dtype.itemsize, n)
    return torch.empty(m, columns, dtype=dtype, device=device)[:, :n]


def _up_to(multiple: int, size: int) -> int:
    return -(-size // multiple) * multiple
