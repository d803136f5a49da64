"""`python -m benchmarks.loading`: a model on the meta device takes its own memory and at most that of one file."""

from __future__ import annotations

import json
import subprocess
import sys

from repository import ROOT


def test_peak_memory_of_loading() -> None:
    command = [sys.executable, "-m", "benchmarks.loading", "--layers", "64", "--shards", "2"]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    frozen, masters = map(json.loads, run.stdout.splitlines())
    assert frozen["parameters"] == masters["parameters"] == 64 * 2048**2
    assert frozen["model_bytes"] <= 1.02 * frozen["parameters"]
    assert masters["model_bytes"] == 2 * masters["parameters"]
    for row in (frozen, masters):
        assert row["model_bytes"] < row["peak_bytes"] <= row["model_bytes"] + row["largest_file_bytes"]
