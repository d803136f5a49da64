"""When a callback is due that does something every so many steps: one rule for all of them."""

from __future__ import annotations


class EveryNSteps:
    """Due is the batch whose optimizer steps take their count to a multiple of ``steps``, or past it.

    A batch makes more than one where manual optimization steps several optimizers, so a multiple may be passed without
    being reached. What has to begin before such a batch goes by the number of steps that the last one made.

    Args:
        owner: the callback, for the message.
        steps: between two times.

    Raises:
        ValueError: if ``steps`` is below 1.
    """

    def __init__(self, owner: str, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"{owner}: `every_n_steps` must be at least 1, got {steps}.")
        self.steps = steps
        self.start(0)

    def start(self, count: int) -> None:
        """Begin at so many steps, as where a fit begins."""
        self._count, self._stride = count, 1
        self._begun_at: int | None = None

    def begins(self) -> bool:
        """Before a batch: whether the step that it belongs to will be due. True once a step, at its first batch."""
        if self._begun_at == self._count or not self._is_due(self._count + self._stride):
            return False
        self._begun_at = self._count
        return True

    def ends(self, count: int) -> bool:
        """After a batch, with the steps made so far: whether it was due; not while gradients are accumulated."""
        if count == self._count:
            return False
        is_due = self._is_due(count)
        self._count, self._stride = count, count - self._count
        return is_due

    def _is_due(self, count: int) -> bool:
        return count // self.steps > self._count // self.steps
