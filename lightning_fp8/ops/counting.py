"""How much of a tensor a cast clips or turns to zero. Counted only in the steps that somebody asks about."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8.ops.formats import FORMATS, Fp8Format
from lightning_fp8.ops.operand import Slot, WeightSlot

_BLOCK_ELEMENTS = 1 << 18


def saturated(scaled: Tensor, fmt: Fp8Format) -> Tensor:
    """Where ``x * scale`` is beyond the largest value, as bool; inf is, NaN is not."""
    return scaled.abs() > fmt.max


def becomes_zero(scaled: Tensor, fmt: Fp8Format) -> Tensor:
    """Where ``x * scale`` is cast to zero, as bool: half the smallest value, a tie, rounds to the even zero."""
    return scaled.abs() <= fmt.smallest / 2


def count(x: Tensor, scale: Tensor, slot: Slot | WeightSlot) -> None:
    """Add one tensor to the state's counts, where :func:`is_counting`; waits for nothing.

    Args:
        x: what is cast, after an activation.
        scale: ``[] float32``, what it is cast with.
        slot: its place.
    """
    if slot.state is None or slot.state.counts is None:
        return
    # in blocks on the CPU, where temporaries as large as the tensor would cost more than the arithmetic
    blocks = x.split(max(1, _BLOCK_ELEMENTS // max(1, x.shape[1]))) if x.device.type == "cpu" else (x,)
    for block in blocks:
        slot.state.counts.index_add_(0, slot.index, _counted(block, scale, FORMATS[slot.format])[None])


def is_counting(slot: Slot | WeightSlot) -> bool:
    """Whether what this cast loses is counted."""
    return slot.state is not None and slot.state.counts is not None and slot.record


def _counted(x: Tensor, scale: Tensor, fmt: Fp8Format) -> Tensor:
    """Numbers, saturated ones, numbers other than zero and underflowed ones, ``[4] int64``."""
    values = x.float()
    scaled = values * scale
    nan, zero = scaled.isnan().count_nonzero(), (values == 0).count_nonzero()
    numbers = x.numel() - nan
    beyond = saturated(scaled, fmt).count_nonzero()
    return torch.stack((numbers, beyond, numbers - zero, becomes_zero(scaled, fmt).count_nonzero() - zero))
