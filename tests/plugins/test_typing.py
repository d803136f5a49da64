"""Type checkers take our precision strings, where a Trainer's annotation has only Lightning's own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import lightning.fabric as lf
import lightning.pytorch as pl
import pytest
from repository import ROOT

import lightning_fp8
from lightning_fp8 import Fp8Precision
from lightning_fp8.plugins.settings import PRECISIONS


def test_it_is_the_string() -> None:
    assert {*get_args(get_type_hints(lightning_fp8.precision)["name"])} == {*PRECISIONS}
    trainer = pl.Trainer(precision=lightning_fp8.precision("fp8-block"), barebones=True, accelerator="cpu")
    assert isinstance(trainer.precision_plugin, Fp8Precision)
    fabric = lf.Fabric(precision=lightning_fp8.precision("fp8-delayed"), accelerator="cpu")
    assert trainer.precision == "fp8-block"
    assert fabric._precision.precision == "fp8-delayed"
    with pytest.raises(
        ValueError, match=r"`precision` must be one of .*, got 'fp8-delyed'. Did you mean 'fp8-delayed'"
    ):
        lightning_fp8.precision("fp8-delyed")  # type: ignore[arg-type]


@pytest.mark.slow
def test_mypy_takes_the_readme_with_it(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet = re.findall(r"^```python\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)[0]
    (instead,) = re.findall(r"`(precision=lightning_fp8\.precision\([^`]*\))`", readme)
    assert 'precision="fp8-delayed"' in snippet
    (tmp_path / "plain.py").write_text(snippet)
    (tmp_path / "typed.py").write_text(snippet.replace('precision="fp8-delayed"', instead))
    (tmp_path / "misspelt.py").write_text(
        snippet.replace('precision="fp8-delayed"', instead.replace("delayed", "delyed"))
    )
    # strict, with the settings and in the folder of `make lint`, whose cache it takes: without it, this takes minutes
    command = [sys.executable, "-m", "mypy", *(str(path) for path in sorted(tmp_path.glob("*.py")))]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    wrong = re.findall(r"(misspelt|plain|typed)\.py:\d+: error: .*\[([\w-]+)\]$", ran.stdout, re.MULTILINE)
    assert sorted(wrong) == [("misspelt", "arg-type"), ("plain", "arg-type")], ran.stdout + ran.stderr
