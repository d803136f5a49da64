"""One scale for every 128 elements along K; for weights, one for every square of 128 x 128.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_fp8.ops import arithmetic, e8m0
from lightning_fp8.ops.amaxes import BLOCK, max_abs, power_of_2, scale_of_current
from lightning_fp8.ops.arithmetic import of_rows, per_element
from lightning_fp8.ops.cuda import gemm
from lightning_fp8.ops.cuda.layouts import multiplies_as_mx
from lightning_fp8.ops.formats import Role
from lightning_fp8.scalings import emulation
from lightning_fp8.scalings.base import Scaling
from lightning_fp8.scalings.in_blocks import InBlocks
from lightning_fp8.scalings.mx import MX
from lightning_fp8.scalings.operand import Cast, Operand
from lightning_fp8.scalings.recipe import Recipe, knows_its_fields

if TYPE_CHECKING:
    from lightning_fp8.serialization.values import Scale

# by whether blocks are squares; made here, because compilers cannot trace the construction
_AS_MX = {squares: MX(squares=squares) for squares in (False, True)}


@dataclass(frozen=True)
class PerBlock(InBlocks):
    """``scale = FP8_MAX / amax`` of a block; 1 where amax is not finite.

    ``scale_inv`` is ``float32``: ``[M, ceil(K/128)]`` with strides ``(1, M)``, which is what GEMMs read fastest, or
    ``[ceil(M/128), ceil(K/128)]`` of squares.

    Attributes:
        squares: see :class:`InBlocks`; both layouts then have the same codes.
        powers_of_2: scales are rounded down to a power of two.
    """

    kind: ClassVar[str] = "per_block"
    file_kind: ClassVar[str | None] = "block"

    powers_of_2: bool = False

    @property
    @override
    def rounds_down(self) -> bool:
        return self.powers_of_2

    @property
    @override
    def layouts_share_codes(self) -> bool:
        return self.squares

    @override
    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return -(-rows // BLOCK) if self.squares else rows, -(-columns // BLOCK)

    @override
    def scale(self, amax: Tensor) -> Tensor:
        scale = scale_of_current(amax, self.fp8)
        return power_of_2(scale) if self.powers_of_2 else scale

    @override
    def show(self, scale: Tensor, newest: Tensor) -> None:
        # the update has already computed scales that are not rounded
        if self.powers_of_2:
            super().show(scale, newest)

    @override
    def new_scales(self, device: torch.device, rows: int, columns: int) -> Tensor:
        shape = self.scale_shape(rows, columns)
        strides = (shape[1], 1) if self.squares else (1, shape[0])
        return torch.empty_strided(shape, strides, dtype=torch.float32, device=device)

    @override
    def quantize(self, x: Tensor, width: int) -> tuple[Operand, Tensor]:
        amaxes = arithmetic.square_amaxes(x, BLOCK) if self.squares else arithmetic.block_amaxes(x, BLOCK)
        scale = self.scale(amaxes)
        codes = arithmetic.saturated_blocks(x, of_rows(scale, BLOCK, len(x)), self.fp8, BLOCK, width)
        scale_inv = self.new_scales(x.device, *x.shape).copy_(scale.reciprocal())
        return Operand(codes, scale_inv, self), arithmetic.largest(amaxes)

    @override
    def amaxes_of_codes(self, w: Tensor) -> Tensor:
        # with powers of two, values are `code * scale_inv` exactly
        return max_abs(w) if self.powers_of_2 else arithmetic.square_amaxes(w, BLOCK)

    @override
    def casts_again(self, scale: Scale, largest: Sequence[Tensor]) -> bool:
        if self.squares and self.powers_of_2:
            # a scale that is the same power of two or a smaller one makes each code a code again
            return scale.kind == self.file_kind and scale.is_power_of_2
        return super().casts_again(scale, largest)

    @override
    def spread(self, scales: Tensor, like: Tensor) -> Tensor:
        return per_element(scales, BLOCK, like)

    @override
    def part(self, operand: Operand, rows: slice, count: int, by_columns: bool) -> Operand | None:
        if not self.squares or rows.start % BLOCK or rows.stop % BLOCK:
            return None
        blocks = slice(rows.start // BLOCK, rows.stop // BLOCK)
        codes, scales = operand[:2]
        if by_columns:
            return operand._replace(codes=codes[:, rows], scale_inv=scales[:, blocks])
        return operand._replace(codes=codes[rows], scale_inv=scales[blocks])

    @override
    def split_part(self, operand: Operand, rows: slice, count: int, by_columns: bool) -> Operand:
        # one scale for each row is equivalent
        codes, scales = (
            operand.codes,
            of_rows(operand.scale_inv.t() if by_columns else operand.scale_inv, BLOCK, count)[rows],
        )
        if by_columns:
            return Operand(codes[:, rows], scales.t(), PerBlockAcross(self.format))
        return Operand(codes[rows], scales, replace(self, squares=False))

    @override
    def with_128_blocks(self, operand: Operand, k: int, rows: int) -> Operand | None:
        return operand

    @override
    def emulated_product(self, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return emulation.product_of_blocks(a, b, bias, dtype)

    # On a GPU

    @override
    def multiplied_as(self, device: torch.device) -> Scaling:
        return _AS_MX[self.squares] if self.powers_of_2 and multiplies_as_mx(device) else self

    @override
    def as_multiplied(self, cast: Cast) -> Cast:
        if not self.powers_of_2:
            return cast
        rows, columns = (None if side is None else self._as_multiplied(side) for side in cast[:2])
        return Cast(rows, columns, cast.sums)

    def _as_multiplied(self, operand: Operand) -> Operand:
        scaling = self.multiplied_as(operand.codes.device)
        if scaling is self:
            return operand
        # E8M0 has a code for every power of two that such a cast may choose; each block of 128 becomes four equal ones
        codes = e8m0.codes_of_powers(of_rows(operand.scale_inv, BLOCK, operand.codes.shape[0]))
        tiles = e8m0.to_tiles(codes.repeat_interleave(BLOCK // e8m0.BLOCK, 1))
        return Operand(operand.codes, tiles, scaling)

    @override
    def gpu_product(self, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, fast: bool) -> Tensor:
        out = gemm.in_blocks(a, b, bias, dtype)
        return self.emulated_product(a, b, bias, dtype) if out is None else out


@dataclass(frozen=True)
class PerBlockAcross(PerBlock):
    """Part of a weight without a master, by columns, that splits its squares. ``scale_inv`` is ``[ceil(M/128), K]``; no
    product sums in blocks along such rows."""

    kind: ClassVar[str] = "per_block_across"

    @override
    def with_128_blocks(self, operand: Operand, k: int, rows: int) -> Operand | None:
        return None


@knows_its_fields
@dataclass(frozen=True, repr=False)
class BlockScaling(Recipe):
    """Scales each block by its own values, ``448 / amax``: activations and gradients in blocks of 1 x 128, weights in
    blocks of 128 x 128, all in E4M3, as in the training of DeepSeek-V3.

    An outlier costs precision only within its block. As with :class:`CurrentScaling` no value is clipped, and nothing
    depends on earlier steps. The logged ``amax`` is the largest value of a tensor, and the logged ``scale`` that of
    the block that holds it.

    Args:
        power_of_2_scales: round each scale down to a power of two.

    Raises:
        ValueError: for an invalid field; the message has the field, the rule and the value.
        TypeError: for a field of another name; the message has the right ones.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.3.2.

    >>> BlockScaling().format_of("grad_output").name
    'e4m3'
    """

    precision: ClassVar[str] = "fp8-block"

    power_of_2_scales: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("power_of_2_scales", "True or False", isinstance(self.power_of_2_scales, bool))

    def scaling(self, role: Role) -> Scaling:
        """See :class:`Recipe`."""
        return PerBlock("e4m3", squares=role == "weight", powers_of_2=self.power_of_2_scales)
