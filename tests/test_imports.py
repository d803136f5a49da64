"""Which package may import which: dependencies go one way, by the source, not by what happens to be loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from limits import limit
from repository import ROOT

Graph = dict[str, set[str]]

# The table of directions: a package, and what it may import of this project. `ops` and `ops.cuda` are one package.
MAY_IMPORT = {
    "kernels_cuda": set(),
    "runtime": set(),
    "examples": {"lightning_fp8"},
    "tools": set(),
    "ops": {"kernels_cuda", "runtime"},
    "metrics": {"ops"},
    "scaling": {"ops", "runtime"},
    "modules": {"ops", "runtime", "scaling"},
    "dtypes": {"modules", "ops", "runtime"},
    "conversion": {"dtypes", "modules", "ops", "runtime", "scaling"},
    "export": {"conversion", "modules", "ops", "scaling"},
    "integrations": {"conversion", "modules", "ops", "scaling"},
    "plugins": {"conversion", "dtypes", "modules", "ops", "runtime", "scaling"},
    "cli": {"conversion", "plugins", "runtime", "scaling"},
    "callbacks": {"conversion", "dtypes", "metrics", "modules", "ops", "plugins", "runtime", "scaling"},
    "lightning_fp8": {"callbacks", "conversion", "dtypes", "export", "modules", "plugins", "runtime", "scaling"},
    "tools.report": {"ops", "runtime"},
    "tools.tune": {"conversion", "kernels_cuda", "metrics", "ops", "runtime", "tools"},
    "tools.doctor": {"kernels_cuda", "ops", "plugins", "runtime", "scaling", "tools"},
    "tools.compare": {"callbacks", "cli", "plugins", "runtime", "scaling", "tools", "tools.report"},
    "__main__": {"cli", "runtime", "tools.compare", "tools.doctor", "tools.report", "tools.tune"},
}
COMMANDS = {"compare", "doctor", "report", "tune"}
IMPORTS_LIGHTNING = {"plugins", "callbacks", "cli", "tools.compare", "examples"}
# the only place that calls an operator by its name
NAMES_OPERATORS = {"lightning_fp8.ops.library"}


def module_files(root: Path) -> dict[str, Path]:
    """The files of both packages by their module names."""
    paths = [path for top in ("lightning_fp8", "kernels_cuda") for path in (root / top).rglob("*.py")]
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


@cache
def _nodes(text: str) -> list[ast.AST]:
    wanted = (ast.If, ast.Import, ast.ImportFrom, ast.Attribute)
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, wanted)]


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """What a file imports, anywhere in it, by full name: the module, or the module that a name is imported from."""
    nodes = _nodes(path.read_text(encoding="utf-8"))
    # these are not run: two files may import each other's types
    of_types = {
        id(part)
        for node in nodes
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for part in ast.walk(node)
    }
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else str(node.module) for name in full]
        else:
            continue
        yield from names if id(node) not in of_types else ()


def package_of(module: str) -> str:
    top, *inside = module.split(".")
    if top == "kernels_cuda" or not inside:
        return top
    # each command is a package; `tools` has what they share
    return ".".join(inside[:2]) if inside[0] == "tools" and inside[1:2] and inside[1] in COMMANDS else inside[0]


def file_graph(root: Path) -> Graph:
    known = module_files(root)
    return {module: {name for name in imported(path, known) if name in known} for module, path in known.items()}


def package_graph(root: Path) -> Graph:
    found: Graph = {}
    for module, names in file_graph(root).items():
        mine = found.setdefault(package_of(module), set())
        mine |= {package_of(name) for name in names} - {package_of(module)}
    return found


def floors(graph: Graph) -> list[list[str]]:
    """Nodes by the length of the longest path below them; a ValueError that names the nodes in and above a cycle."""
    found: list[list[str]] = []
    left = {node: set(below) for node, below in graph.items()}
    while left:
        floor = sorted(node for node, below in left.items() if not below & left.keys())
        if not floor:
            raise ValueError(f"a cycle among {sorted(left)}")
        found.append(floor)
        left = {node: below for node, below in left.items() if node not in floor}
    return found


def check(root: Path) -> None:
    """ValueError for any violation of a rule."""
    graph = package_graph(root)
    wrong = {f"{package} -> {name}" for package, names in graph.items() for name in names - MAY_IMPORT[package]}
    known = module_files(root)
    for module, path in known.items():
        if package_of(module) not in IMPORTS_LIGHTNING:
            wrong |= {f"{module} -> {name}" for name in imported(path, known) if name.split(".")[0] == "lightning"}
        wrong |= {f"{module} -> {name}" for name in imported(path, known) if name.split(".")[0] == "benchmarks"}
        nodes = _nodes(path.read_text(encoding="utf-8"))
        names_them = any(isinstance(node, ast.Attribute) and node.attr == "lightning_fp8" for node in nodes)
        if names_them and module not in NAMES_OPERATORS:
            wrong.add(f"{module} -> torch.ops.lightning_fp8")
    if wrong:
        raise ValueError(f"wrong imports: {sorted(wrong)}")
    floors(graph)
    floors(file_graph(root))


def test_arrows_go_one_way() -> None:
    check(ROOT)
    found = floors(package_graph(ROOT))
    for number, packages in enumerate(found):
        print(number, *packages)
    assert len(found) <= limit("tests/test_imports.py", "arrows")


def test_the_table_allows_no_more_than_is_done() -> None:
    assert package_graph(ROOT) == MAY_IMPORT
    floors(MAY_IMPORT)


FAULTS = [
    ("lightning_fp8/scaling/state.py", "from lightning_fp8.modules.base import Fp8Rows", "scaling -> modules"),
    ("lightning_fp8/ops/linear_layer.py", "def f():\n    import lightning_fp8.conversion.convert", "ops -> conversion"),
    ("lightning_fp8/modules/base.py", "from lightning_fp8 import dtypes", "modules -> dtypes"),
    ("lightning_fp8/callbacks/every_n_steps.py", "from lightning_fp8.tools import timing", "callbacks -> tools"),
    ("lightning_fp8/tools/tune/child.py", "from benchmarks.case import Case", "tune.child -> benchmarks"),
    ("lightning_fp8/export/write.py", "import lightning.pytorch as pl", "export.write -> lightning"),
    ("lightning_fp8/scaling/recipe.py", "import torch\nf = torch.ops.lightning_fp8.cast", "-> torch.ops"),
    ("kernels_cuda/load.py", "from lightning_fp8.ops.formats import E4M3", "kernels_cuda -> ops"),
    ("lightning_fp8/ops/formats.py", "from lightning_fp8.ops.reference import max_abs", "a cycle among"),
]


@pytest.mark.parametrize(("file", "line", "found"), FAULTS)
def test_a_wrong_import_is_found(file: str, line: str, found: str, tmp_path: Path) -> None:
    for path in module_files(ROOT).values():
        copied = tmp_path / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    check(tmp_path)
    with (tmp_path / file).open("a", encoding="utf-8") as opened:
        opened.write(f"\n{line}\n")
    with pytest.raises(ValueError, match=found):
        check(tmp_path)
