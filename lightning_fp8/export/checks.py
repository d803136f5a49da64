"""Checks that a file fits a model, all made before the model is changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_fp8.conversion.candidates import gemm_weights
from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.export.layout import (
    SCALE_RULE,
    Gemms,
    Scales,
    codes_of,
    dequantized,
    is_scale,
    listed,
    memory_of,
    scale_names,
    scales_of,
    weight_name,
)
from lightning_fp8.modules.paths import plain_path
from lightning_fp8.ops.amaxes import max_abs, scale_of_current
from lightning_fp8.ops.formats import E4M3, dtype_name

Tensors = Mapping[str, Tensor]
# what is wrong, and the names of the tensors with which it is
Misfits = Iterator[tuple[str, Iterable[str]]]


def refuse(file: Path, misfits: Misfits) -> None:
    """ValueError for the first misfit of which there are any tensors; those after it may depend on it."""
    for what, names in misfits:
        if wrong := list(names):
            raise ValueError(f"load_exported: {file}: tensors that {what}: {listed(wrong)}.")


def misfits_of_file(tensors: Tensors, in_fp8: Sequence[str], dynamic: bool) -> Misfits:
    """Each FP8 weight is in E4M3 and has a scale, a valid number; so has its input, unless scaled by its own values."""
    yield (
        f"hold codes of another format than {dtype_name(E4M3.dtype)}",
        (
            f"{name} ({dtype_name(tensor.dtype)})"
            for name, tensor in tensors.items()
            if tensor.is_floating_point() and tensor.dtype.itemsize == 1 and tensor.dtype != E4M3.dtype
        ),
    )
    if dynamic:
        of_inputs = (name for weight in in_fp8 for name in scale_names(weight)[1:] if name in tensors)
        yield "are static scales, where the config has activation_scheme='dynamic'", of_inputs
    yield (
        "lack their scales as single numbers",
        (
            name
            for weight in in_fp8
            for name in scale_names(weight)[: 1 if dynamic else 2]
            if name not in tensors or tensors[name].numel() != 1 or not tensors[name].is_floating_point()
        ),
    )
    yield (
        f"are scales, each of which must be {SCALE_RULE}",
        (
            f"{name} ({tensors[name].item()})"
            for weight in in_fp8
            for name, scale in zip(scale_names(weight), scales_of(weight, tensors))
            if not is_scale(scale)
        ),
    )
    yield (
        "have scales whose product with those of their inputs is not finite in float32",
        (weight for weight in in_fp8 if not math.prod(scales_of(weight, tensors), start=torch.ones(())).isfinite()),
    )


def misfits_of_metadata(tensors: Tensors, in_fp8: Sequence[str], gemms: Gemms) -> Misfits:
    """The metadata contain the FP8 weights, with the same scales."""
    yield (
        "have scales other than those in the file's metadata",
        (
            name
            for name in in_fp8
            if (scales := gemms.get(name)) is None
            or [scale.reciprocal() for scale in scales.static.values()] != scales_of(name, tensors)
        ),
    )


def misfits_of_names(own: Tensors, tensors: Tensors, gemms: Gemms) -> Misfits:
    """Each tensor of the model, or one that it is tied to, is in the file, and the file has no other tensors."""
    there = {memory_of(tensor) for name, tensor in own.items() if name in tensors}
    yield (
        "the model has and the file lacks",
        (name for name, tensor in own.items() if name not in tensors and memory_of(tensor) not in there),
    )
    scales = {scale for weight in gemms for scale in scale_names(weight)}
    yield "the file has and the model lacks", (name for name in tensors if name not in own and name not in scales)
    yield (
        "differ between file and model in shape or kind of dtype",
        (
            f"{name} ({tuple(tensors[name].shape)} {dtype_name(tensors[name].dtype)} in the file,"
            f" {tuple(tensor.shape)} {dtype_name(tensor.dtype)} in the model)"
            for name, tensor in own.items()
            if name in tensors and _kind(tensors[name]) != _kind(tensor)
        ),
    )


def _kind(tensor: Tensor) -> tuple[torch.Size, bool, bool, bool]:
    return tensor.shape, tensor.is_floating_point(), tensor.is_complex(), tensor.dtype == torch.bool


def misfits_of_layers(model: nn.Module, gemms: Gemms, plain: Sequence[str]) -> Misfits:
    """Each of these GEMMs belongs to a layer that is converted if the layers that ``plain`` matches are left out.

    A shared layer has the same scales under all of its names.
    """
    layers = {one.layer for one, _ in conversion_plan(model, plain, min_features=0).chosen}
    found: dict[str, tuple[nn.Module, str]] = {}
    for path, layer in model.named_modules(remove_duplicate=False):
        if layer in layers:
            found |= {weight_name(plain_path(path), gemm): (layer, gemm) for gemm in gemm_weights(layer)}
    yield "ran in FP8 and cannot here, see `describe(model)`", (name for name in gemms if name not in found)
    first: dict[tuple[nn.Module, str], Scales | None] = {}
    yield (
        "have different scales for one layer",
        (name for name, scales in gemms.items() if first.setdefault(found[name], scales) != scales),
    )


def misfits_of_values(own: Tensors, tensors: Tensors, gemms: Gemms) -> Misfits:
    """In the model's dtypes, weights keep their values and are cast back to the codes of the file."""
    yield (
        "do not keep the values of the file in the model's dtype (call `model.float()` first)",
        (
            f"{name} ({dtype_name(own[name].dtype)})"
            for name, weight, scales in _fp8_weights(own, tensors, gemms)
            if not (_has_codes(weight, scales.weight, tensors[name]) and bool(weight.isfinite().all()))
        ),
    )
    first: dict[object, str] = {}
    yield (
        "are one tensor in the model and differ in the file",
        (
            f"{name} and {first[memory_of(tensor)]}"
            for name, tensor in own.items()
            if name in tensors
            and first.setdefault(memory_of(tensor), name) != name
            and not torch.equal(
                *(_held(tensor, dequantized(one, tensors, gemms)) for one in (name, first[memory_of(tensor)]))
            )
        ),
    )


def rounded_again(own: Tensors, tensors: Tensors, gemms: Gemms) -> list[str]:
    """Weights that are not cast back to the codes of the file, because these do not reach the largest code."""
    return [
        name
        for name, weight, _ in _fp8_weights(own, tensors, gemms)
        if not _has_codes(weight, scale_of_current(max_abs(weight), E4M3), tensors[name])
    ]


def _fp8_weights(own: Tensors, tensors: Tensors, gemms: Gemms) -> Iterator[tuple[str, Tensor, Scales]]:
    """The weights that are FP8 in the file, as the model's tensors will hold them."""
    for name, scales in gemms.items():
        if scales is not None and name in tensors and tensors[name].dtype == E4M3.dtype:
            yield name, _held(own[name], dequantized(name, tensors, gemms)), scales


def _has_codes(weight: Tensor, scale: Tensor, codes: Tensor) -> bool:
    """Whether the weight is cast to these codes."""
    return torch.equal(codes_of(weight, scale).view(torch.uint8), codes.view(torch.uint8))


def _held(own: Tensor, value: Tensor) -> Tensor:
    """The value as the model's tensor will hold it."""
    return value.to(own.device, own.dtype)
