"""Loads an exported model for evaluation, with the outputs that it had."""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_fp8.conversion.candidates import PlannedLayer
from lightning_fp8.conversion.convert import convert, scaling_state
from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.export.checks import (
    misfits_of_file,
    misfits_of_layers,
    misfits_of_metadata,
    misfits_of_names,
    misfits_of_values,
    refuse,
    rounded_again,
)
from lightning_fp8.export.config import is_dynamic
from lightning_fp8.export.layout import (
    WEIGHTS_FILE,
    Gemms,
    Scales,
    converted_gemms,
    dequantized,
    from_metadata,
    import_safetensors,
    joined,
    listed,
    printable,
    scales_of,
    state_tensors,
)
from lightning_fp8.modules.paths import plain_path
from lightning_fp8.ops.formats import E4M3
from lightning_fp8.ops.operand import CurrentScale
from lightning_fp8.scaling.recipe import CurrentScaling, DelayedScaling
from lightning_fp8.scaling.state import tensor_name


def load_exported(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Load an export of :func:`lightning_fp8.export` into a model of the same architecture, for evaluation.

    The layers that ran in FP8 when the model was exported are converted, and only these; those that had fallen back
    fall back again. The weight of an FP8 layer becomes ``code * weight_scale``, and its cast, with the scale of its own
    amax, gives the same codes. In ``eval()`` and under the same autocast the outputs are bit-identical to those of the
    exported model, if it was exported in its own dtypes. Files of other programs in the same layout are read too;
    their scales are ``1 / weight_scale`` and ``1 / input_scale``, accurate up to the last bit. If the codes of such a
    weight do not reach the largest one, 448, the weight is rounded a second time, with a warning.

    An input's scale is used only with a history, so each input gets a history of one entry: the amax of its scale.
    Training may continue from there. If the file has no input scales (``activation_scheme: dynamic``), a plain
    model is converted with :class:`~lightning_fp8.CurrentScaling`.

    Args:
        model: plain or converted, with the parameters on the device on which it will run.
        path: the folder.

    Returns:
        The same object, in ``eval()``.

    Raises:
        ImportError: without ``safetensors``.
        FileNotFoundError: if the folder holds no export.
        ValueError: for another quantization, a damaged file, scales outside of 2**-118 to 2**118, tensors that are
            missing, unexpected, or of another shape, or layers that cannot run in FP8 here; the message names them and
            the file.
        TypeError: if a layer that ran in FP8 has parameters that are not fp32, bf16 or fp16, or the model's
            ``state_dict`` holds sharded tensors or entries that are not tensors.

    After an error the model is as it was.
    """
    folder = Path(path)
    dynamic = is_dynamic(folder)
    file = folder / WEIGHTS_FILE
    tensors, gemms = _read(file, dynamic)
    state = state_tensors(model)
    own = {name: tensor for name, (_, tensor) in state.items()}
    refuse(file, misfits_of_names(own, tensors, gemms))
    plan = conversion_plan(model, default=CurrentScaling if dynamic else DelayedScaling)
    recipe = plan.config.recipe
    if recipe.from_history == dynamic or (dynamic and recipe.current != CurrentScale()):
        scales = "scales inputs by their own values, with no margin" if dynamic else "has static scales of inputs"
        raise ValueError(
            f"load_exported: the model is converted with {recipe}, and {file} {scales}. Call"
            " `lightning_fp8.unconvert(model)` first."
        )
    plain = _plain_layers(model, plan.layers, gemms)
    refuse(file, misfits_of_layers(model, gemms, plain))
    refuse(file, misfits_of_values(own, tensors, gemms))
    again = rounded_again(own, tensors, gemms)
    convert(model, recipe, ignore_modules=plain, min_features=0)
    values = {state[name][0]: dequantized(name, tensors, gemms) for name in tensors if name in own}
    model.load_state_dict(values, strict=False)
    _set_scales(model, gemms)
    if again:
        warnings.warn(
            f"load_exported: {file}: {len(again)} weights are rounded to FP8 a second time, because their codes do not"
            " reach the largest one and a weight here is scaled by its own amax:"
            f" {listed(again)}.",
            stacklevel=2,
        )
    return model.eval()


def _read(file: Path, dynamic: bool) -> tuple[dict[str, Tensor], Gemms]:
    """The tensors of the file, and the scales of its GEMMs."""
    safetensors = import_safetensors()
    if not file.is_file():
        raise FileNotFoundError(f"There is no {file.name} in {file.parent}. Models in several files are not read here.")
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is damaged or not a safetensors file: {printable(str(error))}") from error
    in_fp8 = [name for name, tensor in tensors.items() if tensor.dtype == E4M3.dtype]
    refuse(file, misfits_of_file(tensors, in_fp8, dynamic))
    try:
        gemms = from_metadata(metadata, dynamic)
    except ValueError as error:
        raise ValueError(f"load_exported: the metadata of {file} are damaged: {error}") from error
    if gemms is not None:
        refuse(file, misfits_of_metadata(tensors, in_fp8, gemms))
    else:
        gemms = {name: Scales(*(scale.reciprocal() for scale in scales_of(name, tensors))) for name in in_fp8}
    if not gemms:
        raise ValueError(f"load_exported: {file} has no {E4M3.dtype} weights.")
    return tensors, gemms


def _plain_layers(model: nn.Module, layers: Sequence[PlannedLayer], gemms: Gemms) -> list[str]:
    """Patterns of the layers that hold none of these weights, and stay plain."""
    chosen = {
        layer
        for path, layer in model.named_modules(remove_duplicate=False)
        for name, _ in layer.named_parameters(recurse=False)
        if joined(plain_path(path), name) in gemms
    }
    return [glob.escape(one.path) for one in layers if chosen.isdisjoint(one.layer.modules())]


def _set_scales(model: nn.Module, gemms: Gemms) -> None:
    state = scaling_state(model)
    margin = 2.0**state.recipe.current.margin
    entries = {name: _entry(None, margin) for name in state.names[: state.delayed]}
    for weight, gemm in converted_gemms(model).items():
        # an attention is converted as a whole: its projections that are not FP8 fall back
        scales, name = gemms.get(weight), tensor_name(gemm.name, "input")
        if scales is not None:
            entries[name] = _entry(scales.input, margin)
        else:
            entries[name]["in_fp8"] = torch.tensor(False)
    state.load_state_dict(entries)


def _entry(scale: Tensor | None, margin: float) -> dict[str, Tensor]:
    """A tensor's part of the scaling state's ``state_dict``, without a history if ``scale`` is None.

    The history is the amax from which ``update`` would have computed this scale, up to rounding: the cast uses the
    scale itself, and checks only whether there is a history.
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
