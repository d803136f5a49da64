"""FP8 copies of weights, kept for a loop of a Trainer: an epoch of training, ``validate``, ``test`` or ``predict``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_fp8.modules.base import Fp8Rows
from lightning_fp8.modules.prepared_weights import compiled_rows, prepared
from lightning_fp8.modules.weight_cache import vouching
from lightning_fp8.modules.weight_group import WeightGroup
from lightning_fp8.modules.weights_unchanged import all_caches, all_rows, drop_unvouched


class LoopWeights:
    """The weights of one model. Between two loops they may be swapped undetectably, but not within one.

    Each run of a loop, the sanity check included, creates a data fetcher, so a new fetcher means that a loop has begun.
    Without a fetcher nothing vouches for unchanged weights, and evaluation casts them in each forward.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._fetcher: weakref.ref[Any] | None = None
        self._group: WeightGroup | None = None
        self._compiled: list[Fp8Rows] = []

    def __reduce__(self) -> tuple[type[LoopWeights], tuple[()]]:
        # weak references cannot be pickled
        return LoopWeights, ()

    @contextmanager
    def in_step(self, trainer: pl.Trainer | None, record: bool) -> Iterator[None]:
        """Context of one step of training (``record``) or evaluation; the first step of a loop drops all copies."""
        fetcher = getattr(getattr(trainer, "_active_loop", None), "_data_fetcher", None)
        if fetcher is None or self._fetcher is None or self._fetcher() is not fetcher:
            self.drop()
            self._fetcher = None if fetcher is None else weakref.ref(fetcher)
            model = None if self._model is None else self._model()
            if model is not None:
                self._group = next((rows.group for rows in all_rows(model)), None)
                self._compiled = compiled_rows(model)
        vouched = fetcher is not None and not record and self._group is not None
        caches = all_caches(self._group.members) if vouched else []  # type: ignore[union-attr]
        with vouching(caches), prepared(self._compiled if fetcher is not None else [], record):
            yield

    def in_backward(self) -> AbstractContextManager[None]:
        """Context of a forward that is recomputed inside backward."""
        return prepared(self._compiled, record=True, in_backward=True)

    def drop(self) -> None:
        """Drop all copies: a loop has ended."""
        if self._group is not None:
            drop_unvouched(all_caches(self._group.members))

    def end(self) -> None:
        """A run has ended: free the memory of all copies."""
        self.drop()
        for rows in self._compiled:
            rows.prepared = None
