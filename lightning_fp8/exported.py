"""Loading of an exported model, to evaluate it here with the outputs it had."""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_fp8.convert import convert, describe, scaling_state
from lightning_fp8.export_config import check_config
from lightning_fp8.export_layout import (
    WEIGHTS_FILE,
    Gemms,
    Scales,
    codes_of,
    converted_gemms,
    from_metadata,
    import_safetensors,
    joined,
    memory_of,
    scale_names,
    state_tensors,
)
from lightning_fp8.formats import E4M3, dtype_name
from lightning_fp8.ops.reference import max_abs, scale_of_current
from lightning_fp8.paths import named_modules, plain_path
from lightning_fp8.scaling import tensor_name


def load_exported(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Read what :func:`lightning_fp8.export` has written into a model of the same architecture, for evaluation.

    The layers that ran in FP8 when the model was exported are converted, and only these; those that had fallen back do
    so again. The weight of an FP8 layer becomes ``code * weight_scale``, whose cast gives the same codes. In ``eval()``
    and under the same autocast the outputs are those of the exported model bit for bit, where it was exported with its
    own dtypes. A file of somebody else's in the same layout is read too; its scales are ``1 / weight_scale`` and
    ``1 / input_scale``, to the last bit but one.

    Scales count only for tensors with a history, so each gets a history of one entry: the amax that its scale belongs
    to. Training may go on from there.

    Args:
        model: plain or converted, with the parameters on the device where it is to run.
        path: the folder.

    Returns:
        The same object, in ``eval()``.

    Raises:
        ImportError: without ``safetensors``.
        FileNotFoundError: if the folder holds no export.
        ValueError: for another quantization, a damaged file, tensors that are missing, unexpected, or of another shape,
            or layers that cannot run in FP8 here; the message names them. Up to the check of names and shapes the model
            has not been changed.
    """
    folder = Path(path)
    check_config(folder)
    tensors, gemms = _read(folder / WEIGHTS_FILE)
    own = state_tensors(model)
    _check_names({name: tensor for name, (_, tensor) in own.items()}, tensors, gemms)
    _convert_only(model, gemms)
    values = {own[name][0]: _dequantized(name, tensors, gemms) for name in tensors if name in own}
    model.load_state_dict(values, strict=False)
    _check_codes({name: tensor for name, (_, tensor) in state_tensors(model).items()}, tensors, gemms)
    _set_scales(model, gemms)
    return model.eval()


def _read(file: Path) -> tuple[dict[str, Tensor], Gemms]:
    """The tensors of the file, and the scales of its GEMMs."""
    safetensors = import_safetensors()
    if not file.is_file():
        raise FileNotFoundError(f"There is no {file.name} in {file.parent}. Models in several files are not read here.")
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is damaged or no safetensors file: {error}") from error
    gemms = from_metadata(metadata)
    in_fp8 = [name for name, tensor in tensors.items() if tensor.dtype == E4M3.dtype]
    _refuse("lack their scales as single numbers", (
        name for weight in in_fp8 for name in scale_names(weight)
        if name not in tensors or tensors[name].numel() != 1 or not tensors[name].is_floating_point()
    ))  # fmt: skip
    if gemms is None:
        if not in_fp8:
            raise ValueError(f"load_exported: {file} has no {E4M3.dtype} weights.")
        return tensors, {name: Scales(*_reciprocals(name, tensors)) for name in in_fp8}
    _refuse("have scales other than those in the file's metadata", (
        name for name in in_fp8
        if gemms.get(name) is None or [scale.reciprocal() for scale in gemms[name] or ()] != _scales(name, tensors)
    ))  # fmt: skip
    return tensors, gemms


def _scales(weight: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [tensors[name].float().reshape(()) for name in scale_names(weight)]


def _reciprocals(weight: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [scale.reciprocal() for scale in _scales(weight, tensors)]


def _refuse(what: str, names: Iterable[str]) -> None:
    wrong = list(names)
    if wrong:
        raise ValueError(
            f"load_exported: tensors that {what}: {', '.join(wrong[:6])}{', ...' if len(wrong) > 6 else ''}."
        )


def _check_names(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], gemms: Gemms) -> None:
    """Each tensor of the model has one in the file, itself or as one it is tied to, and none is left over."""
    there = {memory_of(tensor) for name, tensor in own.items() if name in tensors}
    _refuse("the model has and the file lacks", (
        name for name, tensor in own.items() if name not in tensors and memory_of(tensor) not in there
    ))  # fmt: skip
    scales = {scale for weight in gemms for scale in scale_names(weight)}
    _refuse("the file has and the model lacks", (name for name in tensors if name not in own and name not in scales))
    _refuse("differ between file and model in shape or kind of dtype", (
        f"{name} ({tuple(tensors[name].shape)} {dtype_name(tensors[name].dtype)} in the file,"
        f" {tuple(tensor.shape)} {dtype_name(tensor.dtype)} in the model)"
        for name, tensor in own.items()
        if name in tensors and _kind(tensors[name]) != _kind(tensor)
    ))  # fmt: skip


def _kind(tensor: Tensor) -> tuple[torch.Size, bool]:
    return tensor.shape, tensor.is_floating_point()


def _dequantized(name: str, tensors: Mapping[str, Tensor], gemms: Gemms) -> Tensor:
    """A tensor of the file; of an FP8 one ``code * weight_scale`` in fp32.

    Its largest codes become the amax that its scale was made of, so that the cast finds the same scale again.
    """
    tensor, scales = tensors[name], gemms.get(name)
    if tensor.dtype != E4M3.dtype or scales is None:
        return tensor
    codes = tensor.float()
    values = codes * _scales(name, tensors)[0]
    return torch.where(codes.abs() == E4M3.max, codes.sign() * _amax_of_scale(scales.weight), values)


def _amax_of_scale(scale: Tensor) -> Tensor:
    """An amax, ``[] float32``, that gives this scale; of several the one that narrower dtypes hold too."""
    below = above = nearest = (E4M3.max / scale.double()).float()
    near = [nearest]
    for _ in range(4):
        below, above = torch.nextafter(below, torch.zeros(())), torch.nextafter(above, torch.full((), float("inf")))
        near += [below, above]
    fitting = [amax for amax in near if torch.equal(scale_of_current(amax, E4M3), scale)]
    narrow = [amax for amax in fitting if amax.bfloat16() == amax or amax.half() == amax]
    return [*narrow, *fitting, nearest][0]


def _convert_only(model: nn.Module, gemms: Gemms) -> None:
    """Convert the layers that hold any of these weights, and make the others plain."""
    chosen = {
        layer
        for path, layer in model.named_modules(remove_duplicate=False)
        for name, _ in layer.named_parameters(recurse=False)
        if joined(plain_path(path), name) in gemms
    }
    layers = dict(named_modules(model))
    known = [row.path for row in describe(model) if row.is_layer]
    others = [path for path in known if chosen.isdisjoint(layers[path].modules())]
    convert(model, ignore_modules=[glob.escape(path) for path in others], min_features=0)
    converted = converted_gemms(model).keys()
    _refuse("ran in FP8 and cannot here, see `describe(model)`", (name for name in gemms if name not in converted))


def _check_codes(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], gemms: Gemms) -> None:
    """The model's weights have to be cast to the codes they came from."""
    _refuse("do not keep the values of the file in the model's dtype (call `model.float()` before)", (
        f"{name} ({dtype_name(own[name].dtype)})"
        for name, scales in gemms.items()
        if scales is not None and name in tensors and tensors[name].dtype == E4M3.dtype
        and not _has_codes(own[name], scales.weight, tensors[name])
    ))  # fmt: skip
    again = [
        name
        for name, scales in gemms.items()
        if scales is not None and name in tensors and tensors[name].dtype == E4M3.dtype
        and not _has_codes(own[name], scale_of_current(max_abs(own[name].detach()), E4M3), tensors[name])
    ]  # fmt: skip
    if again:
        warnings.warn(
            f"load_exported: {len(again)} weights are rounded to FP8 a second time, as their codes leave room below the"
            f" largest one and a weight here is scaled by what it holds: {', '.join(again[:6])}"
            f"{', ...' if len(again) > 6 else ''}.",
            stacklevel=3,
        )


def _has_codes(weight: Tensor, scale: Tensor, codes: Tensor) -> bool:
    return torch.equal(codes_of(weight, scale).view(torch.uint8), codes.view(torch.uint8))


def _set_scales(model: nn.Module, gemms: Gemms) -> None:
    state = scaling_state(model)
    margin = 2.0**state.recipe.margin
    entries = {name: _entry(None, margin) for name in state.names[: state.delayed]}
    for weight, rows in converted_gemms(model).items():
        # an attention is converted as one: what is not FP8 of it falls back
        scales, name = gemms.get(weight), tensor_name(rows.name, "input")
        if scales is not None:
            entries[name] = _entry(scales.input, margin)
        else:
            entries[name]["in_fp8"] = torch.tensor(False)
    state.load_state_dict(entries)


def _entry(scale: Tensor | None, margin: float) -> dict[str, Tensor]:
    """A tensor's part of the scaling state's ``state_dict``, without a history for None.

    The history is the amax that ``update`` would have made this scale of, up to rounding: the cast itself takes the
    scale as it is, and asks only whether there is a history.
    """
    limits = torch.finfo(torch.float32)
    amax = None if scale is None else (E4M3.max / margin / scale.double()).clamp(limits.tiny, limits.max).float()
    return {
        "amax": torch.zeros(()),
        "amax_history": torch.zeros(0) if amax is None else amax.reshape(1),
        "scale": torch.ones(()) if scale is None else scale,
        "nonfinite_steps": torch.zeros((), dtype=torch.int64),
        "in_fp8": torch.tensor(True),
    }
