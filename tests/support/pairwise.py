"""Few of all combinations of options, where those share a path and a fault shows with two of them together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations that together have each value of an option with each value of every other one; always the same."""
    left = list(product(*(range(len(values)) for values in options)))
    pairs = {case: set(combinations(enumerate(case), 2)) for case in left}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(left, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        chosen.append(tuple(values[index] for values, index in zip(options, best)))
    return chosen
