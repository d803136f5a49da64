"""The tables of the documentation have the numbers of the rows in ``docs/results``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from statistics import mean
from typing import Any

import pytest
import yaml
from documented import measured, table_of, text_of
from repository import ROOT

from benchmarks import healing, model_losses, packages
from benchmarks.recipes import DECIDING, RECIPES, by_seed, cost, excess, interval, preferred, recipe_of
from lightning_fp8 import DelayedScaling
from lightning_fp8.tools.compare.variants import by_default

RESULTS = ROOT / "docs" / "results"
CONFIGURATIONS = {
    "tiny_gpt_fp8": measured("compare-tiny-gpt-cpu.jsonl"),
    "digits_encoder_fp8": measured("compare-digits-encoder-cpu.jsonl"),
    "vit_fp8": measured("compare-vit-cpu.jsonl"),
}
# measured later, on another CPU
IN_MX = {
    "tiny_gpt_fp8": measured("compare-tiny-gpt-mx-cpu.jsonl"),
    "digits_encoder_fp8": measured("compare-digits-encoder-mx-cpu.jsonl"),
}
BF16, FP8 = (CONFIGURATIONS["tiny_gpt_fp8"][name] for name in ("bf16-mixed", "fp8-delayed"))
LOSSES = {"training loss": "loss", "validation loss": "val_loss"}


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.jsonl")))
def test_every_row_has_a_clean_commit_its_command_and_its_threads(name: str) -> None:
    for row in rows_of(name):
        assert row["commit"]
        assert "dirty" not in row["commit"]
        assert row["threads"] == (1 if row["command"].startswith("python -m ") else 2)
        if name.startswith("compare"):
            # the mean of the last tenth
            assert len(row["losses"]) == row["steps"]
            assert mean(row["losses"][-(row["steps"] // 10) :]) == pytest.approx(row["loss"], abs=1e-4)


# --- losses of the configurations ---


def test_losses_of_the_demo() -> None:
    lines = {line[""]: line for line in table_of("docs/results/README.md", "bf16-mixed", "fp8-delayed", "difference")}
    for name, key in LOSSES.items():
        worse = f"{FP8[key] / BF16[key] - 1:+.1%}"
        expected = {"bf16-mixed": f"{BF16[key]:.4f}", "fp8-delayed": f"{FP8[key]:.4f}", "difference": worse}
        assert lines[name].items() >= expected.items()
        assert {f"{FP8[key]:.3f}", f"{BF16[key]:.3f}", worse} <= {*re.findall(r"[-+]?[\d.]+\d%?", text_of("README.md"))}
    rows = measured("compare-tiny-gpt-cpu.jsonl")
    of_modes = table_of("docs/which-bf16.md", "precision", *LOSSES)
    assert [line["precision"] for line in of_modes] == by_default(emulated=False)
    for line in of_modes:
        assert all(line[name] == f"{rows[line['precision']][key]:.4f}" for name, key in LOSSES.items())


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_losses_of_the_configurations(name: str) -> None:
    (line,) = (line for line in table_of("configs/README.md", "steps") if line["configuration"] == name)
    config = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    for variant in ("bf16-mixed", "fp8-delayed"):
        row = CONFIGURATIONS[name][variant]
        assert line[variant] == f"{row['loss']:.4f}, {row['val_loss']:.4f}"
        assert row["steps"] == int(line["steps"]) == config["trainer"]["max_steps"]


@pytest.mark.parametrize(
    ("rows", "first", "titles"),
    [
        (CONFIGURATIONS, "precision", ("{}: training", "{}: validation")),
        (IN_MX, "in MXFP8", ("{}: loss", "{}: validation loss")),
    ],
)
def test_losses_of_each_recipe(rows: Any, first: str, titles: tuple[str, str]) -> None:
    lines = table_of("docs/which-recipe.md", first, titles[0].format("demo"))
    assert {line[first] for line in lines} == {*rows["digits_encoder_fp8"]}
    for line in lines:
        for model, name in (("demo", "tiny_gpt_fp8"), ("encoder", "digits_encoder_fp8")):
            row = rows[name][line[first]]
            assert [line[title.format(model)] for title in titles] == [f"{row['loss']:.4f}", f"{row['val_loss']:.4f}"]
            assert all(row[key] == CONFIGURATIONS[name]["bf16-mixed"][key] for key in ("steps", "seed", "batches"))


# --- recipes ---

OF_RECIPES, OF_MX = rows_of("recipes-cpu"), rows_of("recipes-mx-cpu")
OTHERS = {"current scaling": "fp8-current", "block scaling": "fp8-block"}
# columns of events -> the event, the number's name and its format
EVENTS = {
    "steps with zeros": ("one spike", "zero_steps", "{:.0f}"),
    "zeros": ("one spike", "zero_fraction", "{:.0%}"),
    "steps clipped by growth": ("growth", "clipped_steps", "{:.0f}"),
    "clipped by growth": ("growth", "clipped_fraction", "{:.0%}"),
    "clipped without an event": ("growth", "steady_clipped_fraction", "{:.4%}"),
}


def variant_of(line: dict[str, str]) -> str:
    return OTHERS.get(line["window"]) or f"fp8-delayed,amax_history_len={line['window']},margin={line['margin']}"


def said(of_seeds: dict[int, float]) -> str:
    assert len(of_seeds) in (0, 5)
    return "{:+.2f} ± {:.2f}".format(*interval([*of_seeds.values()])) if of_seeds else "not run"


def losses_of(variant: str, rows: list[dict[str, Any]]) -> dict[str, str]:
    found = {case: said(excess(rows, case, variant, "loss")) for case in (*DECIDING, "encoder")}
    return {**found, "cost": said(cost(rows, variant))}


def test_losses_of_the_recipes() -> None:
    lines = table_of("docs/recipes.md", "window", "margin", "gpt", "cost")
    assert [variant_of(line) for line in lines] == RECIPES
    for line in lines:
        assert line.items() >= losses_of(variant_of(line), OF_RECIPES).items()
    (line,) = table_of("docs/recipes.md", "recipe", "gpt", "cost")
    assert line == {"recipe": "fp8-mx", **losses_of("fp8-mx", OF_MX)}
    (line,) = (one for one in table_of("docs/which-recipe.md", "MXScaling") if "](recipes.md#loss)" in one[""])
    recipes = {"CurrentScaling": "fp8-current", "BlockScaling": "fp8-block"}
    recipes["DelayedScaling"] = "fp8-delayed,amax_history_len=16,margin=0"
    for column, variant in recipes.items():
        assert line[column] == said(cost(OF_RECIPES, variant))
    assert line["MXScaling"] == said(cost(OF_MX, "fp8-mx"))


def test_events_of_the_recipes() -> None:
    lines = table_of("docs/recipes.md", "window", "steps with zeros")
    assert [variant_of(line) for line in lines] == RECIPES
    for line in lines:
        for column, (case, key, form) in EVENTS.items():
            values = by_seed(OF_RECIPES, case, variant_of(line), key).values()
            assert (len(values), line[column]) == (5, form.format(mean(values))), line


def test_the_default_is_a_candidate() -> None:
    assert DelayedScaling() in map(recipe_of, preferred(OF_RECIPES))


# --- tables as the commands print them ---


def keys(rows: Iterable[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


def test_tables_of_commands() -> None:
    for page, name, command in (
        ("docs/healing.md", "healing-cpu", healing),
        ("docs/packages.md", "packages-cpu", packages),
        ("docs/small-models.md", "model-losses-cpu", model_losses),
    ):
        rows = rows_of(name)
        # whatever the width of the columns
        lines = {re.sub(" +", " ", line) for line in text_of(page).splitlines()}
        assert {re.sub(" +", " ", line) for line in command.table(rows).splitlines()[2:]} <= lines, name
        assert len({*keys(rows, "case", "variant", *(["seed"] if "seed" in rows[0] else []))}) == len(rows)
    assert {row["difference"] for row in rows_of("packages-cpu")} == {0}
    assert min(row["share"] for row in rows_of("model-losses-cpu") if row["variant"] != "baseline") > 0.9


def test_peak_memory_of_loading() -> None:
    rows = rows_of("loading-cpu")
    for line, row in zip(table_of("docs/fp8-checkpoints.md", "model", "largest file", "peak"), rows, strict=True):
        expected = [row[f"{name}_bytes"] for name in ("model", "largest_file", "peak")]
        expected.append(row["peak_bytes"] - row["model_bytes"])
        assert [line[name] for name in ("model", "largest file", "peak", "above the model")] == [
            f"{size / 1e6:.1f} MB" for size in expected
        ]


def test_times_of_a_step_on_the_cpu() -> None:
    rows = measured("cpu-step.jsonl")
    lines = table_of("docs/results/README.md", "variant", "p50", "relative to fp8-delayed")
    for line, (name, row) in zip(lines, rows.items(), strict=True):
        assert line["variant"].startswith(name.split()[0])
        assert line["p50"] == f"{row['p50_ms']:.0f} ms"
        relative = line["relative to fp8-delayed"].removesuffix(" x")
        assert float(relative) == pytest.approx(row["times_fp8_delayed"], rel=0.02)
