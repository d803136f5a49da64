"""The products of converted layers, compared with the same products in bf16 on a sample of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_fp8.callbacks.watch import over_processes
from lightning_fp8.metrics.sqnr import signal_and_noise
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.linear import LinearForward

# of the rows of the first call
ROWS = 64


class Products:
    """Sums of signal and noise by module path, for the first training call of each linear layer between :meth:`start`
    and :meth:`stop`; and whether the layer's input is data, which training does not change. Measuring changes no scale,
    gradient or random number."""

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []
        self._sums: dict[str, Tensor] = {}

    def start(self, layers: Mapping[str, Fp8Module]) -> None:
        """Measure the next call of each layer."""
        self.stop()
        for path, layer in layers.items():
            if type(layer) in LinearForward.family and layer.fp8[""].precision.fprop_in_fp8:
                self._hooks.append(layer.register_forward_hook(self._measuring(path), with_kwargs=True))

    def stop(self) -> dict[str, Tensor]:
        """``[3] float64`` by module path: ``sum(y^2)``, ``sum((y_fp8 - y)^2)``, and 1 if the input is data."""
        for hook in self._hooks:
            hook.remove()
        sums, self._hooks, self._sums = self._sums, [], {}
        return sums

    def _measuring(self, path: str) -> Callable[..., None]:
        def measure(layer: Fp8Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # skip recomputation in backward, which repeats a forward
            is_first = path not in self._sums and torch._C._current_graph_task_id() == -1
            x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            if is_first and layer.training and x is not None and isinstance(output, Tensor) and output.numel():
                # in a forward that backward repeats, no tensor has a gradient
                is_data = torch.is_grad_enabled() and not x.requires_grad
                self._sums[path] = _signal_and_noise(layer, x, output, is_data)

        return measure


@torch.no_grad()
def _signal_and_noise(layer: nn.Module, x: Tensor, output: Tensor, is_data: bool) -> Tensor:
    rows, of_output = (tensor.detach().reshape(-1, tensor.shape[-1])[:ROWS] for tensor in (x, output))
    with torch.autocast(output.device.type, torch.bfloat16):
        exact = layer.plain_class.forward(layer, rows)  # type: ignore[operator, union-attr]
    signal, noise = signal_and_noise(of_output, exact)
    return torch.stack([signal, noise, torch.full_like(signal, is_data)])


def ratios(sums: dict[str, Tensor], paths: Sequence[str], device: torch.device) -> tuple[dict[str, float], set[str]]:
    """The signal-to-noise ratio of each layer's product over all processes, in dB; and layers whose input is data."""
    # zeros for a layer that this process has not run
    empty = torch.zeros(3, dtype=torch.float64, device=device)
    together = over_processes(torch.stack([sums.get(path, empty) for path in paths]), "sum")
    signal, noise, is_data = together.cpu().unbind(dim=1)
    decibels = (10 * torch.log10(signal / noise)).tolist()
    with_data = {path for path, number in zip(paths, is_data.tolist(), strict=True) if number}
    return {path: ratio for path, ratio in zip(paths, decibels, strict=True) if ratio == ratio}, with_data
