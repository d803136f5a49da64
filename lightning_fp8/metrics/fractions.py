"""How much of a tensor a cast clips, and how much of it underflows to zero."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fp8.metrics.exact import ExactMetric, require_floating
from lightning_fp8.ops.counting import becomes_zero, saturated
from lightning_fp8.ops.formats import CASTABLE_DTYPES, FORMATS, dtype_name
from lightning_fp8.runtime.choice import check_choice

FormatName = Literal["e4m3", "e5m2"]


class CastFraction(ExactMetric):
    """The share of elements that a cast affects; ``parts`` says which are affected and which are counted."""

    higher_is_better = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(self, format: FormatName = "e4m3", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_choice(f"{type(self).__name__}: `format`", format, FORMATS)
        self.format = FORMATS[format]
        # In a MetricCollection, metrics whose states have the same names, and after the first update the same
        # values, share one state from then on. So the names contain the metric and the format.
        self._hits, self._elements = (f"{type(self).__name__}_{format}_{count}" for count in ("hits", "elements"))
        for name in (self._hits, self._elements):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def parts(self, x: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """Which elements are affected, and which are counted, as bool; ``scaled`` is ``x * scale`` in fp32."""
        raise NotImplementedError

    def update(self, x: Tensor, scale: float | Tensor = 1.0) -> None:
        """Add the elements of one tensor.

        Args:
            x: ``[...] float32, bfloat16 or float16``, the tensor that is cast.
            scale: the cast's multiplier, a number or a ``[]`` tensor of a floating dtype, taken as float32. A number
                must be positive and finite. A tensor's value is not checked, because that would synchronise with its
                device.
        """
        require_floating(self, "x", x)
        if x.dtype not in CASTABLE_DTYPES:
            castable = ", ".join(map(dtype_name, CASTABLE_DTYPES))
            raise TypeError(f"{type(self).__name__}: the cast takes `x` in {castable}, got {dtype_name(x.dtype)}.")
        scaled = x.detach().float() * self._checked(scale)
        hits, elements = self.parts(x.detach(), scaled)
        setattr(self, self._hits, getattr(self, self._hits) + hits.sum())
        setattr(self, self._elements, getattr(self, self._elements) + elements.sum())

    def compute(self) -> Tensor:
        """The share so far, ``[] float64``, from 0 to 1; 0 where nothing was counted."""
        return getattr(self, self._hits).double() / getattr(self, self._elements).clamp(min=1)

    def extra_repr(self) -> str:
        """The format."""
        return f"format={self.format.name!r}"

    def _checked(self, scale: float | Tensor) -> float | Tensor:
        if isinstance(scale, Tensor):
            require_floating(self, "scale", scale)
            if scale.ndim:
                shape = tuple(scale.shape)
                raise ValueError(f"{type(self).__name__}: a tensor `scale` must have no dimension, got shape {shape}.")
            return scale.detach().float()
        if not isinstance(scale, Real) or isinstance(scale, bool):
            got = f"got {scale!r} of type {type(scale).__name__}"
            raise TypeError(f"{type(self).__name__}: `scale` must be a number or a tensor, {got}.")
        rounded = torch.tensor(float(scale), dtype=torch.float32, device="cpu").item()
        if not (0 < rounded < math.inf):
            rule = "`scale` must be positive and finite in float32"
            raise ValueError(f"{type(self).__name__}: {rule}, got {scale!r}.")
        return rounded


class SaturationFraction(CastFraction):
    """Share of elements that the saturating cast clips.

    ``count(|x * scale| > max) / count(x is not NaN)`` over all updates, the product in fp32 as in the cast itself, with
    ``max`` 448 for E4M3 and 57344 for E5M2. inf is clipped too. NaN stays NaN in the cast: such elements are in neither
    count. A value that only rounds up to ``max`` is not clipped.

    The result is ``[] float64``, from 0 to 1; 0 where nothing was counted.

    Args:
        format: ``"e4m3"`` or ``"e5m2"``.
        kwargs: as for every ``torchmetrics.Metric``.

    Raises:
        ValueError: for an unknown ``format``; from ``update``, for a number ``scale`` that is not positive and finite
            in float32, or a tensor ``scale`` with dimensions.
        TypeError: from ``update``, for an ``x`` that is not a tensor the cast takes, or a ``scale`` of another type.

    >>> x = torch.tensor([1.0, -100.0, 448.0, 500.0])
    >>> SaturationFraction("e4m3")(x).item(), SaturationFraction("e4m3")(x, scale=8.0).item()
    (0.25, 0.75)

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433, table 1.
    """

    def parts(self, x: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """Clipped: beyond the largest value. NaN is not."""
        return saturated(scaled, self.format), ~x.isnan()


class UnderflowFraction(CastFraction):
    """Share of non-zero elements that the cast turns into zero.

    ``count(x != 0 and |x * scale| <= smallest / 2) / count(x != 0)`` over all updates, the product in fp32 as in the
    cast itself, with ``smallest`` the format's smallest value above zero: ``2**-9`` for E4M3, ``2**-16`` for E5M2. Half
    of it is a tie, which rounds to even: to zero. NaN elements are in neither count.

    The result is ``[] float64``, from 0 to 1; 0 where nothing was counted.

    Arguments and errors are those of :class:`SaturationFraction`.

    >>> x = torch.tensor([0.0, 2.0**-10, -(2.0**-9), 1e-6, 1.0])
    >>> UnderflowFraction("e4m3")(x).item(), UnderflowFraction("e5m2")(x).item()
    (0.5, 0.25)

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433, table 1.
    """

    def parts(self, x: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """Underflowed: at most half the smallest value above zero, and not zero before the cast."""
        counted = (x != 0) & ~x.isnan()
        return counted & becomes_zero(scaled, self.format), counted
