"""Which scaling each operand of a layer's products has."""

from __future__ import annotations

import functools
from typing import NamedTuple

from lightning_fp8.ops.formats import Product, Role
from lightning_fp8.scalings.base import Scaling
from lightning_fp8.scalings.recipe import Recipe
from lightning_fp8.scalings.unscaled import Unscaled

_UNSCALED = Unscaled()
# for each tensor, the product that sums along its rows, and the one that sums along its columns
_PRODUCTS: dict[Role, tuple[Product, Product]] = {
    "input": ("fprop", "wgrad"),
    "weight": ("fprop", "dgrad"),
    "grad_output": ("dgrad", "wgrad"),
}


class Plan(NamedTuple):
    """For each tensor of a layer, its scaling as an operand by rows and by columns. Equal plans are one object."""

    input: tuple[Scaling, Scaling]
    weight: tuple[Scaling, Scaling]
    grad_output: tuple[Scaling, Scaling]


@functools.lru_cache(maxsize=256)
def plan_of(recipe: Recipe, in_bf16: tuple[Product, ...] = (), is_current: bool = False) -> Plan:
    """The plan of a layer.

    Args:
        recipe: of the model.
        in_bf16: products that are not in FP8.
        is_current: whether its input and gradient are scaled by their own values under a recipe with histories.
    """

    def of(role: Role) -> tuple[Scaling, Scaling]:
        scaling = recipe.scaling(role)
        scaling = scaling.without_history() if is_current else scaling
        rows, columns = (_UNSCALED if product in in_bf16 else scaling for product in _PRODUCTS[role])
        return rows, columns

    return Plan(of("input"), of("weight"), of("grad_output"))
