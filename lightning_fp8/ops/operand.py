"""The values that functions of an FP8 layer exchange: tensors in FP8, and slots of tensors in a scaling state."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from enum import IntEnum
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


class Fp8Operand(NamedTuple):
    """A tensor ``[M, K]`` in FP8, an operand of GEMMs.

    The dtype of a payload is the precision of its product: ``uint8`` is FP8 in ``format``; a payload of any other dtype
    is the tensor itself, and the product is computed in that dtype.

    Attributes:
        by_rows: ``[M, K] uint8``, for fprop; empty if not requested.
        by_columns: for dgrad or wgrad; empty if not requested. Where it is a tensor of its own, of the shape of
            :func:`columns_shape`, else ``by_rows`` transposed; see
            :func:`lightning_fp8.ops.cuda.layouts.needs_transposed_payload`.
        scale_inv: ``[] float32``, of the payload by rows; or several, see :class:`Fp8Tensor`.
        columns_scale_inv: of the payload by columns; the same tensor as ``scale_inv`` if the operand has one scale.
        format: ``"e4m3"`` or ``"e5m2"``.
    """

    by_rows: Tensor
    by_columns: Tensor
    scale_inv: Tensor
    columns_scale_inv: Tensor
    format: str


class Fp8Tensor(NamedTuple):
    """A tensor in FP8 as one product takes it.

    Attributes:
        payload: ``[M, K] uint8``; the product sums over K.
        scale_inv: ``[] float32``, or with a number of scales for each dimension: one for all, one for every 128, or one
            for each. Blocks are ``[M, ceil(K/128)]``, 128 elements along a row, and ``[ceil(M/128), ceil(K/128)]``,
            squares; a weight may have ``[M, 1]``, one for each row, and by columns ``[1, K]``. Those in E8M0, for every
            32 elements along a row, are ``[*] uint8`` in the order of :func:`lightning_fp8.ops.e8m0.to_tiles`. A weight
            without a master has matrices of them: ``[M, ceil(K/32)]``, squares ``[ceil(M/32), ceil(K/32)]``, or, of the
            former by columns, ``[ceil(M/32), K]``: over such rows no product sums in blocks.
        format: ``"e4m3"`` or ``"e5m2"``.
    """

    payload: Tensor
    scale_inv: Tensor
    format: str


class Layer(NamedTuple):
    """A linear layer among the arguments of an operator that runs several.

    Attributes:
        weight: ``[N, K]``; with the bias it gives the graph its edges, and the gradients their shapes and dtypes.
        bias: ``[N]`` or None.
        bias_value: the bias as it is added: unchanged, or rounded to the output's dtype.
        operand: the weight in FP8, which the GEMMs use.
    """

    weight: Tensor
    bias: Tensor | None
    bias_value: Tensor | None
    operand: Fp8Operand


class Columns(NamedTuple):
    """What backward keeps of an operand ``[M, K]``.

    Attributes:
        payload: ``columns`` of the operand, of any dtype, see :class:`Fp8Operand`; None if no gradient needs it.
        scale_inv: ``[] float32``.
        format: ``"e4m3"`` or ``"e5m2"``.
    """

    payload: Tensor | None
    scale_inv: Tensor
    format: str


class Groups(NamedTuple):
    """Which rows belong to which of E groups, each of which multiplies with a weight of its own.

    T rows, sorted by group, lie in P >= T rows: those of a group begin at a multiple of 128, and zeros follow them up
    to the next one. A group may have no row. All tensors are on the device, and the host reads none of them.

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


class Blocks(NamedTuple):
    """Blocks of a tensor, each of which has a scale.

    Attributes:
        size: how many elements along K, the dimension that a product sums over, share a scale.
        squares: whether blocks of a weight are squares, so that both of its payloads have the same codes and scales;
            else each payload is a cast with scales of its own, as of an input.
    """

    size: int
    squares: bool


# by what CurrentScale.blocks may be
BLOCKS = {
    "float32": Blocks(128, True),
    "power of 2": Blocks(128, True),
    "e8m0": Blocks(32, False),
    "e8m0 squares": Blocks(32, True),
}


class ScaleFrom(IntEnum):
    """What the scale of a tensor follows from; kernels take the number (``kernels_cuda/scales.cuh``).

    Attributes:
        HISTORY: past values, in training under a recipe with histories; while there are none, its own values.
        OWN_VALUES: ``FP8_MAX / amax`` of the tensor itself.
        OWN_VALUES_ROUNDED: the same, rounded down to a power of two, in evaluation: for a wide range of amaxes each
            element has the same code, so it hardly depends on the other elements of the tensor.
    """

    HISTORY = 0
    OWN_VALUES = 1
    OWN_VALUES_ROUNDED = 2


class CurrentScale(NamedTuple):
    """How a tensor is scaled, by its history or by its own values.

    Attributes:
        margin: powers of two kept free above the largest value.
        blocks: the kind of scale that each block has, a key of :data:`BLOCKS`; empty if the whole tensor has one scale.
            ``"float32"`` and ``"power of 2"`` are stored in fp32, ``"e8m0"`` as in :mod:`lightning_fp8.ops.e8m0`.
        group: the name of the process group that the tensor is split over; the largest amax of all parts is used. Empty
            if the tensor is not split.
        scale_from: what the scale follows from.
    """

    margin: int = 0
    blocks: str = ""
    group: str = ""
    scale_from: ScaleFrom = ScaleFrom.OWN_VALUES

    @property
    def in_e8m0(self) -> bool:
        """Whether scales are powers of two in one byte."""
        return self.blocks.startswith("e8m0")

    @property
    def squares(self) -> bool:
        """Whether squares of a weight have scales."""
        return bool(self.blocks) and BLOCKS[self.blocks].squares

    @property
    def adjusts_amax(self) -> bool:
        """Whether the scale is computed from an amax other than that of the tensor, or of this part of it."""
        return bool(self.margin or self.group)


def how_in_words(format: str, current: CurrentScale) -> str:
    """Both in one string, as torch allows an operator at most 64 arguments; see :func:`parsed_how`."""
    return f"{format},{current.margin},{current.blocks},{int(current.scale_from)},{current.group}"


@functools.cache
def parsed_how(words: str) -> tuple[str, CurrentScale]:
    """The arguments of :func:`how_in_words`."""
    fmt, margin, blocks, scale_from, group = words.split(",", 4)
    return fmt, CurrentScale(int(margin), blocks, group, ScaleFrom(int(scale_from)))


class WeightSlot(NamedTuple):
    """The slot of one weight, which has current scaling.

    Attributes:
        index: ``[1] int64``, the row of the tensor in the state.
        format: the FP8 format of the cast.
        state: stores amax and scale of the cast; None if it no longer exists.
        record: whether the cast is part of training, so that its losses are counted if requested.
        current: whether blocks have scales of their own.
    """

    index: Tensor  # type: ignore[assignment]
    format: str
    state: ScalingState | None
    record: bool
    current: CurrentScale = CurrentScale()

    @property
    def live_state(self) -> ScalingState | None:
        """The state: a weight is cast in a forward, whose slots are those of the model as it is."""
        return self.state


class Slot(NamedTuple):
    """The slot of one input or gradient.

    Attributes:
        scale: ``[R] float32``, of the state.
        amax_history: ``[H, D] float32``, of the state, newest first.
        index: ``[1] int64``, the row of the tensor in the state.
        format: the FP8 format of the cast.
        state: its ``amax`` records the casts; None if it no longer exists, so that nothing is recorded.
        record: whether casts are recorded.
        current: how the tensor is scaled.
        generation: see :attr:`live_state`.
    """

    scale: Tensor
    amax_history: Tensor
    index: Tensor  # type: ignore[assignment]
    format: str
    state: ScalingState | None
    record: bool
    current: CurrentScale = CurrentScale(scale_from=ScaleFrom.HISTORY)
    generation: int = 0

    @property
    def live_state(self) -> ScalingState | None:
        """The state, as long as its rows are those of the slot: none for a backward that begins before its model gets
        further layers and ends after that, so that nothing is recorded in the rows of others."""
        state = self.state
        return state if state is not None and state.model.generation == self.generation else None

    def open(self) -> tuple[Tensor | None, bool]:
        """See :meth:`lightning_fp8.scaling.model.Fp8Model.open_cast`."""
        state = self.live_state
        if state is None:
            return None, False
        return state.model.open_cast(self.record, self.index if self.uses_history else None)  # type: ignore[no-any-return]

    @property
    def uses_history(self) -> bool:
        """Whether the scale is that of the tensor's history, where there is one."""
        return self.current.scale_from is ScaleFrom.HISTORY


def with_scale(scale: Tensor, format: str) -> Slot:
    """A slot outside any state, whose casts use this scale, ``[] float32``."""
    scale = scale.reshape(1)
    # a cast uses the scale only if the history is not zero
    return Slot(scale, torch.ones_like(scale)[None], torch.zeros_like(scale, dtype=torch.int64), format, None, False)


def columns_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the payload by columns of a tensor with this many rows and columns: padded with zeros to a multiple
    of 16 rows. Of two operands of a product, the shorter K is the true one."""
    return columns, -(-rows // ALIGNMENT) * ALIGNMENT


def new_payloads(like: Tensor, shape: Sequence[int], layout: str) -> tuple[Tensor, Tensor]:
    """Uninitialised payloads by rows and by columns, each empty if ``layout`` does not include it."""
    return (
        like.new_empty(shape if layout != "columns" else 0, dtype=torch.uint8),
        like.new_empty(columns_shape(*shape) if layout != "rows" else 0, dtype=torch.uint8),
    )


def by_columns(payload: Tensor) -> Tensor:
    """The payload by columns from that by rows ``[M, K]``, contiguous; for ``[E, M, K]`` those of all matrices."""
    *stack, rows, width = payload.shape
    columns = payload.new_empty(*stack, *columns_shape(rows, width))
    columns[..., :rows] = payload.mT
    columns[..., rows:] = 0
    return columns


def in_layout(payload: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The payload by rows and by columns, each empty if ``layout`` does not include it."""
    rows = payload if layout != "columns" else payload.new_empty(0)
    return rows, by_columns(payload) if layout != "rows" else payload.new_empty(0)


def as_stack(parts: Sequence[Tensor]) -> Tensor:
    """``torch.stack(parts)``; a view, where contiguous parts lie side by side in one memory."""
    first = parts[0]
    if not torch.compiler.is_compiling() and not first.is_meta:
        at, size, memory = first.storage_offset(), first.numel(), first.untyped_storage().data_ptr()
        if first.is_contiguous() and all(
            part.storage_offset() == at + number * size and part.untyped_storage().data_ptr() == memory
            for number, part in enumerate(parts)
        ):
            return first.as_strided((len(parts), *first.shape), (size, *first.stride()))
    return torch.stack([*parts])


def nothing(like: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor, in place of a result that is not requested."""
    return like.new_empty(0, dtype=dtype)
