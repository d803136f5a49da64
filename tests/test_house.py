"""How the project is laid out, in numbers: CONTRIBUTING.md has them as a table. `-s` prints what is counted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT

PACKAGE = ROOT / "lightning_fp8"


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def lines(*folders: str) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources(*folders))


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """As a caller counts them."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def rooms() -> int:
    """Packages of the package, at any depth, and loose files."""
    return len([*PACKAGE.glob("**/__init__.py")]) - 1 + loose_files()


def loose_files() -> int:
    return len([*PACKAGE.glob("*.py")])


def share_of_tooling() -> float:
    """Of the package's lines, in percent."""
    return 100 * lines("lightning_fp8/tools", "lightning_fp8/examples") / lines("lightning_fp8")


def long_signatures() -> int:
    """Functions with more than 12 parameters."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in sources("lightning_fp8", "kernels_cuda"))
    found = (node for tree in trees for node in ast.walk(tree))
    return sum(parameters(node) > 12 for node in found if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def unformatted() -> int:
    """Statements that the formatter is told to leave alone."""
    texts = (path.read_text(encoding="utf-8") for path in sources("lightning_fp8", "kernels_cuda", "benchmarks"))
    return sum(len(re.findall(r"#\s*fmt:\s*(?:skip|off)", text)) for text in texts)


def flat_tests() -> int:
    """Test modules that are in no folder."""
    return len([*(ROOT / "tests").glob("test_*.py")])


@pytest.mark.parametrize(
    ("count", "aim"),
    [(rooms, 22), (loose_files, 3), (share_of_tooling, 30), (long_signatures, 6), (unformatted, 9), (flat_tests, 6)],
)
def test_aims(count: object, aim: float) -> None:
    found = count()  # type: ignore[operator]
    print(f"{count.__name__}: {found:.4g}, at most {aim}")  # type: ignore[attr-defined]
    assert found <= aim
