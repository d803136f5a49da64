"""The operators in torch's own operations and ``torch._scaled_mm``, on any device; nothing here waits for a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.ops import reference
from lightning_fp8.ops.activations import activate, activation_gradient
from lightning_fp8.ops.amaxes import as_asked, max_abs, record_amax, scale_of_current, update_scales
from lightning_fp8.ops.counting import count, is_counting
from lightning_fp8.ops.formats import FORMATS, Fp8Format
from lightning_fp8.ops.operand import ALIGNMENT, Slot, WeightSlot, in_layout

__all__ = ["cast", "cast_gradient", "scaled_mm", "update_scales"]


def cast(x: Tensor, slot: Slot, activation: str, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::cast``."""
    x, fmt = activate(x, activation), FORMATS[slot.format]
    current = max_abs(x)
    amax, may_use_history, _ = slot.open()
    if amax is not None:
        record_amax(amax, slot.index, current)
    delayed = slot.scale.index_select(0, slot.index)[0]
    has_history = (slot.amax_history[0].index_select(0, slot.index)[0] > 0) & may_use_history
    used = torch.where(has_history, delayed, scale_of_current(as_asked(current, slot.own), fmt))
    if is_counting(slot):
        count(x, used, slot)
    return (*in_layout(saturating_cast(x, used, fmt), layout), used.reciprocal())


def cast_weight(weight: Tensor, slot: WeightSlot, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """See the operator ``lightning_fp8::cast_weight``."""
    return reference.cast_by_content(weight, slot, layout, saturating_cast)


def cast_gradient(
    dy: Tensor, h: Tensor | None, activation: str, slot: Slot, layout: str, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The cast of dy, or of the gradient of h from it, and with ``bias`` its column sums, ``[N] float32``."""
    if h is not None:
        dy = activation_gradient(h, dy, activation)
    db = dy.sum(dim=0, dtype=torch.float32) if bias else dy.new_empty(0, dtype=torch.float32)
    return (*cast(dy, slot, "none", layout), db)


def saturating_cast(x: Tensor, scale: Tensor, fmt: Fp8Format, amax: Tensor | None = None) -> Tensor:
    """See :func:`lightning_fp8.ops.reference.saturating_cast`; ``amax`` is unused, as reading it would synchronise."""
    return (x.float() * scale).clamp(-fmt.max, fmt.max).to(fmt.dtype).contiguous().view(torch.uint8)


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
) -> Tensor:
    """See the operator ``lightning_fp8::scaled_mm``. Sizes that cuBLASLt does not support are padded with zeros."""
    (m, k), (n, b_k) = a.shape, b.shape
    if not (m and n and k):
        empty = torch.zeros(m, n, dtype=out_dtype, device=a.device)
        return empty if bias is None else empty + bias.to(out_dtype)
    missing = -n % ALIGNMENT
    if missing or (k | b_k) % ALIGNMENT:
        a, b, bias = _padded(a, 0), _padded(b, missing), None if bias is None else F.pad(bias, (0, missing))
    out = aligned_mm(a, b, a_scale_inv, b_scale_inv, bias, a_format, b_format, out_dtype, fast_accumulation)
    return out[:, :n].contiguous() if missing else out


def aligned_mm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    a_format: str,
    b_format: str,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """The same for sizes that cuBLASLt supports: none is 0, and N and K are multiples of 16."""
    fused = None
    # torch adds a bias in the GEMM's own epilogue, in fp32, if bias and result have the same 16-bit dtype
    if bias is not None and out_dtype != torch.float32:
        # a `.to` that does nothing takes the host as long as an allocation
        fused = bias if bias.dtype == out_dtype else bias.to(out_dtype)
    out = torch._scaled_mm(
        a.contiguous().view(FORMATS[a_format].dtype),
        b.contiguous().view(FORMATS[b_format].dtype).mT,
        a_scale_inv,
        b_scale_inv,
        fused,
        out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )
    return out if bias is None or fused is not None else out.add_(bias)


def scaled_mm_in_blocks(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    a_format: str,
    b_format: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """See the operator ``lightning_fp8::scaled_mm``, for operands in blocks.

    Raises:
        RuntimeError: on a GPU for which cuBLASLt has no such product.
    """
    product = reference.scaled_mm_in_blocks
    if a.is_cuda and a.numel() and b.numel():
        check_blocks(torch.cuda.get_device_capability(a.device), torch.version.cuda)
        product = product_of_blocks
    return product(a, b, a_scale_inv, b_scale_inv, bias, a_format, b_format, out_dtype)


def product_of_blocks(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    a_format: str,
    b_format: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """The same by ``torch.nn.functional.scaled_mm``; sizes that cuBLASLt does not support are padded with zeros.

    Partial sums of 128 along K are added up in fp32 in any case.
    """
    m, n = len(a), len(b)
    missing = -n % ALIGNMENT
    if missing and len(b_scale_inv) == n:
        b_scale_inv = F.pad(b_scale_inv, (0, 0, 0, missing))
    out = F.scaled_mm(
        _padded(a, 0).contiguous().view(FORMATS[a_format].dtype),
        _padded(b, missing).contiguous().view(FORMATS[b_format].dtype).mT,
        *as_torch_takes(a_scale_inv, m),
        *as_torch_takes(b_scale_inv, n + missing),
        output_dtype=out_dtype if bias is None else torch.float32,
    )[:, :n]
    return out.contiguous() if bias is None else (out + bias.to(out_dtype)).to(out_dtype)


def check_blocks(capability: tuple[int, int], cuda: str | None) -> None:
    """RuntimeError unless cuBLASLt multiplies operands in blocks on such a GPU with this CUDA version of torch."""
    version = tuple(map(int, (cuda or "0.0").split(".")[:2]))
    if capability[0] != 9 or version < (12, 9):
        raise RuntimeError(
            "fp8-block has no kernel here: lightning_fp8's need CuPy and a GPU of compute capability 8.9, 9.0 or 12.x,"
            " cuBLASLt's a GPU of compute capability 9.0 (H100, H200), and torch built for CUDA 12.9 or newer; got"
            f" {capability[0]}.{capability[1]} and CUDA {cuda}. Use precision='fp8-current' here."
        )


def as_torch_takes(scale_inv: Tensor, rows: int) -> tuple[Tensor, F.ScalingType]:
    """The scales of an operand with this many rows as ``torch.nn.functional.scaled_mm`` takes them, and their kind:
    column-major; those of squares transposed, padded to a multiple of four along K."""
    if len(scale_inv) == rows:
        return scale_inv.t().contiguous().t(), F.ScalingType.BlockWise1x128
    return F.pad(scale_inv, (0, -scale_inv.shape[1] % 4)).contiguous().t(), F.ScalingType.BlockWise128x128


def _padded(payload: Tensor, rows: int) -> Tensor:
    """The payload with additional rows of zeros, and its columns padded to cuBLASLt's alignment; itself if it is."""
    columns = -payload.shape[1] % ALIGNMENT
    return F.pad(payload, (0, columns, 0, rows)) if rows or columns else payload
