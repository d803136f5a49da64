"""Slots of tensors, made by hand."""

from __future__ import annotations

from lightning_fp8.scaling import ScalingState
from lightning_fp8.scalings.operand import Casting, Slot
from lightning_fp8.scalings.per_tensor import PerTensor


def slot_of(state: ScalingState, row: int = 0, format: str = "e4m3", record: bool = False) -> Slot:
    """The slot of one tensor of the state, which is scaled by its history."""
    scaling = PerTensor(format, delayed=True)
    return Slot(state.indices[row], state, scaling, scaling, record, Casting.HISTORY, generation=state.model.generation)
