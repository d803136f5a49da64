"""The precision of a converted layer's products, and who asked for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_fp8.ops.formats import OPERAND_OF, PRODUCTS, Product, Role

# the settings of the conversion; the schedule, by the step; what a checkpoint records: `fall_back` and `Fp8Monitor`
Origin = Literal["settings", "schedule", "move"]


class Choice(NamedTuple):
    """What one origin asks of a layer.

    Attributes:
        in_bf16: the products to compute in bf16, in the order of ``PRODUCTS``.
        is_current: whether its input and gradient are scaled by their own values under a recipe with histories.
    """

    in_bf16: tuple[Product, ...] = ()
    is_current: bool = False

    @property
    def is_bf16(self) -> bool:
        """Whether no product runs in FP8."""
        return len(self.in_bf16) == len(PRODUCTS)

    @property
    def needs_weight(self) -> bool:
        """Whether a product takes the weight itself, not its FP8 cast."""
        return not OPERAND_OF["weight"].isdisjoint(self.in_bf16)

    def __str__(self) -> str:
        products = "bf16" if self.is_bf16 else f"{' and '.join(self.in_bf16)} in bf16" if self.in_bf16 else ""
        current = "current scaling" if self.is_current and not self.is_bf16 else ""
        return ", ".join(filter(None, (products, current))) or "FP8"


AS_SET = Choice()
BF16 = Choice(PRODUCTS)


@dataclass
class LayerPrecision:
    """The precision of one module's GEMMs. Each forward reads it; only :meth:`ScalingState.switch` changes it.

    A product runs in bf16 if any origin asks for it, so a schedule cannot undo what the settings or the monitor ask
    for. The same holds for current scaling.

    Attributes:
        in_fp8: whether any of the products runs in FP8.
        in_bf16: the products that run in bf16.
        is_current: see :class:`Choice`.
        may_fall_back: whether products that take the weight itself may run in bf16.
        choices: the choice of each origin.
    """

    in_fp8: bool = True
    in_bf16: tuple[Product, ...] = ()
    is_current: bool = False
    may_fall_back: bool = True
    choices: dict[Origin, Choice] = field(default_factory=dict)

    def of(self, origin: Origin) -> Choice:
        """What this origin asks for."""
        return self.choices.get(origin, AS_SET)

    def choose(self, choices: dict[Origin, Choice]) -> None:
        """Set what some of the origins ask for."""
        self.choices = {**self.choices, **choices}
        requests = self.choices.values()
        self.in_bf16 = tuple(product for product in PRODUCTS if any(product in request.in_bf16 for request in requests))
        self.in_fp8 = len(self.in_bf16) < len(PRODUCTS)
        self.is_current = any(request.is_current for request in requests)

    @property
    def fprop_in_fp8(self) -> bool:
        """Whether an FP8 product computes the output."""
        return "fprop" not in self.in_bf16

    @property
    def needs_weight(self) -> bool:
        """Whether a product takes the weight itself, not its FP8 cast."""
        return Choice(self.in_bf16).needs_weight

    def check(self, module_name: str, choice: Choice) -> None:
        """Raise a ValueError if the module does not support this choice."""
        if choice.needs_weight and not self.may_fall_back:
            raise ValueError(f"{module_name!r} cannot fall back: its weight is gathered in FP8 (`fp8_all_gather`).")

    def casts(self, role: Role) -> bool:
        """Whether the tensor of this role is cast to FP8 for any product."""
        return not OPERAND_OF[role].issubset(self.in_bf16)
