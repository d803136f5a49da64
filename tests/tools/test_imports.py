"""Arrows go one way: the tools and the benchmarks import the package, which does without them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from repository import ROOT

PACKAGE = ROOT / "lightning_fp8"


def imported(source: str) -> set[str]:
    """All modules and names that a source imports, by their whole path."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def under(names: set[str], package: str) -> set[str]:
    return {name for name in names if f"{name}.".startswith(f"{package}.")}


def test_imports_are_found_however_they_are_written() -> None:
    for source in (
        "import lightning_fp8.tools.timing",
        "from lightning_fp8 import tools",
        "from lightning_fp8.tools import timing",
        "def later():\n    from lightning_fp8.tools.timing import release",
    ):
        assert under(imported(source), "lightning_fp8.tools"), source
    assert not under(imported("from lightning_fp8.toolsmith import x"), "lightning_fp8.tools")


@pytest.mark.parametrize("package", ["lightning_fp8", "kernels_cuda"])
def test_nothing_else_in_the_package_imports_tools_or_benchmarks(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 5
    for path in files:
        names = imported(path.read_text(encoding="utf-8"))
        assert not under(names, "benchmarks"), path
        if path != PACKAGE / "__main__.py" and PACKAGE / "tools" not in path.parents:
            assert not under(names, "lightning_fp8.tools"), path


def test_of_the_tools_compare_alone_imports_callbacks() -> None:
    users: set[Path] = set()
    for path in (PACKAGE / "tools").rglob("*.py"):
        if under(imported(path.read_text(encoding="utf-8")), "lightning_fp8.callbacks"):
            users.add(path.parent)
    assert users == {PACKAGE / "tools" / "compare"}
