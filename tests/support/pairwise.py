"""A small subset of all combinations of options, for faults that show when two options meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations in which each pair of values of two options occurs; always the same."""
    left = list(product(*(range(len(values)) for values in options)))
    pairs = {case: set(combinations(enumerate(case), 2)) for case in left}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(left, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        chosen.append(tuple(values[index] for values, index in zip(options, best)))
    return chosen
