"""The settings of a conversion as users give them, and which products of which layers they put in bf16."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from torch import nn

from lightning_fp8.modules.paths import as_patterns, matches
from lightning_fp8.ops.formats import PRODUCTS, Product
from lightning_fp8.runtime.did_you_mean import did_you_mean
from lightning_fp8.scaling.config import check_frozen_weights
from lightning_fp8.scalings.recipe import ProductPrecision, Recipe, as_recipe, check_recipe

# a precision for a layer, or for some of its products, by patterns on module paths
Overrides = Mapping[str, str | Mapping[str, str]]
_PRECISIONS: tuple[str, ...] = get_args(ProductPrecision)


def checked_settings(**settings: Any) -> dict[str, Any]:
    """The settings that are not None, checked and normalised.

    Args:
        settings: named like the arguments of :func:`lightning_fp8.convert`.

    Raises:
        TypeError, ValueError: for an invalid setting; the message has its name, the rule and the value.
    """
    arguments = {name: value for name, value in settings.items() if value is not None}
    if isinstance(arguments.get("recipe"), str):
        arguments["recipe"] = as_recipe(arguments["recipe"])
    for name, value in arguments.items():
        if name in _CHECKS:
            _CHECKS[name](value)
    if "overrides" in arguments:
        arguments["overrides"] = _as_overrides(arguments["overrides"])
    return arguments


def _check_min_features(value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"`min_features` must be an integer of at least 0, got {value!r}.")


def _as_overrides(overrides: Any) -> dict[str, dict[str, str]]:
    """Overrides with one precision for each product that they set."""
    if not isinstance(overrides, Mapping):
        raise TypeError(
            "`overrides` must be a mapping of patterns on module paths, such as"
            f' {{"blocks.0.*": "bf16", "*.down": {{"wgrad": "bf16"}}}}, got {overrides!r}.'
        )
    as_patterns(tuple(overrides), "overrides")
    return {pattern: _by_product(pattern, chosen) for pattern, chosen in overrides.items()}


def _by_product(pattern: str, chosen: Any) -> dict[str, str]:
    by_product = dict(chosen) if isinstance(chosen, Mapping) else dict.fromkeys(PRODUCTS, chosen)
    for product, precision in by_product.items():
        if product not in PRODUCTS:
            raise ValueError(
                f"`overrides`: the pattern {pattern!r} has {product!r}, and the products of a layer are"
                f" {', '.join(map(repr, PRODUCTS))}.{did_you_mean(str(product), PRODUCTS)}"
            )
        if not isinstance(precision, str) or precision not in _PRECISIONS:
            raise ValueError(
                f"`overrides`: the pattern {pattern!r} must have {' or '.join(map(repr, _PRECISIONS))}, for the layer"
                f" or for each of {', '.join(map(repr, PRODUCTS))}, got {chosen!r}."
                f"{did_you_mean(str(precision), _PRECISIONS)}"
            )
    return by_product


_CHECKS: dict[str, Callable[[Any], None]] = {
    "recipe": check_recipe,
    "min_features": _check_min_features,
    "frozen_weights": check_frozen_weights,
}


def products_in_bf16(
    modules: Sequence[tuple[str, nn.Module]], recipe: Recipe, overrides: Sequence[tuple[str, Mapping[str, str]]]
) -> dict[nn.Module, tuple[tuple[Product, ...], str]]:
    """For each module, the products in bf16 of it or of the layers inside it, and the setting that put them there.

    Later overrides win over earlier ones, product by product.
    """
    by_module = {module: (recipe.in_bf16, "the recipe") for _, module in modules}
    for pattern, chosen in overrides:
        for part in {part for path, module in modules if matches(path, (pattern,)) for part in module.modules()}:
            before, by = by_module[part]
            in_bf16 = tuple(p for p in PRODUCTS if chosen.get(p, "bf16" if p in before else "fp8") == "bf16")
            by_module[part] = in_bf16, by if in_bf16 == before else f"`overrides`, {pattern!r}"
    return by_module
