"""Slots of tensors, made by hand."""

from __future__ import annotations

from lightning_fp8.ops.operand import Slot
from lightning_fp8.scaling import ScalingState


def slot_of(state: ScalingState, row: int = 0, format: str = "e4m3", record: bool = False) -> Slot:
    """The slot of one tensor of the state; without ``record`` the state is not told of its casts."""
    return Slot(state.scale, state.amax_history, state.indices[row], format, state if record else None, record)
