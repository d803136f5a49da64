"""Compares recipes: what they cost in loss, and for how long a spike or a growth harms the casts after it.

    python -m benchmarks.recipes --out docs/results/recipes-cpu.jsonl [--seeds 5] [--recipes fp8-delayed,margin=1 ...]
                                 [--cases gpt restarts outlier spikes encoder "one spike" growth]

A recipe is given as its precision string with fields after commas. The default recipes are windows of 1 to 1024 steps,
each with margins of 0 and 1, and current and block scaling. Each is trained as described in ``recipe_cases``, paired by
seed with ``baseline``, the same training without FP8. ``amax_compute_algo="most_recent"`` is left out: its scales are
those of a window of 1.

A row is written as soon as it is measured, and rows that ``--out`` already has are not measured again. At the end the
tables are printed.

The preferred recipe follows from a rule that was written before anything was measured:

1. The cost of a recipe is the excess of its final training loss over the baseline's in percent, as a mean over the
   trainings of the GPT (gpt, restarts, outlier, spikes). Candidates are those whose cost is not above the lowest one
   by a 95% interval of the paired difference over seeds.
2. Of these, those with the fewest harmed steps after one spike and after growth together.
3. Of these, the simplest: the smaller margin, then the shorter window.

Windows and margins compete; current and block scaling are there for reference.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks.harness import Row, append
from benchmarks.recipe_cases import EVENTS, TRAININGS, train, watch
from lightning_fp8.runtime.environment import environment
from lightning_fp8.scalings.per_tensor import DelayedScaling
from lightning_fp8.scalings.recipe import Recipe, as_recipe, recipe_fields
from lightning_fp8.tools.tables import markdown_table

BASELINE = "baseline"
RECIPES = [
    *(f"fp8-delayed,amax_history_len={window},margin={margin}" for margin in (0, 1) for window in (1, 4, 16, 64, 1024)),
    "fp8-current",
    "fp8-block",
]
# the trainings whose losses decide; not the classifier, whose loss is near zero once it has learned all its images
DECIDING = tuple(case for case in TRAININGS if case != "encoder")
# Student's t for a 95% interval, by number of values, from two on
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
# titles of an event's numbers, and their format
_LOST = {
    "zero_steps": ("steps with zeros", ".0f"),
    "zero_fraction": ("zeros", ".0%"),
    "clipped_steps": ("clipped steps", ".0f"),
    "clipped_fraction": ("clipped", ".0%"),
    "steady_clipped_fraction": ("clipped before", ".4%"),
}


def recipe_of(text: str) -> Recipe | None:
    """``"fp8-delayed,margin=1"`` -> the recipe; None for the baseline.

    Raises:
        ValueError: for a precision or a value that is none of a recipe's.
        TypeError: for a field that the recipe does not have.
    """
    return None if text == BASELINE else as_recipe(recipe_fields(text))


def measure(case: str, variant: str, seed: int) -> Row:
    """One row, without its environment."""
    recipe = recipe_of(variant)
    if case in TRAININGS:
        metrics: dict[str, Any] = train(TRAININGS[case], recipe, seed)
    else:
        assert recipe is not None
        metrics = watch(case, recipe, seed)
    return {"case": case, "variant": variant, "seed": seed, **metrics}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% interval; infinite for a single value."""
    count = len(values)
    return mean(values), _T[min(count, 10) - 2] * stdev(values) / sqrt(count) if count > 1 else float("inf")


def by_seed(rows: Sequence[Row], case: str, variant: str, key: str) -> dict[int, float]:
    """One number of the rows of a case and variant, by seed."""
    return {row["seed"]: row[key] for row in rows if row["case"] == case and row["variant"] == variant}


def excess(rows: Sequence[Row], case: str, variant: str, key: str) -> dict[int, float]:
    """Excess of a loss over the baseline's in percent, by seed."""
    baseline = by_seed(rows, case, BASELINE, key)
    losses = by_seed(rows, case, variant, key)
    return {seed: 100 * (losses[seed] / baseline[seed] - 1) for seed in losses if seed in baseline}


def cost(rows: Sequence[Row], variant: str) -> dict[int, float]:
    """Mean excess of the final training loss in percent, by seed; only seeds that every deciding training has."""
    excesses = [excess(rows, case, variant, "loss") for case in DECIDING]
    return {seed: mean(values[seed] for values in excesses) for seed in sorted(set.intersection(*map(set, excesses)))}


def harmed_steps(rows: Sequence[Row], variant: str) -> float:
    """Steps with clipping or underflow after one spike and after growth together, as a mean over seeds."""
    keys = ("clipped_steps", "zero_steps")
    return sum(mean(by_seed(rows, event, variant, key).values()) for event in EVENTS for key in keys)


def preferred(rows: Sequence[Row]) -> list[str]:
    """The delayed recipes whose losses are as good as the best one's, in order of preference: the command's rule.

    A recipe that lacks an event, or a seed of the baseline in any deciding training, is left out.
    """
    seeds = cost(rows, BASELINE).keys()
    names = [name for name in _variants(rows) if name.startswith(DelayedScaling.precision)]
    names = [name for name in names if all(by_seed(rows, event, name, "zero_steps") for event in EVENTS)]
    costs = {name: excesses for name in names if (excesses := cost(rows, name)) and excesses.keys() == seeds}
    best = min(costs, key=lambda name: mean(costs[name].values()), default="")
    above = {name: interval([costs[name][seed] - costs[best][seed] for seed in seeds]) for name in costs}
    recipes = {name: recipe_of(name) for name, (middle, half) in above.items() if middle <= half}

    def place(name: str) -> tuple[float, int, int]:
        recipe = recipes[name]
        assert isinstance(recipe, DelayedScaling)
        return harmed_steps(rows, name), recipe.margin, recipe.amax_history_len

    return sorted(recipes, key=place)


def _variants(rows: Sequence[Row]) -> list[str]:
    """All variants but the baseline."""
    return [name for name in dict.fromkeys(row["variant"] for row in rows) if name != BASELINE]


def tables(rows: Sequence[Row]) -> str:
    """Markdown: excess of training and validation losses, and what casts lose."""
    sections = []
    for key, title in (("loss", "training loss"), ("val_loss", "validation loss")):
        cells = [["excess of the " + title, *TRAININGS, *(["cost"] if key == "loss" else [])]]
        for name in _variants(rows):
            values = [excess(rows, case, name, key) for case in TRAININGS]
            values += [cost(rows, name)] if key == "loss" else []
            cells.append([name, *("{:+.2f}% ± {:.2f}".format(*interval([*x.values()])) if x else "-" for x in values)])
        sections.append(markdown_table(cells))
    cells = [["what casts lose", *(f"{event}: {title}" for event in EVENTS for title, _ in _LOST.values())]]
    for name in _variants(rows):
        numbers = [(by_seed(rows, event, name, key), form) for event in EVENTS for key, (_, form) in _LOST.items()]
        cells.append([name, *(format(mean(x.values()), form) if x else "-" for x, form in numbers)])
    return "\n\n".join([*sections, markdown_table(cells)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the file lacks, then print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recipes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the rows, as lines of JSON")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, metavar="RECIPE")
    parser.add_argument("--cases", nargs="+", choices=[*TRAININGS, *EVENTS], default=[*TRAININGS, *EVENTS])
    options = parser.parse_args(arguments)
    for text in options.recipes:
        try:
            recipe_of(text)
        except (ValueError, TypeError) as error:
            parser.error(f"--recipes: {text}: {error}")
    # one thread, so that losses do not depend on the number of cores
    torch.set_num_threads(1)
    about = environment(command=f"python -m benchmarks.recipes --out {options.out}")
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(row["case"], row["variant"], row["seed"]) for row in rows}
    for seed in range(options.seeds):
        for case in options.cases:
            for variant in [*([BASELINE] if case in TRAININGS else []), *options.recipes]:
                if (case, variant, seed) not in done:
                    rows.append({**measure(case, variant, seed), **about})
                    append(rows[-1:], options.out)
                    print(f"{case}, seed {seed}, {variant}", file=sys.stderr, flush=True)
    print(tables(rows))
    print(f"\nBy the rule: {', '.join(preferred(rows))}")


if __name__ == "__main__":
    main()
