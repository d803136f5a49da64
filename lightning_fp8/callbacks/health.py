"""The health of an FP8 run: thresholds, findings, and the verdict. Nothing here measures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from lightning_fp8.runtime.did_you_mean import did_you_mean

Status = Literal["healthy", "look at", "unhealthy", "not FP8"]
# findings that the one-line verdict and the report show
MOST_SHOWN = 5


class Condition(NamedTuple):
    """A condition that ``Fp8Monitor`` looks for.

    Attributes:
        threshold: a measured value beyond this is a finding.
        unit: the unit of the threshold.
        status: the status of a run in which it holds now: ``"unhealthy"`` or ``"look at"``; ``"not FP8"`` if FP8 is not
            the cause.
        what: the measurement in words; ``{}`` is the measured value.
        meaning: what the measurement means.
        remedy: what to do. ``{layers}`` are the layers, ``{bf16}`` is the line that runs them in bf16, ``{recipe}`` is
            the run's recipe, ``{margin}`` is the run's margin plus one.
        source: where the threshold comes from.
    """

    threshold: float
    unit: str
    status: Status
    what: str
    meaning: str
    remedy: str
    source: str


CONDITIONS: dict[str, Condition] = {
    "nonfinite": Condition(
        1,
        "steps in a row",
        "not FP8",
        "inf or NaN, at most {:.0f} steps in a row",
        "Casts received inf or NaN: a cast does not create these. It clips inf, so the loss may look right.",
        "look at the batch of that step and at the learning rate; `Trainer(detect_anomaly=True)` names the operation",
        "a healthy run has none",
    ),
    "unmeasured": Condition(
        3,
        "checks before",
        "look at",
        "cannot tell whether FP8 is the cause: inf or NaN after {:.0f} checks",
        "The losses of casts before that were not measured, or too rarely for a finding.",
        "resume from an earlier checkpoint, with finite weights, and `Fp8Monitor(every_n_steps=1)`",
        "ours: as many checks as a share must be found at",
    ),
    "stale": Condition(
        100,
        "steps",
        "unhealthy",
        "the scale has not changed for {:.0f} steps, although the tensor is in use",
        "The layer is in eval mode while it trains, or the loop steps its optimizer without updating scales.",
        "`model.train()`, or `lightning_fp8.scaling_state(model).update()` after each step of a loop of your own",
        "ours: six windows of the default recipe",
    ),
    "saturated": Condition(
        0.01,
        "share of the numbers",
        "unhealthy",
        "{:.2%} of the numbers clipped",
        "The tensor is larger than its scale allows.",
        "`Fp8Precision(recipe=DelayedScaling(margin={margin}))`, or"
        ' `Fp8Monitor(action="current")`: own values set the scale',
        "the demo stays below 0.07%",
    ),
    "underflowed": Condition(
        0.1,
        "share of the nonzero numbers",
        "unhealthy",
        "{:.1%} of the nonzero numbers became 0",
        "Few large numbers take the range of the format; the others vanish.",
        "{bf16}",
        "the demo stays below 0.12%",
    ),
    "imprecise": Condition(
        16.0,
        "dB",
        "unhealthy",
        "signal to noise of {:.1f} dB",
        "The cast keeps less than three bits of the tensor.",
        "{bf16}",
        "normally distributed numbers have 31 dB in E4M3 and 25 dB in E5M2; 6 dB are one bit",
    ),
    "product": Condition(
        16.0,
        "dB",
        "unhealthy",
        "signal to noise of the output of {:.1f} dB, against the same product in bf16",
        "Large terms of the product cancel, so the errors of its operands are large beside what is left.",
        "{bf16}",
        "normally distributed operands have 28 dB in E4M3; 6 dB are one bit",
    ),
    "growing": Condition(
        0.5,
        "share of the steps",
        "unhealthy",
        "above the range of its scale in {:.0%} of the steps",
        "The tensor grows faster than the window of amaxes follows.",
        "`Fp8Precision(recipe=DelayedScaling(margin={margin}))`, or"
        ' `Fp8Monitor(action="current")`: own values set the scale',
        "by chance 1 in 17 steps at the default window of 16",
    ),
    "window": Condition(
        0.3,
        "share of the steps",
        "look at",
        "above the range of its scale in {:.0%} of the steps",
        "The window is too short to know the range of the tensor.",
        "`Fp8Precision(recipe=DelayedScaling(amax_history_len=16))`",
        "by chance 1 in 2 steps at a window of 1, 1 in 17 at 16",
    ),
    "bursts": Condition(
        4.0,
        "times the range",
        "look at",
        "up to {:.3g} times the range of its scale",
        "Single steps have far larger values than the window; these are clipped.",
        '`precision="fp8-current"`, or for the layers in trouble `Fp8Monitor(action="current")`',
        "ours: two bits",
    ),
    "margin": Condition(
        6.0,
        "bits",
        "look at",
        "{:.1f} bits of the format unused",
        "The scale leaves room above the largest value, which small numbers then lack.",
        "a smaller `margin`: `Fp8Precision(recipe={recipe}(margin=0))`",
        "ours: a third of the 17.8 bits from the smallest to the largest number of E4M3",
    ),
    "limit": Condition(
        120.0,
        "log2 of the scale",
        "unhealthy",
        "the scale is 2^{:.0f}, close to the limits of float32",
        "The tensor is all but zero, or all but infinite.",
        "multiply the loss, such as `loss * 2**20`",
        "float32 ends at 2^127",
    ),
    "tiny": Condition(
        -40.0,
        "log2 of the amax",
        "look at",
        "the largest gradient is 2^{:.0f}",
        "FP8 scales it as any other. Optimizers do not: their `eps` is 2^-27.",
        "multiply the loss, such as `loss * 2**20`",
        "Adam's default eps, 1e-8, squared is 2^-53",
    ),
    "dead": Condition(
        3,
        "checks in a row",
        "look at",
        "only zeros at {:.0f} checks in a row",
        "The layer does not learn: what it takes in, or the gradient of its output, is zero.",
        "look at the activation and the initialisation around the layer, and at the scale of the loss if all layers"
        " have it",
        "a healthy layer has gradients at each step",
    ),
    "unused": Condition(
        3,
        "checks in a row",
        "look at",
        "has not run, or had only zeros, at {:.0f} checks in a row",
        "The layer is converted, and nothing calls it in training, or its input and its gradients are all zero.",
        "`Fp8Precision(ignore_modules=[{layers}])` if that is what you want",
        "ours",
    ),
    "diverges": Condition(
        0.5,
        "share of what it had fallen",
        "not FP8",
        "the loss rose again by {:.0%} of what it had fallen",
        "No cast lost more than usual before: FP8 is not the cause.",
        'a lower learning rate; to be sure, the same in `precision="bf16-mixed"`: `python -m lightning_fp8 compare`',
        "ours",
    ),
    "spikes": Condition(
        0.5,
        "share of what it had fallen",
        "not FP8",
        "single steps with a loss higher by {:.0%} of what it had fallen",
        "No cast lost more than usual in these steps: FP8 is not the cause.",
        "look at the batches of these steps",
        "ours",
    ),
}
# conditions that hold if the value is below the threshold
LOW = ("imprecise", "product", "tiny")
# an unsuitable setting comes before the losses that it causes
CAUSES = ("margin", "window")
EFFECTS = ("saturated", "underflowed", "imprecise", "product")
# conditions that a move to current scaling may end, and those that a move to bf16 may end
OF_THE_SCALE = ("stale", "saturated", "underflowed", "growing", "window", "bursts", "margin")
OF_THE_CAST = ("nonfinite", *OF_THE_SCALE, "imprecise", "product", "limit")


def checked_thresholds(changed: Mapping[str, float | None] | None) -> dict[str, float]:
    """The default thresholds by condition, with changes. A condition set to None is not looked for.

    Raises:
        TypeError: if ``changed`` is not a mapping.
        ValueError: for an unknown condition, or a value that is not a finite number.
    """
    thresholds: dict[str, float | None] = {name: condition.threshold for name, condition in CONDITIONS.items()}
    if not isinstance(changed, Mapping | None):
        raise TypeError(f"Fp8Monitor: `thresholds` must map names to numbers, got {changed!r}.")
    for name, value in (changed or {}).items():
        if name not in CONDITIONS:
            raise ValueError(
                f"Fp8Monitor: `thresholds` has {name!r}; there are {', '.join(CONDITIONS)}."
                f"{did_you_mean(str(name), tuple(CONDITIONS))}"
            )
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
        if value is not None and not is_number:
            raise ValueError(f"Fp8Monitor: the threshold of {name!r} must be a finite number or None, got {value!r}.")
        thresholds[name] = value
    return {name: value for name, value in thresholds.items() if value is not None}


@dataclass
class Finding:
    """One thing to look at.

    Attributes:
        condition: its name in :data:`CONDITIONS`.
        where: the tensor, the layer, or empty for the run.
        since: the step of the check that found it first; for inf and NaN, the first step that had them.
        last: the step of the newest check at which it held.
        value: the worst measured value, in the unit of the condition.
        remedy: what to do.
        holds: whether it held at the newest check.
    """

    condition: str
    where: str
    since: int
    last: int
    value: float
    remedy: str
    holds: bool = True

    @property
    def what(self) -> str:
        """What was measured."""
        return CONDITIONS[self.condition].what.format(self.value)


@dataclass(frozen=True)
class Verdict:
    """Whether an FP8 run is healthy. ``str()`` begins with the answer; ``as_dict()`` has all details.

    Attributes:
        findings: what was found, the worst first; empty if the run is healthy.
        layers: how many layers run in FP8.
        steps: how many steps the run has made.
        thresholds: by condition.
    """

    findings: Sequence[Finding]
    layers: int
    steps: int
    thresholds: Mapping[str, float]

    @property
    def status(self) -> Status:
        """``"healthy"``; ``"unhealthy"`` if casts lose too much now; ``"look at"`` for less, or what has passed;
        ``"not FP8"`` if something is wrong with the run, and FP8 is not the cause."""
        found = {(CONDITIONS[finding.condition].status, finding.holds) for finding in self.findings}
        if ("unhealthy", True) in found:
            return "unhealthy"
        if any(status != "not FP8" for status, _ in found):
            return "look at"
        return "not FP8" if found else "healthy"

    @property
    def groups(self) -> list[tuple[Finding, list[str]]]:
        """The findings of each condition, merged: the finding with the worst value, and all places in order."""
        groups: dict[str, list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault(finding.condition, []).append(finding)
        return [(_together(found), [finding.where for finding in found]) for found in groups.values()]

    def __str__(self) -> str:
        size = f"{self.layers} layers, {self.steps:,} steps"
        if not self.layers and self.status == "healthy":
            return "FP8: no layer has run in FP8"
        if self.status == "healthy":
            return f"FP8: healthy ({size})"
        groups = self.groups
        number = f"{len(groups)} finding{'s' if len(groups) > 1 else ''}"
        head = {
            "look at": f"FP8: look at {number}",
            "unhealthy": f"FP8: unhealthy, {number}",
            "not FP8": f"FP8: not the cause of {number}",
        }[self.status]
        lines = [f"{head} ({size})"]
        for worst, places in groups[:MOST_SHOWN]:
            place = f"{_some(places)}: " if places[0] else ""
            until = "" if worst.holds else f" to {worst.last:,}"
            lines += [f"  {place}{worst.what} (from step {worst.since:,}{until})", f"    -> {worst.remedy}"]
        if len(groups) > MOST_SHOWN:
            lines.append(f"  and {len(groups) - MOST_SHOWN} more")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "status": self.status,
            "text": str(self),
            "layers": self.layers,
            "steps": self.steps,
            "findings": [self._as_dict(worst, places) for worst, places in self.groups],
        }

    def _as_dict(self, worst: Finding, places: Sequence[str]) -> dict[str, Any]:
        condition = CONDITIONS[worst.condition]
        return {
            **asdict(worst),
            "where": list(places),
            # JSON has no infinity
            "value": worst.value if math.isfinite(worst.value) else None,
            "threshold": self.thresholds[worst.condition],
            "unit": condition.unit,
            "what": worst.what,
            "meaning": condition.meaning,
            "status": condition.status,
        }


def _together(findings: Sequence[Finding]) -> Finding:
    first, values = findings[0], [finding.value for finding in findings]
    return replace(
        first,
        since=min(finding.since for finding in findings),
        last=max(finding.last for finding in findings),
        value=min(values) if first.condition in LOW else max(values),
        holds=any(finding.holds for finding in findings),
    )


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, worst first: sorted by whether FP8 is the cause, whether they hold now, condition, and distance
    from the threshold.

    An unsuitable setting comes before the losses that it causes. inf and NaN spread, so tensors with these come in the
    order in which they got them: in a step weights, inputs, and then gradients.
    """
    findings = list(findings)
    lossy = {tensor_of(finding.condition, finding.where) for finding in findings if finding.condition in EFFECTS}
    ranks, names = ("unhealthy", "look at", "not FP8"), list(CONDITIONS)

    def key(finding: Finding) -> tuple[Any, ...]:
        condition = CONDITIONS[finding.condition]
        worst = finding.value if finding.condition in LOW else -finding.value
        has_spread = finding.condition == "nonfinite"
        holds, number = (True, finding.since) if has_spread else (finding.holds, worst)
        is_cause = finding.condition in CAUSES and finding.where in lossy
        is_later = not finding.where.endswith("weight") if has_spread else False
        rank = -1 if is_cause else ranks.index(condition.status)
        return rank, not holds, names.index(finding.condition), number, is_later

    return sorted(findings, key=key)


def tensor_of(condition: str, where: str) -> str:
    """The tensor where a condition was found; the input for a product."""
    return f"{where}.input" if condition == "product" else where


def _some(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
