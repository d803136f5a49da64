"""The precisions that are compared, and which settings of a user's plugin apply to each."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Mapping
from typing import Any

from lightning_fp8.plugins.settings import ARGUMENTS, recipe_argument, suggestion
from lightning_fp8.runtime.did_you_mean import did_you_mean
from lightning_fp8.scalings.recipe import RECIPES, as_recipe, recipe_fields

# next to a run's logs: what it measured, or why it failed
MEASURED_FILE = "measured.json"
BASELINE = "bf16-mixed"
# the baseline on a CPU that emulates bf16 products
EMULATED_BASELINE = "32-true"
# class and arguments of the plugin; an FP8 precision also runs with fields of its recipe, as "fp8-delayed,margin=1"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16-mixed": ("lightning_fp8.plugins.Bf16MixedPrecision", {}),
    "bf16-true": ("lightning_fp8.plugins.Bf16TruePrecision", {}),
    **dict.fromkeys(RECIPES, ("lightning_fp8.Fp8Precision", {})),
    "32-true": ("lightning.pytorch.plugins.Precision", {}),
}
BF16 = tuple(name for name in VARIANTS if name.startswith("bf16-"))


def by_default(emulated: bool) -> list[str]:
    """The variants compared by default; ``emulated`` is whether bf16 products are emulated.

    >>> by_default(emulated=True)
    ['32-true', 'fp8-delayed']
    """
    return [EMULATED_BASELINE, "fp8-delayed"] if emulated else [*BF16, "fp8-delayed"]


def checked(text: str) -> str:
    """An argument of ``--precisions``: a key of ``VARIANTS``, or an FP8 precision with fields of its recipe.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    precision, comma, _ = text.partition(",")
    if comma and precision in RECIPES:
        try:
            as_recipe(recipe_fields(text))
        except (ValueError, TypeError) as error:
            raise ArgumentTypeError(f"{text}: {error}") from None
    elif text not in VARIANTS:
        raise ArgumentTypeError(
            f"must be one of {', '.join(VARIANTS)}, those of FP8 also with fields of the recipe, such as"
            f" fp8-delayed,wgrad=bf16; got {text!r}.{suggestion(text) or did_you_mean(text, VARIANTS)}"
        )
    return text


def plugin_settings(variant: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a variant's plugin, including those of the user's ``own`` that apply to it.

    Arguments that all plugins have apply to all variants. Arguments of ``Fp8Precision`` apply to all FP8 precisions,
    except the recipe of another precision; fields that the variant names override those of the user's recipe. Dtypes
    apply to FP8 only, so that the bf16 precisions are what their names say. ``32-true`` is Lightning's own, without
    arguments.

    >>> plugin_settings("bf16-true", {"keep_fp32": ["norm"], "ignore_modules": ["head"]})
    {'keep_fp32': ['norm']}
    >>> plugin_settings("fp8-block,wgrad=bf16", {"recipe": {"margin": 1}})
    {'recipe': {'precision': 'fp8-block', 'wgrad': 'bf16'}}
    """
    if variant == "32-true":
        return {}
    precision = variant.partition(",")[0]
    of_fp8 = ARGUMENTS["Fp8Precision"]
    if precision not in RECIPES:
        in_all = [name for name in of_fp8 if all(name in taken for taken in ARGUMENTS.values())]
        return {**{name: own[name] for name in in_all if name in own}, **VARIANTS[variant][1]}
    recipe = recipe_argument(own.get("recipe"))
    fields = {} if recipe is None else {recipe.precision: recipe.as_dict()}.get(precision, {})
    applied = {name: own[name] for name in of_fp8 if name in own}
    return {**applied, "recipe": {**fields, **recipe_fields(variant)}}
