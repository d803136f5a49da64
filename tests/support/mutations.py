"""Damaged copies of valid files: changes of a JSON tree, and damage to its text. All determined by a seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

# deeper than Python's recursion limit for parsers written in Python, and for its own JSON parser
DEPTH = 100_000


def nested(depth: int) -> list[Any]:
    """Nested lists."""
    tree: list[Any] = []
    for _ in range(depth):
        tree = [tree]
    return tree


REPLACEMENTS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2.5, 10**30, 10**400, -(10**400), float("nan"), float("inf"), 1e308,
    "", "text", "0x1p99999", "-0x1p0", "nan", "\ud800", "x" * 10_000, [], {}, [None], [[], {}], {"": None},
    {"a": {"b": [1]}}, ["text", 3], [{}], [{"path": 1}], nested(200),
)  # fmt: skip


def trees(whole: Any, count: int, seed: int = 0) -> Iterator[Any]:
    """Copies of a JSON tree with one or two nodes replaced, removed or added."""
    rng = random.Random(seed)
    for _ in range(count):
        tree = {"root": copy.deepcopy(whole)}
        for _ in range(rng.choice((1, 1, 2))):
            _change(tree, rng)
        yield tree.get("root")


def _change(tree: dict[str, Any], rng: random.Random) -> None:
    parent, key = rng.choice(list(_places(tree)))
    how = rng.random()
    if how < 0.1 and key != "root":
        del parent[key]
    elif how < 0.2 and isinstance(parent[key], dict):
        parent[key][rng.choice(("extra", "", "rows"))] = copy.deepcopy(rng.choice(REPLACEMENTS))
    elif how < 0.2 and isinstance(parent[key], list):
        parent[key].append(copy.deepcopy(rng.choice(REPLACEMENTS)))
    else:
        parent[key] = copy.deepcopy(rng.choice(REPLACEMENTS))


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """A node's parent, and its key or index there."""
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from _places(node[key])


def texts(whole: str) -> list[bytes]:
    """Files that are no longer valid text, and one whose parser exceeds the recursion limit."""
    return [
        b"", b" ", b"\xff\xfe", b"\0" * 100, whole.encode()[:-2], whole.encode()[: len(whole) // 2], b"null", b"7",
        b'"text"', b"[" * DEPTH, b"[" * DEPTH + b"]" * DEPTH, b'{"a":' * DEPTH, b"1" * 10_000, b"NaN",
        whole.encode("utf-16"), b"\xef\xbb\xbf" + whole.encode(),
    ]  # fmt: skip


def damaged_bytes(whole: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Copies that are truncated, or with some bytes changed."""
    rng = random.Random(seed)
    for _ in range(count):
        content = bytearray(whole)
        if rng.random() < 0.3:
            del content[rng.randrange(len(content)) :]
        # most of what can go wrong is at the beginning
        for _ in range(rng.choice((0, 1, 4))):
            if content:
                content[rng.randrange(min(len(content), rng.choice((16, 256, len(content)))))] = rng.randrange(256)
        yield bytes(content)


def as_json(tree: Any) -> str:
    """The tree as text; NaN and infinity as Python writes them."""
    return json.dumps(tree)
