"""Shapes of operands, groups of rows, and the states that operators find by number."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_fp8.scaling.state import ScalingState

# GEMMs take operands whose rows are a multiple of 16 bytes, and kernels store 16 bytes at once
ALIGNMENT = 16
# rows of a tile, which belongs to one group
GROUP_ROWS = 128
_handles = itertools.count(1)
_states: weakref.WeakValueDictionary[int, ScalingState] = weakref.WeakValueDictionary()


def take_handle(state: ScalingState, former: int = 0) -> int:
    """Registers the state under a new number, for :func:`state_of`, and drops its ``former`` number."""
    handle = next(_handles)
    _states.pop(former, None)
    _states[handle] = state
    return handle


def live_states() -> list[ScalingState]:
    """All states of this process that still exist."""
    return list(_states.values())


def state_of(handle: int) -> ScalingState | None:
    """The state with this handle; None if it no longer exists, or the handle is 0."""
    return _states.get(handle)


# dynamo calls this instead of tracing it: it would take `is_in_onnx_export` to be False, and warnings to be mutations
@torch.compiler.assume_constant_result
def refuse_recording_export(record: bool) -> None:
    """Called for each slot when a program is exported or traced. Such a program does not know the state.

    Raises:
        RuntimeError: if it would record, or in torch's own export to ONNX.
    """
    if torch.onnx.is_in_onnx_export():
        raise RuntimeError(
            "lightning_fp8: torch.onnx.export does not know FP8 layers. Call `lightning_fp8.unconvert(model)` first,"
            " and export the model as a plain one."
        )
    if record:
        raise RuntimeError(
            "lightning_fp8: an exported or traced program cannot record amaxes, so its scales would not follow the"
            " training. Call `model.eval()` first, or trace under `torch.no_grad()`."
        )


class Groups(NamedTuple):
    """Which rows belong to which of E groups. Each group multiplies with its own weight.

    T rows, sorted by group, lie in P >= T rows: the rows of a group begin at a multiple of 128, and zeros follow them
    up to the next multiple. A group may have no row. All tensors are on the device, and the host reads none of them.

    Attributes:
        position: ``[T] int64``, the place of each row among the P.
        of_tile: ``[P/128] int32``, the group of each 128 rows; -1 behind the last group.
        edges: ``[E + 1] int32``, where the groups begin and, last, where the last one ends.
    """

    position: Tensor
    of_tile: Tensor
    edges: Tensor

    @property
    def padded_rows(self) -> int:
        """P."""
        return self.of_tile.shape[0] * GROUP_ROWS


def columns_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the payload by columns of a tensor with this many rows and columns; rows are padded with zeros to a
    multiple of 16. The true K of a product is the smaller K of its operands."""
    return columns, -(-rows // ALIGNMENT) * ALIGNMENT


def as_stack(parts: Sequence[Tensor]) -> Tensor:
    """``torch.stack(parts)``; a view if the parts are contiguous and adjacent in memory."""
    first = parts[0]
    if not torch.compiler.is_compiling() and not first.is_meta:
        at, size, memory = first.storage_offset(), first.numel(), first.untyped_storage().data_ptr()
        if first.is_contiguous() and all(
            part.storage_offset() == at + number * size and part.untyped_storage().data_ptr() == memory
            for number, part in enumerate(parts)
        ):
            return first.as_strided((len(parts), *first.shape), (size, *first.stride()))
    return torch.stack([*parts])
