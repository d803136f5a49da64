"""Which precision to choose, and why: rules for the rows of a comparison.

1. Two losses are compared with the baseline's: the mean of the last steps, and the validation loss if both have one. A
   precision with either loss worse by more than 1%, or not finite, is never recommended. Near zero the limit is 0.1% of
   the baseline's first loss, if that is more than 1% of its loss. The baseline is bf16-mixed, or 32-true on a CPU that
   emulates bf16 products.
2. On a CUDA GPU: of the precisions whose losses pass, the fastest by median step time is recommended, if that is at
   least 5% less than bf16-mixed's and the times of the two do not overlap between their 20th and 80th percentiles. Of
   those within 2% of the fastest, the one with the least peak memory is. Otherwise bf16-mixed is.
3. On the CPU speed is ignored: bf16-mixed is recommended, and if memory is short the precision with the fewest bytes of
   parameters, gradients and optimizer state (the same as on a GPU), if those are at least 5% fewer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_fp8.tools.compare.variants import BASELINE

WORSE_LOSS = 0.01
WORSE_OF_FIRST_LOSS = 0.001
FASTER = 0.05
LESS_MEMORY = 0.05
ABOUT_AS_FAST = 0.02
_LOSSES = {"loss": "training loss", "val_loss": "validation loss"}
_MIB = 2**20
Row = Mapping[str, Any]


def advise(rows: Sequence[Row], baseline: str = BASELINE) -> list[str]:
    """Sentences, the most important first; a row with an ``error`` otherwise has only a ``variant``."""
    ran = [row for row in rows if not row.get("error")]
    on_cuda = any(row.get("gpu") for row in ran)
    lines = []
    if ran and not on_cuda:
        lines.append("These are times of a CPU. They say nothing about speed on a GPU, so they are ignored here.")
    reference = next((row for row in ran if row["variant"] == baseline), None)
    if reference is None:
        return [*lines, f"No recommendation: there is no run of {baseline}, with which the others are compared."]
    candidates = [row for row in ran if row is not reference]
    losses = _losses(reference)
    if not losses:
        lines.append(
            "No loss is known: `training_step` returns none and logs no `train_loss`. Look at your own metrics."
        )
    strange = [row["variant"] for row in candidates if row["batches"] != reference["batches"]]
    if strange:
        lines.append(
            f"{', '.join(strange)} did not get the batches that {baseline} got, so the losses differ by"
            " more than the precision: the data does not follow `seed_everything`."
        )
    if not all(map(math.isfinite, losses.values())):
        return [*lines, f"No recommendation: the loss of {baseline} is not finite. Look into the training first."]
    refused = {row["variant"]: why for row in candidates if (why := worse_loss(row, reference))}
    accepted = [row for row in candidates if row["variant"] not in refused]
    lines += _on_gpu(reference, accepted) if on_cuda else _on_cpu(reference, accepted)
    lines += [f"Not {variant}: {why}." for variant, why in refused.items()]
    if refused:
        lines.append(
            f"After {reference['steps']} steps the difference may be temporary. Repeat with more `--steps` before you"
            " rely on it."
        )
    if any(row["variant"] == "bf16-true" for row in accepted):
        lines.append(
            "bf16-true loses updates smaller than half a unit in the last place of a bf16 weight. A run of"
            f" {reference['steps']} steps may be too short to show what that costs."
        )
    if not on_cuda:
        lines.append("For an answer about speed, run the same command on the GPU that you will train on.")
    return lines


def in_short(rows: Sequence[Row], baseline: str = BASELINE) -> str:
    """One sentence: the loss, time and memory of each precision, and the verdict of its ``Fp8Monitor``.

    Empty if there is no run of the baseline, or of no other precision.
    """
    ran = {row["variant"]: row for row in rows if not row.get("error")}
    if baseline not in ran:
        return ""
    reference, parts = ran.pop(baseline), []
    for variant, row in ran.items():
        memory, of = ("peak_bytes", "at the peak") if row.get("gpu") else ("state_bytes", "of state")
        on = "" if row.get("gpu") else " on this CPU"
        numbers = {"p50_ms": f"{row['p50_ms']:.2f} ms a step{on}", memory: f"{row[memory] / _MIB:,.1f} MiB {of}"}
        if row.get("loss") is not None:
            numbers = {"loss": f"a loss of {row['loss']:.4f}", **numbers}
        said = [f"{text} ({_change(row[key], reference[key])})" for key, text in numbers.items()]
        parts.append(", ".join([f"{variant} has {said[0]}", *said[1:], *filter(None, [row.get("verdict")])]))
    return f"Beside {baseline}, {'; '.join(parts)}." if parts else ""


def _change(value: float, reference: float | None) -> str:
    return f"{value / reference - 1:+.1%}" if reference else f"from {reference}"


def worse_loss(row: Row, reference: Row) -> str:
    """Why the losses do not pass rule 1; empty if they do."""
    mine, first = _losses(row), reference.get("first_loss")
    nearly_nothing = WORSE_OF_FIRST_LOSS * abs(first) if first is not None and math.isfinite(first) else 0.0
    for key, theirs in _losses(reference).items():
        more = mine.get(key, theirs) - theirs
        if not math.isfinite(more):
            return f"its {_LOSSES[key]} is {mine[key]}"
        if more > max(WORSE_LOSS * abs(theirs), nearly_nothing):
            by = f"worse by {more / abs(theirs):.1%}" if theirs else "worse"
            return (
                f"its {_LOSSES[key]} {mine[key]:.4f} is {by} than {reference['variant']}'s {theirs:.4f};"
                f" {WORSE_LOSS:.0%} passes"
            )
    return ""


def _losses(row: Row) -> dict[str, float]:
    return {key: row[key] for key in _LOSSES if row.get(key) is not None}


def _on_gpu(reference: Row, accepted: Sequence[Row]) -> list[str]:
    baseline, time = reference["variant"], reference["p50_ms"]
    noisy, faster = [], []
    for row in accepted:
        if row["p20_ms"] <= reference["p80_ms"] and reference["p20_ms"] <= row["p80_ms"]:
            noisy.append(row["variant"])
        elif row["p50_ms"] <= (1 - FASTER) * time:
            faster.append(row)
    best = reference
    line = (
        f"Recommended: {baseline}. No other precision whose loss passes takes at least {FASTER:.0%} less time per"
        " step, beyond the noise."
    )
    if faster:
        least = min(row["p50_ms"] for row in faster)
        near = [row for row in faster if row["p50_ms"] <= (1 + ABOUT_AS_FAST) * least]
        best = min(near, key=lambda row: (row["peak_bytes"], row["p50_ms"]))
        tied = f", with the least memory of the {len(near)} that are about as fast" if len(near) > 1 else ""
        line = (
            f"Recommended: {best['variant']}. Its step takes {1 - best['p50_ms'] / time:.0%} less time than"
            f" {baseline}'s, {best['p50_ms']:.2f} ms against {time:.2f} ms{tied}. Its loss passes, and its peak memory"
            f" is {best['peak_bytes'] / _MIB:,.0f} MiB against {reference['peak_bytes'] / _MIB:,.0f} MiB."
        )
    lines = [line]
    if noisy:
        lines.append(
            f"Within the noise: the step times of {', '.join(noisy)} and of {baseline} overlap between their 20th and"
            " 80th percentiles."
        )
    return lines + _memory(best, [reference, *accepted], "peak_bytes", "peak memory")


def _on_cpu(reference: Row, accepted: Sequence[Row]) -> list[str]:
    lines = [f"Recommended until measured on a GPU: {BASELINE}. Its fp32 master weights lose no update."]
    if reference["variant"] != BASELINE:
        lines.append(f"Losses are compared with those of {reference['variant']}: this CPU emulates bf16 products.")
    quantity = "sum of parameters, gradients and optimizer state, the same on a GPU,"
    return lines + _memory(reference, accepted, "state_bytes", quantity)


def _memory(best: Row, rows: Sequence[Row], key: str, quantity: str) -> list[str]:
    least = min(rows, key=lambda row: row[key], default=best)
    if least[key] > (1 - LESS_MEMORY) * best[key]:
        return []
    return [
        f"If memory is short: {least['variant']}. Its loss passes, and its {quantity} is"
        f" {least[key] / _MIB:,.1f} MiB against {best[key] / _MIB:,.1f} MiB of {best['variant']}."
    ]
