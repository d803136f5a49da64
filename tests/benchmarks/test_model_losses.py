"""``python -m benchmarks.model_losses``: rows of models that need no package which the tests lack."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import model_losses

MODELS = ["LlamaWeightNorm", "LlamaSpectralNorm", "Pairs"]


def test_rows_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    asked = ["--out", str(out), "--models", *MODELS, "--seeds", "1", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.model_losses", *asked])
    model_losses.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    variants = ("baseline", *model_losses.RECIPES)
    assert [(row["case"], row["variant"]) for row in rows] == [(name, one) for name in MODELS for one in variants]
    # all matrices, those too from which a weight is computed
    assert all(row["share"] == (row["variant"] != "baseline") for row in rows)
    assert len({row["loss"] for row in rows}) == len(rows)
    assert model_losses.table(rows) in capsys.readouterr().out
    assert "torch_geometric" not in sys.modules
