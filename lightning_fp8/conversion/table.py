"""The rows of :func:`lightning_fp8.describe` as one table, with one line for the equal layers of a stack."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from html import escape
from typing import NamedTuple

_TITLES = ("layer", "class", "FP8", "reason")


class Candidate(NamedTuple):
    """A row of :func:`lightning_fp8.describe`: a layer that does matrix multiplications, and whether it runs in FP8.

    A row may also be a large parameter of another module, which stays out of FP8.

    Attributes:
        path: the module path that ``ignore_modules`` patterns match; for a parameter, its name in the model.
        kind: class name; ``"Parameter"`` for a parameter.
        converted: whether it runs in FP8.
        reason: why, or why not, and what would change that.
    """

    path: str
    kind: str
    converted: bool
    reason: str

    @property
    def is_layer(self) -> bool:
        """True for a layer, False for a parameter."""
        return self.kind != "Parameter"

    def __str__(self) -> str:
        return f"{'fp8' if self.converted else '-':4}{self.path or '(root)'} ({self.kind}): {self.reason}"


class LayerTable(list[Candidate]):
    """A list of rows that prints as a table. Rows that differ only in the numbers of their paths share a line.

    >>> print(LayerTable(Candidate(f"blocks.{i}.up", "Linear", i > 0, "converted" if i else "-") for i in range(4)))
    layer          class   FP8  reason
    blocks.0.up    Linear  -    -
    blocks.1-3.up  Linear  fp8  converted
    3 of 4 layers run in FP8
    """

    def folded(self) -> list[Candidate]:
        """The lines of the table, such as a line for ``blocks.0-11.mlp.up``."""
        stacks: dict[tuple[tuple[str, ...], str, bool, str], dict[tuple[int, ...], Candidate]] = {}
        for row in self:
            segments = row.path.split(".")
            pattern = tuple("*" if _is_number(segment) else segment for segment in segments)
            numbers = tuple(int(segment) for segment in segments if _is_number(segment))
            stacks.setdefault((pattern, row.kind, row.converted, _of_any_number(row)), {})[numbers] = row
        lines = []
        for (_, kind, converted, reason), rows in stacks.items():
            for box in _boxes(rows):
                first = rows[tuple(numbers[0] for numbers in box)]
                ranges = map(_ranges, box)
                path = ".".join(next(ranges) if _is_number(part) else part for part in first.path.split("."))
                lines.append(first if path == first.path else Candidate(path, kind, converted, reason))
        return lines

    def __str__(self) -> str:
        lines = [_TITLES, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*table, self._sum()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The same in a notebook."""
        lines = [("th", _TITLES), *(("td", cells) for cells in self._cells())]
        rows = ("".join(f'<{tag} style="text-align: left">{escape(c)}</{tag}>' for c in cells) for tag, cells in lines)
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table><p>{self._sum()}</p>"

    def _cells(self) -> Iterator[tuple[str, ...]]:
        for path, kind, converted, reason in self.folded():
            yield path or "(root)", kind, "fp8" if converted else "-", reason

    def _sum(self) -> str:
        layers = [row.converted for row in self if row.is_layer]
        return f"{sum(layers)} of {len(layers)} layers run in FP8"


def _is_number(segment: str) -> bool:
    # "01" is a name: 1 is another
    return segment.isdecimal() and str(int(segment)) == segment


def _of_any_number(row: Candidate) -> str:
    """A row's reason, with ``*`` in place of the row's own numbers in paths of other layers; not in quoted patterns."""
    segments, reason = row.path.split("."), row.reason
    for end in range(len(segments), 0, -1):
        if _is_number(segments[end - 1]):
            # a number by itself counts as a path only if something follows it
            ends = r"(?=\.[A-Za-z_])" if end == 1 else r"(?!\w)"
            of_row = rf"(?<![\w.'\"]){re.escape('.'.join(segments[:end]))}{ends}"
            reason = ".".join("*" if _is_number(part) else part for part in segments[:end]).join(
                re.split(of_row, reason)
            )
    return reason


def _boxes(points: Collection[tuple[int, ...]]) -> list[tuple[list[int], ...]]:
    """Cover tuples with few products of sets. Each tuple is in exactly one product, and no other tuple is in any."""
    if () in points:
        return [()]
    rests: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in points:
        rests.setdefault(first, []).append(tuple(rest))
    firsts: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first, found in rests.items():
        firsts.setdefault(frozenset(found), []).append(first)
    return [(numbers, *box) for rest, numbers in firsts.items() for box in _boxes(sorted(rest))]


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text, such as ``0-3,7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{start}-{end}" if end > start else str(start) for start, end in runs)
