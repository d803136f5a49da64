"""The benchmark of healing: its rows, and the share that it computes from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import healing
from benchmarks.recipe_cases import Run
from benchmarks.recipes import recipe_of
from lightning_fp8 import PrecisionSchedule

STEPS = 20


def test_variants_that_share_their_first_steps_are_runs_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    healing.main(["--out", str(out), "--seeds", "1", "--steps", str(STEPS)])
    before = out.read_text()
    rows = {row["variant"]: row for row in map(json.loads, before.splitlines())}
    assert list(rows) == ["baseline", *healing.SCHEDULES]
    schedules = {"baseline": None, "last tenth with fprop in bf16": {0.9: {"fprop": "bf16"}}}
    for variant, schedule in schedules.items():
        run = Run(healing.of_steps(STEPS), recipe_of("fp8-delayed" if schedule else "baseline"), 0)
        run.advance(STEPS, schedule and PrecisionSchedule(schedule))
        assert {key: rows[variant][key] for key in run.result()} == run.result()
    assert len({row["val_loss"] for row in rows.values()}) == len(rows)
    # the last step's precision changes no loss before it, and hardly the training
    assert rows[healing.LAST_STEP]["loss"] == pytest.approx(rows[healing.FP8]["loss"], rel=1e-3)
    # rows that are there are not measured again
    healing.main(["--out", str(out), "--seeds", "1", "--steps", str(STEPS)])
    assert out.read_text() == before


def test_the_share_that_is_recovered() -> None:
    losses = {"baseline": (2.0, 4.0), healing.FP8: (2.1, 4.4), "last tenth in bf16": (2.05, 4.0)}
    rows = [
        {"case": healing.CASE, "variant": variant, "seed": seed, "loss": loss, "val_loss": loss}
        for variant, both in losses.items()
        for seed, loss in enumerate(both)
    ]
    # 5% and 10% above the baseline, then 2.5% and 0%
    assert healing.recovered(rows, "last tenth in bf16", "loss") == pytest.approx(1 - 1.25 / 7.5)
    assert healing.recovered(rows, healing.FP8, "loss") == 0
    (line,) = (line for line in healing.table(rows).splitlines() if "last tenth" in line)
    # 12.7062 times the standard deviation of two values by the root of two
    assert line.replace(" ", "").startswith("|lasttenthinbf16|+1.250±15.883|83%|")
