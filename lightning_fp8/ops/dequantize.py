"""The values of FP8 codes on the CPU: in fp32, exact up to a power of two."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8.ops import e8m0
from lightning_fp8.ops.formats import FORMATS

# Dequantized values stay divided by these factors, which is cheaper than correcting their exponents.
DEQUANTIZED_SHIFT = {"e4m3": 256.0, "e5m2": 1.0}
# up to this size, the number of operations determines the time
FEW_ELEMENTS = 1 << 11


def dequantize(payload: Tensor, format: str, may_have_nan: bool = True) -> Tensor:
    """``uint8`` payload -> fp32 values divided by ``DEQUANTIZED_SHIFT[format]``, exactly; NaN and inf stay.

    An FP8 pattern shifted into the fields of fp16 is the same number with another exponent bias, denormals included.
    torch's own conversion of ``float8_e4m3fn`` on the CPU takes seven times as long, except for small tensors, where
    the number of operations determines the time.
    """
    if payload.numel() <= FEW_ELEMENTS:
        return payload.view(FORMATS[format].dtype).float().div_(DEQUANTIZED_SHIFT[format])
    if format == "e5m2":
        return payload.to(torch.int16).bitwise_left_shift_(8).view(torch.float16).float()
    bits = payload.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    # The mask drops the copy of the sign that the shift leaves in fp16's top exponent bit.
    values = bits.bitwise_and_(-0x4001).view(torch.float16).float()
    if may_have_nan and has_nan(payload, format):
        values.masked_fill_(payload.bitwise_and(0x7F) == 0x7F, float("nan"))
    return values


def exact_values(payload: Tensor, scale_inv: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """``code * 2**k`` of ``[N, K]`` with a scale in E8M0 for every 32 of each row, on any device.

    In bf16 and fp32 without rounding, except in bf16 below ``2**-126``, where its subnormal numbers end at ``2**-133``.
    No temporary has more bytes than the result, unless that is in fp16.
    """
    wide = torch.float32 if dtype == torch.float16 else dtype
    values, powers = payload.view(FORMATS[format].dtype).to(wide), e8m0.values_of(scale_inv).to(wide)
    blocks = payload.shape[1] // e8m0.BLOCK
    whole = blocks * e8m0.BLOCK
    values[:, :whole].unflatten(1, (blocks, e8m0.BLOCK)).mul_(powers[:, :blocks, None])
    values[:, whole:].mul_(powers[:, blocks:])
    return values.to(dtype)


def keep_values(codes: Tensor, format: str) -> None:
    """Keep the dequantized values of codes that are never written to again: four more bytes per element."""
    codes.kept_values = dequantize(codes, format)  # type: ignore[attr-defined]


def values_of(payload: Tensor, format: str) -> Tensor:
    """:func:`dequantize`, or what :func:`keep_values` has kept."""
    values: Tensor | None = getattr(payload, "kept_values", None)
    return dequantize(payload, format) if values is None else values


def has_nan(payload: Tensor, format: str) -> bool:
    """Whether any element is NaN."""
    if format == "e5m2" or payload.numel() == 0:
        return bool(payload.view(FORMATS[format].dtype).isnan().any())
    # E4M3's two NaN patterns, 0x7F and 0xFF, are the largest signed and the largest unsigned byte.
    return payload.view(torch.int8).amax().item() == 0x7F or payload.amax().item() == 0xFF
