"""The input of several layers, such as the projections of an attention: cast once, by the first of them that runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_fp8.ops.operand import Fp8Operand
    from lightning_fp8.scaling.state import ScalingState


class _Cast(NamedTuple):
    x: weakref.ref[Tensor]
    circumstances: tuple[Any, ...]
    operand: Fp8Operand


class _Rounded(NamedTuple):
    x: weakref.ref[Tensor]
    circumstances: tuple[Any, ...]
    values: Tensor


class SharedInput:
    """One tensor that several layers of a model take in, one after the other.

    They record it in the row of the first one. Its cast is held here from the layer that makes it to the last one. A
    layer takes it only for the very same tensor, unchanged, in the same thread and under the same scales; another
    tensor, which a hook or a caller gives one of the layers instead, is cast for that layer.

    Attributes:
        modules: positions of the layers in the scaling state, in the order of their calls.
    """

    def __init__(self, modules: Sequence[int]) -> None:
        self.modules = tuple(modules)
        self._made: _Cast | None = None
        self._rounded: _Rounded | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None, "_rounded": None}

    def take(
        self, x: Tensor, state: ScalingState, record: bool, keep: bool, by_rows: bool, is_last: bool
    ) -> Fp8Operand | None:
        """The cast of ``x`` that an earlier layer has made, by columns if ``keep`` and by rows if ``by_rows``; None if
        there is none.
        """
        # read once: another thread may replace it
        made = self._made
        if is_last:
            self._made = None
        if made is None or made.x() is not x or made.circumstances != _circumstances(x, state, record):
            return None
        if (keep and made.operand.columns.dim() != 2) or (by_rows and made.operand.rows.dim() != 2):
            return None
        return made.operand

    def drop(self) -> None:
        """Keep no cast."""
        self._made = self._rounded = None

    def put(self, x: Tensor, state: ScalingState, record: bool, operand: Fp8Operand, is_first: bool) -> None:
        """Keep a cast for the later layers, for as long as ``x`` exists.

        If a later layer was given another tensor, the cast for the other layers stays.
        """
        made = self._made
        if is_first or made is None or made.x() is x:
            self._made = _Cast(weakref.ref(x, self._drop_with), _circumstances(x, state, record), operand)

    def rounded(self, x: Tensor, dtype: torch.dtype, is_last: bool) -> Tensor:
        """``x`` in another dtype, for products that take it in that dtype: one tensor for all layers, which may be
        kept for backward.
        """
        # the streams of two threads do not wait for each other
        made, circumstances = self._rounded, (x._version, dtype, threading.get_ident())
        if made is None or made.x() is not x or made.circumstances != circumstances:
            made = _Rounded(weakref.ref(x, self._drop_with), circumstances, x.detach().to(dtype))
        self._rounded = None if is_last else made
        return made.values

    def _drop_with(self, x: weakref.ref[Tensor]) -> None:
        made, rounded = self._made, self._rounded
        if made is not None and made.x is x:
            self._made = None
        if rounded is not None and rounded.x is x:
            self._rounded = None


def _circumstances(x: Tensor, state: ScalingState, record: bool) -> tuple[Any, ...]:
    # the streams of two threads do not wait for each other
    return x._version, record, state.changes, state.histories_fit, threading.get_ident()
