"""``benchmarks/passes.py`` counts the casts that run: compared with sums by hand, for the example block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from warm import run_warm

TOKENS, WIDTH, HIDDEN = 96, 64, 256
# qkv, out, up, down
INPUTS = (WIDTH, WIDTH, WIDTH, HIDDEN)
GRADIENTS = (3 * WIDTH, WIDTH, HIDDEN, WIDTH)
WEIGHTS = 3 * WIDTH * WIDTH + WIDTH * WIDTH + 2 * WIDTH * HIDDEN


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    file = tmp_path_factory.mktemp("passes") / "rows.jsonl"
    # in a separate process, which keeps the kernels that do nothing
    run_warm("-m", "benchmarks.passes", "--blocks", "example", "--out", str(file), check=True)
    found = [json.loads(line) for line in Path(file).read_text().splitlines()]
    return {(row["what"], row["micro_batches"]): row for row in found}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_casts_of_the_example(rows: dict[tuple[str, int], dict[str, Any]], micro_batches: int) -> None:
    eager, least = rows["eager", micro_batches], rows["least", micro_batches]
    assert (eager["inputs"], eager["gradients"], eager["weights"]) == (4 * micro_batches, 4 * micro_batches, 4)
    assert eager["gemms"] == least["gemms"] == 12 * micro_batches
    # both layouts of each tensor; weights are cast once
    assert eager["written"] == 2 * TOKENS * micro_batches * (sum(INPUTS) + sum(GRADIENTS)) + 2 * WEIGHTS
    # between the GEMMs of its feed-forward block there is nothing except these casts
    assert eager["hidden"] == rows["compiled", micro_batches]["hidden"] == 0
    # for backward: all inputs and weights by columns
    assert (eager["kept_inputs"], eager["kept_weights"]) == (TOKENS * sum(INPUTS), WEIGHTS)
