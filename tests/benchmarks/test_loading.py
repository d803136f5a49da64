"""`python -m benchmarks.loading`: a model on the meta device takes its own memory and at most that of one file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from repository import ROOT

from benchmarks import loading


def test_peak_memory_of_loading(tmp_path: Path) -> None:
    # what stays resident besides varies, and is less than a file of this size
    loading.write(tmp_path, 48, 2)
    # in a new process: this one has memory that was used before
    command = [sys.executable, "-m", "benchmarks.loading", "--measure", "frozen", "--folder", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    frozen = json.loads(run.stdout)
    assert frozen["parameters"] == 48 * 2048**2
    assert frozen["model_bytes"] <= 1.02 * frozen["parameters"]
    assert frozen["model_bytes"] < frozen["peak_bytes"] <= frozen["model_bytes"] + frozen["largest_file_bytes"]
    loading.write(tmp_path, 2, 2)
    masters = loading.measure(tmp_path, frozen=False)
    assert masters["model_bytes"] == 2 * masters["parameters"] == 2 * 2 * 2048**2
