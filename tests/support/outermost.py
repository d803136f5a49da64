"""Operators of torch that a profiler has seen, without those that another of them calls."""

from __future__ import annotations

from typing import Any

# torch operators that launch nothing on a GPU
NO_LAUNCH = {
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "view",
    "_unsafe_view",
    "t",
    "mT",
    "transpose",
    "as_strided",
    "detach",
}
NO_LAUNCH |= {
    "reshape",
    "flatten",
    "_reshape_alias",
    "contiguous",
    "slice",
    "select",
    "to",
    "result_type",
    "expand",
    "resolve_conj",
    "chunk",
}


def is_outermost(event: Any) -> bool:
    """Whether this is a torch operator that was not called by another torch operator."""
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith("aten::"):
        parent = parent.cpu_parent
    return parent is None and event.name.startswith("aten::")
