"""``benchmarks/growth.py``: each operation is measured once for each number of layers."""

from __future__ import annotations

import json
from pathlib import Path

from warm import run_warm


def test_a_row_for_each_number_of_layers(tmp_path: Path) -> None:
    run_warm("-m", "benchmarks.growth", "--layers", "2", "3", "--out", str(tmp_path / "rows"), check=True)
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["layers"] for row in rows] == [2, 3]
    for row in rows:
        assert len(row["us_per_layer"]) == 8
        assert min(row["us_per_layer"].values()) > 0
        assert {"cpu", "commit", "command"} <= row.keys()
