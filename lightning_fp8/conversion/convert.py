"""Conversion of a model's linear and attention layers to FP8 and back, in place, by class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from lightning_fp8.conversion.candidates import (
    Candidate,
    candidates,
    check_dtype,
    converted,
    fp8_classes,
    of_what_size,
    table,
    weights,
)
from lightning_fp8.conversion.min_features import MinFeatures, as_number
from lightning_fp8.dtypes.encoder import keep_own_forwards, restore_fast_path
from lightning_fp8.modules.base import Fp8Module, Fp8Rows
from lightning_fp8.modules.class_swap import exchange_class, own_class
from lightning_fp8.modules.feed_forward import fuse_feed_forward
from lightning_fp8.modules.linear import Fp8Linear
from lightning_fp8.modules.paths import check_patterns
from lightning_fp8.modules.weight_group import WeightGroup
from lightning_fp8.ops.cuda.gemm_choice import check_gemm
from lightning_fp8.runtime.device import check_device
from lightning_fp8.scaling.recipe import DelayedScaling
from lightning_fp8.scaling.state import ScalingState

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class NothingToConvertError(ValueError):
    """A model has no layer that can run in FP8, or the settings leave none."""


def convert(
    module: ModuleT,
    recipe: DelayedScaling | None = None,
    ignore_modules: Sequence[str] = (),
    gemm: str | None = None,
    min_features: MinFeatures | None = None,
) -> ModuleT:
    """Run a model's linear and attention layers in FP8 from now on: in place, by class, on the same objects.

    Converted are ``nn.Linear``, ``nn.MultiheadAttention`` with its ``out_proj``, and the ``Conv1D`` of Hugging Face.
    Same parameters, hooks, training flags and ``state_dict`` keys; tied weights stay tied; subclasses are left alone
    (:func:`describe` names them). Converting a converted model again keeps its scales and takes in layers that have
    been added since.

    Args:
        module: the model; converted in place.
        recipe: how scales follow the tensors; ``DelayedScaling()``, or for a converted model the one it has.
        ignore_modules: ``fnmatch`` patterns on module paths; what they match stays (or becomes again) plain, and so
            does all that is inside.
        gemm: what runs the FP8 GEMMs on a GPU: ``"auto"``, whichever was measured to be faster there; ``"rawkernel"``,
            the kernels of this package; ``"cublaslt"``, those of ``torch._scaled_mm``. Without it ``"auto"``, or for a
            converted model what it has.
        min_features: layers with fewer features in or out, in any of their weights, stay (or become again) plain;
            ``"auto"`` is the size from which FP8 was measured to be faster on the current CUDA device (``python -m
            lightning_fp8 tune --min-features`` measures), unmeasured an estimate of 1024, without a CUDA device 0.
            Without it 0, or for a converted model what it has.

    Returns:
        The same object.

    Raises:
        ValueError: if nothing is left to convert, a pattern matches no module, a converted model has another recipe,
            ``gemm`` is another word, or ``min_features`` another one or negative.
        TypeError: if a layer to convert has parameters that are not fp32, bf16 or fp16.
        RuntimeError: if a converted layer that is to be plain again has been parametrized since.

    >>> model = convert(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), ignore_modules=("2",))
    >>> [type(layer).__name__ for layer in model]
    ['Fp8Linear', 'ReLU', 'Linear']
    """
    gemm = _settle_gemm(module, gemm)
    number = _settle_min_features(module, min_features)
    check_patterns(module, ignore_modules, "ignore_modules")
    recipe = _settle_recipe(module, recipe)
    chosen: list[tuple[str, nn.Module]] = []
    for path, layer, reason in candidates(module, ignore_modules, number):
        if reason is None:
            check_dtype(path, layer)
            chosen.append((path, layer))
    if not chosen:
        raise NothingToConvertError(
            f"There is nothing to convert in {type(module).__name__}: FP8 needs at least one plain `nn.Linear`"
            + of_what_size(module, ignore_modules, number)
            + "".join(f"\n  {row}" for row in describe(module, ignore_modules, number)[:10])
        )
    kept = {layer for _, layer in chosen}
    # Nothing is changed before all checks have passed, so an error loses no scales.
    _restore([(path, layer) for path, layer in converted(module) if layer not in kept])
    _attach(chosen, recipe)
    state = scaling_state(module)
    state.gemm, state.min_features = gemm, number
    fuse_feed_forward(module)
    keep_own_forwards(module, Fp8Module)
    return module


def unconvert(module: ModuleT) -> ModuleT:
    """Make every converted layer a plain one again, in place. The scaling state is dropped.

    Raises:
        RuntimeError: if a layer has been parametrized since it was converted; nothing is changed then.
    """
    _restore(list(converted(module)))
    fuse_feed_forward(module)
    restore_fast_path(module)
    return module


def describe(
    module: nn.Module, ignore_modules: Sequence[str] = (), min_features: MinFeatures | None = None
) -> list[Candidate]:
    """A row for each layer that could run in FP8: converted, or why not. ``print(*describe(model), sep="\\n")``.

    Behind them, a row for each large parameter of 2 or more dimensions that is in no such layer and in none of torch's
    embeddings, convolutions and normalisations, such as the stacked experts of a mixture of experts. Large is what
    makes up, with the parameters of the same path in other layers of a stack, at least 1% of the model.

    The arguments are those of :func:`convert`; without ``min_features`` it is that of the last conversion.
    """
    return table(module, ignore_modules, _settle_min_features(module, min_features))


def is_converted(module: nn.Module) -> bool:
    """Whether any layer of the model runs in FP8."""
    return any(isinstance(layer, Fp8Module) for layer in module.modules())


def scaling_state(module: nn.Module) -> ScalingState:
    """The scaling state of a converted model (of a part of one: the state of the whole model).

    Raises:
        ValueError: if the model is not converted, or is put together of parts converted one by one.
    """
    states = {id(layer.scaling_state): layer.scaling_state for _, layer in converted(module)}
    if not states:
        raise ValueError(f"{type(module).__name__} has no FP8 layers: call `lightning_fp8.convert` on it first.")
    if len(states) > 1:
        raise ValueError(
            f"{type(module).__name__} is put together of parts with {len(states)} scaling states."
            " Call `lightning_fp8.convert` on the whole model: it joins them and keeps the scales."
        )
    return next(iter(states.values()))


def _settle_recipe(module: nn.Module, recipe: DelayedScaling | None) -> DelayedScaling:
    if recipe is not None and not isinstance(recipe, DelayedScaling):
        raise TypeError(f"`recipe` must be a DelayedScaling, got {type(recipe).__name__}: {recipe!r}.")
    for path, layer in converted(module):
        existing = layer.scaling_state.recipe
        recipe = recipe or existing
        if recipe != existing:
            raise ValueError(
                f"{path or '(root)'} is already converted with {existing}, which differs from {recipe}."
                " Call `unconvert(model)` first; the scales start anew then."
            )
    return recipe or DelayedScaling()


def _settle_gemm(module: nn.Module, gemm: str | None) -> str:
    if gemm is None:
        return next((layer.scaling_state.gemm for _, layer in converted(module)), "auto")
    check_gemm(gemm)
    return gemm


def _settle_min_features(module: nn.Module, min_features: MinFeatures | None) -> int:
    if min_features is None:
        return next((layer.scaling_state.min_features for _, layer in converted(module)), 0)
    return as_number(min_features)


def _attach(chosen: list[tuple[str, nn.Module]], recipe: DelayedScaling) -> None:
    """Give all chosen layers one scaling state, keeping the rows of those that had one."""
    classes: dict[type[nn.Module], type[Fp8Module]] = {**fp8_classes(), NonDynamicallyQuantizableLinear: Fp8Linear}
    gemms = [
        (layer, gemm, ".".join(filter(None, (path, gemm))))
        for path, layer in chosen
        for gemm in (layer.fp8 if isinstance(layer, Fp8Module) else classes[own_class(layer)].gemm_weights(layer))
    ]
    names = tuple(name for _, _, name in gemms)
    states = {layer.scaling_state if isinstance(layer, Fp8Module) else None for _, layer in chosen}
    known = next(iter(states))
    if len(states) == 1 and known is not None and known.module_names == names:
        return
    devices = (weight.device for _, layer in chosen for weight in weights(layer))
    device = next((device for device in devices if device.type != "meta"), torch.device("cpu"))
    check_device(device)
    state = ScalingState(names, recipe, device)
    group = WeightGroup()
    new_rows: dict[nn.Module, dict[str, Fp8Rows]] = {layer: {} for _, layer in chosen}
    for position, (layer, gemm, _) in enumerate(gemms):
        if isinstance(layer, Fp8Module):
            state.copy_module(position, layer.scaling_state, layer.fp8[gemm].module)
        new_rows[layer][gemm] = Fp8Rows(state, position, group)
    for layer, rows in new_rows.items():
        made = cast(Fp8Module, layer)
        if not isinstance(layer, Fp8Module):
            made.plain_class = own_class(layer)
            exchange_class(layer, classes[made.plain_class])
        made.fp8 = rows
        for gemm, placed in rows.items():
            placed.belong_to(made, gemm)


def _restore(layers: Sequence[tuple[str, Fp8Module]]) -> None:
    for path, layer in layers:
        if is_parametrized(layer):
            raise RuntimeError(
                f"{path or '(root)'} has been parametrized since it was converted. Call"
                " `torch.nn.utils.parametrize.remove_parametrizations` on it first."
            )
    for _, layer in layers:
        plain_class = layer.plain_class
        del layer.fp8, layer.plain_class
        exchange_class(layer, plain_class)
