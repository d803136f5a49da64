"""Compares recipes: what they cost in loss, and for how long a spike or a growth harms the casts after it.

    python -m benchmarks.recipes --out docs/results/recipes-cpu.jsonl [--seeds 5] [--recipes fp8-delayed,margin=1 ...]
                                 [--cases gpt restarts outlier spikes encoder "one spike" growth]

A recipe is given as its precision string with fields after commas. The default recipes are windows of 1 to 1024 steps,
each with margins of 0 and 1, and current and block scaling. Each is trained as described in ``recipe_cases``, paired by
seed with ``baseline``, the same training without FP8. ``amax_compute_algo="most_recent"`` is left out: its scales are
those of a window of 1.

A row is written as soon as it is measured, and rows that ``--out`` already has are not measured again. At the end the
tables are printed, and two pictures are written next to the rows.

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
from pathlib import Path
from typing import Any

import torch

from benchmarks.recipe_cases import EVENTS, TRAININGS, train, watch
from benchmarks.recipe_tables import BASELINE, draw, draw_growth, preferred, tables
from benchmarks.rows import append
from lightning_fp8.runtime.environment import environment
from lightning_fp8.scaling.recipe import Recipe, as_recipe, recipe_fields

RECIPES = [
    *(f"fp8-delayed,amax_history_len={window},margin={margin}" for margin in (0, 1) for window in (1, 4, 16, 64, 1024)),
    "fp8-current",
    "fp8-block",
]


def recipe_of(text: str) -> Recipe | None:
    """``"fp8-delayed,margin=1"`` -> the recipe; None for the baseline.

    Raises:
        ValueError: for a precision or a value that is none of a recipe's.
        TypeError: for a field that the recipe does not have.
    """
    return None if text == BASELINE else as_recipe(recipe_fields(text))


def measure(case: str, variant: str, seed: int) -> dict[str, Any]:
    """One row, without its environment."""
    recipe = recipe_of(variant)
    if case in TRAININGS:
        found: dict[str, Any] = train(TRAININGS[case], recipe, seed)
    else:
        assert recipe is not None
        found = watch(case, recipe, seed)
    return {"case": case, "variant": variant, "seed": seed, **found}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the file lacks, then print the tables and draw the pictures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recipes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the rows, FILE.jsonl; pictures are FILE.png, FILE-growth.png"
    )
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
                    row = {**measure(case, variant, seed), **about}
                    append([row], options.out)
                    rows.append(row)
                    print(f"{case}, seed {seed}, {variant}", file=sys.stderr, flush=True)
    print(tables(rows))
    print(f"\nBy the rule: {', '.join(preferred(rows))}")
    draw(rows, options.out.with_suffix(".png"))
    draw_growth(rows, options.out.with_name(f"{options.out.stem}-growth.png"))


if __name__ == "__main__":
    main()
