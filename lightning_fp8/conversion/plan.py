"""The plan of a conversion: one scan of a model finds which layers will run in FP8, and why the others will not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_fp8.conversion.candidates import (
    PlannedLayer,
    check_dtype,
    gemm_weights,
    planned_layers,
    sizes,
)
from lightning_fp8.conversion.frozen_weights import notes_on_weights
from lightning_fp8.conversion.one_state import state_of
from lightning_fp8.conversion.rows import elements_of, large_parameters, row_of
from lightning_fp8.conversion.settings import checked_settings, products_in_bf16
from lightning_fp8.conversion.table import Candidate, LayerTable
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.fused_blocks import notes
from lightning_fp8.modules.paths import as_patterns, check_patterns_among, named_modules
from lightning_fp8.runtime.device import check_device
from lightning_fp8.scaling.config import Fp8Config
from lightning_fp8.scaling.precision import Choice
from lightning_fp8.scaling.state import ScalingState
from lightning_fp8.scalings.per_tensor import DelayedScaling
from lightning_fp8.scalings.recipe import Recipe


class NothingToConvertError(ValueError):
    """A model has no layer that can run in FP8, or the settings leave none."""


@dataclass(frozen=True)
class ConversionPlan:
    """What :func:`lightning_fp8.convert` will do to a model. :func:`conversion_plan` makes it and changes nothing.

    Attributes:
        modules: path and module of the model and of everything inside it, parents before children.
        layers: the modules that do matrix multiplications.
        patterns: the patterns of modules that will be plain, by argument.
        settings: the settings that this call asks for, by argument.
        config: the resulting settings: those of this call, else those of the model, else the defaults.
    """

    modules: tuple[tuple[str, nn.Module], ...]
    layers: tuple[PlannedLayer, ...]
    patterns: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, Any]
    config: Fp8Config

    @property
    def selects(self) -> bool:
        """Whether this call asks for layers, or for the precisions of their products."""
        choices = {"min_features", "overrides"}
        return any(self.patterns.values()) or not choices.isdisjoint(self.settings)

    @property
    def chosen(self) -> list[tuple[PlannedLayer, type[Fp8Module]]]:
        """The layers that will run in FP8, each with its class."""
        return [(spec, spec.becomes) for spec in self.layers if spec.becomes is not None]

    @property
    def converted(self) -> list[tuple[str, Fp8Module]]:
        """Path and layer of each layer that is converted now, including those that have fallen back."""
        return [(spec.path, spec.layer) for spec in self.layers if isinstance(spec.layer, Fp8Module)]

    @property
    def restored(self) -> list[tuple[str, Fp8Module]]:
        """Path and layer of each converted layer that will be plain again."""
        return [
            (spec.path, spec.layer) for spec in self.layers if not spec.becomes and isinstance(spec.layer, Fp8Module)
        ]

    @property
    def state(self) -> ScalingState:
        """See :func:`lightning_fp8.scaling_state`."""
        return state_of(self.modules[0][1], (layer for _, layer in self.converted))

    @property
    def size(self) -> int:
        """Number of elements of all parameters. Tied parameters count once, uninitialised ones not at all."""
        return sum(elements_of(self.modules).values())

    @property
    def large_parameters(self) -> list[tuple[Candidate, nn.Parameter]]:
        """Each large matrix, or stack of matrices, outside the layers, with its row."""
        return list(large_parameters(self.modules, self.layers))

    def rows(self) -> LayerTable:
        """See :func:`lightning_fp8.describe`."""
        modules = [module for _, module in self.modules]
        states = {layer.scaling_state for _, layer in self.converted}
        left_out = {layer: reason for state in states for layer, reason in state.model.left_out.items()}
        remarks = (left_out, notes(modules), notes_on_weights(modules))
        rows = (row_of(spec, *(of_layers.get(spec.layer) for of_layers in remarks)) for spec in self.layers)
        return LayerTable([*rows, *(row for row, _ in self.large_parameters)])

    @property
    def device(self) -> torch.device:
        """The device of the first weight to convert that is not on the meta device."""
        devices = (weight.device for spec, _ in self.chosen for weight in gemm_weights(spec.layer).values())
        return next((device for device in devices if device.type != "meta"), torch.device("cpu"))

    def check(self) -> None:
        """Raise if the conversion is not possible, before anything is changed.

        Raises:
            ValueError, TypeError, RuntimeError: see :func:`lightning_fp8.convert`.
        """
        for argument, patterns in {**self.patterns, "overrides": tuple(self.settings.get("overrides", ()))}.items():
            check_patterns_among(self.modules, patterns, argument)
        self._check_recipe()
        for spec in self.layers:
            if isinstance(spec.layer, Fp8Module):
                for gemm in spec.layer.fp8.values():
                    gemm.precision.check(gemm.name, Choice(spec.in_bf16))
        for spec, _ in self.chosen:
            check_dtype(spec.path, spec.layer)
        if not self.chosen:
            raise NothingToConvertError(
                f"There is nothing to convert in {type(self.modules[0][1]).__name__}: FP8 needs at least one plain"
                f" `nn.Linear`{self._of_what_size()}" + "".join(f"\n  {row}" for row in self.rows().folded()[:10])
            )
        check_device(self.device)

    def _check_recipe(self) -> None:
        recipe = self.config.recipe
        for path, layer in self.converted:
            existing = layer.scaling_state.recipe
            recipe.require_same(
                existing,
                f"{path or '(root)'} is already converted with {existing}, which differs from {recipe}."
                " Call `unconvert(model)` first; the scales start anew then.",
            )

    def _of_what_size(self) -> str:
        """The end of the message "FP8 needs a linear layer": it names the largest layer that is too small."""
        small = [(spec.path, min(sizes(spec.layer), key=min)) for spec in self.layers if spec.is_too_small]
        if not small:
            return "."
        path, largest = max(small, key=lambda of: (min(of[1]), max(of[1])))
        return (
            f" with `min_features={self.config.min_features}` or more features in and out. The largest here is"
            f" {path or '(root)'}, {largest}: pass a smaller `min_features`, or 0."
        )


def conversion_plan(
    module: nn.Module,
    ignore_modules: Sequence[str] = (),
    default: Callable[[], Recipe] = DelayedScaling,
    keep_fp32: Sequence[str] = (),
    **settings: Any,
) -> ConversionPlan:
    """Scan a model.

    Args:
        module: the model.
        ignore_modules: see :func:`lightning_fp8.convert`.
        default: makes the recipe for a plain model.
        keep_fp32: patterns of further modules that will be plain, see :class:`lightning_fp8.Fp8Precision`.
        settings: the other arguments of :func:`lightning_fp8.convert`, by name; None for the model's own setting.

    Raises:
        TypeError, ValueError: for an invalid setting; :meth:`ConversionPlan.check` raises all other errors.
    """
    settings = checked_settings(**settings)
    given = {"ignore_modules": ignore_modules, "keep_fp32": keep_fp32}
    patterns = {argument: as_patterns(value, argument) for argument, value in given.items()}
    modules = tuple(named_modules(module))
    fp8_layer = next((layer for _, layer in modules if isinstance(layer, Fp8Module)), None)
    new = dict(settings)
    if "overrides" in new:
        new["overrides"] = tuple(new["overrides"].items())
    config = (
        Fp8Config(**{"recipe": default(), **new})
        if fp8_layer is None
        else replace(fp8_layer.scaling_state.config, **new)
    )
    products = products_in_bf16(modules, config.recipe, config.overrides)
    if "overrides" not in new:
        # the patterns may refer to paths in a larger model
        products |= {layer: (layer.in_bf16, "") for _, layer in modules if isinstance(layer, Fp8Module)}
    layers = tuple(planned_layers(modules, patterns, config, products))
    return ConversionPlan(modules, layers, patterns, settings, config)


def converted(module: nn.Module) -> Iterator[tuple[str, Fp8Module]]:
    """See :attr:`ConversionPlan.converted`."""
    for path, layer in named_modules(module):
        if isinstance(layer, Fp8Module):
            yield path, layer
