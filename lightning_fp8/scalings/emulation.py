"""FP8 products on a CPU: the reference for products on GPUs.

FP8 values are multiplied exactly and added up in fp32; only the order of the sums is up to the library. Everything runs
over parts of the rows, as casts do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_fp8.ops.amaxes import BLOCK
from lightning_fp8.ops.arithmetic import of_rows, row_chunks
from lightning_fp8.ops.dequantize import DEQUANTIZED_SHIFT, FEW_ELEMENTS, dequantize, has_nan, values_of
from lightning_fp8.runtime.cpu import emulates_bf16
from lightning_fp8.runtime.device import gpu_of
from lightning_fp8.runtime.switch import Switch
from lightning_fp8.runtime.warn_once import warn_once
from lightning_fp8.scalings.operand import Operand

_FEW_ROWS = 2
_HAS_BF16_GEMM = not emulates_bf16()


# Products: a [M, K], b [N, K], bias [N] or None -> [M, N]


def product_of_tensors(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product of operands with one scale each, which multiplies the sums."""
    codes, (m, a_k), (n, b_k) = a.codes, a.codes.shape, b.codes.shape
    fmt, other, k = a.scaling.format, b.scaling.format, min(a_k, b_k)
    shift = DEQUANTIZED_SHIFT[fmt] * DEQUANTIZED_SHIFT[other]
    scale_inv = (a.scale_inv * b.scale_inv * shift).item()
    if bias is None and _is_turned(codes) and _is_turned(b.codes):
        return _product_along_rows(a, b, dtype, scale_inv)
    out = torch.empty(m, n, dtype=dtype, device=codes.device)
    # oneDNN's bf16 GEMM takes several times as long as fp32 for one row, as in generation
    operand_dtype = torch.float32 if m <= _FEW_ROWS else _operand_dtype(dtype)
    b_values = values_of(b.codes, other)[:, :k].to(operand_dtype).t()
    addend = None if bias is None else bias.to(dtype).to(operand_dtype)
    a_has_nan = fmt == "e4m3" and codes.numel() > FEW_ELEMENTS and has_nan(codes, fmt)
    for rows in row_chunks(m, max(a_k, n)):
        a_values = dequantize(codes[rows], fmt, a_has_nan)[:, :k].to(operand_dtype)
        _mm_into(out[rows], a_values, b_values, scale_inv, addend)
    return out


def _is_turned(codes: Tensor) -> bool:
    """Whether these codes are a transposed view."""
    return codes.stride(0) == 1 and codes.stride(1) != 1


def _product_along_rows(a: Operand, b: Operand, dtype: torch.dtype, scale_inv: float) -> Tensor:
    """wgrad: the product of two transposed views, in whose memory K comes first."""
    x, y, k = a.codes.t(), b.codes.t(), min(a.codes.shape[1], b.codes.shape[1])
    out = torch.zeros(x.shape[1], y.shape[1], dtype=torch.float32, device=x.device)
    x_has_nan, y_has_nan = (
        side.scaling.format != "e4m3" or has_nan(side.codes, side.scaling.format) for side in (a, b)
    )
    for rows in row_chunks(k, max(out.shape)):
        x_values = dequantize(x[rows], a.scaling.format, x_has_nan)
        y_values = dequantize(y[rows], b.scaling.format, y_has_nan)
        with _bf16_multiply(out.dtype):
            torch.addmm(out, x_values.t(), y_values, alpha=scale_inv, out=out)
    return out.to(dtype)


def product_of_blocks(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product with scales for every 128 elements along K: adds partial sums times their scales in fp32."""
    (m, a_k), (n, b_k) = a.codes.shape, b.codes.shape
    out, k = torch.empty(m, n, dtype=dtype, device=a.codes.device), min(a_k, b_k)
    b_values = values_of(b.codes, b.scaling.format)[:, :k].t()
    a_scales = of_rows(a.scale_inv, BLOCK, m) * DEQUANTIZED_SHIFT[a.scaling.format]
    b_scales = of_rows(b.scale_inv, BLOCK, n).t() * DEQUANTIZED_SHIFT[b.scaling.format]
    for rows in row_chunks(m, max(a_k, n)):
        a_values = dequantize(a.codes[rows], a.scaling.format)[:, :k]
        sums = a_values.new_zeros(len(a_values), n)
        partial = torch.empty_like(sums)
        for number in range(a_scales.shape[1]):
            along_k = slice(number * BLOCK, (number + 1) * BLOCK)
            with _bf16_multiply(torch.float32):
                torch.mm(a_values[:, along_k], b_values[along_k], out=partial)
            sums += partial.mul_(a_scales[rows, number, None] * b_scales[number])
        out[rows] = sums if bias is None else sums.add_(bias.to(dtype))
    return out


def product_of_values(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product of ``code * scale_inv`` in fp32, for any scales."""
    (m, a_k), (n, b_k) = a.codes.shape, b.codes.shape
    out, k = a.codes.new_empty(m, n, dtype=dtype), min(a_k, b_k)
    every, b_values = (side.scaling.values(_narrowed(side, k)) for side in (a, b))
    b_values = b_values.t()
    addend = None if bias is None else bias.to(dtype).float()
    for rows in row_chunks(m, max(a_k, n)):
        a_values = every[rows]
        # not as bf16 operands, which would round these values; autocast leaves the `out=` form alone
        into = a_values.new_empty(len(a_values), n)
        torch.addmm(into if addend is None else addend, a_values, b_values, beta=int(addend is not None), out=into)
        out[rows] = into
    return out


def product_of_rounded_values(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product of ``code * scale_inv`` rounded to ``dtype``. On a GPU, where it is a fallback, it warns once."""
    if gpu_of(a.codes.device) is not None:
        warn_once(
            "Some products of FP8 weights with scales for rows or blocks run on dequantized values: those whose scales"
            " change within 128 elements of the sum, as in gradients of inputs of a weight with a scale for each row,"
            " and all others where neither lightning_fp8 nor cuBLASLt multiplies blocks of these formats."
        )
    k = min(a.codes.shape[1], b.codes.shape[1])
    a_values, b_values = (side.scaling.values(_narrowed(side, k)).to(dtype) for side in (a, b))
    out = a_values.new_empty(len(a_values), len(b_values))
    # autocast leaves the `out=` form alone
    addend = out if bias is None else bias.to(dtype)
    return torch.addmm(addend, a_values, b_values.t(), beta=int(bias is not None), out=out)


def _narrowed(operand: Operand, k: int) -> Operand:
    """The operand without the zeros at the end of rows."""
    return operand._replace(codes=operand.codes[:, :k])


def _operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """bf16 for bf16 results if the CPU multiplies bf16, else fp32. bf16 holds every FP8 value exactly."""
    return torch.bfloat16 if dtype == torch.bfloat16 and _HAS_BF16_GEMM else torch.float32


def _mm_into(out: Tensor, a: Tensor, b: Tensor, scale_inv: float, bias: Tensor | None = None) -> None:
    """``out = (a @ b) * scale_inv + bias``: factor and bias are applied to the fp32 sums, which are rounded once.

    The bias must have the operands' dtype. Autocast, which would turn operands and results to bf16, leaves the ``out=``
    form alone.
    """
    target = out if out.dtype == a.dtype else out.new_empty(out.shape, dtype=a.dtype)
    with _bf16_multiply(a.dtype) if len(a) > _FEW_ROWS else nullcontext():
        torch.addmm(target if bias is None else bias, a, b, beta=0 if bias is None else 1, alpha=scale_inv, out=target)
    if target is not out:
        out.copy_(target)


def _bf16_multiply(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Let oneDNN multiply fp32 operands as bf16 and add up in fp32: exact here, as every FP8 value is a bf16 value.

    On CPUs with bf16 units it is four times as fast; the others keep their fp32 GEMM. The setting is process-wide:
    meanwhile it also changes fp32 products of other threads, so it is left alone where it changes nothing here.
    """
    return _FP32_PRECISION.at("bf16") if dtype == torch.float32 and _HAS_BF16_GEMM else nullcontext()


def _fp32_precision() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]


def _set_fp32_precision(value: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = value  # type: ignore[attr-defined]


_FP32_PRECISION = Switch(_fp32_precision, _set_fp32_precision)
