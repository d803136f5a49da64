"""The base of this package's metrics: sums that keep their dtype, and torchmetrics' own plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torchmetrics import Metric


class ExactMetric(Metric):
    """A metric whose sums stay float64 or int64, whatever dtype the model that owns it is cast to.

    torchmetrics protects states from ``.half()`` and ``.bfloat16()``, but ``.to(torch.bfloat16)``, which gives a model
    its bf16 parameters, casts them: a sum in bf16 soon stops growing. ``set_dtype`` leaves them alone as well.
    """

    full_state_update = False
    is_differentiable = False

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Any:
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, exclude_state)

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: Any = None) -> Any:
        """Plot one value or several.

        Args:
            val: what ``forward`` or ``compute`` gave, or a list of such values; ``compute()`` by default.
            ax: a matplotlib axis to draw on; a new figure by default.

        Returns:
            The figure (None if ``ax`` is given) and the axis.

        Raises:
            ModuleNotFoundError: without matplotlib.
        """
        return self._plot(val, ax)


def require_floating(metric: Metric, name: str, value: Any) -> None:
    """Raise a ``TypeError`` unless ``value`` is a tensor of a floating dtype."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{type(metric).__name__}: `{name}` must be a tensor, got {type(value).__name__}.")
    if not value.is_floating_point():
        raise TypeError(f"{type(metric).__name__}: `{name}` must have a floating dtype, got {value.dtype}.")
