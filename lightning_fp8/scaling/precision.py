"""In which precision the products of one converted layer run."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fp8.ops.formats import OPERAND_OF, Product, Role


@dataclass
class LayerPrecision:
    """Whether the GEMMs of one module run in FP8. Each forward reads it.

    Attributes:
        in_fp8: whether any of the GEMMs runs in FP8: False if the module has fallen back.
        may_fall_back: whether the module can fall back.
        in_bf16: the products that run in bf16 even if the module has not fallen back.
        is_current: whether its input and gradient are scaled by their own values under a recipe with histories.
    """

    in_fp8: bool = True
    may_fall_back: bool = True
    in_bf16: tuple[Product, ...] = ()
    is_current: bool = False

    @property
    def fprop_in_fp8(self) -> bool:
        """Whether the output is that of an FP8 product."""
        return self.in_fp8 and "fprop" not in self.in_bf16

    @property
    def needs_weight(self) -> bool:
        """Whether a product takes the weight itself, not its FP8 cast."""
        return not OPERAND_OF["weight"].isdisjoint(self.in_bf16)

    def check_may_fall_back(self, module_name: str) -> None:
        """Raise a ValueError if the module cannot fall back."""
        if not self.may_fall_back:
            raise ValueError(f"{module_name!r} cannot fall back: its weight is gathered in FP8 (`fp8_all_gather`).")

    def casts(self, role: Role) -> bool:
        """Whether the tensor of this role is cast to FP8 for any product."""
        return self.in_fp8 and not OPERAND_OF[role].issubset(self.in_bf16)
