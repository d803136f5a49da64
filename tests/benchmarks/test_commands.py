"""The commands of ``benchmarks/`` apart from the suites: each runs at a tiny size, and its numbers add up."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lit import Regression, loader
from repository import ROOT
from warm import run_warm

from benchmarks import loading, loss_curves, model_losses, packages

# of `benchmarks.passes`; the widths of qkv, out, up, down
TOKENS, WIDTH, HIDDEN = 96, 64, 256
INPUTS = (WIDTH, WIDTH, WIDTH, HIDDEN)
GRADIENTS = (3 * WIDTH, WIDTH, HIDDEN, WIDTH)
WEIGHTS = 3 * WIDTH * WIDTH + WIDTH * WIDTH + 2 * WIDTH * HIDDEN


def rows_in(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_growth_has_a_row_for_each_number_of_layers(tmp_path: Path) -> None:
    run_warm("-m", "benchmarks.growth", "--layers", "2", "3", "--out", str(tmp_path / "rows"), check=True)
    rows = rows_in(tmp_path / "rows")
    assert [row["layers"] for row in rows] == [2, 3]
    assert all(us > 0 for row in rows for us in row["us_per_layer"].values())


def test_host_time_ends_with_the_ratios_of_its_table() -> None:
    ran = run_warm("-m", "benchmarks.host_time", "--repetitions", "2", "--calls", "1", check=True)
    *lines, linear, block = ran.stdout.splitlines()
    table = {line[:24].strip(): [float(cell) for cell in line[24:].split()] for line in lines[2:]}
    assert list(table) == ["linear", "block"]
    for name, said in (("linear", linear), ("block", block)):
        plain, plain_both, _, converted, converted_both, _ = table[name]
        assert 0 < plain < plain_both
        assert 0 < converted < converted_both
        assert said.startswith(f"ratio {name} ")
        assert float(said.split()[-1]) == pytest.approx(converted_both / plain_both, rel=0.02)


def test_loading_peaks_at_the_model_and_one_file(tmp_path: Path) -> None:
    # in a new process: this one has memory that was used before. What stays resident besides is less than such a file
    loading.write(tmp_path, 32, 2)
    command = [sys.executable, "-m", "benchmarks.loading", "--measure", "frozen", "--folder", str(tmp_path)]
    frozen = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    assert frozen["parameters"] == 32 * 2048**2
    assert frozen["model_bytes"] <= 1.02 * frozen["parameters"]
    assert frozen["model_bytes"] < frozen["peak_bytes"] <= frozen["model_bytes"] + frozen["largest_file_bytes"]
    loading.write(tmp_path, 2, 2)
    masters = loading.measure(tmp_path, frozen=False)
    assert masters["model_bytes"] == 2 * masters["parameters"] == 2 * 2 * 2048**2


def test_losses_of_models_are_in_the_rows_and_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # one plain model of transformers with weights that are computed, and one of this package's own
    models, out = ["LlamaWeightNorm", "Pairs"], tmp_path / "rows.jsonl"
    asked = ["--out", str(out), "--models", *models, "--seeds", "1", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.model_losses", *asked])
    model_losses.main()
    rows, variants = rows_in(out), ("baseline", *model_losses.RECIPES)
    assert [(row["case"], row["variant"]) for row in rows] == [(name, one) for name in models for one in variants]
    # all matrices, those too from which a weight is computed
    assert all(row["share"] == (row["variant"] != "baseline") for row in rows)
    assert len({row["loss"] for row in rows}) == len(rows)
    assert model_losses.table(rows) in capsys.readouterr().out


def test_loss_curves_keep_losses_without_times(tmp_path: Path) -> None:
    losses = {"bf16-mixed": [3.0, 2.00004, 1.5], "fp8-delayed": [3.0, 2.25, 1.75]}
    lines = []
    for variant, of_steps in losses.items():
        (tmp_path / variant).mkdir()
        (tmp_path / variant / "measured.json").write_text(json.dumps({"losses": of_steps, "p50_ms": 1.0}))
        row = {"variant": variant, "loss": of_steps[-1], "val_loss": 2.0, "p50_ms": 1.0, "wall_s": 4.0}
        lines.append(json.dumps(row) + "\n")
    (tmp_path / "compare.jsonl").write_text("".join(lines))
    for _ in range(2):
        loss_curves.main([str(tmp_path), "--out", str(tmp_path / "curves"), "--draw", "fp8-delayed"])
        assert rows_in(tmp_path / "curves.jsonl") == [
            {"variant": variant, "loss": of_steps[-1], "val_loss": 2.0, "losses": [round(x, 4) for x in of_steps]}
            for variant, of_steps in losses.items()
        ]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


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


def stand_in(trainer_arguments: dict[str, Any], folder: Path, is_saved: bool) -> packages.Made:
    model, data = Regression(), loader()
    trainer = pl.Trainer(max_steps=2, enable_checkpointing=False, **trainer_arguments)
    if is_saved:
        model.load_state_dict(torch.load(folder / "weights.pt"))
    else:
        trainer.fit(model, data)
        torch.save(model.state_dict(), folder / "weights.pt")
    return model, lambda: torch.cat(trainer.predict(model, data)), 1.0


def test_packages_compares_what_was_saved_with_what_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(packages.PACKAGES, "torch", stand_in)
    trained = packages.run("torch", "fp8-delayed", tmp_path)
    # without the name of a build, as the package's metadata have it
    assert (trained["version"], trained["coverage"]) == (version("torch"), 1)
    assert packages.run("torch", "fp8-delayed", tmp_path) == {"difference": 0}
