"""Versions of Python, torch and Lightning: every place that names them agrees with pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from repository import ROOT

from lightning_fp8.runtime.torch_version import OLDEST_TORCH

PYPROJECT = (ROOT / "pyproject.toml").read_text()
# the Python versions among the package's classifiers
PYTHONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
OLD_TORCH = """
import sys, torch
torch.__version__ = torch.torch_version.TorchVersion("{version}")
# as in a torch that old
sys.modules["torch.distributed.tensor"] = None
import lightning_fp8
"""


def oldest(package: str) -> str:
    """The lower bound of a dependency in pyproject.toml."""
    (requirement,) = re.findall(rf'^    "({package}[><=!][^"]*)",$', PYPROJECT, re.MULTILINE)
    (bound,) = (one.version for one in Requirement(requirement).specifier if one.operator == ">=")
    return bound


def test_pages_name_the_oldest_versions() -> None:
    said = (
        f"Python {PYTHONS[0]} or newer, torch {oldest('torch')} or newer and Lightning {oldest('lightning')} or newer"
    )
    for page in ("README.md", "docs/faq.md"):
        assert said in " ".join((ROOT / page).read_text().split()), page


def test_an_older_torch_is_refused_by_name() -> None:
    assert oldest("torch") == OLDEST_TORCH
    major, minor = OLDEST_TORCH.split(".")
    version = f"{major}.{int(minor) - 1}.1"
    run = subprocess.run(
        [sys.executable, "-c", OLD_TORCH.format(version=version)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        f"ImportError: lightning_fp8 needs torch {OLDEST_TORCH} or newer, and this is torch {version}. "
        "Run `pip install --upgrade torch`."
    )


def unsupported() -> Iterator[str]:
    """Constraints whose package, as installed here, does not run on a Python version that they apply to."""
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        constraint = Requirement(line)
        try:
            installed = metadata(constraint.name)
        except PackageNotFoundError:
            continue
        if not constraint.specifier.contains(installed["Version"]):
            continue
        for python in PYTHONS:
            applies = constraint.marker is None or constraint.marker.evaluate({"python_version": python})
            if applies and not SpecifierSet(installed.get("Requires-Python") or "").contains(f"{python}.99"):
                yield f"{line}: not for Python {python}"


def test_every_constraint_can_be_installed_on_the_pythons_it_applies_to() -> None:
    assert [*unsupported()] == []
