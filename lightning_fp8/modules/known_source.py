"""Digests of the source of methods: a table of digests tells whether a class's method is a known one."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from types import CodeType
from typing import Any


def source_digest(function: object) -> str:
    """16 hexadecimal digits for the source of a function; empty for anything else, or if the source is not known.

    Functions that differ only in docstring, comments, annotations and layout have the same digest, in all versions of
    Python. The values of names outside the function, such as modules, are not part of it. A function with a closure,
    such as one that a decorator returns, may do anything: it has no digest.

    >>> class Block:
    ...     def forward(self, x): return self.down(self.act(self.up(x)))
    >>> source_digest(Block.forward) == source_digest(Block().forward)  # a method is not a function
    False
    """
    if not inspect.isfunction(function) or function.__closure__:
        return ""
    return _digest(function.__code__)


# by code object: a function gets a new one when a notebook reloads its module
@functools.cache
def _digest(code: CodeType) -> str:
    try:
        # the source of this code object; for a decorated function, `getsource` would return the wrapped function's
        return digest_of(inspect.getsource(code))
    except (OSError, SyntaxError, ValueError):
        return ""


def digest_of(source: str) -> str:
    """The same for the source of one function, as text."""
    (definition,) = ast.parse(textwrap.dedent(source)).body
    if not isinstance(definition, ast.FunctionDef):
        return ""
    if ast.get_docstring(definition) is not None:
        del definition.body[0]
    return hashlib.sha256(repr(_tree(definition)).encode()).hexdigest()[:16]


def _tree(node: Any) -> Any:
    """The nodes without annotations, and without what is empty: Python's versions differ in the empty fields."""
    if isinstance(node, list):
        return [_tree(part) for part in node]
    if not isinstance(node, ast.AST):
        return node
    fields = [field for field in ast.iter_fields(node) if field[0] not in ("annotation", "returns", "type_comment")]
    return type(node).__name__, [(name, _tree(value)) for name, value in fields if value not in (None, [])]
