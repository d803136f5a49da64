"""The values that casts and products exchange: tensors in FP8, and their places in a scaling state."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops.activations import ACTIVATIONS

if TYPE_CHECKING:
    from lightning_fp8.scaling.state import ScalingState
    from lightning_fp8.scalings.base import Scaling


class Operand(NamedTuple):
    """A matrix ``[M, K]`` in the form that one product takes. The product sums over K.

    Attributes:
        codes: ``[M, K'] uint8``, K' >= K with zeros at the end of rows. The smaller K' of two operands is the true K.
            Unscaled operands have the values themselves.
        scale_inv: what each code is multiplied by; shape and dtype depend on the scaling.
        scaling: how the codes were made.
    """

    codes: Tensor
    scale_inv: Tensor
    scaling: Scaling


class Cast(NamedTuple):
    """The requested results of the cast of a tensor ``[M, K]``; the others are None.

    Attributes:
        rows: ``[M, K]``, for the product that sums along its rows.
        columns: its transpose ``[K, M]``, for the product that sums along its columns.
        sums: ``[K] float32``, column sums: of an output's gradient, the gradient of the bias.
    """

    rows: Operand | None
    columns: Operand | None = None
    sums: Tensor | None = None


class Want(NamedTuple):
    """The results that a caller wants from the cast of a tensor.

    Attributes:
        rows: whether a product sums along the tensor's rows.
        columns: whether a product sums along its columns.
        sums: whether the cast also adds up the columns, in the same pass.
        dtype: the dtype of operands that are not in FP8; None for the tensor's dtype.
    """

    rows: bool = True
    columns: bool = False
    sums: bool = False
    dtype: torch.dtype | None = None


class Casting(IntEnum):
    """Which scale the cast of an input or gradient uses, where the tensor has one; kernels take the number
    (``kernels_cuda/scales.cuh``). Blocks are scaled by their own values in any case.

    Attributes:
        HISTORY: in training: the scale of past values. The tensor's own scale while there are no past values, and if
            the scaling keeps none.
        OWN: ``FP8_MAX / amax`` of the tensor itself.
        OWN_POWER_OF_2: the same, rounded down to a power of two, in evaluation: for a wide range of amaxes each element
            has the same code, so it hardly depends on the other elements of the tensor.
    """

    HISTORY = 0
    OWN = 1
    OWN_POWER_OF_2 = 2


class Slot(NamedTuple):
    """The place of one tensor in the scaling state, and how it is cast there.

    Attributes:
        index: ``[1] int64``, which of the R tensors; ``[E]`` of groups of rows.
        state: of the model; None where nothing is recorded and no history is read, as in a program of another process.
        rows: its scaling as an operand whose product sums along its rows.
        columns: its scaling for the product that sums along its columns.
        record: whether the cast is part of training: its amax is recorded, and its losses are counted if requested.
        casting: which scale an input or gradient uses; a weight has its own.
        group: the name of the process group that the tensor is split over, whose largest amax is used in place of a
            part's own; empty if the tensor is not split.
        generation: see :attr:`live_state`.
    """

    index: Tensor  # type: ignore[assignment]
    state: ScalingState | None
    rows: Scaling
    columns: Scaling
    record: bool = False
    casting: Casting = Casting.OWN
    group: str = ""
    generation: int = 0

    def scaling_of(self, want: Want) -> Scaling | None:
        """The scaling of all requested layouts; None if their scalings differ."""
        rows, columns = self.rows, self.columns
        if want.rows and want.columns:
            return rows if rows.name == columns.name else None
        return rows if want.rows else columns

    @property
    def live_state(self) -> ScalingState | None:
        """The state, or None if its rows have changed since the slot was made. A backward during which the model gets
        more layers thus records nothing in rows that now belong to other tensors."""
        state = self.state
        return state if state is not None and state.model.generation == self.generation else None

    def open(self, reads_history: bool) -> Opened:
        """Called before each cast of an input or gradient. ``reads_history``: whether its scaling reads the history."""
        state = self.state
        if state is None or state.model.generation != self.generation:
            return Opened(None, None, False)
        return state.model.open_cast(self.record, self.index if reads_history and not self.casting else None)

    @property
    def counts(self) -> bool:
        """Whether the losses of this cast are counted."""
        state = self.state
        if not self.record or state is None or state.model.counts.values is None:
            return False
        return self.live_state is not None


class Opened(NamedTuple):
    """What a cast may read and write of its state.

    Attributes:
        amax: ``[R] float32`` to record in, or None.
        history: the state whose scale is used, if the tensor has a history; or None.
        is_known: whether the host knows that it has one.
    """

    amax: Tensor | None
    history: ScalingState | None
    is_known: bool


class Computed(NamedTuple):
    """A tensor ``[M, N]`` that only a cast reads, so it need not be in memory: the cast computes it.

    Attributes:
        activation: the activation that computes it, a name in :data:`lightning_fp8.ops.activations.ACTIVATIONS`.
        inputs: the activation's inputs: one, or gate and up, which may be the halves of one tensor.
        gradient: the gradient of the activation's value, to compute the gradient of input number ``of``; None to
            compute the value.
        of: the number of that input.
    """

    activation: str
    inputs: tuple[Tensor, ...]
    gradient: Tensor | None = None
    of: int = 0

    @property
    def is_packed(self) -> bool:
        """Whether gate and up are the halves of one tensor."""
        return len(self.inputs) < ACTIVATIONS[self.activation].inputs

    @property
    def value(self) -> Tensor:
        """The tensor, in torch's own operations."""
        activation, is_packed = ACTIVATIONS[self.activation], self.is_packed
        inputs = self.inputs[0].chunk(2, dim=-1) if is_packed else self.inputs
        if self.gradient is None:
            return activation.value(*inputs)
        gradients = activation.gradients(*inputs, self.gradient)
        return torch.cat(gradients, dim=-1) if is_packed else gradients[self.of]

    @property
    def shape(self) -> tuple[int, int]:
        """Its shape, without computing it."""
        rows, columns = self.inputs[0].shape
        return rows, columns // 2 if self.gradient is None and self.is_packed else columns


Source = Tensor | Computed


def value_of(x: Any) -> Tensor:
    """The tensor that a cast reads."""
    return x.value if isinstance(x, Computed) else x
