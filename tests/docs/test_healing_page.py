"""The page on precision over time: its table matches the rows, and the rows one command."""

from __future__ import annotations

import json
from statistics import mean, stdev
from typing import Any

import pytest
from documented import commands_of, table_of
from repository import ROOT

from benchmarks.healing import FP8, SCHEDULES

PAGE, FILE = "docs/healing.md", "docs/results/healing-cpu.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in (ROOT / FILE).read_text().splitlines()]
# quantile of Student's t for five seeds
T95 = 2.7764


def excess(variant: str, key: str) -> list[float]:
    """Above the baseline in percent, by seed."""
    of = {(row["variant"], row["seed"]): row[key] for row in ROWS}
    return [100 * (of[variant, seed] / of["baseline", seed] - 1) for seed in range(5)]


def test_every_row_is_of_one_command_and_thread() -> None:
    assert {(row["variant"], row["seed"]) for row in ROWS} == {
        (variant, seed) for variant in ("baseline", *SCHEDULES) for seed in range(5)
    }
    assert len(ROWS) == 5 * (1 + len(SCHEDULES))
    for row in ROWS:
        assert row["command"] == f"python -m benchmarks.healing --out {FILE}"
        assert row["threads"] == 1
        assert "dirty" not in row["commit"]
    assert f"OMP_NUM_THREADS=1 {ROWS[0]['command']}" in commands_of(PAGE)


@pytest.mark.parametrize(("key", "title"), [("loss", "training loss"), ("val_loss", "validation loss")])
def test_the_table(key: str, title: str) -> None:
    lines = {line["run"]: line for line in table_of(PAGE, "run", f"{title}: excess")}
    assert lines.keys() == SCHEDULES.keys()
    gap = mean(excess(FP8, key))
    for variant, line in lines.items():
        values = excess(variant, key)
        assert line[f"{title}: excess"] == f"{mean(values):+.3f} ± {T95 * stdev(values) / 5**0.5:.3f}"
        assert line[f"{title}: recovered"] == ("-" if variant == FP8 else f"{1 - mean(values) / gap:.0%}")
