"""Losses in the documentation match the rows in ``docs/results`` and the commands that measured them."""

from __future__ import annotations

import json
from statistics import mean
from typing import Any

import pytest
import yaml
from documented import commands_of, measured, table_of, text_of
from repository import ROOT

from benchmarks import model_losses
from benchmarks.loss_models import DECODERS, TASKS
from benchmarks.packages import PACKAGES, PRECISIONS, table
from benchmarks.recipes import excess
from lightning_fp8.scaling.recipe import RECIPES

DEMO = measured("compare-tiny-gpt-cpu.jsonl")
CONFIGURATIONS = {
    "tiny_gpt_fp8": DEMO,
    "digits_encoder_fp8": measured("compare-digits-encoder-cpu.jsonl"),
    "vit_fp8": measured("compare-vit-cpu.jsonl"),
}
# measured later, on another CPU
IN_MX = {
    "tiny_gpt_fp8": measured("compare-tiny-gpt-mx-cpu.jsonl"),
    "digits_encoder_fp8": measured("compare-digits-encoder-mx-cpu.jsonl"),
}
FP8, BF16 = DEMO["fp8-delayed"], DEMO["bf16-mixed"]


def worse(key: str) -> str:
    return f"{FP8[key] / BF16[key] - 1:+.1%}"


def test_losses_of_the_readme() -> None:
    readme = " ".join(text_of("README.md").split())
    losses = (f"{row['loss']:.3f} in {name}" for row, name in ((FP8, "FP8"), (BF16, "bf16")))
    assert f"training loss ends at {' and '.join(losses)} ({worse('loss')})" in readme
    assert f"validation loss at {FP8['val_loss']:.3f} and {BF16['val_loss']:.3f} ({worse('val_loss')})" in readme


def test_losses_of_the_results() -> None:
    lines = {line[""]: line for line in table_of("docs/results/README.md", "bf16-mixed", "fp8-delayed", "difference")}
    for name, key in {"training loss": "loss", "validation loss": "val_loss"}.items():
        line = lines[name]
        expected = (f"{BF16[key]:.4f}", f"{FP8[key]:.4f}", worse(key))
        assert (line["bf16-mixed"], line["fp8-delayed"], line["difference"]) == expected


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_losses_of_the_configurations(name: str) -> None:
    (line,) = (line for line in table_of("configs/README.md", "steps") if line["configuration"] == name)
    config = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    for variant in ("bf16-mixed", "fp8-delayed"):
        row = CONFIGURATIONS[name][variant]
        assert line[variant] == f"{row['loss']:.4f}, {row['val_loss']:.4f}"
        assert row["steps"] == int(line["steps"]) == config["trainer"]["max_steps"]


def test_losses_of_each_recipe() -> None:
    page = "docs/precisions.md"
    lines = table_of(page, "precision", "demo: training", "encoder: training")
    # fp8-mx was measured apart from these
    of_fp8 = [name + fields for fields in ("", ",wgrad=bf16") for name in RECIPES if name != "fp8-mx"]
    assert [line["precision"] for line in lines] == ["bf16-mixed", *of_fp8]
    (command,) = (line for line in commands_of(page) if "compare --config" in line)
    for line in lines:
        for model, name in (("demo", "tiny_gpt_fp8"), ("encoder", "digits_encoder_fp8")):
            row = CONFIGURATIONS[name][line["precision"]]
            for title, key in (("training", "loss"), ("validation", "val_loss")):
                assert line[f"{model}: {title}"] == f"{row[key]:.4f}", (line, title)
            said = command.replace("tiny_gpt_fp8.yaml --steps 150", f"{name}.yaml --steps {row['steps']}")
            assert said == f"OMP_NUM_THREADS=1 {row['command']}"
    apart = []
    for rows in (DEMO, measured("compare-tiny-gpt-seed-1-cpu.jsonl")):
        found, baseline = rows["fp8-block,wgrad=bf16"], rows["bf16-mixed"]
        assert (found["seed"], found["batches"]) == (baseline["seed"], baseline["batches"])
        apart.append(f"{found['loss'] / baseline['loss'] - 1:+.1%}")
    assert "its training loss is {} from bf16's with seed 0, and {} with seed 1".format(*apart) in " ".join(
        text_of(page).split()
    )


@pytest.mark.parametrize(("model", "name"), [("demo", "tiny_gpt_fp8"), ("encoder", "digits_encoder_fp8")])
def test_losses_in_mx(model: str, name: str) -> None:
    rows, of_others = IN_MX[name], CONFIGURATIONS[name]["bf16-mixed"]
    lines = {line["in MXFP8"]: line for line in table_of("docs/precisions.md", "in MXFP8")}
    assert [*lines] == [*rows] == ["bf16-mixed", "fp8-mx", "fp8-mx,wgrad=bf16"]
    for variant, row in rows.items():
        assert lines[variant][f"{model}: loss"] == f"{row['loss']:.4f}"
        assert lines[variant][f"{model}: validation loss"] == f"{row['val_loss']:.4f}"
        assert all(row[key] == of_others[key] for key in ("steps", "seed", "batches"))
        assert row["command"].endswith(f" --precisions {' '.join(rows)}")


@pytest.mark.parametrize(
    ("name", "found", "cpu"),
    [
        *((name, rows, "with amx_bf16") for name, rows in CONFIGURATIONS.items()),
        *((name, rows, "AMD EPYC with avx512_bf16") for name, rows in IN_MX.items()),
    ],
)
def test_the_command_and_the_thread_of_each_row(name: str, found: dict[str, dict[str, Any]], cpu: str) -> None:
    for row in found.values():
        steps = row["steps"]
        # the mean of the last tenth
        assert sum(row["losses"][-(steps // 10) :]) / (steps // 10) == pytest.approx(row["loss"], abs=1e-4)
        assert len(row["losses"]) == steps
        expected = f"python -m lightning_fp8 compare --config configs/{name}.yaml --steps {steps}"
        assert row["command"].startswith(expected)
        assert row["threads"] == 1
        assert row["cpu"].endswith(cpu)
        assert "dirty" not in row["commit"]


def test_the_commands_that_reproduce() -> None:
    # the arguments of the comparison; a row may have been measured along with other variants, which does not affect it
    (command,) = {f"OMP_NUM_THREADS=1 {row['command'].partition(' --precisions')[0]}" for row in DEMO.values()}
    for page in ("README.md", "docs/results/README.md"):
        first, second = commands_of(page)[:2]
        assert first == command
        assert second.startswith("python -m benchmarks.loss_curves runs/compare/tiny_gpt_fp8 --out docs/results/")


def test_the_demo_is_the_fp8_run_of_the_comparison() -> None:
    makefile = text_of("Makefile").split("\ndemo:")[1].partition("\n\n")[0]
    config = yaml.safe_load(text_of("configs/tiny_gpt_fp8.yaml"))
    assert "fit --config configs/tiny_gpt_fp8.yaml\n" in makefile
    assert f"--config {FP8['case']} --steps {config['trainer']['max_steps']}" in FP8["command"]
    assert (config["trainer"]["precision"], config["seed_everything"]) == (FP8["variant"], FP8["seed"])
    # the loss that a reader sees at the end of the run
    assert f"ends with {FP8['val_loss']:.4f} as its validation loss" in " ".join(
        text_of("docs/results/README.md").split()
    )


def test_times_of_a_step_on_the_cpu() -> None:
    rows = measured("cpu-step.jsonl")
    said = table_of("docs/results/README.md", "variant", "p50", "relative to fp8-delayed")
    names = {"torchao emulated": "torchao 0.18, emulated float8"}
    assert [line["variant"] for line in said] == [names.get(name, name) for name in rows]
    for line, row in zip(said, rows.values(), strict=True):
        assert line["p50"] == f"{row['p50_ms']:.0f} ms"
        relative = line["relative to fp8-delayed"].removesuffix(" x")
        assert float(relative) == pytest.approx(row["times_fp8_delayed"], rel=0.02)
        assert row["threads"] == 2


def test_the_cost_of_watching_attention() -> None:
    rows = measured("attention-dtypes-cpu.jsonl")
    said = " ".join(text_of("docs/results/README.md").split())
    for name, row in rows.items():
        assert f"{row['p50_ms']:.1f} and {row['p50_without_ms']:.1f} ms in `{name}`" in said
    shares = " and ".join(f"{row['added_share']:.3%}" for row in rows.values())
    assert f"or {shares}." in said


def test_packages_built_on_lightning() -> None:
    page, file = "docs/with-other-libraries.md", "docs/results/packages-cpu.jsonl"
    rows = [json.loads(line) for line in text_of(file).splitlines()]
    assert [(row["case"], row["variant"]) for row in rows] == [(name, one) for name in PACKAGES for one in PRECISIONS]
    assert table(rows) in text_of(page)
    for row in rows:
        assert row["difference"] == 0
        assert row["command"].startswith("python -m benchmarks.packages build/packages ")
        assert row["command"].endswith(f"--out {file}")
        assert row["command"] in commands_of(page)
        assert row["threads"] == 1
        assert "dirty" not in row["commit"]


def test_peak_memory_of_loading() -> None:
    page, file = "docs/fp8-checkpoints.md", "docs/results/loading-cpu.jsonl"
    rows = [json.loads(line) for line in text_of(file).splitlines()]
    assert [row["frozen"] for row in rows] == [True, False]
    for line, row in zip(table_of(page, "model", "largest file", "peak"), rows, strict=True):
        said = [f"{row[f'{name}_bytes'] / 1e6:.1f} MB" for name in ("model", "largest_file", "peak")]
        above = f"{(row['peak_bytes'] - row['model_bytes']) / 1e6:.1f} MB"
        assert [line[name] for name in ("model", "largest file", "peak", "above the model")] == [*said, above]
        # the FP8 model and one file at most
        assert not row["frozen"] or row["peak_bytes"] <= row["model_bytes"] + row["largest_file_bytes"]
        assert f"`{row['command']}`" in text_of(page)
        assert "dirty" not in row["commit"]
    assert rows[0]["model_bytes"] / rows[0]["parameters"] == pytest.approx(1.0002, abs=5e-5)


def test_losses_of_models() -> None:
    page, recipes = "docs/with-other-libraries.md", ("baseline", *model_losses.RECIPES)
    text = text_of("docs/results/model-losses-cpu.jsonl")
    rows = [json.loads(line) for line in text.splitlines()]
    # the first models were measured when there was one recipe
    variants = {name: recipes[:2] if name in DECODERS else recipes for name in TASKS}
    expected = [(name, seed, one) for name in TASKS for seed in range(5) for one in variants[name]]
    assert [(row["case"], row["seed"], row["variant"]) for row in rows] == expected
    assert {(row["steps"], row["threads"], "dirty" in row["commit"]) for row in rows} == {(200, 1, False)}
    assert min(row["share"] for row in rows if row["variant"] != "baseline") > 0.9
    assert model_losses.table(rows) in text_of(page)
    above = {name: mean(excess(rows, name, "fp8-delayed", "loss").values()) for name in TASKS}
    assert [name for name, one in above.items() if abs(one) > 1] == ["PNA"]
    assert f"but PNA's in `fp8-delayed`: it is {above['PNA']:.1f}% above." in text_of(page)
    assert all(abs(mean(excess(rows, name, "fp8-block", "loss").values())) < 1 for name in [*TASKS][len(DECODERS) :])
    for command in {f"OMP_NUM_THREADS=1 {row['command']}" for row in rows}:
        assert command in commands_of(page)
        assert command in commands_of("docs/results/README.md")
