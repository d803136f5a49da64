"""The README's code runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
YAML = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("position", range(len(PYTHON)))
def test_python(position: int, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PYTHON[position]], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize("position", range(len(YAML)))
def test_yaml(position: int, tmp_path: Path) -> None:
    parsed = yaml.safe_load((ROOT / "configs" / "tiny_gpt_fp8.yaml").read_text())
    shown = yaml.safe_load(YAML[position])["trainer"]
    if "plugins" in shown:
        parsed["trainer"].pop("precision")
    parsed["trainer"].update(shown, max_steps=2, val_check_interval=1, limit_val_batches=1, accelerator="cpu")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(parsed))
    run = subprocess.run(
        [sys.executable, "-m", "lightning_fp8", "fit", "--config", "config.yaml"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]


def test_there_is_code_to_run() -> None:
    assert len(PYTHON) >= 2
    assert len(YAML) >= 2


def test_files_that_it_names_exist() -> None:
    for path in re.findall(r"\]\(((?!http|#)[^)]+)\)", README):
        assert (ROOT / path).exists(), path
