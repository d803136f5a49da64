"""The wheel: complete, and able to train without the checkout."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from repository import ROOT
from warm import run_warm

import lightning_fp8

TWO_STEPS = """
import lightning.pytorch as pl, torch, lightning_fp8
from lightning_fp8.examples import ByteGPT, StdlibText
trainer = pl.Trainer(precision="fp8-delayed", max_steps=2, accelerator="cpu", devices=1, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False, limit_val_batches=1)
model = ByteGPT(layers=1, width=32, heads=2, context=32)
trainer.fit(model, StdlibText(context=32, batch_size=4, max_bytes=100_000))
assert trainer.global_step == 2
assert (lightning_fp8.scaling_state(model).amax_history > 0).sum(0).unique().tolist() == [2]
print("from", lightning_fp8.__file__)
"""


def files(package: str) -> set[str]:
    found = (path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(ROOT)) for path in found}


@pytest.mark.slow
def test_wheel_is_complete_and_trains_two_steps(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    wheel = next(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        archive.extractall(tmp_path / "clean")
    assert files("lightning_fp8") | files("kernels_cuda") <= packed
    assert {name.split("/")[0].split("-")[0] for name in packed} == {"lightning_fp8", "kernels_cuda"}
    assert "lightning_fp8/py.typed" in packed
    assert sum(name.endswith(".cu") for name in packed) >= 3
    assert "lightning-fp8 = lightning_fp8.__main__:run" in next(tmp_path.rglob("entry_points.txt")).read_text()
    # an index shows the README, where links that are relative lead nowhere
    shown = next(tmp_path.rglob("METADATA")).read_text(encoding="utf-8").partition("\n# lightning_fp8\n")[2]
    assert shown
    assert re.findall(r"\]\((?!https://)[^)]*\)", shown) == []
    run = run_warm("-c", TWO_STEPS, cwd=tmp_path / "clean")
    assert run.returncode == 0, run.stderr[-3000:]
    assert f"from {tmp_path / 'clean'}" in run.stdout


def test_classifiers_name_the_python_versions_of_ci() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    named = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project))
    assert named == set(re.findall(r'python: "(3\.\d+)"', ci))
    oldest = re.search(r'^requires-python = ">=(.+)"', project, re.MULTILINE)
    assert oldest is not None
    assert oldest[1] == min(named, key=lambda version: int(version.partition(".")[2]))


def test_version_and_changelog_agree() -> None:
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == lightning_fp8.__version__
