"""Sources of a kernel family with a mistake in them, for the tests of what finds it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import kernels_cuda


class Change(NamedTuple):
    """A change of a source: ``old``, which must occur exactly once, becomes ``new``."""

    old: str
    new: str


def changed(family: str, change: Change | None) -> dict[str, str]:
    """The family's own sources by name, one of them changed; fails where there is nothing to change."""
    texts = {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted(Path(kernels_cuda.__file__).parent.glob(f"{family}*.cu*"))
    }
    if change is not None:
        counts = {name: text.count(change.old) for name, text in texts.items() if change.old in text}
        assert [*counts.values()] == [1], f"{change.old!r} occurs in {counts or 'no source'}"
        (name,) = counts
        texts[name] = texts[name].replace(change.old, change.new)
    return texts
