"""How much of the loss that FP8 costs a last part in higher precision recovers.

    python -m benchmarks.healing --out docs/results/healing-cpu.jsonl [--seeds 5] [--steps 400] [--recipe fp8-delayed]

The training is ``gpt`` of ``recipe_cases``, a byte-level GPT, in fewer steps. Each variant starts from the same weights
and sees the same batches as ``baseline``, the same training without FP8, with the same seed. The final losses are the
mean training loss of the last tenth of the steps and the validation loss, in the precision at the end. The gap is the
excess of FP8's loss over the baseline's; the share recovered is that of the means over all seeds.

A row is written as soon as it is measured, and rows that ``--out`` already has are not measured again. At the end the
table is printed.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.harness import Row, append
from benchmarks.recipe_cases import TRAININGS, Run, Training
from benchmarks.recipes import BASELINE, by_seed, excess, interval, recipe_of
from lightning_fp8 import PrecisionSchedule
from lightning_fp8.runtime.environment import environment
from lightning_fp8.tools.tables import markdown_table

CASE = "gpt"
FP8, LAST_STEP = "FP8 throughout", "last step in bf16"
# what the run ends in; the last step alone changes the evaluation, and hardly the training
SCHEDULES: dict[str, Any] = {
    FP8: None,
    "last tenth in bf16": {0.9: "bf16"},
    "last tenth with fprop in bf16": {0.9: {"fprop": "bf16"}},
    LAST_STEP: "bf16",
}


def of_steps(steps: int) -> Training:
    """The training in another number of steps."""
    return dataclasses.replace(TRAININGS[CASE], steps=steps, last=steps // 10)


def measure(variants: Sequence[str], recipe: str, seed: int, steps: int) -> Iterator[Row]:
    """A row for each variant, without its environment. They share the steps before the first change."""
    training = of_steps(steps)
    shared = {name: Run(training, recipe_of(name), seed) for name in (BASELINE, recipe)}
    for variant in variants:
        run, schedule = shared[BASELINE if variant == BASELINE else recipe], SCHEDULES.get(variant)
        if variant == LAST_STEP:
            schedule = {steps - 1: schedule}
        if variant != BASELINE:
            run.advance(9 * steps // 10)
            run = copy.deepcopy(run)
        run.advance(steps, None if schedule is None else PrecisionSchedule(schedule))
        about = {"case": CASE, "variant": variant, "seed": seed, "recipe": recipe, "steps": steps}
        entries = None if schedule is None else {str(key): value for key, value in schedule.items()}
        yield {**about, "schedule": entries, **run.result()}


def recovered(rows: Sequence[Row], variant: str, key: str) -> float:
    """The share of the mean gap that a variant has recovered: 0 as FP8, 1 as the baseline."""
    gap, left = (mean(excess(rows, CASE, name, key).values()) for name in (FP8, variant))
    return 1 - left / gap


def table(rows: Sequence[Row]) -> str:
    """Markdown: the excess of each loss over the baseline's in percent, and the share of the gap that is recovered."""
    titles = {"loss": "training loss", "val_loss": "validation loss"}
    cells = [["run", *(f"{title}: {column}" for title in titles.values() for column in ("excess", "recovered"))]]
    for variant in SCHEDULES:
        if not by_seed(rows, CASE, variant, "loss"):
            continue
        line = [variant]
        for key in titles:
            middle, half = interval([*excess(rows, CASE, variant, key).values()])
            line += [f"{middle:+.3f} ± {half:.3f}", "-" if variant == FP8 else f"{recovered(rows, variant, key):.0%}"]
        cells.append(line)
    return markdown_table(cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the file lacks, then print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.healing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the rows, as lines of JSON")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--recipe", default="fp8-delayed")
    options = parser.parse_args(arguments)
    # one thread, so that losses do not depend on the number of cores
    torch.set_num_threads(1)
    about = environment(command=f"python -m benchmarks.healing --out {options.out}")
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(row["variant"], row["seed"]) for row in rows}
    for seed in range(options.seeds):
        missing = [variant for variant in (BASELINE, *SCHEDULES) if (variant, seed) not in done]
        for row in measure(missing, options.recipe, seed, options.steps):
            rows.append({**row, **about})
            append(rows[-1:], options.out)
            print(f"seed {seed}, {row['variant']}", file=sys.stderr, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
