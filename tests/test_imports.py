"""The directions of imports: `make lint` keeps them, by the contracts in pyproject.toml."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from repository import ROOT

# the only file that calls operators by their names
NAMES_OPERATORS = "lightning_fp8/ops/library.py"


def names_operators(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return any(isinstance(node, ast.Attribute) and node.attr == "lightning_fp8" for node in nodes)


def test_arrows_go_one_way() -> None:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_file_calls_operators_by_name() -> None:
    files = [path for top in ("lightning_fp8", "kernels_cuda") for path in (ROOT / top).rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in files if names_operators(path)] == [NAMES_OPERATORS]


def test_an_operator_called_by_name_is_found(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("import torch\nf = torch.ops.lightning_fp8.cast\n", encoding="utf-8")
    assert names_operators(file)
