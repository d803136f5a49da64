"""What ``ScaleFactorLogger`` logged, tensor by tensor and step by step."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

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
MAX_COLUMNS = 150
MAX_LINES = 240


@dataclass
class Tensors:
    """The tensors of a run, in the order of the model.

    Attributes:
        names: ``<module path>.<role>``, R of them.
        layers: the layer of each: its module, or the attention module for an attention's projection.
        steps: at which any tensor was logged, ``[S]``.
        values: ``[R, S]`` by quantity of ``PLANES``, NaN where nothing was logged.
        nonfinite_steps: newest count of each tensor, ``[R]``.
    """

    names: list[str]
    layers: list[str]
    steps: npt.NDArray[np.int64]
    values: dict[str, Floats]
    nonfinite_steps: Floats

    @cached_property
    def bounds(self) -> npt.NDArray[np.int64]:
        """The first and last index in ``steps`` of each column of the heat map, ``[2, C]``."""
        columns = min(len(self.steps), MAX_COLUMNS)
        starts = np.arange(columns) * len(self.steps) // max(columns, 1)
        return np.stack([starts, np.append(starts[1:], len(self.steps)) - 1])

    @cached_property
    def columns(self) -> dict[str, Floats]:
        """``values`` with at most ``MAX_COLUMNS`` columns: of several steps the last scale, else the worst value."""
        starts, ends = self.bounds
        worst = {"min": np.fmin, "max": np.fmax}
        return {
            quantity: self.values[quantity][:, ends]
            if how == "last"
            else worst[how].reduceat(self.values[quantity], starts, axis=1)
            for quantity, how in PLANES.items()
        }

    @cached_property
    def lines(self) -> tuple[list[str], dict[str, Floats]]:
        """Names and ``columns`` by role; beyond ``MAX_LINES`` a line is the worst, or lowest, of several neighbours."""
        each = -(-len(self.names) // MAX_LINES)
        rows = [[row for row, name in enumerate(self.names) if name.endswith(f".{role}")] for role in ROLES]
        groups = [some[start : start + each] for some in rows for start in range(0, len(some), each)]
        names = [self.names[row] + (f" and {len(more)} more" if more else "") for row, *more in groups]
        reduce = {quantity: np.fmax if how == "max" else np.fmin for quantity, how in PLANES.items()}
        planes = {
            quantity: np.stack([reduce[quantity].reduce(values[group], axis=0) for group in groups])
            for quantity, values in self.columns.items()
        }
        return names, planes

    @cached_property
    def worst(self) -> dict[str, tuple[Floats, npt.NDArray[np.int64]]]:
        """The worst value of each tensor over the run, ``[R]``, NaN where there is none, and its first step."""
        by_quantity = {}
        for quantity, how in PLANES.items():
            values = self.values[quantity]
            at = np.where(np.isnan(values), np.inf, values if how == "min" else -values).argmin(axis=1)
            by_quantity[quantity] = values[np.arange(len(values)), at], self.steps[at]
        return by_quantity


def tensors_of(run: Run) -> Tensors | None:
    """The tensors that the run logged; None where it logged none."""
    logged: dict[str, dict[str, Series]] = {}
    for key, series in run.scalars.items():
        name, _, quantity = key.removeprefix("fp8/").rpartition("/")
        if key.startswith("fp8/") and quantity in (*PLANES, "nonfinite_steps") and name.rpartition(".")[2] in ROLES:
            logged.setdefault(name, {})[quantity] = series
    if not logged:
        return None
    names = _in_model_order(logged, run)
    steps = np.unique(np.concatenate([series.steps for curves in logged.values() for series in curves.values()]))
    values: dict[str, Floats] = {quantity: np.full((len(names), len(steps)), np.nan) for quantity in PLANES}
    nonfinite = np.full(len(names), np.nan)
    for row, name in enumerate(names):
        for quantity, series in logged[name].items():
            if quantity in values:
                values[quantity][row, np.searchsorted(steps, series.steps)] = series.values
            else:
                nonfinite[row] = series.values[-1]
    paths = {row["path"] for row in run.record.get("layers") or []}
    return Tensors(names, [_layer_of(name, paths) for name in names], steps, values, nonfinite)


def _in_model_order(names: Iterable[str], run: Run) -> list[str]:
    """Tensor names in the record's order of modules; without a record by name, with 10 after 2."""
    positions = {module: position for position, module in enumerate(run.record.get("modules") or [])}

    def place(name: str) -> tuple[int, str, int]:
        module, _, role = name.rpartition(".")
        by_number = re.sub(r"\d+", lambda digits: digits[0].zfill(9), module)
        return positions.get(module, len(positions)), by_number, ROLES.index(role)  # type: ignore[arg-type]

    return sorted(names, key=place)


def _layer_of(name: str, paths: set[str]) -> str:
    module = name.rpartition(".")[0]
    parent = module.rpartition(".")[0]
    return parent if module not in paths and parent in paths else module
