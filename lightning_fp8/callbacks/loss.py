"""Follows the loss of a run between checks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# how far an interval's median, and single steps, must be above the lowest median, and single steps also above their own
# median: as a share of what the median has fallen, and in standard deviations of recent losses
_RISE = 0.5
_FAR_OF_MEDIANS, _FAR = 3.0, 6.0
_CHECKS_IN_A_ROW = 3
# the number of losses from which their variation is computed
_RECENT = 50
_STATE = ("_first", "_lowest", "_recent", "_in_a_row", "_ends_high", "checks_risen")


class Loss:
    """The losses of the steps since the check before, on the device until then.

    The loss *diverges* if its median over an interval has risen, at three checks in a row, by more than half of what it
    had fallen since the first interval, or if it is inf or NaN. It *spikes* if single steps rise that far but the
    median does not. Neither counts within the noise of recent losses.
    """

    def __init__(self) -> None:
        self._of_batches: list[Tensor] = []
        self._of_steps: list[Tensor] = []
        self._first: float | None = None
        self._lowest = math.inf
        self._recent: list[float] = []
        self._in_a_row = 0
        self._ends_high = False
        # whether the newest interval is the lowest so far
        self.is_lowest = False
        # for how many checks in a row the loss has risen, and how many steps before the newest check it rose
        self.checks_risen, self.steps_risen = 0, 0.0

    def add(self, loss: Tensor | float | None) -> None:
        """Add the loss of a batch; the losses of a step are averaged."""
        if loss is not None and not (isinstance(loss, Tensor) and loss.numel() != 1):
            self._of_batches.append(torch.as_tensor(loss).detach().double().reshape(()))

    def step_ends(self) -> None:
        """Nothing here waits for the device."""
        if self._of_batches:
            self._of_steps.append(torch.stack(self._of_batches).mean())
            self._of_batches = []

    def check(self, reduce: Callable[[Tensor, str], Tensor]) -> dict[str, float]:
        """How far the loss has risen, as a share of what it had fallen, by condition; inf if it is not finite."""
        if not self._of_steps:
            return {}
        # losses from before a resume are on the CPU
        device = self._of_steps[-1].device
        of_steps, self._of_steps = torch.stack([loss.to(device) for loss in self._of_steps]), []
        summed = reduce(torch.stack([of_steps, torch.ones_like(of_steps)]), "sum").cpu()
        losses: list[float] = (summed[0] / summed[1]).tolist()
        finite = [loss for loss in losses if math.isfinite(loss)]
        is_lost = 2 * len(finite) < len(losses)
        median = math.inf if is_lost else statistics.median(finite)
        fallen, noise = self._fallen_and_noise()
        far_of_medians, far = (max(_RISE * fallen, times * noise) for times in (_FAR_OF_MEDIANS, _FAR))
        has_risen = is_lost or median - self._lowest > far_of_medians
        # NaN is not below anything
        is_high = [not loss - self._lowest <= (far_of_medians if has_risen else far) for loss in losses]
        rose = is_high.index(True) if any(is_high) else len(losses)
        self.steps_risen = math.inf if rose == 0 and self._ends_high else len(losses) - rose
        self._ends_high = is_high[-1]
        self.checks_risen = self.checks_risen + 1 if has_risen or self._ends_high else 0
        self._in_a_row = self._in_a_row + 1 if has_risen else 0
        self.is_lowest = not is_lost and median <= self._lowest
        if is_lost:
            return {"diverges": math.inf}
        if fallen == math.inf:
            self._first = self._lowest = median
            self._recent = finite[-_RECENT:]
            return {}
        found = {}
        if self._in_a_row >= _CHECKS_IN_A_ROW:
            found["diverges"] = (median - self._lowest) / fallen
        elif not has_risen and max(finite) - median > far:
            found["spikes"] = (max(finite) - median) / fallen
        if not has_risen:
            self._recent = [*self._recent, *finite][-_RECENT:]
        self._lowest = min(self._lowest, median)
        return found

    def _fallen_and_noise(self) -> tuple[float, float]:
        """How far the median has fallen, and the standard deviation of recent losses; inf before there are any."""
        if self._first is None or len(self._recent) < 2:
            return math.inf, math.inf
        low, _, high = statistics.quantiles(self._recent, n=4)
        # the standard deviation of normally distributed numbers with these quartiles
        noise = (high - low) / 1.349
        fallen = self._first - self._lowest
        # a loss that has hardly fallen diverges if it doubles
        return fallen if fallen > _FAR_OF_MEDIANS * noise else max(fallen, 2 * abs(self._first)), noise

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on exactly."""
        return {
            **{name: getattr(self, name) for name in _STATE},
            "_of_steps": [loss.to("cpu", copy=True) for loss in self._of_steps],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        vars(self).update(state_dict)
        self._of_steps = list(state_dict["_of_steps"])
