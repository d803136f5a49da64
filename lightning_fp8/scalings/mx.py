"""MXFP8: a power of two in one byte (E8M0) for every 32 elements along K.

Sources: OCP Microscaling Formats (MX) Specification 1.0; Mishra et al., "Recipes for Pre-training LLMs with MXFP8",
arXiv 2506.08027, which defines this rounding of the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_fp8.ops import arithmetic, e8m0
from lightning_fp8.ops.arithmetic import of_rows, per_element
from lightning_fp8.ops.cuda import gemm, plain
from lightning_fp8.ops.dequantize import exact_values
from lightning_fp8.ops.formats import Role
from lightning_fp8.scalings import emulation
from lightning_fp8.scalings.base import Scaling
from lightning_fp8.scalings.in_blocks import InBlocks
from lightning_fp8.scalings.operand import Operand
from lightning_fp8.scalings.recipe import Recipe, knows_its_fields
from lightning_fp8.scalings.unscaled import Unscaled

if TYPE_CHECKING:
    from lightning_fp8.serialization.values import Scale

SIZE = e8m0.BLOCK


@dataclass(frozen=True)
class MX(InBlocks):
    """``scale_inv`` is ``[*] uint8``, ``amax / 448`` rounded up to a power of two, in the order that hardware reads,
    see :func:`lightning_fp8.ops.e8m0.to_tiles`. A block with an inf or NaN is NaN.

    A weight without a master has a matrix of scales: ``[M, ceil(K/32)]``, or ``[ceil(M/32), ceil(K/32)]`` for squares.
    By columns, the former becomes ``[ceil(M/32), K]``; no product sums in blocks along such rows.

    Attributes:
        squares: whether blocks are 32 x 32. Both layouts then share the codes, but not the order of scales.
    """

    kind: ClassVar[str] = "mx"
    file_kind: ClassVar[str | None] = "group"
    block: ClassVar[int] = SIZE
    scale_dtype: ClassVar[torch.dtype] = torch.uint8
    in_e8m0: ClassVar[bool] = True

    @override
    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (e8m0.size_of_tiles(rows, columns),)

    @override
    def scale(self, amax: Tensor) -> Tensor:
        return e8m0.multipliers_of(e8m0.codes_of(amax, self.fp8))

    @override
    def quantize(self, x: Tensor, width: int) -> tuple[Operand, Tensor]:
        amaxes = arithmetic.square_amaxes(x, SIZE) if self.squares else arithmetic.block_amaxes(x, SIZE)
        powers = e8m0.codes_of(amaxes, self.fp8)
        scale = of_rows(e8m0.multipliers_of(powers), SIZE, len(x))
        codes = arithmetic.saturated_blocks(x, scale, self.fp8, SIZE, width)
        tiles = e8m0.squares_to_tiles(powers) if self.squares else e8m0.to_tiles(powers)
        return Operand(codes, tiles, self), arithmetic.largest(amaxes)

    @override
    def stored_scales(self, operand: Operand) -> Tensor:
        rows, columns = operand.codes.shape
        return e8m0.of_squares(e8m0.from_tiles(operand.scale_inv, rows, -(-columns // SIZE)))

    @override
    def casts_again(self, scale: Scale, largest: Sequence[Tensor]) -> bool:
        # a new scale is an equal or smaller power of two, so each code becomes a code again; squares need equal scales
        is_known = scale.kind == self.file_kind
        return is_known and (not self.squares or e8m0.of_squares(scale.values) is not scale.values)

    @override
    def exponents(self, operand: Operand) -> Tensor:
        rows, columns = operand.codes.shape
        return e8m0.values_of(e8m0.from_tiles(operand.scale_inv, rows, -(-columns // SIZE)))

    @override
    def numbers(self, scale_inv: Tensor) -> Tensor:
        return e8m0.values_of(scale_inv)

    @override
    def spread(self, scales: Tensor, like: Tensor) -> Tensor:
        if scales.dtype != torch.uint8:
            return per_element(scales, SIZE, like)
        if scales.dim() == 1:
            scales = e8m0.from_tiles(scales, len(like), -(-like.shape[1] // SIZE))
        return per_element(e8m0.values_of(scales), SIZE, like)

    @override
    def part(self, operand: Operand, rows: slice, count: int, by_columns: bool) -> Operand | None:
        scales = operand.scale_inv
        if scales.dim() == 1:
            # tiles
            return None
        scales = scales.t() if by_columns else scales
        if len(scales) != count and (rows.start % SIZE or rows.stop % SIZE):
            # one scale for each row is equivalent
            scales = e8m0.of_rows(scales, count)
        scales = scales[rows] if len(scales) == count else scales[rows.start // SIZE : rows.stop // SIZE]
        codes = operand.codes[:, rows] if by_columns else operand.codes[rows]
        return operand._replace(codes=codes, scale_inv=scales.t() if by_columns else scales)

    @override
    def multiplies_transposed(self, operand: Operand) -> bool:
        return e8m0.are_along_rows(operand.scale_inv.mT, operand.codes.mT)

    @override
    def takes_gradient(self, operand: Operand, scaling: Scaling) -> Scaling:
        return scaling if e8m0.are_along_rows(operand.scale_inv, operand.codes) else Unscaled()

    @override
    def exact_values(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        """The values of an operand with scales along its rows, in this dtype; made for one product only."""
        return exact_values(operand.codes.t(), operand.scale_inv.t(), self.format, dtype).t()

    @override
    def emulated_product(self, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return emulation.product_of_values(a, b, bias, dtype)

    # On a GPU

    @override
    def gpu_product(self, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, fast: bool) -> Tensor:
        is_held, out = max(a.scale_inv.dim(), b.scale_inv.dim()) > 1, None
        # a GPU without this product refuses operands of a weight that is trained
        if not is_held or plain.has_mx(a.codes.device):
            out = gemm.mx(_in_tiles(a), _in_tiles(b), bias, dtype)
        return emulation.product_of_rounded_values(a, b, bias, dtype) if out is None else out


def _in_tiles(operand: Operand) -> Operand:
    """An operand whose scales may be in a matrix, with the tiles that products read."""
    if operand.scale_inv.dim() == 1:
        return operand
    return operand._replace(scale_inv=e8m0.to_tiles(e8m0.of_rows(operand.scale_inv, len(operand.codes))))


@knows_its_fields
@dataclass(frozen=True, repr=False)
class MXScaling(Recipe):
    """MXFP8: 32 elements along the sum of a product share a scale, a power of two in one byte. All tensors are E4M3.

    A scale follows from the block's largest value, rounded up, so nothing is clipped; nothing depends on earlier steps.
    Each of a tensor's two payloads is cast by itself, with scales along its own rows. The logged ``amax`` is a tensor's
    largest value, and the logged ``scale`` belongs to the block that holds it. A block with an infinity or NaN is NaN.

    Args:
        weight_blocks: the blocks of a weight. With ``(1, 32)``, as in the published recipe, forward and backward see
            two different roundings of it. With ``(32, 32)``, squares, both see the same weight.

    Raises:
        ValueError: for an invalid field; the message has the field, the rule and the value.
        TypeError: for a field of another name; the message has the right ones.

    Sources: OCP Microscaling Formats (MX) Specification 1.0; Mishra et al., "Recipes for Pre-training LLMs with MXFP8",
    arXiv 2506.08027, which defines this rounding of the scale.

    >>> MXScaling().format_of("grad_output").name
    'e4m3'
    """

    precision: ClassVar[str] = "fp8-mx"

    weight_blocks: tuple[int, int] = (1, e8m0.BLOCK)

    def __post_init__(self) -> None:
        super().__post_init__()
        # a list, from YAML or a checkpoint's JSON, is as good as a tuple
        blocks = tuple(self.weight_blocks) if isinstance(self.weight_blocks, (list, tuple)) else self.weight_blocks
        object.__setattr__(self, "weight_blocks", blocks)
        self.require("weight_blocks", "(1, 32) or (32, 32)", blocks in ((1, e8m0.BLOCK), (e8m0.BLOCK, e8m0.BLOCK)))

    def scaling(self, role: Role) -> Scaling:
        """See :class:`Recipe`."""
        return MX("e4m3", squares=role == "weight" and self.weight_blocks[0] > 1)
