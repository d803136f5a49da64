"""Signal to quantization noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8.metrics.exact import ExactMetric, require_floating


class SQNR(ExactMetric):
    """Signal to quantization noise ratio, in dB, over all elements of all updates.

    ``10 log10(sum(target**2) / sum((preds - target)**2))``, both sums in float64.

    The result is ``[] float64, dB``: inf for a signal without noise, -inf for noise without a
    signal, NaN for neither (no data, only zeros) or where an element is NaN or inf. No gradient flows
    through it.

    Args:
        kwargs: as for every ``torchmetrics.Metric``.

    Raises:
        TypeError: from ``update``, for anything but tensors of floating dtypes.
        ValueError: from ``update``, for tensors of different shapes.

    >>> exact = torch.tensor([1.0, -2.0, 0.3, 4.0])
    >>> quantized = exact.to(torch.float8_e4m3fn)
    >>> round(SQNR()(quantized, exact).item(), 2)
    51.3

    Source: ``compute_error`` of torchao's ``float8``, which takes one pair of tensors.
    ``torchmetrics.audio.SignalNoiseRatio`` is a different quantity: the mean of the signals' dB, with an epsilon in
    each sum.
    """

    higher_is_better = True
    # anything from -inf to inf
    plot_lower_bound = None
    plot_upper_bound = None
    signal: Tensor
    noise: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("signal", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("noise", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add the elements of one pair of tensors.

        Args:
            preds: ``[...]``, any floating dtype, the quantized or approximate values.
            target: shaped as ``preds``, any floating dtype, the exact values.
        """
        require_floating(self, "preds", preds)
        require_floating(self, "target", target)
        if preds.shape != target.shape:
            raise ValueError(
                "SQNR: `preds` and `target` must have the same shape, "
                f"got {tuple(preds.shape)} and {tuple(target.shape)}."
            )
        signal, noise = signal_and_noise(preds.detach(), target.detach())
        self.signal = self.signal + signal
        self.noise = self.noise + noise

    def compute(self) -> Tensor:
        """The ratio of the sums so far, ``[] float64, dB``."""
        return 10 * torch.log10(self.signal / self.noise)


def signal_and_noise(preds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """``sum(target**2)`` and ``sum((preds - target)**2)``, each ``[] float64``."""
    exact = target.double()
    return exact.square().sum(), (preds.double() - exact).square().sum()
