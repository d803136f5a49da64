"""FP8 GEMMs on a CUDA device: our kernels where chosen and available, else cuBLASLt.

Nothing here synchronises, except that ``gemm="auto"`` may measure a product when it first runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_cuda import gemm as kernel_gemm
from kernels_cuda.gemm import ROW_BYTES, Split
from lightning_fp8.ops.amaxes import BLOCK
from lightning_fp8.ops.cuda import gemm_choice, kernels, plain
from lightning_fp8.ops.cuda.gemm_table import Choice
from lightning_fp8.ops.operand import Fp8Tensor
from lightning_fp8.ops.reference import are_in_blocks

# elements of K in a step; each part of a split has at least one step
_STEP = 128


def scaled_mm(
    a: Fp8Tensor,
    b: Fp8Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    gemm: str = "auto",
) -> Tensor:
    """See the operator ``lightning_fp8::scaled_mm``."""
    if a.scale_inv.dim() or b.scale_inv.dim():
        return _in_blocks(a, b, bias, out_dtype, gemm)
    promote = not fast_accumulation
    (m, k), (n, b_k) = a.payload.shape, b.payload.shape
    choice = gemm_choice.choose(a.payload.device, gemm, m, n, k, promote, out_dtype, run_choice)
    # the usual case takes a short path, because every call adds to the host time of a layer
    if choice.configuration is None and not (n | k | b_k) % plain.ALIGNMENT and m and n and k:
        return plain.aligned_mm(a, b, bias, out_dtype, fast_accumulation)
    return run_choice(choice, a, b, bias, out_dtype, promote)


def run_choice(
    choice: Choice,
    a: Fp8Tensor,
    b: Fp8Tensor,
    bias: Tensor | None,
    output: torch.dtype,
    promote: bool,
) -> Tensor:
    """``(a @ b^T) * a_scale_inv * b_scale_inv + bias`` as chosen.

    Uses cuBLASLt if a kernel is not available. Sizes that a kernel does not support are padded.

    Args:
        choice: the GEMM to run.
        a: ``[M, K]``, with one scale.
        b: ``[N, K]``, with one scale.
        bias: ``[N] float32, bfloat16 or float16``, or None.
        output: dtype of the result.
        promote: whether partial sums are added up in fp32 registers every 128 along K.

    Returns:
        ``[M, N]``, contiguous.
    """
    (m, k), n, device = a.payload.shape, b.payload.shape[0], a.payload.device
    plan = None
    if choice.configuration is not None and m and n and k:
        choice = choice._replace(splits=min(choice.splits, -(-k // _STEP)))
        plan = kernels.kernels_of(choice, device, a.format, b.format, output, promote)
    if plan is None:
        return plain.scaled_mm(a, b, bias, output, not promote)
    return _launch(plan, a, b, bias, output)


def _in_blocks(a: Fp8Tensor, b: Fp8Tensor, bias: Tensor | None, output: torch.dtype, gemm: str) -> Tensor:
    """:func:`scaled_mm` where one or both operands have several scales. Our kernels do not support squares in a, and
    always promote.
    """
    if a.scale_inv.dtype == b.scale_inv.dtype == torch.uint8:
        return _mx(a, b, bias, output, gemm)
    is_mixed = not are_in_blocks(a, b)
    if is_mixed:
        k = min(a.payload.shape[1], b.payload.shape[1])
        a_blocks, b_blocks = plain.as_blocks(a, k, 1), plain.as_blocks(b, k, BLOCK)
        if a_blocks is None or b_blocks is None:
            return plain.scaled_mm_dequantized(a, b, bias, output)
        a, b = a_blocks, b_blocks
    (m, k), n, device = a.payload.shape, b.payload.shape[0], a.payload.device
    choice = gemm_choice.choose_in_blocks(device, gemm, m, n, k) if len(a.scale_inv) == m else Choice(None)
    b_scale_rows = kernel_gemm.b_scale_rows(b.scale_inv, n)
    plan = kernels.kernels_of(choice, device, a.format, b.format, output, True, b_scale_rows)
    if plan is not None:
        return _launch(plan, a, b, bias, output)
    if is_mixed and not plain.multiplies_blocks(a, b):
        return plain.scaled_mm_dequantized(a, b, bias, output)
    return plain.scaled_mm_in_blocks(a, b, bias, output)


def _mx(a: Fp8Tensor, b: Fp8Tensor, bias: Tensor | None, output: torch.dtype, gemm: str) -> Tensor:
    """:func:`scaled_mm` where both operands have scales in E8M0, those of a weight without a master in a matrix.

    Where there is no product in MX, such a weight runs on dequantized values; others, which are trained, are refused.
    """
    if max(a.scale_inv.dim(), b.scale_inv.dim()) > 1 and not plain.has_mx(a.payload.device):
        return plain.scaled_mm_dequantized(a, b, bias, output)
    a, b = plain.in_tiles(a), plain.in_tiles(b)
    (m, k), n, device = a.payload.shape, b.payload.shape[0], a.payload.device
    choice = gemm_choice.choose_in_blocks(device, gemm, m, n, k, True)
    plan = kernels.kernels_of(choice, device, a.format, b.format, output, False, 1)
    return plain.scaled_mm_mx(a, b, bias, output) if plan is None else _launch(plan, a, b, bias, output)


def _launch(plan: kernels.Found, a: Fp8Tensor, b: Fp8Tensor, bias: Tensor | None, output: torch.dtype) -> Tensor:
    """The product ``[M, N]``, contiguous."""
    configuration, kernel, splits, sum_kernel = plan
    m, n, device = a.payload.shape[0], b.payload.shape[0], a.payload.device
    # kernels write rows that begin at multiples of 16 bytes
    out = torch.empty(m, _up_to(ROW_BYTES // output.itemsize, n), dtype=output, device=device)[:, :n]
    bias = None if bias is None else bias.contiguous()
    split = None
    if sum_kernel is not None:
        shape = (splits, kernel_gemm.split_rows(configuration, m), _up_to(ROW_BYTES // torch.float32.itemsize, n))
        split = Split(splits, torch.empty(shape, dtype=torch.float32, device=device), sum_kernel)
    operands = ((_as_operand(a.payload), a.scale_inv), (_as_operand(b.payload), b.scale_inv))
    kernel_gemm.gemm(kernel, configuration, *operands, out, bias, split)
    return out.contiguous()


def _as_operand(payload: Tensor) -> Tensor:
    """``[rows, K] uint8`` as the kernels take it: K padded with zeros, rows at multiples of 16 bytes."""
    payload = plain.padded(payload).contiguous()
    return payload if payload.data_ptr() % ROW_BYTES == 0 else payload.clone()


def _up_to(multiple: int, size: int) -> int:
    return -(-size // multiple) * multiple
