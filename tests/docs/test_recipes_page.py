"""The page that compares recipes: its tables match the rows, and the default is the one that the rule selects."""

from __future__ import annotations

import json
from statistics import mean, stdev
from typing import Any

from documented import commands_of, table_of, text_of
from repository import ROOT

from benchmarks.recipe_cases import AFTER
from benchmarks.recipes import RECIPES, preferred, recipe_of
from lightning_fp8 import DelayedScaling

PAGE, FILE, MX_FILE = "docs/recipes.md", "docs/results/recipes-cpu.jsonl", "docs/results/recipes-mx-cpu.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in (ROOT / FILE).read_text().splitlines()]
GPT = ("gpt", "restarts", "outlier", "spikes")
SEEDS = {row["seed"] for row in ROWS}
OTHERS = {"current scaling": "fp8-current", "block scaling": "fp8-block"}
# quantile of Student's t for five seeds
T95 = 2.7764


def of(case: str, variant: str, key: str, rows: list[dict[str, Any]] = ROWS) -> list[float]:
    """One number of the rows, in the order of the seeds; empty if some seed was not run."""
    found = {row["seed"]: row[key] for row in rows if (row["case"], row["variant"]) == (case, variant)}
    return [found[seed] for seed in sorted(found)] if found.keys() == SEEDS else []


def excess(case: str, variant: str, key: str, rows: list[dict[str, Any]] = ROWS) -> list[float]:
    pairs = zip(of(case, variant, key, rows), of(case, "baseline", key, rows))
    return [100 * (x / base - 1) for x, base in pairs]


def between(values: list[float], digits: int, sign: str = "") -> str:
    """Mean and half-width of its 95% interval."""
    return f"{mean(values):{sign}.{digits}f} ± {T95 * stdev(values) / len(values) ** 0.5:.{digits}f}"


def said(values: list[float]) -> str:
    return between(values, 2, "+") if values else "not run"


def variant_of(line: dict[str, str]) -> str:
    """The benchmark's name of a variant: the page says ``window`` and ``margin``."""
    if line["window"] in OTHERS:
        return OTHERS[line["window"]]
    return f"fp8-delayed,amax_history_len={line['window']},margin={line['margin']}"


def test_every_row_is_of_one_command_and_thread() -> None:
    assert set(range(5)) == SEEDS
    assert len({(row["case"], row["variant"], row["seed"]) for row in ROWS}) == len(ROWS)
    assert {row["variant"] for row in ROWS} == {"baseline", *RECIPES}
    for row in ROWS:
        assert row["command"] == f"python -m benchmarks.recipes --out {FILE}"
        assert row["threads"] == 1
        assert "dirty" not in row["commit"]
    assert f"OMP_NUM_THREADS=1 {ROWS[0]['command']}" in commands_of(PAGE)


def test_losses() -> None:
    lines = table_of(PAGE, "window", "margin", "gpt", "cost")
    assert [variant_of(line) for line in lines] == RECIPES
    for line in lines:
        found = {case: excess(case, variant_of(line), "loss") for case in GPT}
        for case in GPT:
            assert line[case] == said(found[case]), line
        # "not run" if one of the trainings is missing
        assert line["cost"] == said(cost(variant_of(line)))
        assert line["encoder"] == said(excess("encoder", variant_of(line), "loss"))


def test_losses_in_mx() -> None:
    rows = [json.loads(line) for line in (ROOT / MX_FILE).read_text().splitlines()]
    assert {row["cpu"] for row in rows} == {"AMD EPYC with avx512_bf16"}
    assert not any("dirty" in row["commit"] for row in rows)
    assert len({(row["case"], row["seed"], row["variant"]) for row in rows}) == len(rows) == 50
    found = {case: excess(case, "fp8-mx", "loss", rows) for case in (*GPT, "encoder")}
    costs = cost("fp8-mx", rows)
    (line,) = table_of(PAGE, "recipe", "gpt", "cost")
    assert line == {"recipe": "fp8-mx", "cost": said(costs), **{case: said(values) for case, values in found.items()}}
    (line,) = (one for one in table_of("docs/precisions.md", "MXScaling") if "](recipes.md#loss)" in one[""])
    assert line["MXScaling"] == said(costs)


def cost(variant: str, rows: list[dict[str, Any]] = ROWS) -> list[float]:
    return [mean(of_seed) for of_seed in zip(*(excess(case, variant, "loss", rows) for case in GPT))]


def test_costs_of_the_recipes_where_they_are_compared() -> None:
    lines = table_of("docs/precisions.md", "DelayedScaling", "CurrentScaling", "BlockScaling")
    (line,) = (line for line in lines if "](recipes.md#loss)" in line[""])
    recipes = {"DelayedScaling": named(16), "CurrentScaling": "fp8-current", "BlockScaling": "fp8-block"}
    for column, variant in recipes.items():
        assert line[column] == said(cost(variant)), column


def test_events() -> None:
    lines = table_of(PAGE, "window", "steps with zeros")
    assert [variant_of(line) for line in lines] == RECIPES
    for line in lines:
        name = variant_of(line)
        for column, case, key in (
            ("steps with zeros", "one spike", "zero_steps"),
            ("steps clipped by growth", "growth", "clipped_steps"),
        ):
            assert float(line[column]) == mean(of(case, name, key)), line
        for column, case, key in (
            ("zeros", "one spike", "zero_fraction"),
            ("clipped by growth", "growth", "clipped_fraction"),
        ):
            assert line[column] == f"{mean(of(case, name, key)):.0%}", line
        steady = of("growth", name, "steady_clipped_fraction")
        assert line["clipped without an event"] == f"{mean(steady):.4%}"


def test_the_default_is_a_candidate() -> None:
    candidates = [recipe_of(name) for name in preferred(ROWS)]
    assert DelayedScaling() in candidates
    text = " ".join(text_of(PAGE).split())
    names = [f"{recipe.amax_history_len} with margin {recipe.margin}" for recipe in candidates if recipe is not None]
    assert f"Candidates, preferred ones first: {', '.join(names)}." in text


def test_clipped_in_each_step_around_the_growth() -> None:
    before = AFTER
    found = {}
    for name in (*map(named, (1, 16, 1024)), *OTHERS.values()):
        of_steps = [100 * mean(shares) for shares in zip(*of("growth", name, "clipped_fractions"))]
        found[name] = of_steps.pop(before), max(of_steps)
    delayed, current, block = [*found.values()][:3], found["fp8-current"], found["fp8-block"]
    shares = "{:.0f}%, {:.0f}% and {:.0f}%".format(*(grown for grown, _ in delayed))
    assert (
        f"With windows of 1, 16 and 1024, {shares} of the layer's gradient are clipped in the step of the growth, and"
        f" at most {max(most for _, most in delayed):.3f}% in any other step of the picture. Current scaling clips at"
        f" most {max(current):.3f}% (the largest number times its scale may be rounded up), and block scaling nothing."
    ) in " ".join(text_of(PAGE).split())
    assert max(block) == 0


def named(window: int, margin: int = 0) -> str:
    return f"fp8-delayed,amax_history_len={window},margin={margin}"


def test_numbers_in_the_text() -> None:
    text = " ".join(text_of(PAGE).split())
    clipped = [f"{mean(of('gpt', named(window), 'saturated_fraction')):.4%}" for window in (1, 16, 1024)]
    clips = "a window of 1 clips {} of all inputs and gradients, one of 16 {} and one of 1024 {}."
    assert clips.format(*clipped) in text
    with_margin = mean(excess("spikes", named(16, 1), "loss"))
    assert f"With a window of 16 the training with spikes ends {with_margin:.2f}% above the baseline." in text
    spikes = [f"{mean(excess('spikes', named(window), 'loss')):.2f}%" for window in (1024, 16)]
    assert "the loss is {} above the baseline with a window of 1024, and {} with 16".format(*spikes) in text
    encoder = [mean(excess("encoder", name, "loss")) for name in (named(1), named(16), named(1, 1))]
    said_of_it = "the encoder ends {:.0f}% above the baseline in training loss with a window of 1, and {:.0f}% with 16."
    assert said_of_it.format(*encoder) in text
    assert f"With a margin of 1, a window of 1 ends {encoder[2]:.0f}% above it." in text
    pairs = zip(excess("encoder", named(1), "loss"), excess("encoder", named(16), "loss"))
    differences = [one - other for one, other in pairs]
    assert min(differences) > 0
    assert f"by {between(differences, 1)} percentage points" in text
    lower = [one - other for one, other in zip(cost(named(16)), cost(named(4)))]
    pairs = zip(excess("encoder", named(4), "loss"), excess("encoder", named(16), "loss"))
    higher = [one - other for one, other in pairs]
    assert (
        f"the cost of 4 is lower by {between(lower, 2)} percentage points, and its loss of the encoder higher by"
        f" {between(higher, 1)}."
    ) in text
    blocks = [one - other for one, other in zip(cost("fp8-current"), cost("fp8-block"))]
    assert min(blocks) > 0
    assert f"{between(blocks, 2)} percentage points less than current scaling, in each of the five seeds" in text
