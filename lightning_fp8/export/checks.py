"""Checks that a file fits a model, all made before the model is changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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


def _refuse(file: Path, what: str, names: Iterable[str]) -> None:
    wrong = list(names)
    if wrong:
        raise ValueError(f"load_exported: {file}: tensors that {what}: {listed(wrong)}.")


def check_dtypes(file: Path, tensors: Tensors) -> None:
    """Refuse FP8 tensors in a format other than E4M3, whose scales are stored elsewhere."""
    _refuse(
        file,
        f"hold codes of another format than {dtype_name(E4M3.dtype)}",
        (
            f"{name} ({dtype_name(tensor.dtype)})"
            for name, tensor in tensors.items()
            if tensor.is_floating_point() and tensor.dtype.itemsize == 1 and tensor.dtype != E4M3.dtype
        ),
    )


def check_scales(file: Path, in_fp8: Sequence[str], tensors: Tensors, dynamic: bool) -> None:
    """Each FP8 weight has a scale, a single valid number, and so has its input unless scaled by its own values."""
    if dynamic:
        of_inputs = (name for weight in in_fp8 for name in scale_names(weight)[1:] if name in tensors)
        _refuse(file, "are static scales, where the config has activation_scheme='dynamic'", of_inputs)
    _refuse(
        file,
        "lack their scales as single numbers",
        (
            name
            for weight in in_fp8
            for name in scale_names(weight)[: 1 if dynamic else 2]
            if name not in tensors or tensors[name].numel() != 1 or not tensors[name].is_floating_point()
        ),
    )
    _refuse(
        file,
        f"are scales, each of which must be {SCALE_RULE}",
        (
            f"{name} ({tensors[name].item()})"
            for weight in in_fp8
            for name, scale in zip(scale_names(weight), scales_of(weight, tensors))
            if not is_scale(scale)
        ),
    )
    _refuse(
        file,
        "have scales whose product with those of their inputs is not finite in float32",
        (weight for weight in in_fp8 if not math.prod(scales_of(weight, tensors), start=torch.ones(())).isfinite()),
    )


def check_same_scales(file: Path, in_fp8: Sequence[str], tensors: Tensors, gemms: Gemms) -> None:
    """The metadata contain the FP8 weights, with the same scales."""
    _refuse(
        file,
        "have scales other than those in the file's metadata",
        (
            name
            for name in in_fp8
            if (scales := gemms.get(name)) is None
            or [scale.reciprocal() for scale in scales.static.values()] != scales_of(name, tensors)
        ),
    )


def check_names(file: Path, own: Tensors, tensors: Tensors, gemms: Gemms) -> None:
    """Each tensor of the model, or one that it is tied to, is in the file, and the file has no other tensors."""
    there = {memory_of(tensor) for name, tensor in own.items() if name in tensors}
    _refuse(
        file,
        "the model has and the file lacks",
        (name for name, tensor in own.items() if name not in tensors and memory_of(tensor) not in there),
    )
    scales = {scale for weight in gemms for scale in scale_names(weight)}
    _refuse(
        file, "the file has and the model lacks", (name for name in tensors if name not in own and name not in scales)
    )
    _refuse(
        file,
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


def check_convertible(file: Path, model: nn.Module, gemms: Gemms, plain: Sequence[str]) -> None:
    """Each of these GEMMs belongs to a layer that is converted if the layers that ``plain`` matches are left out.

    Raises:
        ValueError: for any other GEMM, and for a shared layer with different scales under its names.
    """
    layers = {one.layer for one, _ in conversion_plan(model, plain, min_features=0).chosen}
    found: dict[str, tuple[nn.Module, str]] = {}
    for path, layer in model.named_modules(remove_duplicate=False):
        if layer in layers:
            for gemm in gemm_weights(layer):
                found[weight_name(plain_path(path), gemm)] = layer, gemm
    _refuse(file, "ran in FP8 and cannot here, see `describe(model)`", (name for name in gemms if name not in found))
    first: dict[tuple[nn.Module, str], Scales | None] = {}
    _refuse(
        file,
        "have different scales for one layer",
        (name for name, scales in gemms.items() if first.setdefault(found[name], scales) != scales),
    )


def fp8_weights(own: Tensors, tensors: Tensors, gemms: Gemms) -> dict[str, Tensor]:
    """The weights that are FP8 in the file, as the model's tensors will hold them."""
    return {
        name: _held(own[name], dequantized(name, tensors, gemms))
        for name, scales in gemms.items()
        if scales is not None and name in tensors and tensors[name].dtype == E4M3.dtype
    }


def check_values(file: Path, own: Tensors, tensors: Tensors, gemms: Gemms, weights: Tensors) -> None:
    """In the model's dtypes, ``weights`` keep their values and are cast back to the codes of the file."""
    _refuse(
        file,
        "do not keep the values of the file in the model's dtype (call `model.float()` first)",
        (
            f"{name} ({dtype_name(own[name].dtype)})"
            for name, weight in weights.items()
            if not (
                (scales := gemms[name]) is not None
                and _has_codes(weight, scales.weight, tensors[name])
                and bool(weight.isfinite().all())
            )
        ),
    )
    first: dict[object, str] = {}
    _refuse(
        file,
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


def rounded_again(weights: Tensors, tensors: Tensors) -> list[str]:
    """Weights that are not cast back to the codes of the file, because these do not reach the largest code."""
    return [
        name
        for name, weight in weights.items()
        if not _has_codes(weight, scale_of_current(max_abs(weight), E4M3), tensors[name])
    ]


def _has_codes(weight: Tensor, scale: Tensor, codes: Tensor) -> bool:
    """Whether the weight is cast to these codes."""
    return torch.equal(codes_of(weight, scale).view(torch.uint8), codes.view(torch.uint8))


def _held(own: Tensor, value: Tensor) -> Tensor:
    """The value as the model's tensor will hold it."""
    return value.to(own.device, own.dtype)
