"""The plan of a conversion: one scan of a model finds which layers will run in FP8, and why the others will not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from lightning_fp8.conversion.candidates import (
    check_dtype,
    check_unparametrized,
    fp8_classes,
    gemm_weights,
    reason_against,
    sizes,
)
from lightning_fp8.conversion.frozen_weights import notes_on_weights
from lightning_fp8.conversion.min_features import MinFeatures, as_number, too_small
from lightning_fp8.modules.adapters import adapted_layer, adapter_modules
from lightning_fp8.modules.base import Fp8Module, Settings
from lightning_fp8.modules.class_swap import own_class
from lightning_fp8.modules.experts import Fp8Experts, find_routers
from lightning_fp8.modules.frozen_content import FrozenWeights, check_frozen_weights
from lightning_fp8.modules.fused_blocks import notes, plain_class
from lightning_fp8.modules.linear import Fp8Linear
from lightning_fp8.modules.paths import as_patterns, check_patterns_among, matches, named_modules, numbered
from lightning_fp8.ops.cuda.gemm_choice import check_gemm
from lightning_fp8.runtime.device import check_device
from lightning_fp8.scaling.recipe import DelayedScaling
from lightning_fp8.scaling.state import ScalingState

# the smallest share of the model's parameters that is worth naming where it is not in FP8
LARGE_SHARE = 0.01
# lookups, convolutions, and the normalisations whose parameters can have 2 dimensions: none is a matrix product
_WITHOUT_GEMMS = (nn.Embedding, nn.EmbeddingBag, _ConvNd, nn.LayerNorm, nn.RMSNorm)

_IN_ADAPTER = "belongs to an adapter of PEFT: pass `adapters=True` to convert it"


class NothingToConvertError(ValueError):
    """A model has no layer that can run in FP8, or the settings leave none."""


class Candidate(NamedTuple):
    """A row of :func:`lightning_fp8.describe`: a layer that does matrix multiplications, and whether they run in FP8.

    Or a large parameter of another module, which FP8 does not reach.

    Attributes:
        path: module path, as ``ignore_modules`` patterns see it; for a parameter, its name in the model.
        kind: class name; ``"Parameter"`` for a parameter.
        converted: whether it runs in FP8.
        reason: why, or why not.
    """

    path: str
    kind: str
    converted: bool
    reason: str

    @property
    def is_layer(self) -> bool:
        """True for a layer, False for a parameter."""
        return self.kind != "Parameter"

    def __str__(self) -> str:
        return f"{'fp8' if self.converted else '-':4}{self.path or '(root)'} ({self.kind}): {self.reason}"


class PlannedLayer(NamedTuple):
    """A layer that does matrix multiplications, and what a conversion makes of it.

    Attributes:
        path: module path.
        layer: the layer itself.
        becomes: its class after the conversion; None if it will be plain.
        reason: why it stays plain, or becomes plain again; None for a layer to convert.
        is_too_small: whether that reason is ``min_features``.
        in_adapter: whether it belongs to an adapter of PEFT, converted or not.
    """

    path: str
    layer: nn.Module
    becomes: type[Fp8Module] | None
    reason: str | None
    is_too_small: bool
    in_adapter: bool


@dataclass(frozen=True)
class ConversionPlan:
    """What :func:`lightning_fp8.convert` makes of a model. :func:`conversion_plan` makes it, and changes nothing.

    Attributes:
        modules: path and module of the model and of everything inside it, parents before children.
        layers: those of them that do matrix multiplications.
        large_parameters: each large matrix, or stack of matrices, that is in none of these layers, with its row.
        size: number of elements of all parameters; tied ones count once, those not initialised yet not at all.
        ignore_modules: patterns of the modules that will be plain.
        recipe: the requested one, else that of the model, else the default.
        settings: those of the layers, by the same rule.
    """

    modules: tuple[tuple[str, nn.Module], ...]
    layers: tuple[PlannedLayer, ...]
    large_parameters: tuple[tuple[Candidate, nn.Parameter], ...]
    size: int
    ignore_modules: Sequence[str]
    recipe: DelayedScaling
    settings: Settings

    @property
    def chosen(self) -> list[PlannedLayer]:
        """The layers that will run in FP8."""
        return [one for one in self.layers if one.becomes is not None]

    @property
    def converted(self) -> list[tuple[str, Fp8Module]]:
        """Path and layer of each layer that is converted now, those that have fallen back among them."""
        return [(one.path, one.layer) for one in self.layers if isinstance(one.layer, Fp8Module)]

    @property
    def restored(self) -> list[tuple[str, Fp8Module]]:
        """Those of them that will be plain again."""
        return [(one.path, one.layer) for one in self.layers if not one.becomes and isinstance(one.layer, Fp8Module)]

    @property
    def state(self) -> ScalingState:
        """See :func:`lightning_fp8.scaling_state`."""
        return state_of(self.modules[0][1], (layer for _, layer in self.converted))

    def rows(self) -> list[Candidate]:
        """See :func:`lightning_fp8.describe`."""
        modules = [module for _, module in self.modules]
        fused, held = notes(modules), notes_on_weights(modules)
        rows = (_row(one, fused.get(one.layer), held.get(one.layer)) for one in self.layers)
        return [*rows, *(row for row, _ in self.large_parameters)]

    def check(self) -> None:
        """Raise if the conversion is not possible, before anything is changed.

        Raises:
            ValueError, TypeError, RuntimeError: see :func:`lightning_fp8.convert`.
        """
        check_patterns_among(self.modules, self.ignore_modules, "ignore_modules")
        self._check_recipe()
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
        if not isinstance(recipe, DelayedScaling):
            raise TypeError(f"`recipe` must be a DelayedScaling, got {type(recipe).__name__}: {recipe!r}.")
        for path, layer in self.converted:
            existing = layer.scaling_state.recipe
            if recipe != existing:
                raise ValueError(
                    f"{path or '(root)'} is already converted with {existing}, which differs from {recipe}."
                    " Call `unconvert(model)` first; the scales start anew then."
                )

    def _of_what_size(self) -> str:
        """The end of the message that FP8 needs a linear layer: it names the largest of those that are too small."""
        small = [(one.path, min(sizes(one.layer), key=min)) for one in self.layers if one.is_too_small]
        if not small:
            return "."
        path, largest = max(small, key=lambda of: (min(of[1]), max(of[1])))
        return (
            f" with `min_features={self.settings.min_features}` or more features in and out. The largest here is"
            f" {path or '(root)'}, {largest}: pass a smaller `min_features`, or 0."
        )


def conversion_plan(
    module: nn.Module,
    recipe: DelayedScaling | None = None,
    ignore_modules: Sequence[str] = (),
    gemm: str | None = None,
    min_features: MinFeatures | None = None,
    adapters: bool | None = None,
    frozen_weights: FrozenWeights | None = None,
) -> ConversionPlan:
    """Scan a model. The arguments are those of :func:`lightning_fp8.convert`.

    Raises:
        ValueError: for an invalid ``gemm``, ``min_features`` or ``frozen_weights``; :meth:`ConversionPlan.check` raises
            all other errors.
        TypeError: if ``ignore_modules`` is not a sequence of strings.
    """
    check_frozen_weights(frozen_weights)
    if gemm is not None:
        check_gemm(gemm)
    ignore_modules = as_patterns(ignore_modules, "ignore_modules")
    modules = tuple(named_modules(module))
    known = next((layer for _, layer in modules if isinstance(layer, Fp8Module)), None)
    settings = Settings() if known is None else known.settings
    least = settings.min_features if min_features is None else as_number(min_features)
    settings = Settings(
        gemm or settings.gemm,
        least,
        settings.adapters if adapters is None else adapters,
        frozen_weights or settings.frozen_weights,
    )
    parameters = (parameter for _, layer in modules for parameter in layer.parameters(recurse=False))
    elements = {parameter: 0 if is_lazy(parameter) else parameter.numel() for parameter in parameters}
    layers = tuple(_planned(modules, ignore_modules, settings))
    return ConversionPlan(
        modules,
        layers,
        tuple(_large_parameters(modules, layers, elements)),
        sum(elements.values()),
        ignore_modules,
        recipe if recipe is not None else DelayedScaling() if known is None else known.scaling_state.recipe,
        settings,
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


def _planned(
    modules: Sequence[tuple[str, nn.Module]], ignore_modules: Sequence[str], settings: Settings
) -> Iterator[PlannedLayer]:
    classes = fp8_classes(layer for _, layer in modules)
    routers = set(find_routers(layer for _, layer in modules))
    kinds = tuple(classes)
    ignored = {part for path, layer in modules if matches(path, ignore_modules) for part in layer.modules()}
    of_adapters = adapter_modules(layer for _, layer in modules)
    least = settings.min_features
    outputs_of_converted: set[nn.Module] = set()
    for path, layer in modules:
        if not isinstance(layer, (*kinds, nn.Bilinear)) and layer not in routers:
            continue
        is_output, in_adapter = layer in outputs_of_converted, layer in of_adapters
        if layer in ignored:
            reason: str | None = "matches `ignore_modules`"
        elif in_adapter and not settings.adapters:
            reason = _IN_ADAPTER
        elif layer in routers:
            reason = "a router: rounded to FP8, its outputs would choose other experts"
        else:
            reason = reason_against(layer, kinds, is_output)
        size_reason = too_small(sizes(layer), least) if least and not reason else None
        if reason or size_reason:
            yield PlannedLayer(path, layer, None, reason or size_reason, size_reason is not None, in_adapter)
            continue
        if isinstance(layer, nn.MultiheadAttention):
            outputs_of_converted.add(adapted_layer(layer.out_proj))
        # the output projection of an attention is a subclass of nn.Linear that only marks its owner
        yield PlannedLayer(path, layer, classes.get(plain_class(layer), Fp8Linear), None, False, in_adapter)


def _large_parameters(
    modules: Sequence[tuple[str, nn.Module]], layers: Sequence[PlannedLayer], elements: Mapping[nn.Parameter, int]
) -> Iterator[tuple[Candidate, nn.Parameter]]:
    """Parameters of 2 or more dimensions outside of ``layers`` and of torch's embeddings, convolutions, normalisations.

    Parameters whose paths differ only in numbers are counted together, as in a stack of layers: they are large if they
    make up at least ``LARGE_SHARE`` of the model's parameters.
    """
    in_layers = {parameter for one in layers for parameter in one.layer.parameters()}
    passed_over = {part for _, layer in modules if isinstance(layer, _WITHOUT_GEMMS) for part in layer.modules()}
    found: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for path, owner in modules:
        for name, parameter in owner.named_parameters(recurse=False):
            is_known = owner in passed_over or parameter in in_layers
            if not is_known and not is_lazy(parameter) and parameter.dim() >= 2:
                found.setdefault(parameter, (".".join(filter(None, (path, name))), owner))
    of_stacks: Counter[str] = Counter()
    for parameter, (path, _) in found.items():
        of_stacks[numbered(path)] += elements[parameter]
    least = max(1, LARGE_SHARE * sum(elements.values()))
    for parameter, (path, owner) in found.items():
        if of_stacks[numbered(path)] >= least:
            shape, kind = list(parameter.shape), own_class(owner).__name__
            reason = f"{shape} parameter of {kind}: no layer known here multiplies with it"
            if parameter.dim() == 3:
                reason += "; as one `nn.Linear` for each of its matrices it could run in FP8"
            yield Candidate(path, "Parameter", False, reason), parameter


def _row(one: PlannedLayer, fused: str | None, held: str | None) -> Candidate:
    layer = one.layer
    if not isinstance(layer, Fp8Module):
        return Candidate(one.path, type(layer).__name__, False, one.reason or "not converted yet: call `convert`")
    gemms = sizes(layer)
    shapes = " and ".join(map(str, gemms))
    if isinstance(layer, Fp8Experts):
        shapes = f"{len(gemms) // 2} experts, {gemms[0]} and {gemms[-1]}"
    fallen = ", ".join(rows.name for rows in layer.fp8.values() if not rows.switch.in_fp8)
    shared = ", ".join(rows.input_leader.name for rows in layer.fp8.values() if rows.input_leader is not None)
    remarks = [
        f"shares its input with {shared}" if shared else None,
        f"fell back to bf16: {fallen}" if fallen else None,
        fused,
        held,
    ]
    reason = "; ".join([f"converted, {shapes}", *filter(None, remarks)])
    return Candidate(one.path, layer.plain_class.__name__, layer.in_fp8, reason)
