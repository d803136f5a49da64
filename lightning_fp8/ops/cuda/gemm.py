"""FP8 GEMMs on a CUDA device: our kernels where the rule says so and they are available, else torch's.

Nothing here synchronises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels_cuda import gemm as kernel_gemm
from kernels_cuda.gemm import ROW_BYTES
from kernels_cuda.gemm_variants import Configuration
from kernels_cuda.launch import Kernel
from lightning_fp8.ops.cuda import kernels, plain, rule

if TYPE_CHECKING:
    from lightning_fp8.scalings.operand import Operand


def one_scale(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, fast_accumulation: bool) -> Tensor:
    """The product of operands with one scale each."""
    (m, k), (n, b_k) = a.codes.shape, b.codes.shape
    if not (m and n and k):
        return plain.scaled_mm(a, b, bias, out_dtype, fast_accumulation)
    configuration = rule.configuration_for(a.codes.device, m, n, "one", fast_accumulation)
    if configuration is not None:
        kernel = kernels.gemm_kernel(a.codes.device, configuration, a.scaling.format, b.scaling.format, out_dtype, True)
        if kernel is not None:
            return launch(configuration, kernel, a, b, bias, out_dtype)
    # the usual case takes a short path, because every call adds to the host time of a layer
    if not (n | k | b_k) % plain.ALIGNMENT:
        return plain.aligned_mm(a, b, bias, out_dtype, fast_accumulation)
    return plain.scaled_mm(a, b, bias, out_dtype, fast_accumulation)


def mixed(a: Operand, b: Operand, bias: Tensor | None, output: torch.dtype) -> Tensor | None:
    """The product of operands with different kinds of scaling, both with scales expanded to every 128 elements along K.
    None if neither our kernels nor torch multiply these formats."""
    out, _ = _by_kernel(a, b, bias, output)
    if out is None and plain.multiplies_blocks(a, b):
        out = plain.scaled_mm_in_blocks(a, b, bias, output)
    return out


def in_blocks(a: Operand, b: Operand, bias: Tensor | None, output: torch.dtype) -> Tensor | None:
    """The product of operands with scales for every 128 elements along K. Partial sums are always promoted to fp32.
    None without a GPU, or if a size is 0."""
    out, failure = _by_kernel(a, b, bias, output)
    return plain.scaled_mm_in_blocks(a, b, bias, output, failure) if out is None else out


def _by_kernel(a: Operand, b: Operand, bias: Tensor | None, output: torch.dtype) -> tuple[Tensor | None, str | None]:
    """The product in blocks by our kernels, which do not support squares in a; or None, and the reason if known."""
    (m, k), n, device = a.codes.shape, b.codes.shape[0], a.codes.device
    rows_of_a, rows = kernel_gemm.scale_rows(a.scale_inv, m), kernel_gemm.scale_rows(b.scale_inv, n)
    if not (m and n and k) or rows_of_a > 1:
        return None, None
    configuration = rule.configuration_for(device, m, n, "blocks", False)
    if configuration is None:
        return None, None
    kernel = kernels.gemm_kernel(device, configuration, a.scaling.format, b.scaling.format, output, True, rows)
    if kernel is None:
        return None, kernels.failure_of(device, configuration.family)
    return launch(configuration, kernel, a, b, bias, output), None


def mx(a: Operand, b: Operand, bias: Tensor | None, output: torch.dtype) -> Tensor | None:
    """The product of operands with E8M0 scales in tiles; None without a GPU, or if a size is 0."""
    (m, k), n, device = a.codes.shape, b.codes.shape[0], a.codes.device
    if m and n and k:
        configuration = rule.configuration_for(device, m, n, "mx", True)
        if configuration is not None:
            kernel = kernels.gemm_kernel(device, configuration, a.scaling.format, b.scaling.format, output, False, 1)
            if kernel is not None:
                return launch(configuration, kernel, a, b, bias, output)
    return plain.scaled_mm_mx(a, b, bias, output)


def launch(
    configuration: Configuration, kernel: Kernel, a: Operand, b: Operand, bias: Tensor | None, output: torch.dtype
) -> Tensor:
    """The product ``[M, N]``, contiguous, by one of our kernels. Sizes must not be 0; they are padded as needed."""
    m, n, device = a.codes.shape[0], b.codes.shape[0], a.codes.device
    # kernels write rows that begin at multiples of 16 bytes
    row = -(-n * output.itemsize // ROW_BYTES) * ROW_BYTES // output.itemsize
    out = torch.empty(m, row, dtype=output, device=device)[:, :n]
    bias = None if bias is None else bias.contiguous()
    operands = ((_as_operand(a.codes), a.scale_inv), (_as_operand(b.codes), b.scale_inv))
    kernel_gemm.gemm(kernel, configuration, *operands, out, bias)
    return out.contiguous()


def _as_operand(payload: Tensor) -> Tensor:
    """``[rows, K] uint8`` as the kernels take it: K padded with zeros, rows at multiples of 16 bytes."""
    payload = plain.padded(payload).contiguous()
    return payload if payload.data_ptr() % ROW_BYTES == 0 else payload.clone()
