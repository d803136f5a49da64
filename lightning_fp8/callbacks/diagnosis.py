"""Diagnoses an FP8 run from what its checks measure: which conditions hold, and where."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from lightning_fp8.callbacks.health import OF_THE_CAST
from lightning_fp8.callbacks.loss import Loss
from lightning_fp8.callbacks.watch import Measured, over_processes
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.scaling.state import ScalingState, tensor_name

# in a small tensor, one number is a large share: fewer lost numbers than this at a check never exceed a threshold
_MIN_LOST = 10
# tensors grow in the first steps of a run: steps above the range count from so many updates on
_MIN_UPDATES = 100
# what a resumed run needs besides
# of layers that inf or NaN may keep from running, or from having a scale
_IDLE = ("stale", "unused", "dead")
_STATE = ("began", "_finite", "_in_doubt", "_made_it_rise")
# the measured values, by condition and by tensor or layer; for the run, the key is an empty string
Found = dict[tuple[str, str], float]


class Diagnosis:
    """The conditions that hold at each check of one run.

    Args:
        thresholds: the thresholds by condition; other conditions are not looked for.
        checks_in_a_row: the number of checks in a row at which a share or a ratio must be beyond its threshold.

    What came first decides. After the loss has risen, casts lose more because all tensors change. So what begins after
    the rise counts only if FP8 may have caused the rise, or if it is in data, which the loss does not change.

    Attributes:
        loss: the loss of the run; gets the loss of each step.
        began: the step at which the run began, or was resumed without its measurements; None: 0.
    """

    def __init__(self, thresholds: Mapping[str, float], checks_in_a_row: int) -> None:
        self.thresholds = thresholds
        self.checks_in_a_row = checks_in_a_row
        self.loss = Loss()
        self.began: int | None = None
        # at how many checks all was finite, and whether inf or NaN then came before there were enough
        self._finite = 0
        self._in_doubt: bool | None = None
        # whether casts lost too much before the loss rose
        self._made_it_rise = False
        # how often in a row a condition held at checks, and the step at which a tensor was last updated, by name
        self._in_a_row: dict[tuple[str, str], int] = {}
        self._last_update: dict[str, int] = {}
        # by tensor, of the newest checks: at how many updates it was beyond its range, and of how many
        self._beyond: dict[str, list[tuple[int, int]]] = {}
        # by input, what was far beyond its range since the loss was lowest and before it rose
        self._bursts: dict[str, float] = {}

    def find(
        self,
        state: ScalingState,
        measured: Measured,
        products: dict[str, float],
        data: Collection[str],
        layers: Iterable[Fp8Module],
        steps: int,
        held: Collection[tuple[str, str]],
    ) -> Found:
        """The conditions that hold now.

        Args:
            state: of the model.
            measured: the measurements of its tensors.
            products: the signal-to-noise ratio of each layer's product, in dB.
            data: the layers whose input is data.
            layers: all converted layers.
            steps: the number of steps that the run has made.
            held: the findings that held at the previous check.
        """
        rises = {
            name: value
            for name, value in self.loss.check(over_processes).items()
            if value > self.thresholds.get(name, math.inf)
        }
        lossy = {*OF_THE_CAST} - {"nonfinite"}
        has_lost = any(condition in lossy for condition, _ in held)
        has_risen = self.loss.checks_risen > 0
        self._made_it_rise = has_risen and (self._made_it_rise or has_lost or bool(self._bursts))
        if self.loss.is_lowest:
            self._bursts = {}
        names = {tensor_name(layer, "input") for layer in data}
        found = self._of_tensors(state, measured, products, {*data, *names}, steps)
        rows = (measured.nonfinite.bool() & state.rows_in_fp8).nonzero().flatten().tolist()
        lost = {state.names[row] for row in rows} | {state.module_names[state.module_of(row)] for row in rows}
        # casts of inf and NaN are not counted: what held goes on there
        found |= {key: math.nan for key in held if key[0] in lossy and key[1] in lost and key not in found}
        in_doubt = self._is_in_doubt(bool(rows) or rises.get("diverges") == math.inf, not names.isdisjoint(lost))
        if in_doubt and not any(condition in lossy for condition, _ in found):
            found["unmeasured", ""] = float(self._finite)
        training = [layer for layer in layers if layer.training]
        run = {gemm.module for layer in training for gemm in layer.fp8.values()}
        trains = {gemm.module for layer in training for gemm, weight in layer.gemms() if weight.requires_grad}
        found |= self._of_layers(state, measured, run, trains)
        if rows:
            # where inf and NaN pass, layers behind an activation have zeros, and no scale follows
            found = {key: value for key, value in found.items() if key[0] not in _IDLE or key in held}
        if rises and self._bursts:
            return found | {("bursts", name): value for name, value in self._bursts.items()}
        # what the loss does, where no cast explains it
        explained = has_lost or any(key[0] in OF_THE_CAST for key in found)
        return found if explained else found | {(name, ""): value for name, value in rises.items()}

    def forget(self, changes: Callable[[str], bool]) -> None:
        """Restart the counts of the places for which ``changes`` is true, because their scaling has been changed."""
        self._in_a_row = {key: times for key, times in self._in_a_row.items() if not changes(key[1])}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on exactly."""
        return {
            "loss": self.loss.state_dict(),
            "in_a_row": [(*key, times) for key, times in self._in_a_row.items()],
            "last_update": dict(self._last_update),
            "beyond": {name: list(counts) for name, counts in self._beyond.items()},
            "bursts": dict(self._bursts),
            **{name: getattr(self, name) for name in _STATE},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.loss.load_state_dict(state_dict["loss"])
        self._in_a_row = {(condition, where): times for condition, where, times in state_dict["in_a_row"]}
        self._last_update = dict(state_dict["last_update"])
        self._beyond = {name: [*map(tuple, counts)] for name, counts in state_dict["beyond"].items()}
        self._bursts = dict(state_dict["bursts"])
        vars(self).update({name: state_dict[name] for name in _STATE})

    def _of_tensors(
        self, state: ScalingState, measured: Measured, products: dict[str, float], data: Collection[str], steps: int
    ) -> Found:
        """What is wrong with tensors and products; ``data``: the tensors and layers that do not follow the loss."""
        limits, found = self.thresholds, Found()
        m, in_fp8, names = measured, state.rows_in_fp8.tolist(), state.names
        saturated, underflowed = m.saturated_fraction.tolist(), m.underflowed_fraction.tolist()
        log2_scale, log2_amax = m.scale.log2().tolist(), m.amax.log2().tolist()
        uses_history = state.recipe.scaling("input").reads_history

        def is_effect(name: str, checks: int) -> bool:
            return checks <= self.loss.checks_risen and not self._made_it_rise and name not in data

        def lasting(condition: str, name: str, holds: bool, was_seen: bool, value: float) -> None:
            if not was_seen or condition not in limits:
                return
            times = self._count(condition, name, holds)
            if holds and is_effect(name, times):
                self._count(condition, name, False)
            elif times >= self.checks_in_a_row:
                found[condition, name] = value

        def above(condition: str, value: float) -> bool:
            return value > limits.get(condition, math.inf)

        for row, name in enumerate(names):
            if not in_fp8[row]:
                continue
            if m.updated[row]:
                self._last_update[name] = steps
            if m.nonfinite[row] >= limits.get("nonfinite", math.inf):
                found["nonfinite", name] = float(m.nonfinite[row])
            is_delayed = row < state.delayed
            current = state.precisions[state.module_of(row)].is_current or not uses_history
            age = steps - self._last_update.setdefault(name, self.began or 0)
            # a layer that records a gradient has recorded its input too, which may be 0
            is_recorded = bool(m.updated[len(state.module_names) + state.module_of(row)])
            is_stale = bool(m.active[row]) and is_delayed and not (current or m.nonfinite[row] or is_recorded)
            if is_stale and age >= limits.get("stale", math.inf):
                found["stale", name] = float(age)
            was_cast = bool(m.numbers[row])
            is_many = int(m.saturated[row]) >= _MIN_LOST
            lasting("saturated", name, above("saturated", saturated[row]) and is_many, was_cast, saturated[row])
            is_many = int(m.underflowed[row]) >= _MIN_LOST
            share = underflowed[row]
            lasting("underflowed", name, above("underflowed", share) and is_many, was_cast, share)
            sqnr = float(m.sqnr[row])
            lasting("imprecise", name, sqnr < limits.get("imprecise", -math.inf), sqnr == sqnr, sqnr)
            if not is_delayed or not m.updated[row]:
                continue
            extreme = max(abs(log2_scale[row]), abs(math.log2(float(m.overshoot[row]) or 1)))
            lasting("limit", name, above("limit", extreme), not current or uses_history, log2_scale[row])
            if row >= len(state.module_names) and ("limit", name) not in found:
                lasting("tiny", name, log2_amax[row] < limits.get("tiny", -math.inf), True, log2_amax[row])
            if current or ("limit", name) in found:
                continue
            counts = self._beyond.setdefault(name, [])
            counts.append((int(m.beyond[row]), m.updates))
            while len(counts) > self.checks_in_a_row and sum(of for _, of in counts[1:]) >= _MIN_UPDATES:
                counts.pop(0)
            times, of = map(sum, zip(*counts, strict=True))
            kind = "window" if state.recipe.window < 4 or state.recipe.newest_only else "growing"
            is_known = len(counts) >= self.checks_in_a_row and of >= _MIN_UPDATES
            if is_known and above(kind, times / of) and not is_effect(name, 1):
                found[kind, name] = times / of
            overshoot = float(m.overshoot[row])
            # in a step, the loss comes after the inputs and before the gradients
            is_input = row < len(state.module_names)
            if above("bursts", overshoot) and int(m.since_burst[row]) > self.loss.steps_risen - is_input:
                if is_input:
                    self._bursts[name] = overshoot
                # single steps, so not at checks in a row; the first one may be chance
                if self._count("bursts", name, True) > 1:
                    found["bursts", name] = overshoot
            headroom = float(m.headroom[row])
            lasting("margin", name, above("margin", headroom), headroom == headroom, headroom)
        for path, ratio in products.items():
            lasting("product", path, ratio < limits.get("product", -math.inf), True, ratio)
        return found

    def _is_in_doubt(self, is_lost: bool, with_data: bool) -> bool:
        """Whether inf and NaN are there, and came before enough checks could tell whether FP8 is the cause: in all, or
        of a condition that had begun."""
        if not is_lost:
            self._finite += 1
            self._in_doubt = None
        elif self._in_doubt is None:
            least = self.thresholds.get("unmeasured", -1)
            begun = any(times and condition in OF_THE_CAST for (condition, _), times in self._in_a_row.items())
            # no cast makes data inf or NaN
            self._in_doubt = (self._finite < least or (begun and least >= 0)) and not with_data
        return bool(self._in_doubt)

    def _of_layers(self, state: ScalingState, measured: Measured, run: set[int], trains: set[int]) -> Found:
        """Layers in training mode that do not run, and layers with a weight to train that do not learn. ``run`` and
        ``trains`` hold positions."""
        found, count = Found(), len(state.module_names)
        updated, nonfinite, active = measured.updated, measured.nonfinite, measured.active
        if not measured.updates:
            return found
        for module, layer in enumerate(state.module_names):
            if not state.precisions[module].in_fp8:
                continue
            owner = state.input_owners.get(module, module)
            its, grad = bool(updated[owner]), bool(updated[count + module])
            is_finite = not (nonfinite[owner] or nonfinite[count + module])
            ran = its or grad or bool(active[module]) or not is_finite
            dead_input = grad and not its
            # with a gradient of its weight, the gradient of its output was lost, not zero
            dead_grad = its and not grad and module in trains and not measured.with_gradient[module]
            for condition, where, holds in (
                ("unused", layer or "(root)", not ran and module in run),
                ("dead", tensor_name(layer, "input"), dead_input and is_finite),
                ("dead", tensor_name(layer, "grad_output"), dead_grad and is_finite),
            ):
                limit = self.thresholds.get(condition)
                if limit is not None and (times := self._count(condition, where, holds)) >= limit:
                    found[condition, where] = float(times)
        return found

    def _count(self, condition: str, where: str, holds: bool) -> int:
        """The number of checks in a row, including this one, at which a condition holds."""
        times = self._in_a_row[condition, where] = self._in_a_row.get((condition, where), 0) + 1 if holds else 0
        return times
