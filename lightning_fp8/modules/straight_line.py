"""What a method computes, read from its source: for methods without branches, loops and side effects."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

# the names that the method's own arguments get
_ARGUMENTS = ("self", "x", "y")


class Expression(NamedTuple):
    """The value that a method returns.

    Attributes:
        text: as one expression of ``self``, ``x`` and ``y``, in Python's own spelling.
        calls: how many calls the method makes: fewer than ``text`` where it uses a value twice, more where it does not
            use one.
    """

    text: str
    calls: int


def returned_by(method: object) -> Expression | None:
    """What a method returns, if it consists of assignments to local names and a ``return``; None for any other.

    >>> class Block:
    ...     def forward(self, hidden):
    ...         hidden = self.up(hidden)
    ...         return self.down(hidden)
    >>> returned_by(Block.forward)
    Expression(text='self.down(self.up(x))', calls=2)
    """
    # by its code, which a wrapper does not copy from the wrapped method
    return _of_code(method.__code__) if inspect.isfunction(method) else None


def parsed(function: Callable[..., Any] | CodeType) -> ast.Module | None:
    """The source of a function or of its code, as it is in the file now; None if there is none that can be parsed."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


@cache
def _of_code(code: CodeType) -> Expression | None:
    tree = parsed(code)
    function = None if tree is None else tree.body[0]
    if tree is None or not isinstance(function, ast.FunctionDef) or not _is_source_of(tree, code):
        return None
    arguments = function.args
    names = [argument.arg for argument in arguments.args]
    if len(names) > len(_ARGUMENTS) or any(
        (arguments.vararg, arguments.kwarg, arguments.kwonlyargs, arguments.defaults, arguments.posonlyargs)
    ):
        return None
    values: dict[str, ast.expr] = {name: ast.Name(known) for name, known in zip(names, _ARGUMENTS)}
    *assignments, last = [line for line in function.body if not _is_docstring(line)] or [ast.Pass()]
    calls = sum(isinstance(part, ast.Call) for part in ast.walk(function))
    for line in assignments:
        if not isinstance(line, ast.Assign) or len(line.targets) != 1:
            return None
        target, value = line.targets[0], _Substitute(values).visit(line.value)
        if isinstance(target, ast.Name):
            values[target.id] = value
        elif isinstance(target, ast.Tuple) and all(isinstance(name, ast.Name) for name in target.elts):
            for position, name in enumerate(target.elts):
                values[name.id] = ast.Subscript(value, ast.Constant(position))  # type: ignore[attr-defined]
        else:
            return None
    if not isinstance(last, ast.Return) or last.value is None:
        return None
    return Expression(ast.unparse(_Substitute(values).visit(last.value)), calls)


def _is_source_of(tree: ast.Module, code: CodeType) -> bool:
    """Whether the source, read from the file as it is now, is that of the code."""
    made = next(one for one in compile(tree, code.co_filename, "exec").co_consts if isinstance(one, CodeType))
    return (made.co_code, made.co_names) == (code.co_code, code.co_names)


def _is_docstring(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


class _Substitute(ast.NodeTransformer):
    """Replaces local names by their values."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self._values = dict(values)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._values.get(node.id, node)
