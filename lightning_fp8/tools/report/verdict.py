"""The verdict of ``Fp8Monitor`` on a run: findings, with the curves that show them and the code that mends them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_fp8.ops.formats import ROLES
from lightning_fp8.tools.report.charts import Chart, Switch, curve_keys, line, loss_keys, summary
from lightning_fp8.tools.report.runs import Run, Series

MOST_SHOWN = 5
_MOST_PLACES = 3
# the logged quantities that show a condition of the monitor; the first one that was logged is drawn
_QUANTITIES: dict[str, tuple[str, ...]] = {
    "nonfinite": ("nonfinite_steps",),
    "stale": ("scale",),
    "saturated": ("saturated_fraction",),
    "underflowed": ("underflowed_fraction",),
    "imprecise": ("sqnr_db",),
    "product": ("sqnr_db",),
    "growing": ("amax", "headroom_bits"),
    "window": ("amax", "headroom_bits"),
    "bursts": ("amax", "headroom_bits"),
    "margin": ("headroom_bits",),
    "limit": ("scale",),
    "tiny": ("amax",),
    "dead": ("amax",),
}
_TITLES = {
    "nonfinite_steps": "steps with inf or NaN so far",
    "scale": "scale",
    "saturated_fraction": "share clipped",
    "underflowed_fraction": "share that became 0",
    "sqnr_db": "signal to noise, dB",
    "headroom_bits": "headroom, bits",
    "amax": "largest absolute value",
}
_OF_THE_LOSS = ("diverges", "spikes")


@dataclass
class Shown:
    """A finding, as the page shows it.

    Attributes:
        what: what was measured, at the worst place.
        where: the first places, and how many more; empty for the run.
        when: since which step, and until which if it no longer holds.
        meaning: what that means.
        remedy: text and code in turn.
        is_wrong: whether it holds now and makes the run unhealthy.
        chart: the curve that shows it; None if nothing was logged.
    """

    what: str
    where: str
    when: str
    meaning: str
    remedy: list[str]
    is_wrong: bool
    chart: Chart | None


def headline(run: Run) -> str:
    """The verdict in one line; without one, what would give it."""
    if run.health:
        return str(run.health["text"]).partition("\n")[0]
    if run.record and not run.record.get("layers"):
        return f"No verdict: no layer runs in FP8 under precision {run.precision}."
    return "No verdict: add lightning_fp8.Fp8Monitor to the callbacks."


def findings(run: Run) -> list[Shown]:
    """The findings, the worst first, as the monitor has ordered them."""
    return [_shown(run, finding) for finding in run.health.get("findings", ())]


def _shown(run: Run, finding: dict[str, Any]) -> Shown:
    places = finding["where"]
    more = f" and {len(places) - _MOST_PLACES} more" if len(places) > _MOST_PLACES else ""
    since, last = f"{finding['since']:,}", f"{finding['last']:,}"
    ended = f"at step {since}" if since == last else f"from step {since} to {last}"
    chart = _chart(run, finding["condition"], places)
    if chart is not None:
        chart.switches = [Switch(finding["since"], "found", 1)]
    return Shown(
        finding["what"],
        ", ".join(places[:_MOST_PLACES]) + more,
        f"since step {since}" if finding["holds"] else ended,
        finding["meaning"],
        re.split("`([^`]*)`", finding["remedy"]),
        # inf and NaN are wrong, whatever they come from
        finding["holds"] and (finding["status"] == "unhealthy" or finding["condition"] == "nonfinite"),
        chart,
    )


def _chart(run: Run, condition: str, places: Sequence[str]) -> Chart | None:
    if condition in _OF_THE_LOSS:
        keys = loss_keys(curve_keys([run]))
        return _lines(", ".join(keys), {key: run.scalars[key] for key in keys})
    charts = (_chart_of(run, quantity, places) for quantity in _QUANTITIES.get(condition, ()))
    return next(filter(None, charts), None)


def _chart_of(run: Run, quantity: str, places: Sequence[str]) -> Chart | None:
    """A quantity at the first places, or else at the worst tensor of each of their roles."""
    named = {place: run.scalars.get(f"fp8/{place}/{quantity}") for place in places[:_MOST_PLACES]}
    if not any(named.values()):
        statistic = "max" if quantity.endswith("fraction") else "min"
        # the products of layers have no role
        ends = [place.rpartition(".")[2] for place in places]
        roles = dict.fromkeys(end if end in ROLES else "product" for end in ends)
        named = {f"{role}, {statistic}": summary(run, role, quantity, statistic) for role in roles}
    return _lines(_TITLES[quantity], named, quantity.endswith("fraction"), quantity in ("scale", "amax"))


def _lines(title: str, named: dict[str, Series | None], is_share: bool = False, is_log: bool = False) -> Chart | None:
    lines = [
        line(name, number, 0, series)
        for number, (name, series) in enumerate(named.items())
        if series is not None and len(series.steps) > 1
    ]
    return Chart(title, is_share, lines, is_log=is_log) if lines else None
