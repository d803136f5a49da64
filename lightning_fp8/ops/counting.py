"""What casts clip or turn to zero, and the scales of their blocks; counted only in the steps that are requested."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fp8.ops.formats import Fp8Format

if TYPE_CHECKING:
    from lightning_fp8.scalings.operand import Slot

_CHUNK_ELEMENTS = 1 << 18
# about how many rows of a tensor are compared with their cast
SAMPLED_ROWS = 64


class CastCounts:
    """How many values the casts of a model clip or turn to zero, counted while anyone requests it.

    Args:
        tensors: R, the number of tensors of the scaling state.
        device: where they are.

    Attributes:
        values: ``[R, 4] int64`` while counting, else None: how many elements were not NaN, saturated, not zero, and not
            zero but cast to zero, over all recording casts since :meth:`start`.
        noise: ``[R, 2] float64`` while counting, else None: ``sum(x^2)`` and ``sum((x_fp8 - x)^2)`` over a sample of
            rows of these casts.
        exponents: ``[R, 2] float32`` while counting, else None: the negated smallest, and the largest, log2 of
            ``scale_inv`` over these casts' blocks; -inf where there is none. Negated, so that both are maxima.
    """

    values: Tensor | None
    noise: Tensor | None
    exponents: Tensor | None

    def __init__(self, tensors: int, device: torch.device) -> None:
        self.values = self.noise = self.exponents = None
        self._tensors = tensors
        self._device = device
        self._requesters: set[int] = set()

    def start(self, requester: object) -> None:
        """Count from now on, which takes further passes over each tensor.

        There may be several requesters: the first one sets ``values`` to zero, and ``values`` is dropped when the last
        one has stopped.
        """
        if self.values is None:
            self._begin()
        self._requesters.add(id(requester))

    def _begin(self) -> None:
        with torch.inference_mode(False):
            self.values = torch.zeros(self._tensors, 4, dtype=torch.int64, device=self._device)
            self.noise = torch.zeros(self._tensors, 2, dtype=torch.float64, device=self._device)
            self.exponents = torch.full((self._tensors, 2), float("-inf"), device=self._device)

    def stop(self, requester: object) -> None:
        """See :meth:`start`."""
        self._requesters.discard(id(requester))
        if not self._requesters:
            self.values = self.noise = self.exponents = None

    def resize(self, tensors: int) -> None:
        """The state now has this many tensors; all counts are dropped."""
        self._tensors = tensors
        if self.values is not None:
            self._begin()

    def to(self, device: torch.device) -> None:
        """Move to ``device``."""
        self._device = device
        self.values = None if self.values is None else self.values.to(device)
        self.noise = None if self.noise is None else self.noise.to(device)
        self.exponents = None if self.exponents is None else self.exponents.to(device)


def saturated(scaled: Tensor, fmt: Fp8Format) -> Tensor:
    """Where ``x * scale`` is beyond the largest value, as bool; inf is, NaN is not."""
    return scaled.abs() > fmt.max


def becomes_zero(scaled: Tensor, fmt: Fp8Format) -> Tensor:
    """Where ``x * scale`` is cast to zero, as bool: half the smallest value, a tie, rounds to the even zero."""
    return scaled.abs() <= fmt.smallest / 2


def count(x: Tensor, scale: Tensor, slot: Slot, fmt: Fp8Format) -> None:
    """Add one tensor to the state's counts, if they are requested; never waits for the device.

    Args:
        x: the tensor that is cast, after any activation.
        scale: the scale of the cast, ``[] float32``, or in the shape of x.
        slot: the tensor's slot in the state.
        fmt: of the cast.
    """
    state = slot.live_state
    counts = None if state is None else state.model.counts.values
    if counts is None:
        return
    # in parts on the CPU, where temporaries as large as the tensor would cost more than the arithmetic
    rows = max(1, _CHUNK_ELEMENTS // max(1, x.shape[1])) if x.device.type == "cpu" else max(1, len(x))
    for part, scale_of_part in zip(x.split(rows), scale.expand(x.shape).split(rows), strict=True):
        counts.index_add_(0, slot.index, _counted(part, scale_of_part, fmt)[None])


def sample_of(rows: int) -> slice:
    """Some of the rows, evenly spread."""
    return slice(None, None, max(1, rows // SAMPLED_ROWS))


def note_noise(x: Tensor, of_codes: Tensor, slot: Slot) -> None:
    """Add the losses of rows in a cast: the rows x ``[S, K]``, and the values of their codes, ``[S, K'] float32``."""
    state = slot.live_state
    noise = None if state is None else state.model.counts.noise
    if noise is None or not x.numel():
        return
    exact = x.double()
    lost = of_codes[:, : x.shape[1]].double() - exact
    noise.index_add_(0, slot.index, torch.stack([exact.square().sum(), lost.square().sum()])[None])


def note_exponents(scale_inv: Tensor, slot: Slot) -> None:
    """Widen the tensor's range of exponents by these scales of blocks, ``[*] float32``; never waits for the device.

    Two kinds of blocks have no exponent: blocks of zeros, whose scale_inv is below every normal number, and NaN blocks.
    """
    state = slot.live_state
    exponents = None if state is None else state.model.counts.exponents
    if exponents is None or not scale_inv.numel():
        return
    log2 = scale_inv.log2().where(scale_inv >= torch.finfo(torch.float32).tiny, float("nan"))
    ends = torch.stack([(sign * log2).nan_to_num(float("-inf")).amax() for sign in (-1, 1)])
    exponents.index_copy_(0, slot.index, torch.maximum(exponents.index_select(0, slot.index), ends[None]))


def _counted(x: Tensor, scale: Tensor, fmt: Fp8Format) -> Tensor:
    """The counts of one tensor, ``[4] int64``, in the order of :attr:`CastCounts.values`."""
    values = x.float()
    scaled = values * scale
    nan, zero = scaled.isnan().count_nonzero(), (values == 0).count_nonzero()
    numbers = x.numel() - nan
    beyond = saturated(scaled, fmt).count_nonzero()
    return torch.stack((numbers, beyond, numbers - zero, becomes_zero(scaled, fmt).count_nonzero() - zero))
