"""Follows the tensors of a scaling state from update to update, and measures them at checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.scaling.state import LAYOUT, ScalingState
from lightning_fp8.scaling.statistics import cast_counts, cast_noise, headroom_bits

# a scale and its inverse are rounded, so a value may be above the range by this much without being clipped
_ROUNDING = 1 + 2**-16
# counts by row, which tensors keep when rows are arranged anew
_PER_ROW = (
    *("_updates", "_nonfinite_in_a_row", "_most_in_a_row", "_beyond", "_overshoot"),
    *("_since_nonfinite", "_since_burst"),
)


class Measured(NamedTuple):
    """What a check measured, over all processes, on the host. ``[R]`` each, unless it says otherwise.

    Attributes:
        updates: the number of updates since the previous check.
        updated: the number of these updates at which the tensor had a finite amax above 0, int64.
        nonfinite: the most steps in a row at which it held inf or NaN, int64.
        active: whether it is in use: its layer's weight got a gradient, another tensor of its layer was updated, or it
            records amaxes that no update uses.
        with_gradient: whether the weight of its layer got a nonzero gradient.
        beyond: the number of these updates at which its amax was beyond the range of its scale, int64.
        overshoot: the largest amax relative to the range of its scale.
        since_nonfinite: the number of steps since the first one with inf or NaN after the previous check, inclusive,
            int64.
        since_burst: the same for a burst.
        numbers: how many numbers the casts of this step took, int64.
        saturated: how many of these were clipped, int64.
        nonzero: how many of these were not zero, int64.
        underflowed: how many of the nonzero numbers became zero, int64.
        sqnr: signal to noise of its casts, in dB, float64; NaN if nothing was cast.
        amax: the newest amax, float64.
        scale: the scale, float64.
        headroom: ``log2(FP8_MAX / (amax * scale))``, in bits, float64; NaN if there is no amax.
    """

    updates: int
    updated: Tensor
    nonfinite: Tensor
    active: Tensor
    with_gradient: Tensor
    beyond: Tensor
    overshoot: Tensor
    since_nonfinite: Tensor
    since_burst: Tensor
    numbers: Tensor
    saturated: Tensor
    nonzero: Tensor
    underflowed: Tensor
    sqnr: Tensor
    amax: Tensor
    scale: Tensor
    headroom: Tensor

    @property
    def saturated_fraction(self) -> Tensor:
        """Share of the numbers that casts of this step clipped, 0 where there was no cast."""
        return self.saturated / self.numbers.clamp(min=1)

    @property
    def underflowed_fraction(self) -> Tensor:
        """Share of the nonzero numbers that casts of this step turned into zero, 0 where there was no cast."""
        return self.underflowed / self.nonzero.clamp(min=1)


class Watch:
    """Follows the updates of a scaling state. Between checks nothing waits for the device.

    The amax alone does not show whether a tensor is in use, because a lost amax is one of the faults to find.

    Args:
        state: the state to follow.
        burst: an amax of more than this many times the range of its scale is a burst.
    """

    def __init__(self, state: ScalingState, burst: float) -> None:
        self._burst = burst
        self._begin(state)
        state.model.before_update.append(self._see_update)

    def _begin(self, state: ScalingState) -> None:
        self.state, self.names, self._generation = state, state.names, state.model.generation
        count = len(state.names)
        with torch.inference_mode(False):
            self._updates = torch.zeros(count, dtype=torch.int64, device=state.device)
            self._nonfinite_in_a_row = torch.zeros_like(self._updates)
            self._most_in_a_row = torch.zeros_like(self._updates)
            self._beyond = torch.zeros_like(self._updates)
            self._overshoot = torch.zeros(count, dtype=torch.float32, device=state.device)
            self._since_nonfinite = torch.zeros_like(self._updates)
            self._since_burst = torch.zeros_like(self._updates)
            self._with_gradient = torch.zeros(len(state.module_names), dtype=torch.bool, device=state.device)
        self._seen = state.updates

    @torch.no_grad()
    def follow(self, state: ScalingState) -> None:
        """Follow the model's current state: tensors keep their counts by name, new tensors start counting."""
        if state is self.state and state.model.generation == self._generation:
            return
        if state is not self.state:
            self.close()
            state.model.before_update.append(self._see_update)
        before = {name: row for row, name in enumerate(self.names)}
        former = {name: getattr(self, name) for name in _PER_ROW}
        self._begin(state)
        self._take(before, former)

    def _take(self, before: dict[str, int], former: dict[str, Tensor]) -> None:
        """Take over the former counts of tensors, by name."""
        pairs = [(row, before[name]) for row, name in enumerate(self.names) if name in before]
        rows, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
        for name, values in former.items():
            own = getattr(self, name)
            own[rows] = values[theirs].to(own)

    def close(self) -> None:
        """Stop following the updates."""
        if self._see_update in self.state.model.before_update:
            self.state.model.before_update.remove(self._see_update)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on exactly, on the CPU."""
        per_row = {name: getattr(self, name).to("cpu", copy=True) for name in _PER_ROW}
        return {
            "names": list(self.names),
            **per_row,
            "with_gradient": self._with_gradient.to("cpu", copy=True),
            "unseen_updates": self.state.updates - self._seen,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; tensors of other names start counting."""
        self._take({name: row for row, name in enumerate(state_dict["names"])}, {n: state_dict[n] for n in _PER_ROW})
        if list(self.names) == state_dict["names"]:
            self._with_gradient.copy_(state_dict["with_gradient"])
        self._seen = self.state.updates - state_dict["unseen_updates"]

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
        state, delayed = self.state, slice(self.state.delayed)
        beyond = state.recipe.scaling("input").beyond(amax[delayed], state.scale[delayed], state.fp8_max[delayed])
        beyond = torch.where(updated[delayed] & (state.amax_history[0] > 0), beyond, 0.0)
        if state.model.current_rows is not None:
            # their scales are shown, not used
            beyond = beyond.index_fill(0, state.model.current_rows, 0.0)
        self._beyond[delayed] += beyond > _ROUNDING
        self._overshoot[delayed] = torch.maximum(self._overshoot[delayed], beyond)

    def step_ends(self) -> None:
        """Count a step."""
        self._since_nonfinite += self._most_in_a_row > 0
        self._since_burst += self._overshoot > self._burst

    @torch.no_grad()
    def on_gradients(self, model: nn.Module) -> None:
        """Note which layers have a gradient; to be called before gradients are set to zero."""
        self.follow(self.state)
        layers = (layer for layer in model.modules() if isinstance(layer, Fp8Module))
        gemms = (gemm for layer in layers for gemm in layer.fp8.values() if gemm.state is self.state)
        gradients = {gemm.module: _gradient(gemm) for gemm in gemms}
        nothing = torch.zeros((), dtype=torch.bool, device=self.state.device)
        # a gradient set to zero instead of None belongs to a layer that did not run
        flags = [_any(gradients.get(module), nothing) for module in range(len(self.state.module_names))]
        self._with_gradient |= torch.stack(flags)

    @torch.no_grad()
    def check(self, reduce: Callable[[Tensor, str], Tensor]) -> Measured:
        """What has happened since the previous check. It takes one copy from the device, and waits for it.

        Args:
            reduce: the ``"sum"`` or ``"max"`` over all processes. All processes have to check at the same time.
        """
        state, roles = self.state, len(LAYOUT)
        # while gradients are accumulated an amax may wait for its update
        waiting = (state.fill_sharers(state.amax.data) != 0) & (self._seen == state.updates)
        by_layer = self._with_gradient.repeat(roles)
        sums = [*cast_counts(state).unbind(1), *cast_noise(state).unbind(1), waiting, by_layer]
        most = [getattr(self, name) for name in _PER_ROW if name != "_nonfinite_in_a_row"]
        # if scales are not reduced, each process may see different steps; float64 holds the counts
        summed = reduce(torch.stack([column.double() for column in sums]), "sum")
        largest = reduce(torch.stack([column.double() for column in most]), "max")
        newest = torch.cat([state.amax_history[0], state.amax[state.delayed :]])
        own = torch.stack([column.double() for column in (newest, state.scale, state.fp8_max)])
        copied = torch.cat([summed, largest, own]).cpu()
        numbers, saturated, nonzero, underflowed, signal, noise, waits, grads, *rest = copied
        updated, nonfinite, beyond, overshoot, since_nonfinite, since_burst, amax, scale, fp8_max = rest
        is_delayed = torch.arange(len(state.names), device="cpu") < state.delayed
        was_updated = (updated > 0) & is_delayed
        # a layer is in use if its input was updated; this does not show that its gradient is
        forward = torch.tensor([role != "grad_output" for role in LAYOUT], device="cpu")
        of_layers = was_updated.view(roles, -1).any(0).repeat(roles) & forward.repeat_interleave(
            len(state.module_names)
        )
        measured = Measured(
            updates=state.updates - self._seen,
            updated=updated.long(),
            nonfinite=nonfinite.long(),
            active=of_layers | (grads > 0) | ((waits > 0) & is_delayed),
            with_gradient=grads > 0,
            beyond=beyond.long(),
            overshoot=overshoot,
            since_nonfinite=since_nonfinite.long(),
            since_burst=since_burst.long(),
            numbers=numbers.long(),
            saturated=saturated.long(),
            nonzero=nonzero.long(),
            underflowed=underflowed.long(),
            sqnr=10 * torch.log10(signal / noise),
            amax=amax,
            scale=scale,
            headroom=headroom_bits(fp8_max, amax, scale).where(is_delayed, float("nan")),
        )
        self._seen = state.updates
        for name in ("_updates", "_beyond", "_overshoot", "_since_nonfinite", "_since_burst", "_with_gradient"):
            getattr(self, name).zero_()
        # a streak may continue
        self._most_in_a_row = self._nonfinite_in_a_row.clone()
        return measured


def over_processes(tensor: Tensor, op: str) -> Tensor:
    """The ``"sum"`` or ``"max"`` of a tensor over the processes of a distributed run, in place."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
    return tensor


def _gradient(gemm: Gemm) -> Tensor | None:
    """The gradient of the weight, or of the first parameter that it is computed from; None if there is none."""
    source = next(iter(gemm.sources()), None)
    # if one parameter holds several experts, experts without a token have a gradient of zeros
    return None if source is None or source.grad is None else gemm.matrix(source.grad)


def _any(gradient: Tensor | None, nothing: Tensor) -> Tensor:
    if gradient is None:
        return nothing
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    # NaN counts as nonzero
    return (local != 0).any()
