"""The directions of imports: `make lint` keeps them, by the contracts in pyproject.toml."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

from limits import limit
from repository import ROOT

# the only file that calls operators by their names
NAMES_OPERATORS = "lightning_fp8/ops/library.py"


def names_operators(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return any(isinstance(node, ast.Attribute) and node.attr == "lightning_fp8" for node in nodes)


def levels() -> dict[str, int]:
    """The length of the longest path of imports below each package, command and loose file."""
    # not on a machine that only runs the tests for a GPU
    import grimp

    graph = grimp.build_graph("lightning_fp8", "kernels_cuda", exclude_type_checking_imports=True)
    packages = [path.parent.relative_to(ROOT) for path in (ROOT / "lightning_fp8").glob("**/__init__.py")]
    for name in ("kernels_cuda", *(".".join(package.parts) for package in packages)):
        # `tools` has the commands, and what they share
        if name in graph.modules and name not in ("lightning_fp8", "lightning_fp8.tools"):
            graph.squash_module(name)

    @cache
    def level(module: str) -> int:
        return 1 + max(map(level, graph.find_modules_directly_imported_by(module) - {module}), default=-1)

    return {module: level(module) for module in sorted(graph.modules)}


def test_arrows_go_one_way() -> None:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = levels()
    count = 1 + max(found.values())
    for number in range(count):
        print(number, *(module for module, level in found.items() if level == number))
    assert found["kernels_cuda"] == 0
    assert found["lightning_fp8.examples"] == count - 1
    assert count <= limit("tests/test_imports.py", "arrows")


def test_one_file_calls_operators_by_name() -> None:
    files = [path for top in ("lightning_fp8", "kernels_cuda") for path in (ROOT / top).rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in files if names_operators(path)] == [NAMES_OPERATORS]


def test_an_operator_called_by_name_is_found(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("import torch\nf = torch.ops.lightning_fp8.cast\n", encoding="utf-8")
    assert names_operators(file)
