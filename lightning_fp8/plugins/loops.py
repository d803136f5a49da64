"""FP8 casts of weights, kept for a loop of a Trainer: an epoch of training, ``validate``, ``test`` or ``predict``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_fp8.modules.compiled_casts import keep_compiled_casts
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.modules.weight_cast import KeptCast, assume_unchanged
from lightning_fp8.modules.weights_unchanged import all_gemms, casts_of, compiled_gemms, drop_unless_assumed


class LoopWeights:
    """The weights of one model. They may be swapped undetectably between two loops, but not within a loop.

    Each run of a loop, including the sanity check, creates a data fetcher: a new fetcher means that a loop has begun.
    Without a fetcher, nothing guarantees that weights stay unchanged, so evaluation casts them in each forward.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._fetcher: weakref.ref[Any] | None = None
        self._gemms: list[weakref.ref[Gemm]] = []
        self._compiled: list[Gemm] = []

    def __reduce__(self) -> tuple[type[LoopWeights], tuple[()]]:
        # weak references cannot be pickled
        return LoopWeights, ()

    @contextmanager
    def in_step(self, trainer: pl.Trainer | None, record: bool) -> Iterator[None]:
        """Context of one step of training (``record``) or evaluation; the first step of a loop drops all casts."""
        fetcher = _fetcher_of(trainer)
        if fetcher is None or self.is_first_step(trainer):
            self.drop()
            self._fetcher = None if fetcher is None else weakref.ref(fetcher)
            model = None if self._model is None else self._model()
            if model is not None:
                self._gemms = [weakref.ref(gemm) for gemm in all_gemms(model)]
                self._compiled = compiled_gemms(model)
        assumed = self._casts() if fetcher is not None and not record else []
        compiled = self._compiled if fetcher is not None else []
        with assume_unchanged(assumed), keep_compiled_casts(compiled, record) if compiled else nullcontext():
            yield

    def is_first_step(self, trainer: pl.Trainer | None) -> bool:
        """Whether a loop of this Trainer begins with the next step."""
        fetcher = _fetcher_of(trainer)
        return fetcher is not None and (self._fetcher is None or self._fetcher() is not fetcher)

    def in_backward(self) -> AbstractContextManager[None]:
        """Context of a forward that is recomputed inside backward."""
        return keep_compiled_casts(self._compiled, True, in_backward=True) if self._compiled else nullcontext()

    def drop(self) -> None:
        """Drop all casts: a loop has ended."""
        drop_unless_assumed(self._casts())

    def _casts(self) -> list[KeptCast[Any]]:
        return casts_of(gemm for reference in self._gemms if (gemm := reference()) is not None)

    def end(self) -> None:
        """A run has ended: free the memory of all casts."""
        self.drop()
        for gemm in self._compiled:
            gemm.weight_cast.compiled_cast = gemm.weight_cast.compiled_from = None


def _fetcher_of(trainer: pl.Trainer | None) -> Any:
    return getattr(getattr(trainer, "_active_loop", None), "_data_fetcher", None)
