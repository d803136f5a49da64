"""The CPU implementation in plain torch, the reference for every other implementation.

Casts are bit-exact to the specification. GEMMs multiply FP8 values exactly and accumulate in fp32; only the order of
accumulation is up to the library.

Everything runs over parts of the rows, with temporaries of a few megabytes: the operating system would map and clear
temporaries as large as the tensors again and again, which can take longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_fp8.ops.activations import activate, activation_gradient
from lightning_fp8.ops.amaxes import BLOCK, by_element, max_abs, own_scale, per_row, scale_of_current
from lightning_fp8.ops.counting import count, is_counting
from lightning_fp8.ops.dequantize import DEQUANTIZED_SHIFT, FEW_ELEMENTS, dequantize, has_nan, scaled_values, values_of
from lightning_fp8.ops.formats import FORMATS, Fp8Format
from lightning_fp8.ops.operand import Columns, Fp8Tensor, Slot, WeightSlot, in_layout
from lightning_fp8.runtime.cpu import emulates_bf16
from lightning_fp8.runtime.switch import Switch

_CHUNK_ELEMENTS = 1 << 20
_FEW_ROWS = 2
_HAS_BF16_GEMM = not emulates_bf16()


def cast(x: Tensor, slot: Slot, activation: str, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """``sat(activation(x) * scale)``; see the operator ``lightning_fp8::cast``."""
    x = x if activation == "none" else activate(x, activation)
    used, current = _scale_to_use(x, slot)
    if is_counting(slot):
        count(x, used, slot)
    payload = saturating_cast(x, used, FORMATS[slot.format], current)
    return (*in_layout(payload, layout), used.reciprocal())


def _scale_to_use(x: Tensor, slot: Slot) -> tuple[Tensor, Tensor | None]:
    """The scale of this cast, and ``max|x|`` if it was needed. Host branches cost nothing on the CPU."""
    row, (amax, _) = int(slot.index.item()), slot.open()
    has_history = slot.uses_history and bool(slot.amax_history[0, row] > 0)
    current = max_abs(x) if amax is not None or not has_history else None
    if amax is not None and current is not None:
        torch.maximum(amax[row], current, out=amax[row])
    if has_history or current is None:
        return slot.scale[row].clone(), current
    return own_scale(current, slot.current, FORMATS[slot.format]), current


def saturating_cast(x: Tensor, scale: Tensor, fmt: Fp8Format, amax: Tensor | None = None) -> Tensor:
    """``x * scale`` in fp32, saturated to ±max, rounded to nearest even, as contiguous ``uint8``. NaN stays NaN.

    ``amax``, if already known, saves the saturating pass over tensors that cannot saturate.
    """
    saturate = _may_saturate(scale, fmt, amax)
    if x.numel() <= _CHUNK_ELEMENTS and x.is_contiguous():
        return _scaled(x, scale, fmt, saturate).to(fmt.dtype).view(torch.uint8)
    payload = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    for rows in row_chunks(*x.shape):
        payload[rows] = _scaled(x[rows], scale, fmt, saturate)
    return payload.view(torch.uint8)


def cast_weight(weight: Tensor, slot: WeightSlot, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """A weight with current scaling; see the operator ``lightning_fp8::cast_weight``."""
    return cast_by_content(weight, slot, layout, saturating_cast)


def cast_by_content(
    weight: Tensor,
    slot: WeightSlot,
    layout: str,
    cast: Callable[[Tensor, Tensor, Fp8Format, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`cast_weight` on any device, with the given cast."""
    fmt, amax = FORMATS[slot.format], max_abs(weight)
    used = scale_of_current(amax, fmt)
    if slot.state is not None:
        slot.state.record_weight(slot.index, amax, used)
    if is_counting(slot):
        count(weight, used, slot)
    return (*in_layout(cast(weight, used, fmt, amax), layout), used.reciprocal())


def _may_saturate(scale: Tensor, fmt: Fp8Format, amax: Tensor | None) -> bool:
    # `not <=` rather than `>`: a NaN amax says nothing about the other elements
    return amax is None or not bool(amax * scale <= fmt.max)


def _scaled(x: Tensor, scale: Tensor, fmt: Fp8Format, saturate: bool) -> Tensor:
    values = x * scale if x.dtype == torch.float32 else x.float().mul_(scale)
    return values.clamp_(-fmt.max, fmt.max) if saturate else values


def scaled_mm(
    a: Fp8Tensor,
    b: Fp8Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """``(a @ b^T) * a_scale_inv * b_scale_inv + bias``; see the operator ``lightning_fp8::scaled_mm``."""
    if a.scale_inv.dim() or b.scale_inv.dim():
        product = scaled_mm_in_blocks if are_in_blocks(a, b) else scaled_mm_dequantized
        return product(a, b, bias, out_dtype)
    codes, (m, a_k), (n, b_k) = a.payload, a.payload.shape, b.payload.shape
    out, k = torch.empty(m, n, dtype=out_dtype, device=codes.device), min(a_k, b_k)
    # oneDNN's bf16 GEMM takes several times as long as fp32 for one row, as in generation
    operand_dtype = torch.float32 if m <= _FEW_ROWS else _operand_dtype(out_dtype)
    b_values = values_of(b.payload, b.format)[:, :k].to(operand_dtype).t()
    scale_inv = _gemm_scale_inv(a.scale_inv, b.scale_inv, a.format, b.format)
    addend = None if bias is None else bias.to(out_dtype).to(operand_dtype)
    a_has_nan = a.format == "e4m3" and codes.numel() > FEW_ELEMENTS and has_nan(codes, a.format)
    for rows in row_chunks(m, max(a_k, n)):
        a_values = dequantize(codes[rows], a.format, a_has_nan)[:, :k].to(operand_dtype)
        _mm_into(out[rows], a_values, b_values, scale_inv, addend)
    return out


def scaled_mm_in_blocks(a: Fp8Tensor, b: Fp8Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """The same with a scale for each block: partial sums of 128 along K times their scales are added up in fp32."""
    (m, a_k), (n, b_k) = a.payload.shape, b.payload.shape
    out, k = torch.empty(m, n, dtype=out_dtype, device=a.payload.device), min(a_k, b_k)
    b_values = values_of(b.payload, b.format)[:, :k].t()
    a_scales = per_row(a.scale_inv, m) * DEQUANTIZED_SHIFT[a.format]
    b_scales = per_row(b.scale_inv, n).t() * DEQUANTIZED_SHIFT[b.format]
    for rows in row_chunks(m, max(a_k, n)):
        a_values = dequantize(a.payload[rows], a.format)[:, :k]
        sums = a_values.new_zeros(len(a_values), n)
        partial = torch.empty_like(sums)
        for number in range(a_scales.shape[1]):
            along_k = slice(number * BLOCK, (number + 1) * BLOCK)
            with _bf16_multiply(torch.float32):
                torch.mm(a_values[:, along_k], b_values[along_k], out=partial)
            sums += partial.mul_(a_scales[rows, number, None] * b_scales[number])
        out[rows] = sums if bias is None else sums.add_(bias.to(out_dtype))
    return out


def are_in_blocks(*operands: Fp8Tensor) -> bool:
    """Whether both operands of a product have scales for every 128 elements along K."""
    k = min(operand.payload.shape[1] for operand in operands)
    return all(
        operand.scale_inv.dim() == 2
        and operand.scale_inv.dtype == torch.float32
        and operand.scale_inv.shape[1] == -(-k // BLOCK)
        and len(operand.scale_inv) in (len(operand.payload), -(-len(operand.payload) // BLOCK))
        for operand in operands
    )


def scaled_mm_dequantized(a: Fp8Tensor, b: Fp8Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """The same with any scales, from ``code * scale_inv`` in fp32."""
    (m, a_k), (n, b_k) = a.payload.shape, b.payload.shape
    out, k = a.payload.new_empty(m, n, dtype=out_dtype), min(a_k, b_k)
    b_values = scaled_values(b.payload[:, :k], b.scale_inv, b.format).t()
    a_scales = by_element(a.scale_inv, a.payload[:, :k])
    addend = None if bias is None else bias.to(out_dtype).float()
    for rows in row_chunks(m, max(a_k, n)):
        scales = a_scales[rows] if a_scales.dim() and len(a_scales) == m else a_scales
        a_values = scaled_values(a.payload[rows, :k], scales, a.format)
        # not as bf16 operands, which would round these values; autocast leaves the `out=` form alone
        into = a_values.new_empty(len(a_values), n)
        torch.addmm(into if addend is None else addend, a_values, b_values, beta=int(addend is not None), out=into)
        out[rows] = into
    return out


def linear_backward(
    dy: Tensor,
    h: Tensor | None,
    activation: str,
    x_fp8_t: Columns,
    w_fp8_t: Columns,
    slot: Slot,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dgrad, wgrad and bias gradient, each block of ``dy`` cast once; see ``lightning_fp8::linear_backward``."""
    if h is not None:
        dy = activation_gradient(h, dy, activation)
    fmt, x, w = FORMATS[slot.format], x_fp8_t, w_fp8_t
    m, n = dy.shape
    x_fp8 = None if x.payload is None else x.payload[:, :m].t()
    w_fp8 = None if w.payload is None else w.payload[:, :n].t()
    k = 0 if x_fp8 is None else x_fp8.shape[1]
    used, current = _scale_to_use(dy, slot)
    if is_counting(slot):
        count(dy, used, slot)
    saturate, dy_scale_inv = _may_saturate(used, fmt, current), used.reciprocal()
    dx = dy.new_empty(0, dtype=dx_dtype) if w_fp8 is None else dy.new_empty(m, w_fp8.shape[1], dtype=dx_dtype)
    dw, db = dy.new_zeros(n, k, dtype=torch.float32), dy.new_zeros(n if bias else 0, dtype=torch.float32)
    w_values = None if w_fp8 is None else dequantize(w_fp8, w.format).to(_operand_dtype(dx_dtype))
    dx_scale_inv = _gemm_scale_inv(dy_scale_inv, w.scale_inv, slot.format, w.format)
    dw_scale_inv = _gemm_scale_inv(dy_scale_inv, x.scale_inv, slot.format, x.format)
    dy_has_nan = slot.format == "e4m3" and (current is None or bool(current.isnan()))
    x_has_nan = x_fp8 is not None and has_nan(x_fp8, x.format)
    for rows in row_chunks(m, max(n, k, dx.shape[-1])):
        values = dy[rows].float()
        if bias:
            db += values.sum(dim=0)
        if w_values is None and x_fp8 is None:
            continue
        payload = _scaled(values, used, fmt, saturate).to(fmt.dtype).view(torch.uint8)
        values = dequantize(payload, slot.format, dy_has_nan)
        if w_values is not None:
            _mm_into(dx[rows], values.to(w_values.dtype), w_values, dx_scale_inv)
        if x_fp8 is not None:
            with _bf16_multiply(dw.dtype):
                torch.addmm(dw, values.t(), dequantize(x_fp8[rows], x.format, x_has_nan), alpha=dw_scale_inv, out=dw)
    return dx, dw.to(dw_dtype), db


def _gemm_scale_inv(a_scale_inv: Tensor, b_scale_inv: Tensor, a_format: str, b_format: str) -> float:
    return (a_scale_inv * b_scale_inv * (DEQUANTIZED_SHIFT[a_format] * DEQUANTIZED_SHIFT[b_format])).item()


def _operand_dtype(out_dtype: torch.dtype) -> torch.dtype:
    """bf16, which holds every FP8 value exactly, for bf16 results if the CPU multiplies bf16; else fp32."""
    return torch.bfloat16 if out_dtype == torch.bfloat16 and _HAS_BF16_GEMM else torch.float32


def _mm_into(out: Tensor, a: Tensor, b: Tensor, scale_inv: float, bias: Tensor | None = None) -> None:
    """``out = (a @ b) * scale_inv + bias``: factor and bias are applied to the fp32 sums, which are rounded once.

    The bias must have the operands' dtype.
    Autocast, which would turn operands and results to bf16, leaves the ``out=`` form alone.
    """
    target = out if out.dtype == a.dtype else out.new_empty(out.shape, dtype=a.dtype)
    with _bf16_multiply(a.dtype) if len(a) > _FEW_ROWS else nullcontext():
        torch.addmm(target if bias is None else bias, a, b, beta=0 if bias is None else 1, alpha=scale_inv, out=target)
    if target is not out:
        out.copy_(target)


def row_chunks(rows: int, columns: int) -> list[slice]:
    """Slices of about equal length that cover all rows."""
    chunks = rows * columns // _CHUNK_ELEMENTS
    if chunks <= 1:
        return [slice(0, rows)] if rows else []
    step = -(-rows // chunks)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _bf16_multiply(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Let oneDNN multiply fp32 operands as bf16 and accumulate in fp32: exact here, as every FP8 value is a bf16 value.

    On CPUs with bf16 units it is four times as fast; the others keep their fp32 GEMM. The setting is process-wide:
    meanwhile it also changes fp32 products of other threads, so it is left alone where it changes nothing here.
    """
    return _FP32_PRECISION.at("bf16") if dtype == torch.float32 and _HAS_BF16_GEMM else nullcontext()


def _fp32_precision() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]


def _set_fp32_precision(value: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = value  # type: ignore[attr-defined]


_FP32_PRECISION = Switch(_fp32_precision, _set_fp32_precision)
