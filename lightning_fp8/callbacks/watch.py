"""Finds tensors with problems: stale scales, numbers lost in casts, steps with inf or NaN, outliers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.scaling.state import LAYOUT, ScalingState
from lightning_fp8.scaling.statistics import cast_counts

CONDITIONS = ("stale", "nonfinite", "saturated", "underflowed", "kurtosis", "outliers")
# One number is a large share of a small tensor: fewer lost numbers than this at one check never exceed a limit.
MIN_LOST = 10
# which of the counts of casts are lost numbers, and of how many
_LOST = {"saturated": (1, 0), "underflowed": (3, 2)}


@dataclass(frozen=True)
class Limits:
    """The limits; None disables one.

    Attributes:
        stale_steps: steps without an update of an active tensor's scale.
        nonfinite_steps: optimizer steps in a row at which a tensor held inf or NaN.
        saturated_above: share of clipped numbers; fewer than ``MIN_LOST`` of them are never too much.
        underflowed_above: share of the nonzero numbers that became zero; with the same exception.
        checks_in_a_row: number of consecutive checks at which a share, or one of the next two, has to be above its
            limit.
        kurtosis_above: kurtosis of an input.
        outliers_above: share of outliers in the input behind a SwiGLU.
    """

    stale_steps: int | None
    nonfinite_steps: int | None
    saturated_above: float | None
    underflowed_above: float | None
    checks_in_a_row: int
    kurtosis_above: float | None = None
    outliers_above: float | None = None


@dataclass
class Findings:
    """What a check found, by condition (``CONDITIONS``) and by the row of the tensor.

    Attributes:
        tensors: by condition and row, the number of steps or the share that is above its limit.
        lost: for shares, by condition and row: how many numbers were lost, and of how many.
        active: how many modules have run.
        any_update: whether any scale has been updated since the check before.
    """

    tensors: dict[str, dict[int, float]] = field(default_factory=lambda: {condition: {} for condition in CONDITIONS})
    lost: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)
    active: int = 0
    any_update: bool = False

    def keep(self, rows: set[int]) -> None:
        """Drop the tensors of all other rows."""
        self.tensors = {
            condition: {row: number for row, number in numbers.items() if row in rows}
            for condition, numbers in self.tensors.items()
        }


class Watch:
    """Follows the updates of a scaling state, and compares its counts with limits.

    A weight is scaled by its current values, so its only possible problem is inf or NaN.

    The amax alone does not show whether a tensor is active, because a lost amax is one of the faults to find. A tensor
    is active if its layer's weight got a gradient, if another tensor of its layer was updated (input and weight only),
    or if it recorded an amax while there was no update at all.
    """

    def __init__(self, state: ScalingState, limits: Limits) -> None:
        self.limits = limits
        self._begin(state)
        state.model.before_update.append(self._see_update)

    def _begin(self, state: ScalingState) -> None:
        self.state, self._names, self._generation = state, state.names, state.model.generation
        count = len(state.names)
        with torch.inference_mode(False):
            self._updates = torch.zeros(count, dtype=torch.int64, device=state.device)
            self._nonfinite_in_a_row = torch.zeros_like(self._updates)
            self._most_in_a_row = torch.zeros_like(self._updates)
            self._with_gradient = torch.zeros(len(state.module_names), dtype=torch.bool, device=state.device)
        self._is_delayed = torch.arange(count, device="cpu") < state.delayed
        roles = [role != "grad_output" for role in LAYOUT]
        self._is_of_forward = torch.tensor(roles, device="cpu").repeat_interleave(len(state.module_names))
        self._seen = state.updates
        self._last_update = torch.zeros(count, dtype=torch.int64, device="cpu")
        self._above = {name: torch.zeros_like(self._last_update) for name in (*_LOST, "kurtosis", "outliers")}

    @torch.no_grad()
    def follow(self, state: ScalingState) -> None:
        """Go on with the state that the model has now: tensors keep their counts by name, new ones begin."""
        if state is self.state and state.model.generation == self._generation:
            return
        if state is not self.state:
            self.close()
            state.model.before_update.append(self._see_update)
        before = {name: row for row, name in enumerate(self._names)}
        per_tensor = self._updates, self._nonfinite_in_a_row, self._most_in_a_row, self._last_update
        above = self._above
        self._begin(state)
        pairs = [(row, before[name]) for row, name in enumerate(state.names) if name in before]
        rows, former = ([pair[side] for pair in pairs] for side in (0, 1))
        new = self._updates, self._nonfinite_in_a_row, self._most_in_a_row, self._last_update
        for values, old in (*zip(new, per_tensor, strict=True), *((self._above[name], above[name]) for name in above)):
            values[rows] = old[former].to(values.device)

    def close(self) -> None:
        """Stop following the updates."""
        if self._see_update in self.state.model.before_update:
            self.state.model.before_update.remove(self._see_update)

    @torch.no_grad()
    def _see_update(self, amax: Tensor) -> None:
        self.follow(self.state)
        # nothing here synchronises with the device
        is_finite = amax.isfinite()
        updated = is_finite & (amax > 0)
        self._updates += updated
        # a tensor that did not run, with amax 0, neither ends its streak nor adds to it
        self._nonfinite_in_a_row = (self._nonfinite_in_a_row + ~is_finite) * ~updated
        self._most_in_a_row = torch.maximum(self._most_in_a_row, self._nonfinite_in_a_row)

    @torch.no_grad()
    def on_gradients(self, model: nn.Module) -> None:
        """Note which layers have a gradient; to be called before the optimizer step."""
        self.follow(self.state)
        layers = (layer for layer in model.modules() if isinstance(layer, Fp8Module))
        gemms = (gemm for layer in layers for gemm in layer.fp8.values() if gemm.state is self.state)
        gradients = {gemm.module: _gradient(gemm) for gemm in gemms}
        nothing = torch.zeros((), dtype=torch.bool, device=self.state.device)
        # a gradient set to zero instead of None belongs to a layer that did not run
        modules = range(len(self.state.module_names))
        flags = [_any(gradients.get(module), nothing) for module in modules]
        self._with_gradient |= torch.stack(flags)

    @torch.no_grad()
    def check(
        self, step: int, sum_over_processes: Callable[[Tensor], Tensor], inputs: Tensor | None = None
    ) -> Findings:
        """Find the tensors that have problems now.

        Args:
            step: number of steps so far, in the unit of ``stale_steps``.
            sum_over_processes: sums a tensor over all processes, all of which have to check at the same time.
            inputs: kurtosis and share of outliers of all processes together, ``[2, R] float64`` on the device, NaN
                where there is none.
        """
        state, most, limit = self.state, self._most_in_a_row, self.limits.nonfinite_steps or 0
        # while gradients are accumulated an amax may wait for its update
        waiting = (state.fill_sharers(state.amax.data) != 0) & (self._seen == state.updates)
        # where scales are not reduced, each process may see different steps
        seen = (self._updates > 0, waiting, self._with_gradient.repeat(len(LAYOUT)), most >= limit, most > 0)
        summed = sum_over_processes(torch.cat([cast_counts(state).t(), torch.stack(seen)]))
        if inputs is None:
            inputs = torch.full((2, len(state.names)), torch.nan, dtype=torch.float64, device=state.device)
        # the one copy to the host, which waits for it; float64 holds the counts
        *counts, most_in_a_row, kurtosis, outliers = torch.cat([summed.double(), most[None].double(), inputs]).cpu()
        updated, waiting, with_gradient, in_a_row, nonfinite = (count > 0 for count in counts[4:])
        updated, in_fp8 = updated & self._is_delayed, state.rows_in_fp8
        of_layers = updated.view(len(LAYOUT), -1).any(0).repeat(len(LAYOUT)) & self._is_of_forward
        active = of_layers | with_gradient | (waiting & self._is_delayed)
        self._start_anew()
        self._last_update[updated] = step

        findings = Findings(active=int(active.view(len(LAYOUT), -1).any(0).sum()), any_update=bool(updated.any()))
        if self.limits.stale_steps is not None:
            age = step - self._last_update
            # a scale that inf or NaN keeps unchanged is reported as `nonfinite`
            # a scale that is not used is not stale
            of_modules = [layer.is_current for layer in self.state.precisions]
            is_current = torch.tensor(of_modules, device="cpu").repeat(len(LAYOUT))
            is_used = active & in_fp8 & self._is_delayed & ~is_current
            stale = is_used & ~nonfinite & (age >= self.limits.stale_steps)
            findings.tensors["stale"] = _numbers(stale, age)
        if self.limits.nonfinite_steps is not None:
            findings.tensors["nonfinite"] = _numbers(in_a_row & in_fp8, most_in_a_row.clamp(min=limit))
        for name, values in (("kurtosis", kurtosis), ("outliers", outliers)):
            above = getattr(self.limits, f"{name}_above")
            if above is not None:
                findings.tensors[name] = self._lasting(name, values > above, ~values.isnan() & in_fp8, values)
        for name in _LOST:
            share = getattr(self.limits, f"{name}_above")
            if share is not None:
                # counts from before a layer fell back say nothing about the run
                lost, of = (counts[number] * in_fp8 for number in _LOST[name])
                shares = lost / of.clamp(min=1)
                is_above = (shares > share) & (lost >= MIN_LOST)
                findings.tensors[name] = self._lasting(name, is_above, of > 0, shares)
                findings.lost[name] = {row: (int(lost[row]), int(of[row])) for row in findings.tensors[name]}
        return findings

    def forgive(self, modules: Iterable[int]) -> None:
        """Restart the counts of checks in a row for these modules' tensors: their scaling has been changed."""
        for above in self._above.values():
            above.view(len(LAYOUT), -1)[:, list(modules)] = 0

    def _start_anew(self) -> None:
        self._seen = self.state.updates
        self._updates.zero_()
        self._with_gradient.zero_()
        # a streak may continue
        self._most_in_a_row = self._nonfinite_in_a_row.clone()

    def _lasting(self, name: str, is_above: Tensor, was_seen: Tensor, values: Tensor) -> dict[int, float]:
        # a check at which the tensor was not cast, or not seen, changes nothing
        self._above[name] = torch.where(was_seen, (self._above[name] + 1) * is_above, self._above[name])
        return _numbers((self._above[name] >= self.limits.checks_in_a_row) & was_seen, values)


def _numbers(chosen: Tensor, values: Tensor) -> dict[int, float]:
    rows = chosen.nonzero().flatten().tolist()
    return dict(zip(rows, values[chosen].tolist(), strict=True))


def _gradient(gemm: Gemm) -> Tensor | None:
    """The gradient of the weight, or of the first parameter that it is computed from; None if there is none."""
    source = next(iter(gemm.sources()), None)
    # where one parameter holds several experts, those without a token have a gradient of zeros
    return None if source is None or source.grad is None else gemm.matrix(source.grad)


def _any(gradient: Tensor | None, nothing: Tensor) -> Tensor:
    if gradient is None:
        return nothing
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    # NaN counts as nonzero
    return (local != 0).any()
