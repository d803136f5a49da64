"""What the loss of a run does between checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.callbacks.health import CHECKS_IN_A_ROW

# how far single steps, and means, must be from the mean, in standard deviations of the calmest interval
_FAR, _FAR_OF_MEANS = 6.0, 3.0
_RISE = 0.5


class Loss:
    """Sums of losses on the device, read at checks.

    A loss *diverges* if its mean over the steps between two checks has risen, at three checks in a row, by more than
    half of what it had fallen from the first check to its lowest mean; or if it is inf or NaN. It *spikes* if single
    steps of an interval rise so far while its mean does not. Neither counts within the noise of the calmest interval.
    """

    def __init__(self) -> None:
        self._now: Tensor | None = None
        self._batches = 0
        # sum, sum of squares, number of steps with a finite loss, number of others, largest
        self._sums: Tensor | None = None
        self._first: float | None = None
        self._lowest = 0.0
        self._noise = float("inf")
        self._in_a_row = 0

    def add(self, loss: Tensor | float | None) -> None:
        """The loss of a batch; those of a step are averaged."""
        if loss is None or (isinstance(loss, Tensor) and loss.numel() != 1):
            return
        value = torch.as_tensor(loss).detach().double().reshape(())
        self._now = value if self._now is None else self._now + value
        self._batches += 1

    def step_ends(self) -> None:
        """Nothing here waits for the device."""
        if self._now is None:
            return
        loss, self._now, self._batches = self._now / self._batches, None, 0
        if self._sums is None:
            self._sums = loss.new_tensor([0.0, 0.0, 0.0, 0.0, -torch.inf])
        is_finite = loss.isfinite()
        added = torch.stack([loss, loss.square(), torch.ones_like(loss), torch.zeros_like(loss)])
        others = torch.stack([loss * 0, loss * 0, loss * 0, torch.ones_like(loss)]).nan_to_num(0.0)
        added = torch.where(is_finite, added, others)
        largest = torch.where(is_finite, torch.maximum(self._sums[4], loss), self._sums[4])
        self._sums = torch.cat([self._sums[:4] + added, largest[None]])

    def check(self, reduce: Callable[[Tensor, str], Tensor]) -> dict[str, float]:
        """By condition, how far the loss has risen, as a share of what it had fallen; inf if it is not finite."""
        if self._sums is None:
            return {}
        sums, self._sums = self._sums, None
        added, most = reduce(sums[:4].clone(), "sum"), reduce(sums[4:].clone(), "max")
        total, squares, steps, others, highest = torch.cat([added, most]).tolist()
        if others or not steps:
            self._in_a_row += 1
            return {"diverges": float("inf")} if not steps or self._in_a_row >= CHECKS_IN_A_ROW else {}
        mean = total / steps
        deviation = max(0.0, squares / steps - mean * mean) ** 0.5
        if self._first is None:
            self._first = self._lowest = mean
            self._noise = deviation
            return {}
        # a loss that has never fallen diverges where it doubles
        fallen = self._first - self._lowest or 2 * abs(self._first)
        has_risen = mean - self._lowest > max(_RISE * fallen, _FAR_OF_MEANS * self._noise)
        self._in_a_row = self._in_a_row + 1 if has_risen else 0
        found = {}
        if self._in_a_row >= CHECKS_IN_A_ROW:
            found["diverges"] = (mean - self._lowest) / fallen
        elif not has_risen and highest - mean > max(_RISE * fallen, _FAR * self._noise):
            found["spikes"] = (highest - mean) / fallen
        self._lowest, self._noise = min(self._lowest, mean), min(self._noise, deviation)
        return found

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on exactly."""
        own = {name: getattr(self, name) for name in ("_first", "_lowest", "_noise", "_in_a_row")}
        return {**own, "_sums": None if self._sums is None else self._sums.to("cpu", copy=True)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        vars(self).update(state_dict)
