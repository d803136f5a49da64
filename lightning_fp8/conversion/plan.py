"""The plan of a conversion: one scan of a model finds which layers will run in FP8, and why the others will not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_fp8.conversion.candidates import (
    check_dtype,
    check_unparametrized,
    gemm_weights,
    sizes,
)
from lightning_fp8.conversion.frozen_weights import notes_on_weights
from lightning_fp8.conversion.min_features import check_min_features
from lightning_fp8.conversion.planned import PlannedLayer, planned_layers
from lightning_fp8.conversion.products import Overrides, all_overrides, products_in_bf16
from lightning_fp8.conversion.rows import Candidate, large_parameters, row_of
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.fused_blocks import notes
from lightning_fp8.modules.paths import as_patterns, check_patterns_among, named_modules
from lightning_fp8.ops.cuda.gemm_choice import check_gemm
from lightning_fp8.ops.formats import OPERAND_OF
from lightning_fp8.runtime.device import check_device
from lightning_fp8.scaling.config import Fp8Config, FrozenWeights, check_frozen_weights
from lightning_fp8.scaling.recipe import KINDS, DelayedScaling, Recipe
from lightning_fp8.scaling.state import ScalingState


class NothingToConvertError(ValueError):
    """A model has no layer that can run in FP8, or the settings leave none."""


@dataclass(frozen=True)
class ConversionPlan:
    """What :func:`lightning_fp8.convert` will do to a model. :func:`conversion_plan` makes it and changes nothing.

    Attributes:
        modules: path and module of the model and of everything inside it, parents before children.
        layers: the modules that do matrix multiplications.
        large_parameters: each large matrix, or stack of matrices, outside these layers, with its row.
        size: number of elements of all parameters; tied ones count once, those not initialised yet not at all.
        ignore_modules: patterns of the modules that will be plain.
        overrides: patterns of the modules for which this call sets the precisions of products.
        config: the requested settings, each else that of the model, else the default.
    """

    modules: tuple[tuple[str, nn.Module], ...]
    layers: tuple[PlannedLayer, ...]
    large_parameters: tuple[tuple[Candidate, nn.Parameter], ...]
    size: int
    ignore_modules: Sequence[str]
    overrides: Sequence[str]
    config: Fp8Config

    @property
    def recipe(self) -> Recipe:
        """The recipe of the layers."""
        return self.config.recipe

    @property
    def chosen(self) -> list[PlannedLayer]:
        """The layers that will run in FP8."""
        return [one for one in self.layers if one.becomes is not None]

    @property
    def converted(self) -> list[tuple[str, Fp8Module]]:
        """Path and layer of each layer that is converted now, including those that have fallen back."""
        return [(one.path, one.layer) for one in self.layers if isinstance(one.layer, Fp8Module)]

    @property
    def restored(self) -> list[tuple[str, Fp8Module]]:
        """Path and layer of each converted layer that will be plain again."""
        return [(one.path, one.layer) for one in self.layers if not one.becomes and isinstance(one.layer, Fp8Module)]

    @property
    def state(self) -> ScalingState:
        """See :func:`lightning_fp8.scaling_state`."""
        return state_of(self.modules[0][1], (layer for _, layer in self.converted))

    def rows(self) -> list[Candidate]:
        """See :func:`lightning_fp8.describe`."""
        modules = [module for _, module in self.modules]
        fused, held = notes(modules), notes_on_weights(modules)
        rows = (row_of(one, fused.get(one.layer), held.get(one.layer)) for one in self.layers)
        return [*rows, *(row for row, _ in self.large_parameters)]

    def check(self) -> None:
        """Raise if the conversion is not possible, before anything is changed.

        Raises:
            ValueError, TypeError, RuntimeError: see :func:`lightning_fp8.convert`.
        """
        check_patterns_among(self.modules, self.ignore_modules, "ignore_modules")
        check_patterns_among(self.modules, self.overrides, "overrides")
        self._check_recipe()
        self._check_gathered()
        for one in self.chosen:
            check_dtype(one.path, one.layer)
        if not self.chosen:
            raise NothingToConvertError(
                f"There is nothing to convert in {type(self.modules[0][1]).__name__}: FP8 needs at least one plain"
                f" `nn.Linear`{self._of_what_size()}" + "".join(f"\n  {row}" for row in self.rows()[:10])
            )
        check_unparametrized(self.restored)
        check_device(self.device)

    @property
    def device(self) -> torch.device:
        """The device of the first weight to convert that is not on the meta device."""
        devices = (weight.device for one in self.chosen for weight in gemm_weights(one.layer).values())
        return next((device for device in devices if device.type != "meta"), torch.device("cpu"))

    def _check_recipe(self) -> None:
        recipe = self.recipe
        if recipe.own.blocks and self.config.frozen_weights == "fp8":
            raise ValueError(
                f"`frozen_weights='fp8'` keeps one scale for each weight, but {recipe} has one scale for each block"
                " of it. Leave the argument out, or use another recipe."
            )
        for path, layer in self.converted:
            existing = layer.scaling_state.recipe
            if recipe != existing:
                raise ValueError(
                    f"{path or '(root)'} is already converted with {existing}, which differs from {recipe}."
                    " Call `unconvert(model)` first; the scales start anew then."
                )

    def _check_gathered(self) -> None:
        for one in self.layers:
            if isinstance(one.layer, Fp8Module) and not OPERAND_OF["weight"].isdisjoint(one.in_bf16):
                for gemm in one.layer.fp8.values():
                    gemm.precision.check_may_fall_back(gemm.name)

    def _of_what_size(self) -> str:
        """The end of the message that FP8 needs a linear layer; it names the largest layer that is too small."""
        small = [(one.path, min(sizes(one.layer), key=min)) for one in self.layers if one.is_too_small]
        if not small:
            return "."
        path, largest = max(small, key=lambda of: (min(of[1]), max(of[1])))
        return (
            f" with `min_features={self.config.min_features}` or more features in and out. The largest here is"
            f" {path or '(root)'}, {largest}: pass a smaller `min_features`, or 0."
        )


def conversion_plan(
    module: nn.Module,
    recipe: Recipe | None = None,
    ignore_modules: Sequence[str] = (),
    gemm: str | None = None,
    min_features: int | None = None,
    adapters: bool | None = None,
    frozen_weights: FrozenWeights | None = None,
    overrides: Overrides | None = None,
    bf16_blocks: tuple[int, int] | None = None,
    default: type[Recipe] = DelayedScaling,
) -> ConversionPlan:
    """Scan a model. The arguments are those of :func:`lightning_fp8.convert`, and the default recipe of a plain model.

    Raises:
        ValueError: for an invalid ``gemm``, ``min_features``, ``frozen_weights``, ``overrides`` or ``bf16_blocks``;
            :meth:`ConversionPlan.check` raises all other errors.
        TypeError: for another kind of recipe, if ``ignore_modules`` is not a sequence of strings, or ``overrides`` is
            not a mapping of them.
    """
    check_frozen_weights(frozen_weights)
    if min_features is not None:
        check_min_features(min_features)
    if gemm is not None:
        check_gemm(gemm)
    ignore_modules = as_patterns(ignore_modules, "ignore_modules")
    modules = tuple(named_modules(module))
    known = next((layer for _, layer in modules if isinstance(layer, Fp8Module)), None)
    chooses_products = overrides is not None or bf16_blocks is not None
    if recipe is None and known is None:
        recipe = default()
    if not (recipe is None or isinstance(recipe, Recipe)):
        raise TypeError(f"`recipe` must be {KINDS}, got {type(recipe).__name__}: {recipe!r}.")
    asked: dict[str, Any] = {
        "recipe": recipe,
        "gemm": gemm,
        "min_features": min_features,
        "adapters": adapters,
        "frozen_weights": frozen_weights,
        "overrides": all_overrides(modules, overrides or {}, bf16_blocks or (0, 0)) if chooses_products else None,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    config = Fp8Config(**given) if known is None else replace(known.config, **given)
    products = products_in_bf16(modules, config.recipe, config.overrides)
    if not chooses_products:
        # the patterns may refer to paths in a larger model
        products |= {layer: (layer.in_bf16, "") for _, layer in modules if isinstance(layer, Fp8Module)}
    parameters = (parameter for _, layer in modules for parameter in layer.parameters(recurse=False))
    elements = {parameter: 0 if is_lazy(parameter) else parameter.numel() for parameter in parameters}
    layers = tuple(planned_layers(modules, ignore_modules, config, products))
    return ConversionPlan(
        modules,
        layers,
        tuple(large_parameters(modules, layers, elements)),
        sum(elements.values()),
        ignore_modules,
        tuple(overrides or ()),
        config,
    )


def converted(module: nn.Module) -> Iterator[tuple[str, Fp8Module]]:
    """See :attr:`ConversionPlan.converted`."""
    for path, layer in named_modules(module):
        if isinstance(layer, Fp8Module):
            yield path, layer


def state_of(module: nn.Module, layers: Iterable[Fp8Module]) -> ScalingState:
    """The scaling state that a model's converted layers share; see :func:`lightning_fp8.scaling_state`."""
    states = {id(layer.scaling_state): layer.scaling_state for layer in layers}
    if not states:
        raise ValueError(f"{type(module).__name__} has no FP8 layers: call `lightning_fp8.convert` on it first.")
    if len(states) > 1:
        raise ValueError(
            f"{type(module).__name__} consists of parts with {len(states)} scaling states."
            " Call `lightning_fp8.convert` on the whole model: it joins them and keeps the scales."
        )
    return next(iter(states.values()))
