"""The base of scalings with one scale for each block along K, from the block's own values; and their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_fp8.scalings import launches
from lightning_fp8.scalings.base import Scaling
from lightning_fp8.scalings.launches import WeightScales
from lightning_fp8.scalings.operand import Cast, Computed, Slot, Source, Want


@dataclass(frozen=True)
class InBlocks(Scaling):
    """Blocks along K. Kernels support E4M3 only: squares for weights, other blocks for all tensors.

    Attributes:
        in_e8m0: whether scales are E8M0, powers of two in one byte.
        squares: whether each block is a square, with as many rows as columns.
    """

    in_e8m0: ClassVar[bool] = False

    squares: bool = False

    @property
    def rounds_down(self) -> bool:
        """Whether scales in fp32 are rounded down to powers of two."""
        return False

    @override
    def by_kernel(self, x: Source, slot: Slot, want: Want) -> Cast | None:
        if self.squares or self.format != "e4m3":
            return None
        return launches.in_blocks(x, self, slot, slot.open(False), want)

    @override
    def pair_by_kernel(self, pair: Computed, slots: Sequence[Slot], want: Want) -> list[Cast] | None:
        if self.squares or self.format != "e4m3":
            return None
        return launches.pair_in_blocks(pair, self, slots, [slot.open(False) for slot in slots], want)

    @override
    def weights_by_kernel(
        self, weights: Sequence[Tensor], slots: Sequence[Slot], out: Sequence[Cast | None], want: Want
    ) -> list[Cast] | None:
        if not (self.squares or self.in_e8m0) or self.format != "e4m3":
            return None
        scales = WeightScales(self.squares, self.in_e8m0, self.rounds_down)
        return launches.weights(weights, self, slots, out, scales, want)
