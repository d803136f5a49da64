"""What travels between the functions of an FP8 layer: tensors in FP8, and the places of tensors in a scaling state."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_fp8.ops.counting import CastCounts

_handles = itertools.count(1)
_states: weakref.WeakValueDictionary[int, State] = weakref.WeakValueDictionary()


class State(Protocol):
    """What operators know of the scaling state of a model, :class:`lightning_fp8.ScalingState`, which says more."""

    handle: int
    scale: Tensor
    amax: Tensor
    cast_counts: CastCounts

    def open_cast(self, record: bool) -> tuple[Tensor | None, bool, bool]:
        """An input or gradient is cast."""

    def note_weight(self, index: Tensor, amax: Tensor, scale: Tensor) -> None:
        """A weight has been cast."""

    def see_weight_cast(self, row: int, amax: float, record: bool) -> None:
        """The same, on a device that nobody has to wait for."""


def take_handle(state: State) -> int:
    """A number by which :func:`state_of` knows the state for as long as it lives."""
    handle = next(_handles)
    _states[handle] = state
    return handle


def state_of(handle: int) -> State | None:
    """The state with this handle; None where it is gone with its model, or the handle is 0."""
    return _states.get(handle)


class Fp8Operand(NamedTuple):
    """A tensor ``[M, K]`` in FP8, as GEMMs take it.

    Attributes:
        rows: ``[M, K] uint8``; empty where not asked for.
        columns: ``[K, M] uint8``; empty where not asked for.
        scale_inv: ``[] float32``.
        format: ``"e4m3"`` or ``"e5m2"``.
    """

    rows: Tensor
    columns: Tensor
    scale_inv: Tensor
    format: str


class Columns(NamedTuple):
    """What backward keeps of an operand ``[M, K]``.

    Attributes:
        payload: ``[K, M] uint8``; None where no gradient is taken with it.
        scale_inv: ``[] float32``.
        format: ``"e4m3"`` or ``"e5m2"``.
    """

    payload: Tensor | None
    scale_inv: Tensor
    format: str


class WeightSlot(NamedTuple):
    """The place of one weight, which is scaled by what it holds.

    Attributes:
        index: ``[1] int64``, which of the state's R tensors it is.
        format: what it is cast to.
        state: where amax and scale of the cast are left; None where it is gone with its model.
        record: whether this is a cast of training, in which what is lost counts where somebody counts.
    """

    index: Tensor  # type: ignore[assignment]
    format: str
    state: State | None
    record: bool


class Slot(NamedTuple):
    """The place of one input or gradient.

    Attributes:
        scale: ``[R] float32``, of the state.
        amax_history: ``[H, D] float32``, of the state, newest first.
        index: ``[1] int64``, which of the state's R tensors it is.
        format: what it is cast to.
        state: in whose ``amax`` its casts are recorded; None where it is gone with its model, and nothing is.
        record: whether they are recorded.
        gemm: which GEMMs its model runs, one of ``lightning_fp8.ops.cuda.gemm_choice.GEMMS``.
    """

    scale: Tensor
    amax_history: Tensor
    index: Tensor  # type: ignore[assignment]
    format: str
    state: State | None
    record: bool
    gemm: str = "auto"

    def open(self) -> tuple[Tensor | None, bool, bool]:
        """See :meth:`lightning_fp8.ScalingState.open_cast`."""
        return (None, True, False) if self.state is None else self.state.open_cast(self.record)


def with_scale(scale: Tensor, format: str) -> Slot:
    """A place outside of any state, whose casts use this scale, ``[] float32``."""
    scale = scale.reshape(1)
    # a history other than zero is what makes a cast take it
    return Slot(scale, torch.ones_like(scale)[None], torch.zeros_like(scale, dtype=torch.int64), format, None, False)


def in_layout(payload: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The payload by rows and by columns, each empty where ``layout`` leaves it out."""
    rows = payload if layout != "columns" else payload.new_empty(0)
    return rows, payload.t().contiguous() if layout != "rows" else payload.new_empty(0)


def nothing(like: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor, in the place of a result that is not asked for."""
    return like.new_empty(0, dtype=dtype)
