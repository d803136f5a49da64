"""Which products of which layers run in bf16, as set by the recipe, ``bf16_blocks`` and ``overrides``."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from torch import nn

from lightning_fp8.modules.paths import as_patterns, matches
from lightning_fp8.ops.formats import PRODUCTS, Product
from lightning_fp8.runtime.did_you_mean import did_you_mean
from lightning_fp8.scaling.config import Override
from lightning_fp8.scaling.recipe import ProductPrecision, Recipe

# a precision for a layer, or for some of its products, by patterns on module paths
Overrides = Mapping[str, str | Mapping[str, str]]
_PRECISIONS: tuple[str, ...] = get_args(ProductPrecision)


def as_overrides(overrides: Any) -> dict[str, dict[str, str]]:
    """Overrides with one precision for each product that they set.

    Raises:
        TypeError: for anything but a mapping of patterns.
        ValueError: for an unknown product or precision.

    >>> as_overrides({"*.down": {"wgrad": "bf16"}, "head": "fp8"})
    {'*.down': {'wgrad': 'bf16'}, 'head': {'fprop': 'fp8', 'dgrad': 'fp8', 'wgrad': 'fp8'}}
    """
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
            )
    return by_product


def as_bf16_blocks(value: Any) -> tuple[int, int]:
    """ValueError for anything but two numbers of blocks."""
    is_pair = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2
    if not is_pair or not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in value):
        raise ValueError(
            "`bf16_blocks` must be two integers of at least 0, how many of the first and of the last blocks stay in"
            f" bf16, got {value!r}."
        )
    first, last = value
    return first, last


def all_overrides(
    modules: Sequence[tuple[str, nn.Module]], overrides: Overrides, bf16_blocks: tuple[int, int]
) -> tuple[Override, ...]:
    """All overrides in the order in which they apply: ``bf16_blocks``, then ``overrides``.

    Raises:
        TypeError, ValueError: for invalid ones, or if there is no single longest list with enough blocks.
    """
    by_blocks = _of_blocks(modules, as_bf16_blocks(bf16_blocks))
    by_pattern = as_overrides(overrides).items()
    return (*by_blocks, *(Override(pattern, chosen, f"`overrides`, {pattern!r}") for pattern, chosen in by_pattern))


def products_in_bf16(
    modules: Sequence[tuple[str, nn.Module]], recipe: Recipe, overrides: Sequence[Override]
) -> dict[nn.Module, tuple[tuple[Product, ...], str]]:
    """By module, the products in bf16 of it or of the layers inside it, and the setting that put them there.

    Later overrides win over earlier ones, product by product.
    """
    found = {module: (recipe.in_bf16, "the recipe") for _, module in modules}
    for pattern, chosen, source in overrides:
        for part in {part for path, module in modules if matches(path, (pattern,)) for part in module.modules()}:
            before, by = found[part]
            in_bf16 = tuple(one for one in PRODUCTS if chosen.get(one, "bf16" if one in before else "fp8") == "bf16")
            found[part] = in_bf16, by if in_bf16 == before else source
    return found


def _of_blocks(modules: Sequence[tuple[str, nn.Module]], bf16_blocks: tuple[int, int]) -> Iterator[Override]:
    (first, last), asked = bf16_blocks, f"`bf16_blocks={bf16_blocks}`"
    if not first + last:
        return
    lists = {path: module for path, module in modules if isinstance(module, nn.ModuleList)}
    # nested modules, such as the experts of each block
    inside = {part for module in lists.values() for block in module for part in block.modules()}
    lengths = {path: len(module) for path, module in lists.items() if module not in inside}
    most = max(lengths.values(), default=0)
    longest = [path for path, length in lengths.items() if length == most]
    instead = 'Choose layers with `overrides`, as in `overrides={"encoder.layers.0": "bf16"}`.'
    if not most:
        raise ValueError(f"{asked}: {type(modules[0][1]).__name__} has no `nn.ModuleList` of blocks. {instead}")
    if len(longest) > 1:
        raise ValueError(
            f"{asked} applies to the longest `nn.ModuleList`, but {len(longest)} have {most} blocks:"
            f" {', '.join(map(repr, longest))}. {instead}"
        )
    (path,) = longest
    if first + last > most:
        raise ValueError(f"{asked}: the longest `nn.ModuleList`, {path!r}, has only {most} blocks.")
    for at in (*range(first), *range(most - last, most)):
        block = ".".join(filter(None, (path, str(at))))
        source = f"{asked}: block {at} of {most} in {path!r}"
        yield Override(glob.escape(block), dict.fromkeys(PRODUCTS, "bf16"), source)
