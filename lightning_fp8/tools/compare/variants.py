"""The precisions that are compared, and what of a user's own plugin holds for which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_fp8.plugins.arguments import ARGUMENTS
from lightning_fp8.scaling.recipe import RECIPES, as_recipe

BASELINE = "bf16-mixed"
# in its place on a CPU that emulates bf16 products
EMULATED_BASELINE = "32-true"
# class and arguments of the plugin
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16-mixed": ("lightning_fp8.Bf16MixedPrecision", {}),
    "bf16-mixed+weight_copy": ("lightning_fp8.Bf16MixedPrecision", {"weight_copy": True}),
    "bf16-true": ("lightning_fp8.Bf16TruePrecision", {}),
    "fp8-delayed": ("lightning_fp8.Fp8Precision", {}),
    "fp8-current": ("lightning_fp8.Fp8Precision", {"recipe": {"precision": "fp8-current"}}),
    "fp8-block": ("lightning_fp8.Fp8Precision", {"recipe": {"precision": "fp8-block"}}),
    "32-true": ("lightning.pytorch.plugins.Precision", {}),
}
BF16 = tuple(name for name in VARIANTS if name.startswith("bf16-"))


def by_default(emulated: bool) -> list[str]:
    """What is compared where nothing is named; ``emulated`` is whether bf16 products are.

    >>> by_default(emulated=True)
    ['32-true', 'fp8-delayed']
    """
    return [EMULATED_BASELINE, "fp8-delayed"] if emulated else [*BF16, "fp8-delayed"]


def baseline_of(variants: Sequence[str], emulated: bool) -> str:
    """The variant that the others are compared with: where bf16 products are emulated, ``32-true`` if it runs."""
    return EMULATED_BASELINE if emulated and EMULATED_BASELINE in variants else BASELINE


def plugin_settings(variant: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a variant's plugin, with those of the user's ``own`` that hold for it.

    Those that all plugins have hold for all, and all that its plugin has for the FP8 precisions, except a recipe of
    another one. Dtypes hold for FP8 only: the bf16 precisions are to be what their names say. ``32-true`` is
    Lightning's own, without arguments.

    >>> plugin_settings("bf16-true", {"keep_fp32": ["norm"], "ignore_modules": ["head"]})
    {'keep_fp32': ['norm']}
    """
    if variant == "32-true":
        return {}
    of_fp8 = ARGUMENTS["fp8-delayed"]
    in_all = [name for name in of_fp8 if all(name in taken for taken in ARGUMENTS.values())]
    held = {name: own[name] for name in (of_fp8 if variant in RECIPES else in_all) if name in own}
    recipe = as_recipe(held.get("recipe"))
    if recipe is not None and recipe.precision == variant:
        return held
    return {**{name: value for name, value in held.items() if name != "recipe"}, **VARIANTS[variant][1]}
