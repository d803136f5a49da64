"""What ``import lightning_fp8`` imports, and that what it does not is there when it is used."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from repository import ROOT
from torch import nn
from warm import run_warm

import lightning_fp8
import lightning_fp8.plugins
from lightning_fp8 import DelayedScaling, convert

# the packages of ours that register precision strings, recipes and operators
REGISTERING = {"core", "ops", "plugins", "runtime", "scalings"}
PLUGINS = {"", ".front_ends", ".registration", ".settings"}
NEW_MODULES = """
import json, runpy, sys
import lightning
before = set(sys.modules)
{program}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
HELP = """
sys.argv = ["lightning-fp8", "--help"]
runpy.run_module("lightning_fp8", run_name="__main__")
"""


def type_imports(package: str) -> dict[str, str]:
    """The names that type checkers see, with the module of each, written from the package on."""
    tree = ast.parse(Path(import_module(package).__file__ or "").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {name.name: (node.module or "").removeprefix(f"{package}.") for node in imports for name in node.names}


def table(package: str) -> dict[str, str]:
    """The names that are imported when they are first used, likewise."""
    tree = ast.parse(Path(import_module(package).__file__ or "").read_text(encoding="utf-8"))
    (call,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "_lazy_names"
    )
    homes = ast.literal_eval(call.args[1])
    return {name: home for home, names in homes.items() for name in names}


@pytest.mark.parametrize("program", ["import lightning_fp8", HELP])
def test_only_what_registers_is_imported(program: str) -> None:
    command = [sys.executable, "-c", NEW_MODULES.format(program=program)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    new = json.loads(ran.stdout.splitlines()[-1])
    # the FLOP counter has not been imported by every version of Lightning
    of_others = {name for name in new if name.partition(".")[0] not in ("kernels_cuda", "lightning_fp8")}
    assert of_others <= {"torch.utils.flop_counter", "torch.utils.module_tracker"}
    ours = [name.split(".", 2) for name in new if name.startswith("lightning_fp8.")]
    assert {package for _, package, *_ in ours} == REGISTERING
    plugins = {name.removeprefix("lightning_fp8.plugins") for name in new if name.startswith("lightning_fp8.plugins")}
    assert plugins == PLUGINS


def test_dir_shows_the_public_names_alone() -> None:
    assert dir(lightning_fp8) == sorted([*lightning_fp8.__all__, "__version__"])


@pytest.mark.parametrize("package", ["lightning_fp8", "lightning_fp8.plugins"])
def test_type_checkers_and_python_see_the_same_names(package: str) -> None:
    module = import_module(package)
    assert type_imports(package) == table(package)
    assert table(package).keys() <= {*module.__all__}
    assert len(module.__all__) == len({*module.__all__})
    for name, home in table(package).items():
        assert getattr(module, name) is getattr(import_module(f"{package}.{home}"), name)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'lightning_fp8' has no attribute 'Fp8Monitr'"):
        lightning_fp8.Fp8Monitr  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Fp8Monitr'"):
        from lightning_fp8 import Fp8Monitr  # noqa: F401
    assert not hasattr(lightning_fp8, "__wrapped__")


PROGRAMS = {
    "star": "from lightning_fp8 import *; assert Fp8Monitor and describe and 'warnings' not in globals()",
    "package": "import lightning_fp8; assert lightning_fp8.metrics.SQNR and lightning_fp8.conversion.convert.convert",
    "short name": """
import lightning_fp8
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
cli = LightningCLI(BoringModel, run=False, save_config_callback=None, args=[
    "--trainer.callbacks=Fp8Monitor", "--trainer.callbacks+=lightning_fp8.DtypeAudit",
    "--trainer.plugins=Fp8Precision"])
assert isinstance(cli.trainer.precision_plugin, lightning_fp8.Fp8Precision)
assert [*map(type, cli.trainer.callbacks)][:2] == [lightning_fp8.Fp8Monitor, lightning_fp8.DtypeAudit]
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_names_are_there_when_they_are_used(name: str) -> None:
    ran = run_warm("-c", PROGRAMS[name])
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_checkpoints_and_programs_load_after_the_import_alone(tmp_path: Path) -> None:
    torch.save({"hyper_parameters": {"recipe": DelayedScaling(margin=1)}}, tmp_path / "model.ckpt")
    model = convert(nn.Sequential(nn.Linear(64, 32))).eval()
    x = torch.randn(16, 64)
    with torch.no_grad():
        torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
        torch.save((x, model(x)), tmp_path / "values.pt")
    program = f"""
import torch, lightning_fp8
recipe = torch.load({str(tmp_path / "model.ckpt")!r}, weights_only=True)["hyper_parameters"]["recipe"]
assert recipe == lightning_fp8.DelayedScaling(margin=1)
x, y = torch.load({str(tmp_path / "values.pt")!r})
program = torch.export.load({str(tmp_path / "model.pt2")!r}).module()
with torch.no_grad():
    assert torch.equal(program(x), y)
"""
    ran = run_warm("-c", program)
    assert ran.returncode == 0, ran.stderr[-3000:]
