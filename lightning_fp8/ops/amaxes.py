"""From the largest values of tensors, amaxes, to their scales: in torch's own operations, on any device.

Nothing here waits for a device.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from lightning_fp8.ops.formats import Fp8Format
from lightning_fp8.ops.operand import OwnScaling

FP32_MAX = torch.finfo(torch.float32).max
# the side of a block with a scale of its own, where a tensor has several
BLOCK = 128


def max_abs(x: Tensor) -> Tensor:
    """Largest absolute value of ``x`` as ``[] float32``: 0 for an empty tensor, NaN if any element is NaN."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(low.abs(), high.abs()).float()


def record_amax(amax: Tensor, index: Tensor, current: Tensor) -> None:
    """``amax[index] = max(amax[index], current)``: index ``[1] int64``, current ``[] float32``. Waits for no device."""
    # The bits of non-negative floats as integers: NaN > inf > every finite value, so nothing non-finite is lost.
    amax.view(torch.int32).scatter_reduce_(0, index, current.view(torch.int32)[None], "amax")


def as_asked(amax: Tensor, own: OwnScaling) -> Tensor:
    """The amax ``[] float32`` from which a tensor is scaled by its own values."""
    if not own.adjusts_amax:
        return amax
    if own.group:
        amax = amax.reshape(1).clone()
        # as integers, the bits of non-negative floats order as finite < inf < NaN
        dist.all_reduce(amax.view(torch.int32), op=dist.ReduceOp.MAX, group=_resolve_process_group(own.group))  # type: ignore[arg-type]
        amax = amax[0]
    # a finite one stays finite: a scale of 0 would turn the whole tensor into NaN
    return torch.where(amax.isfinite(), (amax * 2.0**own.margin).clamp(max=FP32_MAX), amax)


def scale_of_current(amax: Tensor, fmt: Fp8Format) -> Tensor:
    """``FP8_MAX / amax``; 1 where ``amax`` is not finite: finite elements survive."""
    # tensor by tensor: a Python number divided by a tensor is its reciprocal times the number, rounded twice
    return torch.where(amax.isfinite(), (torch.full_like(amax, fmt.max) / amax).clamp(max=FP32_MAX), 1.0)


def scale_below(fp8_max: Tensor, amax: Tensor, margin_factor: float) -> Tensor:
    """``fp8_max / (amax * margin_factor)``, both ``[D] float32``; inf becomes the largest finite number."""
    # the product may leave fp32; a scale of 0 would turn the whole tensor into NaN
    return (fp8_max / (amax * margin_factor).clamp(max=FP32_MAX)).clamp(max=FP32_MAX)


def power_of_2(scale: Tensor) -> Tensor:
    """The largest power of two that is not above each scale, which is a normal number above 0."""
    # without its mantissa
    return (scale.view(torch.int32) & -0x800000).view(torch.float32)


def per_row(scale: Tensor, rows: int) -> Tensor:
    """The scales of blocks, each row's: those of squares are ``[ceil(rows/128), *]``."""
    return scale if len(scale) == rows else scale.repeat_interleave(BLOCK, 0)[:rows]


def by_element(scale: Tensor, x: Tensor) -> Tensor:
    """The scales of blocks of x, each element's."""
    return per_row(scale, len(x)).repeat_interleave(BLOCK, 1)[:, : x.shape[1]]


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
