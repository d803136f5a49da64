"""The cast of a weight: made when the weight has changed, and only then; never stale."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor, nn

from lightning_fp8.modules.optimizer_steps import optimizer_steps
from lightning_fp8.modules.stamp import Stamped, stamp

_LOCK = threading.Lock()


T = TypeVar("T")


class _Entry(NamedTuple):
    weight: Stamped
    steps: int | None
    copy: Any


class WeightCache(Generic[T]):
    """Keeps a copy derived from one weight for as long as the weight is certain to be the same.

    A copy is stale after a change that leaves a trace, see :func:`~lightning_fp8.modules.stamp.stamp`, and, unless the
    weight is frozen, after an optimizer step. Copies and pickles of a model start with an empty cache.

    Attributes:
        vouchers: how many contexts vouch for the weight.
        part: which matrix of a parameter ``[E, N, K]`` the copy is made from; None if it is made from all of it.
    """

    def __init__(self) -> None:
        self._entry: _Entry | None = None
        self._last_used = 0
        self.vouchers = 0
        self.part: int | None = None

    def matrix(self, weight: Tensor) -> Tensor:
        """The part of ``weight`` that the copy is made from."""
        return weight if self.part is None else weight[self.part]

    def get(self, weight: Tensor) -> T | None:
        """The copy of ``weight``; None if there is none, or it may be stale."""
        entry = self._entry
        if entry is None or entry.weight.key != stamp(weight) or entry.steps != _steps_of(weight):
            return None
        self._last_used = id(weight)
        return entry.copy  # type: ignore[no-any-return]

    def was_used(self, weight: Tensor) -> bool:
        """Whether the last copy of ``weight``, stale or not, has been used."""
        return self._last_used == id(weight)

    def drop(self) -> None:
        """Drop the copy and free its memory."""
        self._entry = None

    def put(self, weight: Tensor, copy: T, used: bool = True) -> None:
        """Keep ``copy``, just made from ``weight``, for a forward that uses it now or, if not ``used``, later."""
        # Only a parameter is known to be the same tensor at the next call; a parametrized weight is made each time.
        if isinstance(weight, nn.Parameter) and not weight.is_inference():
            self._entry = _Entry(Stamped(weight), _steps_of(weight), copy)
            self._last_used = id(weight) if used else 0

    def __getstate__(self) -> dict[str, Any]:
        return {"_entry": None, "_last_used": 0, "vouchers": 0, "part": self.part}


def _steps_of(weight: Tensor) -> int | None:
    # an optimizer changes what has a gradient; it may do so through `.data`
    return optimizer_steps() if weight.requires_grad or weight.grad is not None else None


@contextmanager
def vouching(caches: Iterable[WeightCache[Any]]) -> Iterator[None]:
    """Declare that these weights change only in ways that leave a trace, in all threads, until all such contexts end.

    It does not drop the copies made before it or in it: the caller knows for how long they are valid.
    """
    caches = list(caches)
    with _LOCK:
        for cache in caches:
            cache.vouchers += 1
    try:
        yield
    finally:
        with _LOCK:
            for cache in caches:
                cache.vouchers -= 1
