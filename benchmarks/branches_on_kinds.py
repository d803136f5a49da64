"""List the branches on a kind of scaling, an operand or a recipe outside ``lightning_fp8/scalings``.

What depends on the kind belongs into the file of the kind. A branch is a condition (of ``if`` or ``while``, a filter, a
part of ``and`` or ``or``, the subject of a ``match``) that reads an attribute of such a value, asks for its class, or
compares it. mypy knows which values these are; it takes minutes:

    python -m benchmarks.branches_on_kinds
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

from mypy import build, nodes
from mypy.config_parser import parse_config_file
from mypy.find_sources import create_source_list
from mypy.options import Options
from mypy.types import CallableType, Instance, TupleType, Type, TypeType, UnionType, get_proper_type

ROOT = Path(__file__).parents[1]
WATCHED = {
    "lightning_fp8.scalings.base.Scaling",
    "lightning_fp8.scalings.operand.Operand",
    "lightning_fp8.scalings.recipe.Recipe",
}
Place = tuple[int, int, int | None, int | None]


def is_watched(kind: Type | None) -> bool:
    """Whether values of this type are such values, or such classes."""
    kind = get_proper_type(kind)
    if isinstance(kind, UnionType):
        return any(map(is_watched, kind.items))
    if isinstance(kind, TypeType):
        return is_watched(kind.item)
    if isinstance(kind, CallableType):
        return kind.is_type_obj() and is_watched(kind.ret_type)
    if isinstance(kind, TupleType):
        return is_watched(kind.partial_fallback)
    return isinstance(kind, Instance) and any(parent.fullname in WATCHED for parent in kind.type.mro)


def expressions(file: nodes.MypyFile) -> Iterator[nodes.Expression]:
    """All expressions of a file. (mypy's own visitors are compiled and cannot be inherited.)"""
    seen, open_nodes = set(), list[object](file.defs)
    fields: dict[str, list[str]] = {}  # of each class of nodes, those that may hold others
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, list | tuple):
            open_nodes += node
        elif isinstance(node, nodes.Statement | nodes.Expression | nodes.FuncDef) and id(node) not in seen:
            seen.add(id(node))
            if isinstance(node, nodes.Expression):
                yield node
            kind = type(node).__name__
            if kind not in fields:
                skipped = ("info", "node", "analyzed")
                fields[kind] = [name for name in dir(node) if not name.startswith("_") and name not in skipped]
            open_nodes += [getattr(node, name, None) for name in fields[kind]]


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    """What decides which code runs, or which value an expression has."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.BoolOp):
            # the last one decides only where the whole is a condition
            yield from node.values[:-1]
        elif isinstance(node, ast.Match):
            yield node.subject


def depends(condition: ast.expr, types: dict[Place, Type]) -> bool:
    """Whether a condition depends on the kind of a value: not on whether there is one, or on its tensors."""

    def watched(node: ast.expr) -> bool:
        return is_watched(types.get((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)))

    for node in ast.walk(condition):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Attribute):
            parts = [node.value]
        elif isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass", "type"):
            parts = node.args
        if any(map(watched, parts)):
            return True
    return False


def branches() -> Iterator[tuple[Path, int, str]]:
    """File, line and condition."""
    options = Options()
    parse_config_file(options, lambda: None, str(ROOT / "pyproject.toml"))
    options.export_types = options.preserve_asts = True
    options.incremental = False
    sources = create_source_list([str(ROOT / "lightning_fp8")], options)
    result = build.build(sources, options)
    for source in sorted(sources, key=lambda source: source.module):
        path = Path(source.path or "")
        if path.parent.name == "scalings":
            continue
        types = {
            (node.line, node.column, node.end_line, node.end_column): result.types[node]
            for node in expressions(result.files[source.module])
            if node in result.types
        }
        found = {
            (node.lineno, ast.unparse(node)) for node in conditions(ast.parse(path.read_text())) if depends(node, types)
        }
        lines: set[int] = set()
        for line, text in sorted(found, key=lambda item: (item[0], -len(item[1]))):
            # a part of a condition is no further branch
            if line not in lines:
                lines.add(line)
                yield path.relative_to(ROOT), line, text


def main() -> None:
    """Print them, and how many there are."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    found = list(branches())
    for path, line, text in found:
        print(f"{path}:{line}: {text}")
    print(f"{len(found)} branches in {len({path for path, *_ in found})} files")


if __name__ == "__main__":
    main()
