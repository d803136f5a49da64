"""The input of several layers, such as the projections of an attention: cast once, by the first of them that runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops.operand import Fp8Operand
from lightning_fp8.scaling.model import Fp8Model


class _Made(NamedTuple):
    x: weakref.ref[Tensor]
    circumstances: tuple[Any, ...]
    value: Any


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
        # by kind: "fp8", or "rounded" for products that take the input in another dtype
        self._made: dict[str, _Made] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"modules": self.modules, "_made": {}}

    def take(
        self, x: Tensor, model: Fp8Model, record: bool, keep: bool, by_rows: bool, is_last: bool
    ) -> Fp8Operand | None:
        """The cast of ``x`` that an earlier layer has made, by columns if ``keep`` and by rows if ``by_rows``; None if
        there is none.
        """
        # read once: another thread may replace it
        made = self._made.pop("fp8", None) if is_last else self._made.get("fp8")
        if made is None or made.x() is not x or made.circumstances != _circumstances(x, model, record):
            return None
        operand: Fp8Operand = made.value
        if (keep and operand.columns.dim() != 2) or (by_rows and operand.rows.dim() != 2):
            return None
        return operand

    def drop(self) -> None:
        """Keep no cast."""
        self._made.clear()

    def put(self, x: Tensor, model: Fp8Model, record: bool, operand: Fp8Operand, is_first: bool) -> None:
        """Keep a cast for the later layers, for as long as ``x`` exists.

        If a later layer was given another tensor, the cast for the other layers stays.
        """
        made = self._made.get("fp8")
        if is_first or made is None or made.x() is x:
            self._made["fp8"] = _Made(weakref.ref(x, self._drop_with), _circumstances(x, model, record), operand)

    def rounded(self, x: Tensor, dtype: torch.dtype, is_last: bool) -> Tensor:
        """``x`` in another dtype, for products that take it in that dtype: one tensor for all layers, which may be
        kept for backward.
        """
        # the streams of two threads do not wait for each other
        made, circumstances = self._made.get("rounded"), (x._version, dtype, threading.get_ident())
        if made is None or made.x() is not x or made.circumstances != circumstances:
            made = _Made(weakref.ref(x, self._drop_with), circumstances, x.detach().to(dtype))
        if is_last:
            self._made.pop("rounded", None)
        else:
            self._made["rounded"] = made
        return made.value  # type: ignore[no-any-return]

    def _drop_with(self, x: weakref.ref[Tensor]) -> None:
        for kind, made in list(self._made.items()):
            if made.x is x:
                self._made.pop(kind, None)


def _circumstances(x: Tensor, model: Fp8Model, record: bool) -> tuple[Any, ...]:
    # the streams of two threads do not wait for each other
    return x._version, record, model.changes, model.histories_fit, threading.get_ident()
