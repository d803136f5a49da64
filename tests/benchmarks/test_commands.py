"""The commands of ``benchmarks/`` apart from the suites: bytes that loading and casting take, as by hand."""

from __future__ import annotations

import json
from pathlib import Path

from warm import run_warm

from benchmarks import loading


def test_loading_peaks_at_the_model_and_one_file(tmp_path: Path) -> None:
    # in another process: this one has memory that was used before. What stays resident besides is less than such a file
    loading.write(tmp_path, 20, 2)
    ran = run_warm("-m", "benchmarks.loading", "--measure", "frozen", "--folder", str(tmp_path), check=True)
    frozen = json.loads(ran.stdout)
    assert frozen["parameters"] == 20 * 2048**2
    assert frozen["model_bytes"] <= 1.02 * frozen["parameters"]
    assert frozen["model_bytes"] < frozen["peak_bytes"] <= frozen["model_bytes"] + frozen["largest_file_bytes"]
    loading.write(tmp_path, 2, 2)
    masters = loading.measure(tmp_path, frozen=False)
    assert masters["model_bytes"] == 2 * masters["parameters"] == 2 * 2 * 2048**2
