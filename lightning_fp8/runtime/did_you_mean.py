"""Suggestions for misspelt words."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def closest(word: str, words: Iterable[str]) -> str | None:
    """The closest word, which may differ in case, in ``_`` for ``-``, or in a few letters; None if no word is close.

    >>> closest("FP8_delyed", ["bf16-mixed", "fp8-delayed"])
    'fp8-delayed'
    """
    plain = {_plain(candidate): candidate for candidate in words}
    matches = get_close_matches(_plain(word), plain, n=1, cutoff=0.75)
    return plain[matches[0]] if matches else None


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """``" Did you mean 'closest word'?"`` with a leading space; empty if no word is close."""
    match = closest(word, words)
    return f" Did you mean {match!r}?" if match else ""


def _plain(word: str) -> str:
    return word.lower().replace("_", "-")
