"""FP8 GEMMs on a CUDA device: our kernels where the rule says so and they are available, else torch's.

Nothing here synchronises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_cuda import gemm as kernel_gemm
from kernels_cuda.gemm import ROW_BYTES
from kernels_cuda.gemm_variants import Configuration
from kernels_cuda.launch import Kernel
from lightning_fp8.ops.amaxes import BLOCK
from lightning_fp8.ops.cuda import kernels, plain, rule
from lightning_fp8.ops.operand import Fp8Tensor
from lightning_fp8.ops.reference import are_in_blocks


def scaled_mm(
    a: Fp8Tensor,
    b: Fp8Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """See the operator ``lightning_fp8::scaled_mm``."""
    if a.scale_inv.dim() or b.scale_inv.dim():
        return _in_blocks(a, b, bias, out_dtype)
    (m, k), (n, b_k) = a.payload.shape, b.payload.shape
    if not (m and n and k):
        return plain.scaled_mm(a, b, bias, out_dtype, fast_accumulation)
    configuration = rule.configuration_for(a.payload.device, m, n, "one", fast_accumulation)
    if configuration is not None:
        kernel = kernels.gemm_kernel(a.payload.device, configuration, a.format, b.format, out_dtype, True)
        if kernel is not None:
            return launch(configuration, kernel, a, b, bias, out_dtype)
    # the usual case takes a short path, because every call adds to the host time of a layer
    if not (n | k | b_k) % plain.ALIGNMENT:
        return plain.aligned_mm(a, b, bias, out_dtype, fast_accumulation)
    return plain.scaled_mm(a, b, bias, out_dtype, fast_accumulation)


def _in_blocks(a: Fp8Tensor, b: Fp8Tensor, bias: Tensor | None, output: torch.dtype) -> Tensor:
    """:func:`scaled_mm` where one or both operands have several scales. Our kernels do not support squares in a, and
    always promote.
    """
    if a.scale_inv.dtype == b.scale_inv.dtype == torch.uint8:
        return _mx(a, b, bias, output)
    is_mixed = not are_in_blocks(a, b)
    if is_mixed:
        k = min(a.payload.shape[1], b.payload.shape[1])
        a_blocks, b_blocks = plain.as_blocks(a, k, 1), plain.as_blocks(b, k, BLOCK)
        if a_blocks is None or b_blocks is None:
            return plain.scaled_mm_dequantized(a, b, bias, output)
        a, b = a_blocks, b_blocks
    (m, k), n, device = a.payload.shape, b.payload.shape[0], a.payload.device
    failure = None
    if m and n and k and len(a.scale_inv) == m:
        configuration = rule.configuration_for(device, m, n, "blocks", False)
        if configuration is not None:
            rows = kernel_gemm.b_scale_rows(b.scale_inv, n)
            kernel = kernels.gemm_kernel(device, configuration, a.format, b.format, output, True, rows)
            if kernel is not None:
                return launch(configuration, kernel, a, b, bias, output)
            failure = kernels.failure_of(device, configuration.family)
    if is_mixed and not plain.multiplies_blocks(a, b):
        return plain.scaled_mm_dequantized(a, b, bias, output)
    return plain.scaled_mm_in_blocks(a, b, bias, output, failure)


def _mx(a: Fp8Tensor, b: Fp8Tensor, bias: Tensor | None, output: torch.dtype) -> Tensor:
    """:func:`scaled_mm` where both operands have scales in E8M0, those of a weight without a master in a matrix.

    Where there is no product in MX, such a weight runs on dequantized values; others, which are trained, are refused.
    """
    if max(a.scale_inv.dim(), b.scale_inv.dim()) > 1 and not plain.has_mx(a.payload.device):
        return plain.scaled_mm_dequantized(a, b, bias, output)
    a, b = plain.in_tiles(a), plain.in_tiles(b)
    (m, k), n, device = a.payload.shape, b.payload.shape[0], a.payload.device
    if m and n and k:
        configuration = rule.configuration_for(device, m, n, "mx", True)
        if configuration is not None:
            kernel = kernels.gemm_kernel(device, configuration, a.format, b.format, output, False, 1)
            if kernel is not None:
                return launch(configuration, kernel, a, b, bias, output)
    return plain.scaled_mm_mx(a, b, bias, output)


def launch(
    configuration: Configuration, kernel: Kernel, a: Fp8Tensor, b: Fp8Tensor, bias: Tensor | None, output: torch.dtype
) -> Tensor:
    """The product ``[M, N]``, contiguous, by one of our kernels; no size is 0, and others are padded."""
    m, n, device = a.payload.shape[0], b.payload.shape[0], a.payload.device
    # kernels write rows that begin at multiples of 16 bytes
    row = -(-n * output.itemsize // ROW_BYTES) * ROW_BYTES // output.itemsize
    out = torch.empty(m, row, dtype=output, device=device)[:, :n]
    bias = None if bias is None else bias.contiguous()
    operands = ((_as_operand(a.payload), a.scale_inv), (_as_operand(b.payload), b.scale_inv))
    kernel_gemm.gemm(kernel, configuration, *operands, out, bias)
    return out.contiguous()


def _as_operand(payload: Tensor) -> Tensor:
    """``[rows, K] uint8`` as the kernels take it: K padded with zeros, rows at multiples of 16 bytes."""
    payload = plain.padded(payload).contiguous()
    return payload if payload.data_ptr() % ROW_BYTES == 0 else payload.clone()
