"""The layout of the project in numbers, with the limits of the table in CONTRIBUTING.md. `-s` prints the counts."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from limits import limit
from repository import ROOT

PACKAGE = ROOT / "lightning_fp8"


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def lines(*folders: str) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources(*folders))


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters as a caller counts them."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def rooms() -> int:
    """Packages inside the package, at any depth, and loose files."""
    return len([*PACKAGE.glob("**/__init__.py")]) - 1 + loose_files()


def loose_files() -> int:
    return len([*PACKAGE.glob("*.py")])


def share_of_tooling() -> float:
    """The tools' and examples' share of the package's lines, in percent."""
    return 100 * lines("lightning_fp8/tools", "lightning_fp8/examples") / lines("lightning_fp8")


def long_signatures() -> int:
    """Functions with more than 12 parameters."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in sources("lightning_fp8", "kernels_cuda"))
    found = (node for tree in trees for node in ast.walk(tree))
    return sum(parameters(node) > 12 for node in found if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def unformatted() -> int:
    """Statements that are exempt from the formatter."""
    texts = (path.read_text(encoding="utf-8") for path in sources("lightning_fp8", "kernels_cuda", "benchmarks"))
    return sum(len(re.findall(r"#\s*fmt:\s*(?:skip|off)", text)) for text in texts)


def flat_tests() -> int:
    """Test modules that are in no folder."""
    return len([*(ROOT / "tests").glob("test_*.py")])


def shown_tree() -> dict[str, list[str]]:
    """The package's folders in CONTRIBUTING.md, and the files and folders that it names in them."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = text[text.index("\nlightning_fp8/\n") : text.index("\ntests/ ")]
    found = {}
    # "ops/  operand  library: values", over several lines; "plugins/  callbacks/  the only ones"
    for part in re.split(r"\n +(?=\w+/)", tree)[1:]:
        names, colon, _ = re.sub(r"\n +->.*", "", part).partition(":")
        folders = re.findall(r"(\w+)/(?= |$)", names if colon else part)
        found |= dict.fromkeys(folders, names.split()[1:] if colon else [])
    return found


@pytest.mark.parametrize("count", [rooms, loose_files, share_of_tooling, long_signatures, unformatted, flat_tests])
def test_aims(count: Callable[[], float]) -> None:
    found, aim = count(), limit("tests/test_house.py", count.__name__)
    print(f"{count.__name__}: {found:.4g}, at most {aim}")
    assert found <= aim


def test_the_tree_is_as_shown() -> None:
    shown = shown_tree()
    folders = {path.parent.name: path.parent for path in PACKAGE.glob("*/**/__init__.py")}
    commands = {path.parent.name for path in PACKAGE.glob("tools/*/__init__.py")}
    assert shown.keys() == folders.keys() - commands
    assert sum(map(len, shown.values())) > 50
    for folder, names in shown.items():
        missing = {*names} - {path.stem for path in folders[folder].iterdir()}
        assert not missing, f"CONTRIBUTING.md shows them in {folder}/"
