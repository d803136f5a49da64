from __future__ import annotations

import json
from pathlib import Path

from benchmarks import loss_curves


def test_losses_are_kept_and_times_are_not(tmp_path: Path) -> None:
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
