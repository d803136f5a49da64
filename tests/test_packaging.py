"""The wheel: complete, installable in a clean environment, and able to train."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from repository import ROOT

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
def test_wheel_trains_two_steps_in_a_clean_environment(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    wheel = next(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    assert files("lightning_fp8") | files("kernels_cuda") <= packed
    assert {name.split("/")[0].split("-")[0] for name in packed} == {"lightning_fp8", "kernels_cuda"}
    assert "lightning_fp8/py.typed" in packed
    assert sum(name.endswith(".cu") for name in packed) >= 3
    # A clean environment; its dependencies, gigabytes of them, are taken from the current one.
    venv.create(tmp_path / "clean", with_pip=False)
    python = tmp_path / "clean" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--quiet", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    lent = [path for path in sys.path if path.endswith("site-packages")]
    environment = next((tmp_path / "clean").glob("lib/python*/site-packages"))
    (environment / "lent.pth").write_text("\n".join(lent))
    run = subprocess.run(
        [str(python), "-I", "-c", TWO_STEPS], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert f"from {environment}" in run.stdout


def test_version_and_changelog_agree() -> None:
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == lightning_fp8.__version__
