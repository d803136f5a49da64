"""How much of a tensor a cast clips or turns to zero. Counted only in the steps that somebody asks about."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8.formats import Fp8Format
from lightning_fp8.scaling import state_of

_BLOCK_ELEMENTS = 1 << 18


def saturated(scaled: Tensor, fmt: Fp8Format) -> Tensor:
    """Where ``x * scale`` is beyond the largest value, as bool; inf is, NaN is not."""
    return scaled.abs() > fmt.max


def becomes_zero(scaled: Tensor, fmt: Fp8Format) -> Tensor:
    """Where ``x * scale`` is cast to zero, as bool: half the smallest value, a tie, rounds to the even zero."""
    return scaled.abs() <= fmt.smallest / 2


def is_counting(state: int, record: bool) -> bool:
    """Whether the state with this handle counts, in a cast that records."""
    known = state_of(state) if record else None
    return known is not None and known.counts is not None


def count(x: Tensor, scale: Tensor, index: Tensor, fmt: Fp8Format, state: int) -> None:
    """Add one tensor to ``state.counts``; waits for nothing.

    Args:
        x: what is cast, after an activation.
        scale: ``[] float32``, what it is cast with.
        index: ``[1] int64``, which tensor of the state it is.
        fmt: what it is cast to.
        state: handle of a state that counts.
    """
    known = state_of(state)
    if known is None or known.counts is None:
        return
    # in blocks on the CPU, where temporaries as large as the tensor would cost more than the arithmetic
    blocks = x.split(max(1, _BLOCK_ELEMENTS // max(1, x.shape[1]))) if x.device.type == "cpu" else (x,)
    for block in blocks:
        known.counts.index_add_(0, index, _counted(block, scale, fmt)[None])


def _counted(x: Tensor, scale: Tensor, fmt: Fp8Format) -> Tensor:
    """Numbers, saturated ones, numbers other than zero and underflowed ones, ``[4] int64``."""
    values = x.float()
    scaled = values * scale
    nan, zero = scaled.isnan().count_nonzero(), (values == 0).count_nonzero()
    numbers = x.numel() - nan
    beyond = saturated(scaled, fmt).count_nonzero()
    return torch.stack((numbers, beyond, numbers - zero, becomes_zero(scaled, fmt).count_nonzero() - zero))
