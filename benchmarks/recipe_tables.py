"""The rows of ``python -m benchmarks.recipes`` as tables and pictures, and the recipes that they favour."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.recipe_cases import AFTER, EVENTS, HARMED, TRAININGS
from lightning_fp8.scaling.recipe import BlockScaling, CurrentScaling, DelayedScaling
from lightning_fp8.tools.report.pictures import COLOURS, STYLE
from lightning_fp8.tools.tables import markdown_table

BASELINE = "baseline"
# the trainings whose losses decide; not the classifier, whose loss is near zero once it has learned all its images
DECIDING = tuple(case for case in TRAININGS if case != "encoder")
# windows in the picture of the growth; 0: current and block scaling, which have none
GROWTH_WINDOWS = (0, 1, 16, 1024)
# Student's t for a 95% interval, by number of values, from two on
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
Row = dict[str, Any]


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
    found = by_seed(rows, case, variant, key)
    return {seed: 100 * (found[seed] / baseline[seed] - 1) for seed in found if seed in baseline}


def cost(rows: Sequence[Row], variant: str) -> dict[int, float]:
    """Mean excess of the final training loss in percent, by seed; only seeds that every deciding training has."""
    found = [excess(rows, case, variant, "loss") for case in DECIDING]
    seeds = sorted(set.intersection(*map(set, found)))
    return {seed: mean(one[seed] for one in found) for seed in seeds}


def harmed_steps(rows: Sequence[Row], variant: str) -> float:
    """Steps with clipping or underflow after one spike and after growth together, as a mean over seeds."""
    keys = ("clipped_steps", "zero_steps")
    return sum(mean(by_seed(rows, event, variant, key).values()) for event in EVENTS for key in keys)


def preferred(rows: Sequence[Row]) -> list[str]:
    """The delayed recipes whose losses are as good as the best one's, in order of preference: the command's rule.

    A recipe that lacks an event, or a seed of the baseline in any deciding training, is left out.
    """
    seeds = cost(rows, BASELINE).keys()
    names = [name for name in variants(rows) if name.startswith(DelayedScaling.precision)]
    names = [name for name in names if all(by_seed(rows, event, name, "zero_steps") for event in EVENTS)]
    costs = {name: found for name in names if (found := cost(rows, name)) and found.keys() == seeds}
    best = min(costs, key=lambda name: mean(costs[name].values()), default="")
    above = {name: interval([costs[name][seed] - costs[best][seed] for seed in seeds]) for name in costs}
    candidates = [name for name, (middle, half) in above.items() if middle <= half]
    return sorted(candidates, key=lambda name: (harmed_steps(rows, name), _number(name, "margin"), window(name)))


def variants(rows: Sequence[Row]) -> list[str]:
    """All variants but the baseline."""
    return [name for name in dict.fromkeys(row["variant"] for row in rows) if name != BASELINE]


def window(variant: str) -> int:
    """The variant's ``amax_history_len``, or 0."""
    return _number(variant, "amax_history_len")


def _number(variant: str, field: str) -> int:
    return int(dict(part.partition("=")[::2] for part in variant.split(",")).get(field, 0))


def tables(rows: Sequence[Row]) -> str:
    """Markdown: excess of training and validation losses, and what casts lose."""
    names = variants(rows)
    found = []
    for key, title in (("loss", "training loss"), ("val_loss", "validation loss")):
        cells = [["excess of the " + title, *TRAININGS, "cost" if key == "loss" else "accuracy"]]
        for name in names:
            of_cases = [_percent(excess(rows, case, name, key)) for case in TRAININGS]
            last = _percent(cost(rows, name)) if key == "loss" else _points(rows, name)
            cells.append([name, *of_cases, last])
        found.append(markdown_table(cells))
    cells = [["what casts lose", *(f"{event}: {what}" for event in EVENTS for what in _LOST), "clipped before"]]
    for name in names:
        numbers = [by_seed(rows, event, name, key) for event in EVENTS for key in _LOST.values()]
        steady = [x for event in EVENTS for x in by_seed(rows, event, name, "steady_clipped_fraction").values()]
        lost = [_lost(one, key) for one, key in zip(numbers, [*_LOST.values()] * len(EVENTS), strict=True)]
        cells.append([name, *lost, f"{mean(steady):.4%}" if steady else "-"])
    return "\n\n".join([*found, markdown_table(cells)])


# titles and keys of an event's numbers
_LOST = {
    "steps with zeros": "zero_steps",
    "zeros": "zero_fraction",
    "clipped steps": "clipped_steps",
    "clipped": "clipped_fraction",
}


def _lost(values: dict[int, float], key: str) -> str:
    if not values:
        return "-"
    return f"{mean(values.values()):.0f}" if key.endswith("steps") else f"{mean(values.values()):.0%}"


def _percent(values: dict[int, float]) -> str:
    return "{:+.2f}% ± {:.2f}".format(*interval([*values.values()])) if values else "-"


def _points(rows: Sequence[Row], variant: str) -> str:
    baseline = by_seed(rows, "encoder", BASELINE, "val_accuracy")
    found = by_seed(rows, "encoder", variant, "val_accuracy")
    if not found:
        return "-"
    return "{:+.2f} ± {:.2f}".format(*interval([100 * (found[seed] - baseline[seed]) for seed in found]))


def draw(rows: Sequence[Row], path: Path) -> None:
    """A picture: excess of the training loss by window for each training, and steps with zeros at margin 0."""
    import matplotlib
    from matplotlib.figure import Figure

    names = variants(rows)
    delayed = [name for name in names if window(name)]
    windows = sorted({window(name) for name in delayed})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(14, 3.2), layout="constrained")
        grid = figure.subplots(1, len(TRAININGS) + 1)
        for axes, case in zip(grid, TRAININGS):
            for colour, margin in zip(COLOURS, sorted({_number(name, "margin") for name in delayed})):
                values = {name: excess(rows, case, name, "loss") for name in delayed}
                found = [
                    (windows.index(window(name)), *interval([*of_seeds.values()]))
                    for name, of_seeds in values.items()
                    if of_seeds and _number(name, "margin") == margin
                ]
                if not found:
                    continue
                places, means, halves = zip(*sorted(found))
                shifted = [place + 0.12 * margin for place in places]
                axes.errorbar(shifted, means, halves, color=colour, marker="o", capsize=3, label=f"margin {margin}")
            for colour, name in zip(COLOURS[2:], (CurrentScaling.precision, BlockScaling.precision)):
                if found_of := excess(rows, case, name, "loss"):
                    axes.axhline(mean(found_of.values()), color=colour, linestyle="--", label=name)
            axes.axhline(0, color="black", linewidth=0.8)
            axes.set(title=case, xlabel="window, steps")
        grid[0].set_ylabel("training loss above the baseline, %")
        bars = {window(name): by_seed(rows, "one spike", name, "zero_steps") for name in reversed(delayed)}
        harmed = [mean(bars[length].values() or [0]) for length in windows]
        grid[-1].bar(range(len(windows)), harmed, color=COLOURS[0])
        grid[-1].set(
            title="one spike", xlabel="window, steps", ylabel=f"steps with over {HARMED:.0%} zeros", yscale="log"
        )
        grid[-1].set_yticks(windows, windows)
        grid[-1].minorticks_off()
        for axes in grid:
            axes.set_xticks(range(len(windows)), windows)
        grid[len(TRAININGS) - 1].legend()
        figure.savefig(path, dpi=150)


def draw_growth(rows: Sequence[Row], path: Path) -> None:
    """A picture: the share of the gradient that is clipped in each step around a hundredfold growth."""
    import matplotlib
    from matplotlib.figure import Figure

    shown = [name for name in variants(rows) if window(name) in GROWTH_WINDOWS and not _number(name, "margin")]
    found = {name: [*by_seed(rows, "growth", name, "clipped_fractions").values()] for name in shown}
    found = {name: of_seeds for name, of_seeds in found.items() if of_seeds}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        axes = figure.subplots()
        for place, (name, of_seeds) in enumerate(found.items()):
            shares = [100 * mean(of_step) for of_step in zip(*of_seeds)]
            steps = [step + (place - (len(found) - 1) / 2) / (len(found) + 1) for step in range(-AFTER, AFTER)]
            label = f"{DelayedScaling.precision}, a window of {window(name)}" if window(name) else name
            axes.bar(steps, shares, 1 / (len(found) + 1), color=COLOURS[place % len(COLOURS)], label=label)
        axes.set(xlabel="optimizer step; in step 0 the gradient grows a hundredfold", ylabel="clipped", yscale="log")
        ticks = (0.001, 0.01, 0.1, 1, 10, 100)
        axes.set_yticks(ticks, [f"{tick:g}%" for tick in ticks])
        axes.set(xlim=(-AFTER, AFTER), ylim=(0.001, 150))
        axes.legend()
        figure.savefig(path, dpi=150)
