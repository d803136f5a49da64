"""``python -m lightning_fp8 compare``: which precisions run, with which settings, and which of them is recommended."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling
from lightning_fp8.scalings.recipe import as_recipe
from lightning_fp8.tools.compare import command
from lightning_fp8.tools.compare.advice import advise, in_short, worse_loss
from lightning_fp8.tools.compare.command import main
from lightning_fp8.tools.compare.variants import plugin_settings

THREE = ["bf16-mixed", "bf16-true", "fp8-delayed"]


def test_plugin_settings_and_recipes() -> None:
    own = {"recipe": {"margin": 1}, "ignore_modules": ["a"], "keep_fp32": ["b"], "param_dtype": "bfloat16",
           "dtype_mismatch": "warn", "frozen_weights": "fp8"}  # fmt: skip
    for_all = {"keep_fp32": ["b"], "dtype_mismatch": "warn"}
    assert plugin_settings("bf16-mixed", own) == plugin_settings("bf16-true", own) == for_all
    assert plugin_settings("32-true", own) == {}
    assert plugin_settings("fp8-delayed", own) == {**own, "recipe": DelayedScaling(margin=1).as_dict()}
    delayed, current = {"margin": 1}, {"precision": "fp8-current", "margin": 2}
    for variant, recipe, expected in (
        ("fp8-current", current, CurrentScaling(margin=2)),
        ("fp8-delayed", current, DelayedScaling()),
        # named fields come before the user's
        ("fp8-delayed,amax_history_len=4,reduce_amax=False", delayed, DelayedScaling(1, "HYBRID", 4, "max", False)),
        ("fp8-block,power_of_2_scales=true", delayed, BlockScaling(power_of_2_scales=True)),
    ):
        assert as_recipe(plugin_settings(variant, {"recipe": recipe})["recipe"]) == expected


# whether there is a GPU, and bf16 products are emulated; the precisions named -> those that run, and the baseline
MACHINES = {
    "with bf16 products": (False, False, [], THREE, "bf16-mixed"),
    "without": (False, True, [], ["32-true", "fp8-delayed"], "32-true"),
    "asked for no fp32": (False, True, ["bf16-mixed", "fp8-delayed"], None, "bf16-mixed"),
    "fp32 with bf16 products": (False, False, ["32-true", "bf16-mixed"], None, "bf16-mixed"),
    "a GPU, whatever its CPU": (True, True, [], THREE, "bf16-mixed"),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_what_runs_where_bf16_products_are_emulated(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_gpu, emulated, named, expected, baseline = MACHINES[machine]
    ran = []

    def run(variant: str, folder: Path, steps: int, warmup: int, fit: Any) -> dict[str, Any]:
        ran.append((variant, steps))
        # 2% worse than the others
        loss = 2.04 if variant == "fp8-delayed" else 2.0
        found = row(variant, 1.0, gpu=None, loss=loss, losses=[3.0, loss], device="cpu", seed=0, left_out=[])
        return {**found, "warmup": warmup}

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "emulates_bf16", lambda: emulated)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    precisions = ["--precisions", *named] if named else []
    config = tmp_path / "tiny.yaml"
    config.write_text("trainer: {accelerator: auto}")
    main(["--config", str(config), "--out", str(tmp_path), *precisions])
    assert ran == [(variant, 200 if has_gpu else 30) for variant in expected or named]
    written = [json.loads(line) for line in (tmp_path / "compare.jsonl").read_text().splitlines()]
    assert [row["baseline"] for row in written] == [baseline] * len(ran)
    printed = capsys.readouterr().out
    assert ("This CPU emulates bf16 products." in printed) == (emulated and not has_gpu)
    assert ("Not fp8-delayed: " in printed) == ("fp8-delayed" in (expected or named))
    # for the GPU that the user will train on
    assert "Recommended until measured on a GPU: bf16-mixed." in printed
    # arguments override the configuration
    ran.clear()
    main(["--config", str(config), "--out", str(tmp_path), "--precisions", "32-true", "--trainer.accelerator=cpu"])
    assert ran == [("32-true", 30)]


# advice


def test_in_short() -> None:
    base = row("bf16-mixed", 10.0)
    fp8 = row("fp8-delayed", 8.0, peak=900, loss=2.01, verdict="FP8: healthy (24 layers, 200 steps)")
    assert in_short([base, fp8]) == (
        "Beside bf16-mixed, fp8-delayed has a loss of 2.0100 (+0.5%), 8.00 ms a step (-20.0%),"
        " 900.0 MiB at the peak (-10.0%), FP8: healthy (24 layers, 200 steps)."
    )
    on_cpu = in_short([base, row("bf16-true", 10.0, gpu=None, loss=None), {"variant": "fp8-block", "error": "no"}])
    assert on_cpu == (
        "Beside bf16-mixed, bf16-true has 10.00 ms a step on this CPU (+0.0%), 1,000.0 MiB of state (+0.0%)."
    )
    assert in_short([base]) == in_short([fp8]) == in_short([]) == ""


def row(variant: str, milliseconds: float, peak: int = 1000, **more: Any) -> dict[str, Any]:
    return {
        "variant": variant, "gpu": "H100", "steps": 200, "p20_ms": 0.99 * milliseconds, "p50_ms": milliseconds,
        "p80_ms": 1.01 * milliseconds, "peak_bytes": peak << 20, "state_bytes": peak << 20, "loss": 2.0,
        "val_loss": 2.0, "batches": "ab", **more,
    }  # fmt: skip


def recommended(*rows: dict[str, Any]) -> str | None:
    found = re.search(r"^Recommended: (\S+)\. ", "\n".join(advise(rows)), re.MULTILINE)
    return found and found[1]


def test_on_a_gpu_the_fastest_whose_loss_passes() -> None:
    mixed, fp8, true = row("bf16-mixed", 10), row("fp8-delayed", 7), row("bf16-true", 8)
    assert recommended(mixed, true, fp8) == "fp8-delayed"
    assert "30% less time" in "\n".join(advise([mixed, fp8]))
    assert recommended(mixed, true, {**fp8, "loss": 2.021}) == "bf16-true"
    assert recommended(mixed, true, {**fp8, "loss": 2.019}) == "fp8-delayed"
    assert recommended(mixed, true, {**fp8, "val_loss": 2.021}) == "bf16-true"
    assert recommended(mixed, true, {**fp8, "val_loss": None, "loss": math.nan}) == "bf16-true"
    assert recommended({**mixed, "val_loss": None}, {**fp8, "val_loss": None}) == "fp8-delayed"
    assert recommended(mixed, {"variant": "fp8-delayed", "error": "no"}) == "bf16-mixed"
    # five percent
    assert recommended(mixed, row("fp8-delayed", 9.4)) == "fp8-delayed"
    assert recommended(mixed, row("fp8-delayed", 9.6)) == "bf16-mixed"


def test_memory_decides_between_those_about_as_fast() -> None:
    mixed, fp8 = row("bf16-mixed", 10), row("fp8-delayed", 7)
    assert recommended(mixed, fp8, row("bf16-true", 7.1, peak=600)) == "bf16-true"
    assert recommended(mixed, fp8, row("bf16-true", 7.2, peak=600)) == "fp8-delayed"
    said = "\n".join(advise([mixed, fp8, row("bf16-true", 7.2, peak=600)]))
    assert "If memory is short: bf16-true." in said
    assert "600.0 MiB" in said
    assert "If memory" not in "\n".join(advise([mixed, fp8, row("bf16-true", 7.2, peak=990)]))


def test_noise_is_no_reason() -> None:
    mixed = row("bf16-mixed", 10)
    for noisy in (row("fp8-delayed", 8, p80_ms=9.95), row("fp8-delayed", 8, p20_ms=7, p80_ms=11)):
        assert recommended(mixed, noisy) == "bf16-mixed"
        assert "noise:" in "\n".join(advise([mixed, noisy]))
    assert "noise:" not in "\n".join(advise([mixed, row("fp8-delayed", 8)]))


def test_on_the_cpu_speed_counts_for_nothing() -> None:
    mixed, fast, small = (row(*of, gpu=None) for of in (("bf16-mixed", 10), ("fp8-delayed", 1), ("bf16-true", 9, 500)))
    said = "\n".join(advise([mixed, fast, small]))
    assert "Recommended until measured on a GPU: bf16-mixed." in said
    assert "If memory is short: bf16-true." in said
    assert "fp8-delayed" not in said
    refused = "\n".join(advise([mixed, fast, {**small, "loss": 2.1}]))
    assert "If memory is short" not in refused
    assert "Not bf16-true: " in refused


def test_without_a_reference_there_is_no_recommendation() -> None:
    for rows in (
        [row("fp8-delayed", 1)],
        [row("bf16-mixed", 10, loss=math.inf), row("fp8-delayed", 1)],
        [{"variant": "bf16-mixed", "error": "x"}],
    ):
        assert recommended(*rows) is None
        assert "No recommendation: " in "\n".join(advise(rows))


def test_doubts() -> None:
    mixed, other = row("bf16-mixed", 10), row("fp8-delayed", 8, batches="cd")
    assert "fp8-delayed did not get the batches that bf16-mixed got" in "\n".join(advise([mixed, other]))
    nothing = {"loss": None, "val_loss": None}
    assert "No loss is known" in advise([mixed | nothing, other | nothing])[0]


def test_negative_losses_and_losses_near_zero() -> None:
    assert worse_loss(row("bf16-true", 1, loss=-1.0), row("bf16-mixed", 1, loss=-2.0)).startswith("its training loss")
    for passes in (-3.0, -1.99):
        assert not worse_loss(row("bf16-true", 1, loss=passes), row("bf16-mixed", 1, loss=-2.0))
    # compared with the first loss
    learnt = row("bf16-mixed", 1, loss=0.0026, val_loss=None, first_loss=2.4)
    near, far = (row("fp8-delayed", 1, loss=loss, val_loss=None, first_loss=2.4) for loss in (0.0049, 0.0051))
    assert not worse_loss(near, learnt)
    assert worse_loss(far, learnt)
    for first in (None, math.nan, math.inf):
        assert worse_loss(near, {**learnt, "first_loss": first})
    # for a loss that is still large, 1% is the limit
    assert not worse_loss({**near, "loss": 2.02}, {**learnt, "loss": 2.001})
    assert worse_loss({**near, "loss": 2.03}, {**learnt, "loss": 2.0})
