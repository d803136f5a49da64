from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import loss_curves


def test_losses_are_kept_and_times_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {"bf16-mixed": [3.0, 2.00004, 1.5], "fp8-delayed": [3.0, 2.25, 1.75]}
    rows = []
    for variant, of_steps in losses.items():
        (tmp_path / variant).mkdir()
        (tmp_path / variant / "measured.json").write_text(json.dumps({"losses": of_steps, "p50_ms": 1.0}))
        kept = {"variant": variant, "steps": 3, "loss": of_steps[-1], "val_loss": 2.0, "seed": 0, "command": "compare"}
        times = {"p50_ms": 1.0, "tokens_per_s": 2.0, "peak_bytes": 3, "wall_s": 4.0}
        rows.append((kept, {**kept, **times}))
    (tmp_path / "compare.jsonl").write_text("".join(json.dumps(row) + "\n" for _, row in rows))
    loss_curves.main([str(tmp_path), "--out", str(tmp_path / "curves")])
    written = [json.loads(line) for line in (tmp_path / "curves.jsonl").read_text().splitlines()]
    assert [row.pop("losses") for row in written] == [[3.0, 2.0, 1.5], [3.0, 2.25, 1.75]]
    assert written == [kept for kept, _ in rows]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    # a variant is measured again, and another one is added
    (tmp_path / "fp8-delayed").rename(tmp_path / "fp8-block")
    rows[1][1].update(variant="fp8-block", loss=1.5)
    (tmp_path / "compare.jsonl").write_text("".join(json.dumps({**row, "seed": 1}) + "\n" for _, row in rows))
    loss_curves.main([str(tmp_path), "--out", str(tmp_path / "curves")])
    found = [json.loads(line) for line in (tmp_path / "curves.jsonl").read_text().splitlines()]
    assert [(row["variant"], row["seed"], row["loss"]) for row in found] == [
        ("bf16-mixed", 1, 1.5),
        ("fp8-delayed", 0, 1.75),
        ("fp8-block", 1, 1.5),
    ]

    drawn: list[str] = []
    monkeypatch.setattr(loss_curves, "draw", lambda rows, path: drawn.extend(row["variant"] for row in rows))
    arguments = [str(tmp_path), "--out", str(tmp_path / "curves"), "--draw"]
    loss_curves.main([*arguments, "fp8-delayed"])
    assert drawn == ["fp8-delayed"]
    assert len((tmp_path / "curves.jsonl").read_text().splitlines()) == 3
    with pytest.raises(SystemExit):
        loss_curves.main([*arguments, "bf16-true"])
    assert "the rows are those of bf16-mixed, fp8-delayed, fp8-block, got bf16-true" in capsys.readouterr().err
