"""FP8 copies of weights, over one loop of a Trainer: an epoch of training, ``validate``, ``test`` or ``predict``."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_fp8.modules.weight_cache import vouching
from lightning_fp8.modules.weights_unchanged import all_caches, all_rows, drop_unvouched


class LoopWeights:
    """The weights of one model, which may be swapped without a trace between two loops, but not within one.

    Each run of a loop makes a data fetcher, so another one means that a loop has begun; the sanity check is one too.
    Where Lightning has none, nobody vouches, and evaluation casts the weights in each forward.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._group = next((rows.group for rows in all_rows(model)), None) if model is not None else None
        self._fetcher: weakref.ref[Any] | None = None

    def __reduce__(self) -> tuple[type[LoopWeights], tuple[()]]:
        # weak references cannot be pickled
        return LoopWeights, ()

    def see_step(self, trainer: pl.Trainer | None) -> bool:
        """A step begins: drops the copies if it is the first of a loop. Returns whether the loop is known."""
        fetcher = getattr(getattr(trainer, "_active_loop", None), "_data_fetcher", None)
        if fetcher is None or self._fetcher is None or self._fetcher() is not fetcher:
            self.drop()
            self._fetcher = None if fetcher is None else weakref.ref(fetcher)
        return fetcher is not None

    def vouched(self, trainer: pl.Trainer | None) -> AbstractContextManager[None]:
        """For one step of an evaluation."""
        if not self.see_step(trainer) or self._group is None:
            return nullcontext()
        return vouching(all_caches(self._group.members))

    def drop(self) -> None:
        """Drop all copies: a loop has ended."""
        if self._group is not None:
            drop_unvouched(all_caches(self._group.members))
