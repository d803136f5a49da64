"""Conversion of a model's linear layers to FP8 and back, in place, by class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar, cast

import torch
from torch import nn

from lightning_fp8.device import check_device
from lightning_fp8.formats import CASTABLE_DTYPES, ROLES
from lightning_fp8.modules.linear import Fp8Linear, Fp8Rows
from lightning_fp8.recipe import DelayedScaling
from lightning_fp8.scaling import ScalingState

ModuleT = TypeVar("ModuleT", bound=nn.Module)
# Wrappers add these to a module's path; without them names stay the same with and without the wrapper.
_WRAPPER_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Candidate(NamedTuple):
    """A row of :func:`describe`: a layer that does matrix multiplications, and whether they run in FP8.

    Attributes:
        path: module path, as ``ignore_modules`` patterns see it.
        kind: class name.
        converted: whether it runs in FP8.
        reason: why, or why not.
    """

    path: str
    kind: str
    converted: bool
    reason: str

    def __str__(self) -> str:
        return f"{'fp8' if self.converted else '-':4}{self.path or '(root)'} ({self.kind}): {self.reason}"


def convert(module: ModuleT, recipe: DelayedScaling | None = None, ignore_modules: Sequence[str] = ()) -> ModuleT:
    """Run every ``nn.Linear`` of a model in FP8 from now on: in place, by class, on the same objects.

    Same parameters, hooks, training flags and ``state_dict`` keys; tied weights stay tied; subclasses of ``nn.Linear``
    are left alone (:func:`describe` names them). Converting a converted model again keeps its scales and takes in
    layers that have been added since.

    Args:
        module: the model; converted in place.
        recipe: how scales follow the tensors; ``DelayedScaling()``, or for a converted model the one it has.
        ignore_modules: ``fnmatch`` patterns on module paths; what they match stays (or becomes again) a plain layer.

    Returns:
        The same object.

    Raises:
        ValueError: if nothing is left to convert, a pattern matches no module, or a converted model has another recipe.
        TypeError: if a layer to convert has parameters that are not fp32, bf16 or fp16.

    >>> model = convert(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), ignore_modules=("2",))
    >>> [type(layer).__name__ for layer in model]
    ['Fp8Linear', 'ReLU', 'Linear']
    """
    _check_patterns(module, ignore_modules)
    recipe = _settle_recipe(module, recipe)
    chosen: list[tuple[str, nn.Linear]] = []
    for path, layer in _named_modules(module):
        if isinstance(layer, nn.Linear) and _reason_against(path, layer, ignore_modules) is None:
            _check_dtype(path, layer)
            chosen.append((path, layer))
    if not chosen:
        raise ValueError(
            f"There is nothing to convert in {type(module).__name__}: FP8 needs at least one plain `nn.Linear`."
            + "".join(f"\n  {row}" for row in describe(module, ignore_modules)[:10])
        )
    # Nothing has been changed up to here, so an error above loses no scales.
    for path, layer in _converted(module):
        if _matches(path, ignore_modules):
            _restore(layer)
    _attach(chosen, recipe)
    return module


def unconvert(module: ModuleT) -> ModuleT:
    """Make every converted layer a plain ``nn.Linear`` again, in place. The scaling state is dropped."""
    for _, layer in _converted(module):
        _restore(layer)
    return module


def describe(module: nn.Module, ignore_modules: Sequence[str] = ()) -> list[Candidate]:
    """A row for each layer that could run in FP8: converted, or why not. ``print(*describe(model), sep="\\n")``."""
    rows = []
    for path, layer in _named_modules(module):
        if type(layer) is Fp8Linear:
            rows.append(Candidate(path, "Linear", True, f"converted, {layer.in_features} -> {layer.out_features}"))
        elif isinstance(layer, nn.Linear | nn.MultiheadAttention | nn.Bilinear):
            reason = _reason_against(path, layer, ignore_modules) or "not converted yet: call `convert`"
            rows.append(Candidate(path, type(layer).__name__, False, reason))
    return rows


def is_converted(module: nn.Module) -> bool:
    """Whether any layer of the model runs in FP8."""
    return any(type(layer) is Fp8Linear for layer in module.modules())


def scaling_state(module: nn.Module) -> ScalingState:
    """The scaling state of a converted model (of a part of one: the state of the whole model).

    Raises:
        ValueError: if the model is not converted, or is put together of parts converted one by one.
    """
    states = {id(layer.fp8.state): layer.fp8.state for _, layer in _converted(module)}
    if not states:
        raise ValueError(f"{type(module).__name__} has no FP8 layers: call `lightning_fp8.convert` on it first.")
    if len(states) > 1:
        raise ValueError(
            f"{type(module).__name__} is put together of parts with {len(states)} scaling states."
            " Call `lightning_fp8.convert` on the whole model: it joins them and keeps the scales."
        )
    return next(iter(states.values()))


def _named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, layer in module.named_modules():
        yield ".".join(segment for segment in path.split(".") if segment not in _WRAPPER_SEGMENTS), layer


def _converted(module: nn.Module) -> Iterator[tuple[str, Fp8Linear]]:
    for path, layer in _named_modules(module):
        if type(layer) is Fp8Linear:
            yield path, layer


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _check_patterns(module: nn.Module, patterns: Sequence[str]) -> None:
    if isinstance(patterns, str):
        raise TypeError(f"`ignore_modules` must be a sequence of patterns, got the string {patterns!r}.")
    paths = [path for path, _ in _named_modules(module)]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            linear = [path for path, layer in _named_modules(module) if isinstance(layer, nn.Linear)]
            raise ValueError(
                f"The `ignore_modules` pattern {pattern!r} matches no module of {type(module).__name__}."
                f" Its linear layers are: {', '.join(linear[:10])}{', ...' if len(linear) > 10 else ''}."
            )


def _reason_against(path: str, layer: nn.Module, ignore_modules: Sequence[str]) -> str | None:
    """Why this layer is not to be converted; None if it is to be."""
    if isinstance(layer, nn.MultiheadAttention):
        return "nn.MultiheadAttention reads its projection weights directly, so they run in the compute dtype"
    if type(layer) not in (nn.Linear, Fp8Linear):
        return f"a {type(layer).__name__}, and only nn.Linear itself is converted"
    if _matches(path, ignore_modules):
        return "matches `ignore_modules`"
    if "forward" in vars(layer):
        return "its `forward` was replaced on the object, and a conversion by class would have no effect"
    if layer.in_features == 0 or layer.out_features == 0:
        return "has no elements"
    return None


def _check_dtype(path: str, layer: nn.Linear) -> None:
    for name, parameter in (("weight", layer.weight), ("bias", layer.bias)):
        if parameter is not None and parameter.dtype not in CASTABLE_DTYPES:
            raise TypeError(
                f"{path or '(root)'}.{name} is {parameter.dtype}, and FP8 layers take float32, bfloat16 or float16"
                " parameters. Call `model.float()` first, or leave the layer out with `ignore_modules`."
            )


def _settle_recipe(module: nn.Module, recipe: DelayedScaling | None) -> DelayedScaling:
    if recipe is not None and not isinstance(recipe, DelayedScaling):
        raise TypeError(f"`recipe` must be a DelayedScaling, got {type(recipe).__name__}: {recipe!r}.")
    for path, layer in _converted(module):
        existing = layer.fp8.state.recipe
        recipe = recipe or existing
        if recipe != existing:
            raise ValueError(
                f"{path or '(root)'} is already converted with {existing}, which differs from {recipe}."
                " Call `unconvert(model)` first; the scales start anew then."
            )
    return recipe or DelayedScaling()


def _attach(chosen: list[tuple[str, nn.Linear]], recipe: DelayedScaling) -> None:
    """Give all chosen layers one scaling state, keeping the rows of those that had one."""
    rows = {path: len(ROLES) * position for position, (path, _) in enumerate(chosen)}
    states = {id(layer.fp8.state) if isinstance(layer, Fp8Linear) else None for _, layer in chosen}
    first = chosen[0][1]
    if len(states) == 1 and isinstance(first, Fp8Linear) and first.fp8.state.module_names == tuple(rows):
        return
    device = next(
        (layer.weight.device for _, layer in chosen if layer.weight.device.type != "meta"), torch.device("cpu")
    )
    check_device(device)
    state = ScalingState(tuple(rows), recipe, device)
    for path, layer in chosen:
        if isinstance(layer, Fp8Linear):
            state.copy_rows(rows[path], layer.fp8.state, layer.fp8.row)
        converted = cast(Fp8Linear, layer)
        converted.__class__ = Fp8Linear
        converted.fp8 = Fp8Rows(state, rows[path])


def _restore(layer: Fp8Linear) -> None:
    del layer.fp8
    cast(nn.Linear, layer).__class__ = nn.Linear
