"""`python -m benchmarks.loading`: a model on the meta device takes its own memory and at most that of one file."""

from __future__ import annotations

import json
import subprocess
import sys

from repository import ROOT


def test_peak_memory_of_loading() -> None:
    command = [sys.executable, "-m", "benchmarks.loading", "--layers", "8", "--shards", "2"]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    frozen, masters = map(json.loads, run.stdout.splitlines())
    assert frozen["parameters"] == masters["parameters"] == 8 * 2048**2
    assert frozen["model_bytes"] <= 1.02 * frozen["parameters"]
    assert masters["model_bytes"] == 2 * masters["parameters"]
    # masters take fp32 values of single weights on top, and how much of it stays resident varies
    assert frozen["model_bytes"] < frozen["peak_bytes"] <= frozen["model_bytes"] + frozen["largest_file_bytes"]
