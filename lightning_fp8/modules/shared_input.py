"""The input of several layers, such as the projections of an attention: cast once, by the first of them that runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_fp8.modules.weight_cast import stamp


class _Made(NamedTuple):
    x: weakref.ref[Tensor]
    circumstances: tuple[Hashable, ...]
    value: Any


class SharedInput:
    """One input tensor that several layers of a model share. The layers run one after the other.

    They record it in the row of the first layer. Its cast is held here from the layer that makes it to the last layer.
    A layer takes this cast only for the very same tensor, unchanged, in the same thread and under the same
    circumstances. If a hook or a caller gives a layer another tensor, that tensor is cast for this layer.

    Attributes:
        modules: positions of the layers in the scaling state, in the order of their calls.
    """

    def __init__(self, modules: Sequence[int]) -> None:
        self.modules = tuple(modules)
        self._made: _Made | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"modules": self.modules, "_made": None}

    def take(self, module: int, x: Tensor, circumstances: tuple[Hashable, ...]) -> Any:
        """What an earlier layer has made of ``x``; None if it is not valid for the layer at position ``module``. The
        last layer frees it."""
        if module == self.modules[0]:
            return None
        # read once: another thread may replace it
        entry = self._made
        if module == self.modules[-1]:
            self._made = None
        is_valid = entry is not None and entry.x() is x and entry.circumstances == _now(x, circumstances)
        return entry.value if entry is not None and is_valid else None

    def put(self, module: int, x: Tensor, circumstances: tuple[Hashable, ...], value: Any) -> None:
        """Keep what the layer at position ``module`` has made of ``x``, for later layers and while ``x`` exists.

        If a later layer gets another tensor, the value for the other layers stays.
        """
        if module == self.modules[-1]:
            return
        entry = self._made
        if module == self.modules[0] or entry is None or entry.x() is x:
            self._made = _Made(weakref.ref(x, self._drop_with), _now(x, circumstances), value)

    def pass_by(self, module: int) -> None:
        """A layer does not need the value; if it is the last layer, free the value."""
        if module == self.modules[-1]:
            self._made = None

    def _drop_with(self, x: weakref.ref[Tensor]) -> None:
        entry = self._made
        if entry is not None and entry.x is x:
            self._made = None


def _now(x: Tensor, circumstances: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    # the streams of two threads do not wait for each other
    return *stamp(x), threading.get_ident(), *circumstances
