"""Attributes that a scaling state had up to 0.5.0: each raises an AttributeError that names its replacement."""

from __future__ import annotations

from typing import Any


class _Former:
    # A `__getattr__` of the class would be shorter, but slows down every access to an attribute of the state.

    def __init__(self, now: str) -> None:
        self._now = now

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, state: object, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__} has no attribute {self._name!r}: use `{self._now}`.")


class FormerNames:
    """The former attributes."""

    fall_back = _Former("lightning_fp8.fall_back(model, name)")
    fallbacks = _Former("lightning_fp8.fallbacks(model)")
    counts = _Former("state.cast_counts.values")
    start_counting = _Former("state.cast_counts.start(requester)")
    stop_counting = _Former("state.cast_counts.stop(requester)")
    gemm = _Former("lightning_fp8.convert(model, gemm=...)")
    min_features = _Former("lightning_fp8.convert(model, min_features=...)")
