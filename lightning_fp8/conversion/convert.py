"""Conversion of a model's linear and attention layers to FP8 and back, in place, by class."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeVar, cast

from torch import nn

from lightning_fp8.conversion.frozen_weights import keep_in_fp8, restore_masters
from lightning_fp8.conversion.one_state import Member, arrange, path_of_gemm, state_of
from lightning_fp8.conversion.plan import ConversionPlan, conversion_plan, converted
from lightning_fp8.conversion.settings import Overrides
from lightning_fp8.conversion.shared_inputs import share_inputs
from lightning_fp8.conversion.table import LayerTable
from lightning_fp8.dtypes.encoder import keep_own_forwards, restore_fast_path
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.class_swap import exchange_class, own_class, plain_class
from lightning_fp8.modules.fused_blocks import Fp8FeedForward, fuse_feed_forward
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.modules.known_blocks import known_form
from lightning_fp8.modules.paths import named_modules
from lightning_fp8.runtime.did_you_mean import did_you_mean
from lightning_fp8.runtime.warn_once import warn_once
from lightning_fp8.scaling.config import FrozenWeights
from lightning_fp8.scaling.precision import BF16, Choice
from lightning_fp8.scaling.state import ScalingState
from lightning_fp8.scalings.recipe import Recipe

ModuleT = TypeVar("ModuleT", bound=nn.Module)
# FP8 layers of other libraries; they may have replaced ours
_OTHER_FP8 = ("torchao.float8", "transformer_engine")


def convert(
    module: ModuleT,
    recipe: Recipe | str | None = None,
    ignore_modules: Sequence[str] = (),
    min_features: int | None = None,
    frozen_weights: FrozenWeights | None = None,
    overrides: Overrides | None = None,
) -> ModuleT:
    """Convert a model's linear and attention layers to FP8 in place: the objects stay the same, their classes change.

    It converts ``nn.Linear``, ``nn.MultiheadAttention`` with its ``out_proj``, Hugging Face's ``Conv1D``, and the
    experts of transformers 5, each expert with its own scales. Routers stay as they are. Other linear layers are
    converted if their ``forward`` is that of ``nn.Linear``, of a class passed to :func:`register_linear`, or of a known
    class, such as those of Falcon, timm, torch_geometric and OpenFold; :func:`describe` says which, or why not. A layer
    stays as it is if the class of its weight or bias has its own operators, as after quantization by torchao or
    bitsandbytes. The small matrices of PEFT's adapters stay too; the layers that they adapt are converted.
    Parameters, hooks, training flags and ``state_dict`` keys stay the same; tied weights stay tied. Converting a
    converted model again converts layers added since; the others keep their histories.

    A feed-forward block of a known class, such as an ``nn.Sequential`` or the MLPs of GPT-2, Llama, BERT and ViT in
    transformers, runs fused unless something needs its parts. In your own block, call
    :func:`lightning_fp8.feed_forward`.

    Args:
        module: the model; converted in place.
        recipe: how scales are computed: a recipe, or the precision string of one with its defaults, such as
            ``"fp8-block"``. Default ``DelayedScaling()``, or for a converted model its current recipe.
        ignore_modules: ``fnmatch`` patterns on module paths; matching modules, and everything inside them, stay (or
            become again) plain.
        min_features: layers with fewer features in or out, in any of their weights, stay (or become again) plain;
            0 converts all layers. Default 16, or for a converted model its current setting.
        frozen_weights: ``"fp8"`` keeps only the FP8 cast of frozen weights (``requires_grad=False``) of converted
            layers and frees their masters: one byte per parameter, or two on a GPU where gradients pass through to the
            input. Outputs and gradients stay bit-identical, except in an attention under ``BlockScaling`` whose width
            is not a multiple of 128. ``"master"`` keeps masters; weights without a master get one with rounded values.
            Tied and sharded weights always keep their masters; :func:`describe` says so. Default ``"master"``, or for a
            converted model its current setting.
        overrides: the precision, ``"fp8"`` or ``"bf16"``, of some layers' products, in place of the recipe's. Keys are
            ``fnmatch`` patterns on module paths; values set all products or some, as in ``{"blocks.0": "bf16",
            "*.down": {"wgrad": "bf16"}}``. A pattern also applies inside the modules that it matches. Later patterns
            win, product by product. A layer without a product in FP8 stays (or becomes again) plain. Default: none, or
            for a converted model its current precisions.

    Returns:
        The same object.

    Raises:
        ValueError: if nothing is left to convert, a pattern matches no module, a converted model has another recipe,
            ``min_features``, ``frozen_weights`` or ``overrides`` has an invalid value, or a weight that is gathered in
            FP8 would be multiplied in bf16.
        TypeError: if a layer to convert has parameters that are not fp32, bf16 or fp16.

    >>> model = convert(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), ignore_modules=("2",))
    >>> [type(layer).__name__ for layer in model]
    ['Fp8Linear', 'ReLU', 'Linear']
    """
    carry_out(
        conversion_plan(
            module,
            ignore_modules,
            recipe=recipe,
            min_features=min_features,
            frozen_weights=frozen_weights,
            overrides=overrides,
        )
    )
    return module


def carry_out(plan: ConversionPlan) -> ScalingState:
    """Convert the layers that the plan has chosen, in place; after an error, nothing is changed."""
    plan.check()
    _restore(plan.restored)
    state = _attach(plan)
    _give_settings(plan)
    layers = [layer for _, layer in plan.modules]
    state.model.scanned.update(layers)
    state.model.ignored = tuple(chain.from_iterable(plan.patterns.values()))
    for spec in plan.layers:
        state.model.left_out.pop(spec.layer, None)
        if spec.is_ignored and spec.reason:
            state.model.left_out[spec.layer] = spec.reason
    share_inputs(layers)
    _fuse(layers)
    keep_own_forwards(layers, Fp8Module)
    return state


def carry_out_for_run(plan: ConversionPlan) -> ScalingState:
    """Convert a model at the start of a run.

    If the user or an earlier run has converted it, its layers stay as they are, unless the run selects layers.
    ``frozen_weights`` is always that of the plan.
    """
    if plan.selects or not plan.converted:
        return carry_out(plan)
    state, recipe = plan.state, plan.config.recipe
    recipe.require_same(
        state.recipe,
        f"The model is already converted with {state.recipe}, but this run has {recipe}."
        " Call `lightning_fp8.unconvert(model)` first; the scales then start from the beginning.",
    )
    _give_settings(plan)
    name_late_layers(plan.modules, state)
    return state


def name_late_layers(modules: Sequence[tuple[str, nn.Module]], state: ScalingState) -> None:
    """Warn once about layers that were added after the conversion and would run in FP8 if they were converted.

    Args:
        modules: paths and modules of the model, or of a larger model that contains it.
        state: its scaling state.
    """
    scanned, mark = state.model.scanned, (len(modules), sum(id(module) for _, module in modules))
    if mark == state.model.last_scan:
        # loops call this at each step; usually nothing has been added
        return
    state.model.last_scan, parents = mark, dict(modules)
    new = [(path, module) for path, module in modules if module not in scanned]
    late = {module for path, module in new if parents.get(path.rpartition(".")[0]) in scanned}
    late = {part for module in late for part in module.modules() if part not in scanned}
    if late:
        scanned.update(late)
        plan = conversion_plan(modules[0][1], state.model.ignored)
        names = [spec.path for spec, _ in plan.chosen if spec.layer in late and not isinstance(spec.layer, Fp8Module)]
        state.model.notices.on_late_layers(names)


def unconvert(module: ModuleT) -> ModuleT:
    """Make every converted layer a plain one again, in place. The scaling state is dropped.

    Weights that have no masters become plain parameters with rounded values, with a warning.
    """
    layers = list(module.modules())
    fp8_layers = list(converted(module))
    _restore(fp8_layers)
    _fuse(layers)
    restore_fast_path(layers)
    return module


def describe(
    module: nn.Module,
    ignore_modules: Sequence[str] = (),
    min_features: int | None = None,
    overrides: Overrides | None = None,
    recipe: Recipe | str | None = None,
) -> LayerTable:
    """A row for each layer that could run in FP8: whether it does, why, and what would change it.

    The result is a list of rows. ``print(describe(model))`` shows it as a table, in which rows that differ only in the
    numbers of their paths share a line.

    Rows for large parameters follow the rows for layers. Such a parameter has 2 or more dimensions, and is outside
    these layers and outside torch's embeddings, convolutions and normalisations, like stacked experts of other
    libraries. It is large if it and the parameters at the same path in other layers of a stack make up at least 1% of
    the model's parameters.

    The row of a converted layer in a feed-forward block of a known class says whether the block runs fused in the
    model's current mode, and if not, why.

    The arguments are the same as in :func:`convert`. All but ``ignore_modules`` default to the last conversion's.
    """
    return conversion_plan(
        module,
        ignore_modules,
        recipe=recipe,
        min_features=min_features,
        overrides=overrides,
    ).rows()


def is_converted(module: nn.Module) -> bool:
    """Whether any layer of the model runs in FP8."""
    return any(isinstance(layer, Fp8Module) for layer in module.modules())


def scaling_state(module: nn.Module) -> ScalingState:
    """The scaling state of a converted model (for a part of one, the state of the whole model).

    It stays the same object while layers are added and converted. Parts that were converted separately, and copies of
    parts, join the state of the rest in this call. So call this wherever you use the state, rather than storing it.

    Raises:
        ValueError: if the model is not converted, or consists of parts with different recipes or devices.
    """
    layers = list(named_modules(module))
    # custom loops call this at each step; most programs have imported neither library
    are_loaded = any(name in sys.modules for name in _OTHER_FP8)
    paths = [path for path, layer in layers if are_loaded and type(layer).__module__.startswith(_OTHER_FP8)]
    if paths:
        warn_once(
            f"{len(paths)} layers ({', '.join(paths[:3])}{', ...' if paths[3:] else ''}) run in the FP8 of another"
            ' library, the others in that of lightning_fp8. `Accelerator(mixed_precision="fp8")` replaces converted'
            ' layers like this: choose "bf16" for FP8 by lightning_fp8 alone.'
        )
    state = state_of(module, (layer for _, layer in layers if isinstance(layer, Fp8Module)))
    name_late_layers(layers, state)
    return state


def fall_back(module: nn.Module, name: str) -> None:
    """Run one layer's GEMMs without FP8 from its next forward on: in bf16 under autocast, else in its input's dtype.

    ``scaling_state(model).fallbacks`` names such layers, and checkpoints record them. The layer's histories are
    dropped. To undo it, call ``unconvert`` and then ``convert``.

    Args:
        module: a converted model.
        name: path of the layer; for an attention, that of one projection, such as ``"blocks.3.attn.in_proj"``.

    Raises:
        ValueError: if the model is not converted, no converted layer has this name, or its weight is gathered in FP8.
    """
    state = scaling_state(module)
    if name not in state.module_names:
        raise ValueError(
            f"There is no converted module {name!r} to fall back. The first ones are:"
            f" {', '.join(map(repr, state.module_names[:6]))}.{did_you_mean(name, state.module_names)}"
        )
    state.switch("move", {state.module_names.index(name): BF16})


def _attach(plan: ConversionPlan) -> ScalingState:
    """Give all chosen layers one scaling state, keeping the scales of those that had one."""
    members = [
        Member(path_of_gemm(spec.path, name), spec.layer.fp8[name] if isinstance(spec.layer, Fp8Module) else None)
        for spec, kind in plan.chosen
        for name in (spec.layer.fp8 if isinstance(spec.layer, Fp8Module) else kind.gemm_weights(spec.layer))
    ]
    state, positions = arrange(members, plan.config.recipe, plan.device, rename=True)
    places = iter(positions)
    for spec, kind in plan.chosen:
        if isinstance(spec.layer, Fp8Module):
            for _ in spec.layer.fp8:
                next(places)
            continue
        layer = cast(Fp8Module, spec.layer)
        gemms = {name: Gemm(state, next(places)) for name in kind.gemm_weights(layer)}
        layer.plain_class = own_class(layer)
        exchange_class(layer, kind)
        layer.fp8 = gemms
        for name, gemm in gemms.items():
            gemm.belong_to(layer, name)
    return state


def _give_settings(plan: ConversionPlan) -> None:
    """Give all converted layers of the model the settings of the plan, from their next forward on."""
    layers = [layer for _, layer in plan.converted]
    for state in {layer.scaling_state for layer in layers}:
        state.configure(plan.config)
    changed: dict[int, Choice] = {}
    for spec in plan.layers:
        if isinstance(spec.layer, Fp8Module) and spec.layer.in_bf16 != spec.in_bf16:
            changed |= {gemm.module: Choice(spec.in_bf16) for gemm in spec.layer.fp8.values()}
    if changed:
        plan.state.switch("settings", changed)
    if plan.config.frozen_weights == "fp8":
        keep_in_fp8([module for _, module in plan.modules])
    else:
        _give_masters(layers)


def _give_masters(layers: Iterable[Fp8Module]) -> None:
    without = [layer for layer in layers if layer.has_fp8_only]
    if without:
        restore_masters(without)


def _fuse(modules: Iterable[nn.Module]) -> None:
    """Fuse the feed-forward blocks whose layers are converted; make those of others plain again."""
    blocks = [part for part in modules if isinstance(part, Fp8FeedForward) or known_form(part, plain_class(part))]
    if blocks:
        fuse_feed_forward(blocks)


def _restore(layers: Sequence[tuple[str, Fp8Module]]) -> None:
    _give_masters(layer for _, layer in layers)
    for _, layer in layers:
        kind = layer.plain_class
        for gemm in layer.fp8.values():
            gemm.model.leave(gemm)
        del layer.fp8, layer.plain_class
        exchange_class(layer, kind)
