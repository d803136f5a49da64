"""Outliers among the inputs of converted layers: kurtosis, and the share of outliers behind a SwiGLU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.fused_blocks import behind_swiglu

# an outlier is larger than so many root mean squares; of a product of two normal numbers, three in a million are
OUTLIER = 10.0
QUANTITIES = ("kurtosis", "outlier_share")
NOT_SEEN = "no converted layer was called. Layers inside `torch.compile` cannot be watched"


class InputStatistics:
    """Sums over the inputs of layers between :meth:`start` and :meth:`stop`.

    - kurtosis: ``mean((x - mean(x))^4) / mean((x - mean(x))^2)^2`` over all numbers of the input; 3 for normally
      distributed ones, up to their count where one of them is far larger than all others.
    - outlier share: of the numbers with ``|x| > 10 sqrt(mean(x^2))``, for the input of the layer behind a SwiGLU; the
      mean is that of one call in one process.

    Layers inside ``torch.compile`` are not seen. Where a layer has several GEMMs, it is the first one's input.
    """

    def __init__(self, layers: Mapping[str, Fp8Module], model: nn.Module) -> None:
        self.layers = layers
        self._behind = behind_swiglu(model.modules())
        self._hooks: list[RemovableHandle] = []
        self._sums: dict[str, Tensor] = {}

    def start(self) -> None:
        """Watch the calls from now on."""
        self.stop()
        self._sums = {}
        for path, layer in self.layers.items():
            self._hooks.append(layer.register_forward_pre_hook(self._summing(path), with_kwargs=True))

    def stop(self) -> None:
        """Watch no more; the sums stay."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def is_watching(self) -> bool:
        """Whether it has been started and not stopped."""
        return bool(self._hooks)

    @property
    def has_seen(self) -> bool:
        """Whether any layer has been called since the start."""
        return bool(self._sums)

    def _summing(self, path: str) -> Callable[..., None]:
        def add(layer: Fp8Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # not recomputation in backward, which repeats a forward
            if torch._C._current_graph_task_id() == -1:
                x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
                sums = _sums(x.detach())
                self._sums[path] = sums + self._sums[path] if path in self._sums else sums

        return add

    def values(self, sum_over_processes: Callable[[Tensor], Tensor], device: torch.device) -> dict[str, Tensor]:
        """Each of ``QUANTITIES``, ``[layers] float64`` on the device, NaN where there is none."""
        # zeros for a layer that this process has not run
        empty = torch.zeros(6, dtype=torch.float64, device=device)
        together = sum_over_processes(torch.stack([self._sums.get(path, empty) for path in self.layers]))
        count, first, second, third, fourth, outliers = together.unbind(dim=1)
        mean, square = first / count, second / count
        variance = square - mean.square()
        central = fourth / count - 4 * mean * third / count + 6 * mean.square() * square - 3 * mean.pow(4)
        shares = [
            share if layer in self._behind else share * torch.nan
            for layer, share in zip(self.layers.values(), outliers / count, strict=True)
        ]
        return {"kurtosis": central / variance.square(), "outlier_share": torch.stack(shares)}


def _sums(x: Tensor) -> Tensor:
    """``[6] float64``: how many numbers, the sums of their powers 1 to 4, and how many are outliers."""
    # float32 would lose the difference of the moments
    wide = x.double()
    square = wide.square()
    outliers = square > OUTLIER**2 * square.mean()
    powers = (wide.sum(), square.sum(), (square * wide).sum(), square.square().sum())
    count = wide.new_full((), wide.numel())
    return torch.stack([count, *powers, outliers.sum().double()])
