"""What ``ScaleFactorLogger`` logged, tensor by tensor and step by step."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fp8.ops.formats import ROLES
from lightning_fp8.tools.report.runs import Floats, Run, Series

# how several steps are combined in one column
PLANES = {
    "scale": "last",
    "headroom_bits": "min",
    "saturated_fraction": "max",
    "underflowed_fraction": "max",
}
STATISTICS = ("min", "median", "max")
MAX_COLUMNS = 150


@dataclass
class Tensors:
    """The tensors of a run, in the order of the model.

    Attributes:
        names: ``<module path>.<role>``, R of them.
        steps: at which any tensor was logged, ``[S]``.
        values: ``[R, S]`` by quantity of ``PLANES``, NaN where nothing was logged.
        nonfinite_steps: newest count of each tensor, ``[R]``.
        sqnr_db: newest SQNR of each tensor's layer, ``[R]``.
    """

    names: list[str]
    steps: npt.NDArray[np.int64]
    values: dict[str, Floats]
    nonfinite_steps: Floats
    sqnr_db: Floats

    @cached_property
    def roles(self) -> list[str]:
        """The role of each tensor."""
        return [name.rpartition(".")[2] for name in self.names]

    @cached_property
    def bounds(self) -> npt.NDArray[np.int64]:
        """Where each column of the heat map begins in ``steps``."""
        columns = min(len(self.steps), MAX_COLUMNS)
        return np.arange(columns) * len(self.steps) // max(columns, 1)

    @cached_property
    def columns(self) -> dict[str, Floats]:
        """``values`` with at most ``MAX_COLUMNS`` columns: of several steps the last scale, else the worst value."""
        return {quantity: _reduced(self.values[quantity], self.bounds, how) for quantity, how in PLANES.items()}

    @cached_property
    def worst(self) -> dict[str, tuple[Floats, npt.NDArray[np.int64]]]:
        """The worst value of each tensor over the run, ``[R]``, NaN where there is none, and its first step."""
        found = {}
        for quantity, how in PLANES.items():
            values = self.values[quantity]
            at = np.where(np.isnan(values), np.inf, values if how == "min" else -values).argmin(axis=1)
            found[quantity] = values[np.arange(len(values)), at], self.steps[at]
        return found


def _reduced(values: Floats, bounds: npt.NDArray[np.int64], how: str) -> Floats:
    if len(bounds) == values.shape[1]:
        return values
    if how == "last":
        # the newest value
        known = np.where(np.isnan(values), -1, np.arange(values.shape[1]))
        newest = np.maximum.reduceat(known, bounds, axis=1)
        filled = np.take_along_axis(values, np.maximum(newest, 0), axis=1)
        return np.where(newest >= 0, filled, np.nan)
    reduce = np.fmin if how == "min" else np.fmax
    return reduce.reduceat(values, bounds, axis=1)


def tensors_of(run: Run) -> Tensors | None:
    """The tensors that the run logged; None where it logged none."""
    logged: dict[str, dict[str, Series]] = {}
    for key, series in run.scalars.items():
        name, _, quantity = key.removeprefix("fp8/").rpartition("/")
        if key.startswith("fp8/") and quantity in (*PLANES, "nonfinite_steps") and name.rpartition(".")[2] in ROLES:
            logged.setdefault(name, {})[quantity] = series
    if not logged:
        return None
    names = in_model_order(logged, run)
    seen = [series.steps for quantities in logged.values() for series in quantities.values()]
    steps = np.unique(np.concatenate(seen))
    values: dict[str, Floats] = {quantity: np.full((len(names), len(steps)), np.nan) for quantity in PLANES}
    nonfinite = np.full(len(names), np.nan)
    for row, name in enumerate(names):
        for quantity, series in logged[name].items():
            if quantity in values:
                values[quantity][row, np.searchsorted(steps, series.steps)] = series.values
            else:
                nonfinite[row] = series.values[-1]
    sqnr = sqnr_of(run)
    found = np.array([sqnr.get(layer_of(name, run, sqnr), np.nan) for name in names])
    return Tensors(names, steps, values, nonfinite, found)


def in_model_order(names: Iterable[str], run: Run) -> list[str]:
    """Tensor names in the record's order of modules; without a record by name, with 10 after 2."""
    known = {module: position for position, module in enumerate(run.record.get("modules") or [])}

    def place(name: str) -> tuple[Any, ...]:
        module, _, role = name.rpartition(".")
        by_name = [_by_size(part) if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", module)]
        return known.get(module, len(known)), by_name, ROLES.index(role) if role in ROLES else 0  # type: ignore[arg-type]

    return sorted(names, key=place)


def _by_size(digits: str) -> tuple[int, str]:
    # not `int`, which refuses thousands of digits
    digits = digits.lstrip("0")
    return len(digits), digits


def layer_of(name: str, run: Run, sqnr: dict[str, float]) -> str:
    """The layer that a tensor belongs to: its module, or the attention module for an attention's projection."""
    module = name.rpartition(".")[0]
    parent = module.rpartition(".")[0]
    layers = {row["path"] for row in run.record.get("layers") or []} | sqnr.keys()
    return parent if module not in layers and parent in layers else module


def sqnr_of(run: Run) -> dict[str, float]:
    """The newest SQNR that ``QuantizationProbe`` measured, in dB, by module path."""
    ending = "/sqnr_db"
    return {
        key[len("fp8/") : -len(ending)]: float(series.values[-1])
        for key, series in run.scalars.items()
        if key.startswith("fp8/") and key.endswith(ending)
    } | ({"": float(run.scalars["fp8/sqnr_db"].values[-1])} if "fp8/sqnr_db" in run.scalars else {})


def role_curves(run: Run, tensors: Tensors | None) -> dict[str, dict[str, dict[str, Series]]]:
    """Series by quantity, role and statistic: the logged summaries, or else computed from the tensors."""
    curves: dict[str, dict[str, dict[str, Series]]] = {}
    for quantity in PLANES:
        for role in ROLES:
            found = {
                statistic: run.scalars[key]
                for statistic in STATISTICS
                if (key := f"fp8/{role}/{quantity}/{statistic}") in run.scalars
            }
            if not found and tensors is not None:
                found = _statistics(tensors, quantity, role)
            if found:
                curves.setdefault(quantity, {})[role] = found
    return curves


def _statistics(tensors: Tensors, quantity: str, role: str) -> dict[str, Series]:
    values = tensors.values[quantity][[name == role for name in tensors.roles]]
    known = ~np.isnan(values).all(axis=0) if len(values) else np.zeros(len(tensors.steps), bool)
    if not known.any():
        return {}
    steps, some = tensors.steps[known], values[:, known]
    return {
        "min": Series(steps, np.nanmin(some, axis=0)),
        "median": Series(steps, np.nanmedian(some, axis=0)),
        "max": Series(steps, np.nanmax(some, axis=0)),
    }
