"""When a callback that acts every N steps is due: one rule for all callbacks."""

from __future__ import annotations


def check_count(argument: str, value: object) -> None:
    """Check a number of steps; ``argument`` is what the message calls it.

    Raises:
        ValueError: unless it is an integer of at least 1.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{argument} must be an integer of at least 1, got {value!r}.")


class EveryNSteps:
    """A batch is due if its optimizer steps bring the step count to a multiple of ``steps``, or past it.

    With manual optimization a batch may make several optimizer steps, so the count may pass a multiple without reaching
    it. :meth:`begins`, called before a batch, assumes that the batch makes as many steps as the previous one.

    Args:
        owner: the callback, for the message.
        steps: optimizer steps between two due batches.

    Raises:
        ValueError: unless ``steps`` is an integer of at least 1.
    """

    def __init__(self, owner: str, steps: int) -> None:
        check_count(f"{owner}: `every_n_steps`", steps)
        self.owner = owner
        self.steps = steps
        self.start(0)

    def start(self, count: int) -> None:
        """Begin at this step count, such as that at the start of a fit."""
        self._began = self._count = count
        self._stride = 1
        self._begun_at: int | None = None

    def begins(self) -> bool:
        """Before a batch: whether the step that it belongs to will be due. True once per step, at its first batch."""
        if self._begun_at == self._count or not self._is_due(self._count + self._stride):
            return False
        self._begun_at = self._count
        return True

    def ends(self, count: int) -> bool:
        """After a batch, given the step count: whether the batch was due; False while gradients accumulate."""
        if count == self._count:
            return False
        is_due = self._is_due(count)
        self._count, self._stride = count, count - self._count
        return is_due

    def in_vain(self) -> str:
        """Why no batch since :meth:`start` was due, and what to set; empty if one was, or if there were no steps."""
        count = self._count - self._began
        if not count or self._count // self.steps > self._began // self.steps:
            return ""
        return (
            f"{self.owner}: the run made {count} steps and `every_n_steps` is {self.steps}, so nothing was logged. Set"
            f" `every_n_steps` to {count} or less."
        )

    def _is_due(self, count: int) -> bool:
        return count // self.steps > self._count // self.steps
