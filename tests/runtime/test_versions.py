"""The oldest torch that is supported: what pyproject.toml says is what an import refuses."""

from __future__ import annotations

import re

from repository import ROOT
from warm import run_warm

from lightning_fp8.runtime.torch_version import OLDEST_TORCH

OLD_TORCH = """
import sys, torch
torch.__version__ = torch.torch_version.TorchVersion("{version}")
# as in a torch that old
sys.modules["torch.distributed.tensor"] = None
import lightning_fp8
"""


def test_an_older_torch_is_refused_by_name() -> None:
    assert re.findall(r'^    "torch>=([\d.]+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE) == [OLDEST_TORCH]
    major, minor = OLDEST_TORCH.split(".")
    version = f"{major}.{int(minor) - 1}.1"
    run = run_warm("-c", OLD_TORCH.format(version=version))
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert f"torch {OLDEST_TORCH}" in last
    assert f"torch {version}" in last
