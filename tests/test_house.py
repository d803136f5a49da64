"""The layout of the project in numbers, with the limits of the table in CONTRIBUTING.md. `-s` prints the counts."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from limits import limit
from repository import ROOT
from torch import nn

import lightning_fp8

PACKAGE = ROOT / "lightning_fp8"


def sources(*folders: str, suffix: str = ".py") -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob(f"*{suffix}"))


def lines(*folders: str, suffix: str = ".py") -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources(*folders, suffix=suffix))


def nodes(*folders: str) -> Iterator[ast.AST]:
    for path in sources(*folders):
        yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Parameters as a caller sees them."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def schemas() -> list[list[str]]:
    """The arguments of each operator, by their names."""
    calls = (node for node in nodes("lightning_fp8/ops") if isinstance(node, ast.Call))
    texts = [ast.literal_eval(call.args[0]) for call in calls if getattr(call.func, "id", "") == "define"]
    return [re.findall(r"(\w+)(?:=[^,)]*)?[,)]", text.partition("->")[0].partition("(")[2]) for text in texts]


def rooms() -> int:
    """Packages inside the package, at any depth, and loose files."""
    return len([*PACKAGE.glob("**/__init__.py")]) - 1 + len([*PACKAGE.glob("*.py")])


def lines_of_package() -> int:
    return lines("lightning_fp8")


def lines_of_tests() -> int:
    return lines("tests")


def lines_of_benchmarks() -> int:
    return lines("benchmarks")


def lines_of_tools() -> int:
    """Of Python and JavaScript."""
    return lines("lightning_fp8/tools") + lines("lightning_fp8/tools", suffix=".js")


def long_signatures() -> int:
    """Functions with more than 8 parameters, those apart whose parameters are an operator's."""
    every = nodes("lightning_fp8", "kernels_cuda")
    of_functions = [parameters(node) for node in every if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    of_operators = schemas()
    return sum(len(names) > 8 and names not in of_operators for names in of_functions)


def public_names() -> int:
    return len(lightning_fp8.__all__)


def gemm_attributes() -> int:
    """Of the GEMM of a layer that has trained."""
    return len(vars(trained_layer().fp8[""]))


def state_attributes() -> int:
    return len(vars(lightning_fp8.scaling_state(trained_layer())))


def trained_layer() -> nn.Module:
    layer = lightning_fp8.convert(nn.Linear(16, 16))
    layer(torch.randn(16, 16)).sum().backward()
    lightning_fp8.scaling_state(layer).update()
    return layer


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


COUNTS = [
    rooms,
    lines_of_package,
    lines_of_tests,
    lines_of_benchmarks,
    lines_of_tools,
    long_signatures,
    public_names,
    gemm_attributes,
    state_attributes,
    unformatted,
    flat_tests,
]


@pytest.mark.parametrize("count", COUNTS)
def test_aims(count: Callable[[], int]) -> None:
    found, aim = count(), limit("tests/test_house.py", count.__name__)
    print(f"{count.__name__}: {found:,}, at most {aim:,}")
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
