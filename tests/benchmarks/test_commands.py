"""The commands of ``benchmarks/`` apart from the suites: bytes that loading and casting take, as by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from warm import run_warm

from benchmarks import loading

# of `benchmarks.passes`; the widths of qkv, out, up, down
TOKENS, WIDTH, HIDDEN = 96, 64, 256
INPUTS = (WIDTH, WIDTH, WIDTH, HIDDEN)
GRADIENTS = (3 * WIDTH, WIDTH, HIDDEN, WIDTH)
WEIGHTS = 3 * WIDTH * WIDTH + WIDTH * WIDTH + 2 * WIDTH * HIDDEN


def rows_in(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


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


@pytest.mark.slow
def test_passes_counts_the_casts_of_the_example_as_by_hand(tmp_path: Path) -> None:
    # in a separate process, which keeps the kernels that do nothing
    run_warm("-m", "benchmarks.passes", "--blocks", "example", "--out", str(tmp_path / "rows"), check=True)
    rows = {(row["what"], row["micro_batches"]): row for row in rows_in(tmp_path / "rows")}
    for batches in (1, 2):
        eager, least = rows["eager", batches], rows["least", batches]
        assert (eager["inputs"], eager["gradients"], eager["weights"]) == (4 * batches, 4 * batches, 4)
        assert eager["gemms"] == least["gemms"] == 12 * batches
        # both layouts of each tensor; weights are cast once
        assert eager["written"] == 2 * TOKENS * batches * (sum(INPUTS) + sum(GRADIENTS)) + 2 * WEIGHTS
        # between the GEMMs of its feed-forward block there is nothing except these casts
        assert eager["hidden"] == rows["compiled", batches]["hidden"] == 0
        # for backward: all inputs and weights by columns
        assert (eager["kept_inputs"], eager["kept_weights"]) == (TOKENS * sum(INPUTS), WEIGHTS)
