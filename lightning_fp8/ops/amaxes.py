"""Amaxes, the largest absolute values of tensors, and the scales that follow: in torch's own operations, on any device.

Nothing here waits for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8.ops import e8m0
from lightning_fp8.ops.formats import Fp8Format

FP32_MAX = torch.finfo(torch.float32).max
# side length of a block, for tensors whose blocks each have a scale in fp32
BLOCK = 128


def max_abs(x: Tensor) -> Tensor:
    """Largest absolute value of ``x`` as ``[] float32``: 0 for an empty tensor, NaN if any element is NaN."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(low.abs(), high.abs()).float()


def scale_of_current(amax: Tensor, fmt: Fp8Format) -> Tensor:
    """``FP8_MAX / amax``; 1 where ``amax`` is not finite, so that finite elements survive."""
    # a tensor, because torch computes number / tensor as number * (1 / tensor), which rounds twice
    return torch.where(amax.isfinite(), (torch.full_like(amax, fmt.max) / amax).clamp(max=FP32_MAX), 1.0)


def scale_below(fp8_max: Tensor, amax: Tensor, margin_factor: float) -> Tensor:
    """``fp8_max / (amax * margin_factor)``, both ``[D] float32``; inf becomes the largest finite number."""
    # the product may leave fp32; a scale of 0 would turn the whole tensor into NaN
    return (fp8_max / (amax * margin_factor).clamp(max=FP32_MAX)).clamp(max=FP32_MAX)


def power_of_2(scale: Tensor) -> Tensor:
    """Each scale, a positive normal number, rounded down to a power of two."""
    # clears the mantissa
    return (scale.view(torch.int32) & -0x800000).view(torch.float32)


def by_element(scale: Tensor, x: Tensor) -> Tensor:
    """Scales of x ``[M, K]``, ``float32``, in a shape that expands to that of x.

    Along a dimension, there is one scale for all elements, for each block, or for each element. E8M0 scales are for
    blocks of 32, and may be in tiles.
    """
    block = BLOCK
    if scale.dtype == torch.uint8:
        if scale.dim() == 1:
            rows, columns = x.shape
            scale = e8m0.from_tiles(scale, rows, -(-columns // e8m0.BLOCK))
        scale, block = e8m0.values_of(scale), e8m0.BLOCK
    for dim, size in enumerate(x.shape if scale.dim() else ()):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return scale


def update_scales(
    amax: Tensor,
    amax_history: Tensor,
    scale: Tensor,
    fp8_max: Tensor,
    nonfinite_steps: Tensor,
    most_recent: bool,
    margin_factor: float,
) -> None:
    """See the operator ``lightning_fp8::update_scales``. Never waits for a device."""
    nonfinite_steps += ~torch.isfinite(amax)
    delayed = amax_history.shape[1]
    amax, scale, fp8_max = amax[:delayed], scale[:delayed], fp8_max[:delayed]
    push = torch.isfinite(amax) & (amax > 0)
    amax_history.copy_(torch.where(push, torch.cat([amax[None], amax_history[:-1]]), amax_history))
    newest_or_max = amax_history[0] if most_recent else amax_history.amax(dim=0)
    scale.copy_(torch.where(push, scale_below(fp8_max, newest_or_max, margin_factor), scale))
    amax.zero_()
