"""Loads FP8 weights into a model, from exports of this package or from published checkpoints."""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_fp8.conversion.candidates import PlannedLayer
from lightning_fp8.conversion.convert import convert, scaling_state
from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.frozen_layers import free_masters
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.modules.paths import plain_path, without_wrappers
from lightning_fp8.ops.formats import E4M3, dtype_name
from lightning_fp8.runtime.switch import as_torch_starts
from lightning_fp8.scaling.config import FrozenWeights
from lightning_fp8.scaling.state import tensor_name
from lightning_fp8.scalings.recipe import Recipe
from lightning_fp8.serialization.checks import (
    Product,
    gemm_key,
    misfits_of_codes,
    misfits_of_file,
    misfits_of_layers,
    misfits_of_merges,
    misfits_of_metadata,
    misfits_of_names,
    misfits_of_pairs,
    misfits_of_scales,
    misfits_of_twins,
    misfits_of_values,
    parameter_of,
    products_of,
    refuse,
)
from lightning_fp8.serialization.fill import Source, fill, missing_buffers, without_memory
from lightning_fp8.serialization.layouts.base import Scheme, kind_of
from lightning_fp8.serialization.layouts.registry import config_read, scheme_of
from lightning_fp8.serialization.names import placed
from lightning_fp8.serialization.shards import Shards
from lightning_fp8.serialization.tensors import amax_of_scale, from_metadata, joined, listed, state_tensors, tied_to
from lightning_fp8.serialization.values import Scale

# the checkpoints of models that hold the FP8 weights of one
_sources: WeakKeyDictionary[nn.Module, Source] = WeakKeyDictionary()


@as_torch_starts()
def load_exported(model: nn.Module, path: str | os.PathLike[str], *, frozen: bool = False) -> nn.Module:
    """Load FP8 weights into a model of the same architecture, from an export or from a published checkpoint.

    The folder has a ``config.json`` and either ``model.safetensors`` or several such files with their index.
    :mod:`lightning_fp8.serialization.layouts` lists the supported quantizations: one scale for each tensor, row, or
    block of 128 x 128, as ``fp8``, ``compressed-tensors`` or ``modelopt``; and MXFP8, as ``compressed-tensors``. Only
    layers with FP8 weights in the file are converted. Tensors are read one by one, so a model on the meta device takes
    only its own memory.

    With ``frozen=True`` the model is a base for adapters: FP8 weights keep their codes and scales, one byte per
    parameter, and no parameter is trained. Otherwise an FP8 weight becomes ``code * scale``, computed in fp32, in the
    dtype of the model's parameter, and can be trained. Other tensors are read as they are.

    A plain model is converted with the recipe that fits the file: :class:`~lightning_fp8.BlockScaling` for blocks, with
    ``power_of_2_scales`` if all their scales are powers of two, :class:`~lightning_fp8.MXScaling` for MXFP8, else
    :class:`~lightning_fp8.DelayedScaling` if inputs have static scales, else :class:`~lightning_fp8.CurrentScaling`. A
    converted model must have a recipe that fits; with ``frozen=True``, it may have any. The scale of an input becomes a
    history with one entry, from which training may continue.

    A loaded export has the same outputs, bit for bit, as the exported model had in ``eval()``, if it was exported in
    its own dtypes; layers that had fallen back fall back again. Without ``frozen``, a weight is cast with the scales of
    its own values. This gives the codes of the file, unless the codes do not reach 448, or the file has a scale for
    each row: such weights are rounded a second time, with a warning.

    For a transformers model, the file may use the names of published files, in which experts and projections are
    separate; they are merged by transformers' own rules. Skips layers that the class of the model leaves out, and the
    scales of an FP8 cache.

    Args:
        model: plain or converted. Parameters on the meta device, and buffers, get memory on torch's default device.
        path: the folder.
        frozen: keep FP8 weights as they are, and freeze the model.

    Returns:
        The same object, in ``eval()``.

    Raises:
        ImportError: without ``safetensors``.
        FileNotFoundError: if the folder holds no model.
        ValueError: for another quantization, a damaged file, a file outside of the folder, scales outside of 2**-118
            to 2**118, tensors that are missing, unexpected, or of another shape, layers that cannot run in FP8 here,
            merged weights whose scales have no common form (with ``frozen=True``), or buffers on the meta device that
            nothing initialises; the message names them and the file.
        TypeError: if a layer that ran in FP8 has parameters that are not fp32, bf16 or fp16, or the model's
            ``state_dict`` holds sharded tensors or entries that are not tensors.

    After an error the model is as it was.
    """
    folder = Path(path)
    own = state_tensors(model, on_meta=True)
    source = _read(folder, model, own)
    file = source.path
    targets = source.placed.by_target.items()
    in_fp8 = dict.fromkeys(target for target, pieces in targets if pieces[0].name in source.scales)
    # with the other names of tied weights
    all_in_fp8 = {*in_fp8, *tied_to(in_fp8, own)}
    plan = conversion_plan(model, default=source.recipe)
    recipe = plan.config.recipe
    if not frozen:
        _check_recipe(recipe, source.scheme, file)
    plain = _plain_layers(model, plan.layers, {*all_in_fp8, *source.exact})
    products = products_of(model, plain)
    frozen_weights: FrozenWeights | None = "fp8" if frozen else None
    inputs = _inputs(source, in_fp8, all_in_fp8, products, recipe)
    refuse(file, misfits_of_layers(source.exact or inputs, products))
    conversion_plan(model, plain, recipe=recipe, min_features=0, frozen_weights=frozen_weights).check()
    if frozen:
        refuse(file, misfits_of_merges(source, in_fp8, products))
    again = _check_values(source, own, recipe, frozen)
    buffers = missing_buffers(model)
    # from here on, no error can depend on the file
    devices: Mapping[str, torch.device] = {}
    if frozen:
        model.requires_grad_(False)
        devices = without_memory(model, in_fp8)
    convert(model, recipe, plain, min_features=0, frozen_weights=frozen_weights)
    kept_gemms = _kept(products, devices)
    fill(model, source, kept_gemms, devices)
    # the state was made while weights were on the meta device
    scaling_state(model).to(conversion_plan(model).device)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer
    _set_scales(model, inputs, {name for name, scales in source.exact.items() if scales is None})
    for layer in model.modules():
        if isinstance(layer, Fp8Module):
            free_masters(layer)
    if frozen:
        _sources[without_wrappers(model)] = source
    else:
        _sources.pop(without_wrappers(model), None)
    if rounded := [target for target in again if target not in kept_gemms]:
        warnings.warn(
            f"load_exported: {file}: {len(rounded)} weights are rounded to FP8 a second time, because a weight here is"
            f" scaled by its own values, and these codes do not reach the largest one: {listed(rounded)}.",
            stacklevel=2,
        )
    return model.eval()


def source_of(model: nn.Module) -> Source | None:
    """The checkpoint whose weights a model keeps in FP8; None if there is none."""
    return _sources.get(without_wrappers(model))


def _read(folder: Path, model: nn.Module, own: Mapping[str, Tensor]) -> Source:
    """Everything that is known without reading weights, checked."""
    # first, so that the error for a folder without a model says so
    config_file, config = config_read(folder)
    scheme_of(config_file, config["quantization_config"], ())
    shards = Shards(folder)
    stored, file = shards.stored, shards.path
    scheme = scheme_of(config_file, config["quantization_config"], stored)
    in_fp8 = [name for name, entry in stored.items() if entry.dtype == E4M3.dtype]
    twins = {
        twin: name
        for twin, name in tied_to(in_fp8, own).items()
        if twin not in stored and scheme.scale_of(twin) in stored
    }
    refuse(file, misfits_of_file(stored, scheme, twins))
    try:
        metadata = from_metadata(shards.metadata.get(file), not scheme.static)
    except ValueError as error:
        raise ValueError(f"load_exported: the metadata of {file} are damaged: {error}") from error
    exact = metadata or {}
    if not in_fp8 and not exact:
        raise ValueError(f"load_exported: {file} has no {E4M3.dtype} weights.")
    of_weights = {scheme.scale_of(name): name for name in (*in_fp8, *twins, *exact)}
    of_inputs = {scheme.input_of(name): name for name in (*in_fp8, *twins, *exact)}
    apart = {name for name in stored if name in of_inputs or scheme.is_of_cache(name)}
    read = {name: tensor.clone() for name, tensor in shards.tensors({*apart, *(of_weights.keys() & stored.keys())})}
    scales_read = {name: scale for name, scale in read.items() if not scheme.is_of_cache(name)}
    numbers = scales_read if scheme.in_e8m0 else {name: scale.float() for name, scale in scales_read.items()}
    refuse(file, misfits_of_scales(numbers, scheme.in_e8m0))
    scales = {}
    for name in in_fp8:
        kind = kind_of(scheme.kinds, stored[name].shape, stored[scheme.scale_of(name)].shape)
        if kind is not None:
            scales[name] = Scale.of(kind, stored[name].shape, read[scheme.scale_of(name)])
    refuse(file, misfits_of_pairs(scheme, [*in_fp8, *twins], numbers))
    refuse(file, misfits_of_twins(scheme, twins, numbers))
    if metadata is not None:
        refuse(file, misfits_of_metadata(scheme, in_fp8, numbers, metadata))
    names = [name for name in stored if name not in read]
    placement = placed(
        model, {name: tuple(tensor.shape) for name, tensor in own.items()}, {name: stored[name].shape for name in names}
    )
    refuse(file, misfits_of_names(placement, own, stored))
    return Source(shards, config, scheme, placement, scales, {name: read[name] for name in apart}, exact, twins)


def _check_recipe(recipe: Recipe, scheme: Scheme, file: Path) -> None:
    """ValueError for a recipe that does not match the checkpoint's scaling."""
    in_blocks = scheme.in_e8m0 or "block" in scheme.kinds
    kind = recipe.scaling("weight").file_kind
    fits = (kind != "tensor") == in_blocks and (recipe.from_history or in_blocks or not scheme.static)
    if fits and (kind == "group" or not scheme.in_e8m0):
        return
    trait = "has static scales of inputs" if scheme.static else "has one scale for each weight"
    trait = f"has a scale for each {'group' if scheme.in_e8m0 else 'block'} of a weight" if in_blocks else trait
    raise ValueError(
        f"load_exported: the model is converted with {recipe}, and {file} {trait}. Call"
        " `lightning_fp8.unconvert(model)` first."
    )


def _plain_layers(model: nn.Module, layers: Sequence[PlannedLayer], weights: Collection[str]) -> list[str]:
    """Patterns for the layers that stay plain, because they hold none of these weights."""
    chosen = {
        layer
        for path, layer in model.named_modules(remove_duplicate=False)
        for name, _ in layer.named_parameters(recurse=False)
        if joined(plain_path(path), name) in weights
    }
    return [glob.escape(spec.path) for spec in layers if chosen.isdisjoint(spec.layer.modules())]


def _inputs(
    source: Source,
    in_fp8: Collection[str],
    all_in_fp8: Collection[str],
    products: Mapping[str, Product],
    recipe: Recipe,
) -> dict[str, Tensor | None]:
    """For each GEMM, the multiplier of its input before the cast, ``[] float32``; None for scaling by own values."""
    if source.exact:
        return {name: scales and scales.input for name, scales in source.exact.items()}
    if not (source.scheme.static and recipe.from_history):
        # weights without a layer keep their own names
        targets = {key: parameter_of(key, product) for key, product in products.items()}
        keys = [key for key, target in targets.items() if target in all_in_fp8]
        return dict.fromkeys([*keys, *(target for target in in_fp8 if target not in targets.values())])
    scales: dict[tuple[str, int | None], dict[float, str]] = {}
    for twin in source.twins:
        scales[twin, None] = {source.inputs[source.scheme.input_of(twin)].float().item(): twin}
    for name, _, target, at in source.placed.pieces:
        if name in source.scales:
            stored = source.inputs[source.scheme.input_of(name)].float().reshape(())
            expert = at[0] if isinstance(at[0], int) else None
            scales.setdefault((target, expert), {})[stored.item()] = name
    different = [", ".join(names.values()) for names in scales.values() if len(names) > 1]
    if different:
        raise ValueError(
            f"load_exported: {source.path}: tensors that are one weight in the model and have different static scales"
            f" of inputs: {listed(different)}. Convert the model with `CurrentScaling()` and pass `frozen=True`."
        )
    inputs: dict[str, Tensor | None] = {}
    for key, product in products.items():
        target = parameter_of(key, product)
        expert = int(key.rpartition(".")[2]) if product[1].weights_are_stacked else None
        of_input = scales.get((target, expert)) or scales.get((target, None))
        if target in all_in_fp8:
            inputs[key] = torch.tensor(next(iter(of_input)), dtype=torch.float32).reciprocal() if of_input else None
    without = {parameter_of(key, products[key]) for key in inputs}
    return {**inputs, **dict.fromkeys(target for target in in_fp8 if target not in without)}


def _check_values(source: Source, own: Mapping[str, Tensor], recipe: Recipe, frozen: bool) -> list[str]:
    """Read all codes once, and refuse those that the model cannot hold.

    Returns:
        The weights whose codes would change in a cast here.
    """
    largest: dict[str, Tensor] = {}
    lost: list[str] = []
    by_name = {piece.name: piece for piece in source.placed.pieces if piece.name in source.scales}
    dtypes = {name: own[piece.target].dtype for name, piece in by_name.items()}
    for name, codes in source.shards.tensors(by_name):
        scale = source.scales[name]
        largest[name] = scale.largest_codes(codes)
        if frozen or scale.is_kept_in(dtypes[name]):
            continue
        if not scale.keeps(codes, source.values(name, codes).to(dtypes[name])):
            lost.append(f"{name} ({dtype_name(dtypes[name])})")
    refuse(source.path, misfits_of_codes(largest, source.scales, dtypes))
    refuse(source.path, misfits_of_values(source, own, lost))
    in_fp8 = dict.fromkeys(piece.target for piece in source.placed.pieces if piece.name in source.scales)
    return [target for target in in_fp8 if _is_rounded(source, target, recipe, largest)]


def _is_rounded(source: Source, target: str, recipe: Recipe, largest: Mapping[str, Tensor]) -> bool:
    """Whether a cast of the weight with the scales of its own values gives codes that differ from the file's."""
    scale = source.scale_of(target)
    if scale is None:
        return True
    matrices: dict[object, Tensor] = {}
    for piece in source.placed.by_target[target]:
        codes = largest[piece.name]
        # if a matrix has one scale, the largest value is in one of its parts
        expert = piece.at[0] if isinstance(piece.at[0], int) else None
        matrix = expert if scale.kind == "tensor" else piece.name
        matrices[matrix] = torch.maximum(matrices[matrix], codes) if matrix in matrices else codes
    return not recipe.scaling("weight").casts_again(scale, list(matrices.values()))


def _kept(products: Mapping[str, Product], names: Collection[str]) -> dict[str, list[Gemm]]:
    """The weights among these that are to be kept in FP8 only, with their GEMMs."""
    by_name: dict[str, list[Gemm]] = {}
    for key, (layer, kind, gemm) in products.items():
        if (name := parameter_of(key, (layer, kind, gemm))) in names and isinstance(layer, Fp8Module):
            by_name.setdefault(name, []).append(layer.fp8[gemm])
    return {name: gemms for name, gemms in by_name.items() if all(gemm.weight_cast.fp8_only for gemm in gemms)}


def _set_scales(model: nn.Module, inputs: Mapping[str, Tensor | None], fallen: Collection[str]) -> None:
    state = scaling_state(model)
    entries = state.state_dict()
    for entry in entries.values():
        for tensor in entry.values():
            tensor.zero_()
        entry["in_fp8"].fill_(True)
    for path, layer in model.named_modules(remove_duplicate=False):
        for gemm, fp8_gemm in layer.fp8.items() if isinstance(layer, Fp8Module) else ():
            key, name = gemm_key(plain_path(path), type(layer), gemm), tensor_name(fp8_gemm.name, "input")
            # an attention is converted as a whole: its projections without FP8 weights fall back
            if key in inputs and key not in fallen:
                scale, history = inputs[key], entries[name].get("amax_history")
                if scale is not None and history is not None:
                    # the amax from which an update would have computed this scale
                    history[0] = amax_of_scale(scale * state.recipe.margin_factor)
            else:
                entries[name]["in_fp8"].fill_(False)
    state.load_state_dict(entries)
