"""Export of a trained model with FP8 weights and their scales, in the layout that vLLM reads."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.export.config import config_of, output_embedding
from lightning_fp8.export.layout import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Scales,
    import_safetensors,
    in_file,
    memory_of,
    state_tensors,
    to_metadata,
)
from lightning_fp8.export.scales import check_finite, in_whole_blocks, scales_to_write
from lightning_fp8.modules.experts import Fp8Experts
from lightning_fp8.modules.fp8_parameter import Fp8Parameter
from lightning_fp8.modules.paths import named_modules
from lightning_fp8.ops.formats import CASTABLE_DTYPES, dtype_name
from lightning_fp8.ops.operand import CurrentScale


def export(
    model: nn.Module, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, overwrite: bool = False
) -> Path:
    """Write a trained model with FP8 weights and their scales: ``model.safetensors`` and ``config.json``.

    The layout is that of :mod:`lightning_fp8.export.layout`; :func:`lightning_fp8.load_exported` reads it. Scales are
    those that an evaluation would use now: for inputs from the training history, for weights from their own amax. A
    model with :class:`~lightning_fp8.CurrentScaling` is written without input scales, because readers scale inputs by
    their own values. The same holds for :class:`~lightning_fp8.BlockScaling`, which has a scale for each block of a
    weight, as in the published DeepSeek-V3; ``load_exported`` does not read that layout.

    Some weights are not written in FP8 even if they run in FP8 here: weights that something else reads too (such as an
    embedding tied to the head), and the output embedding of a Hugging Face model, which vLLM does not quantize
    (vllm-project/vllm#40999). The metadata hold their scales, so :func:`~lightning_fp8.load_exported` runs them in FP8
    again. Layers that fell back or have fprop in bf16 are exported as plain ones. So are, with a warning, experts in
    3-D parameters, and with ``BlockScaling`` weights whose sizes are no multiples of 128. vLLM fuses q, k and v (also
    gate and up), with the largest of their scales, and accepts them only if all or none are in FP8.

    Names are relative to ``model``: if a LightningModule wraps a Hugging Face model, export the latter. Tied weights
    are written once. In a distributed run call this on one process.

    Args:
        model: a converted model after at least one optimizer step.
        path: a folder; created if needed.
        dtype: dtype of floating point tensors that are not FP8: float32, bfloat16 or float16; None keeps the stored
            dtypes, and with them bit-identical outputs.
        overwrite: replace an existing export.

    Returns:
        The folder.

    Raises:
        ImportError: without ``safetensors``.
        FileExistsError: if the folder holds a model already.
        TypeError: for another ``dtype``, or an entry that is sharded or not a tensor.
        ValueError: for a model without FP8 layers, tensors without a history, parameters that are not finite, a recipe
            whose forward is not E4M3, one that scales inputs by their own values with a margin, scales outside of
            2**-118 to 2**118, ``BlockScaling`` without a weight whose sizes are multiples of 128, or two tensors with
            the same name; the message names them.
    """
    import_safetensors()
    if dtype is not None and dtype not in CASTABLE_DTYPES:
        choices = ", ".join(map(dtype_name, CASTABLE_DTYPES))
        raise TypeError(f"export: `dtype` must be None or one of {choices}, got {dtype!r}.")
    folder = Path(path)
    _check_folder(folder, overwrite)
    tensors_by_name = {name: tensor for name, (_, tensor) in state_tensors(model).items()}
    plain = output_embedding(model)
    gemms = in_whole_blocks(scales_to_write(model, tensors_by_name), tensors_by_name, plain)
    _note_experts(model)
    tensors, in_file_as_fp8 = _tensors(tensors_by_name, gemms, plain, dtype)
    of_any = next(scales for scales in gemms.values() if scales is not None)
    _write(folder, tensors, to_metadata(gemms), config_of(model, in_file_as_fp8, dtype, of_any))
    return folder


def _write(folder: Path, tensors: dict[str, Tensor], metadata: dict[str, str], config: dict[str, Any]) -> None:
    """Write both files in a temporary folder inside ``folder``, then move them to their final paths."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-") as unfinished:
        made = Path(unfinished)
        import_safetensors().torch.save_file(tensors, made / WEIGHTS_FILE, metadata)
        (made / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        # the library writes files that only the owner can read
        (made / WEIGHTS_FILE).chmod((made / CONFIG_FILE).stat().st_mode)
        # between the two renames there is no config, so nothing can be mistaken for a model
        (folder / CONFIG_FILE).unlink(missing_ok=True)
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            (made / name).replace(folder / name)


def _check_folder(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"export: `path` must be a folder, and {folder} is a file.")
    other = sorted(file.name for file in folder.glob("*.safetensors*") if file.name != WEIGHTS_FILE)
    if other:
        raise FileExistsError(
            f"export: {folder} holds weights of another model, which would be loaded together with these:"
            f" {', '.join(other[:3])}. Choose another folder."
        )
    existing = [name for name in (WEIGHTS_FILE, CONFIG_FILE) if (folder / name).exists()]
    if existing and not overwrite:
        raise FileExistsError(
            f"export: {folder} holds {' and '.join(existing)} already. Choose another folder, or pass `overwrite=True`."
        )


def _note_experts(model: nn.Module) -> None:
    experts = [path for path, layer in named_modules(model) if isinstance(layer, Fp8Experts)]
    if experts:
        warnings.warn(
            f"export: the weights of {len(experts)} layers of experts ({experts[0]}, ...) are written as they are: the"
            " layout has one scale for each tensor, and theirs hold many weights. They ran in FP8 until now, so outputs"
            " differ.",
            stacklevel=3,
        )


def _tensors(
    by_name: Mapping[str, Tensor],
    gemms: Mapping[str, Scales | CurrentScale | None],
    plain: set[str],
    dtype: torch.dtype | None,
) -> tuple[dict[str, Tensor], set[str]]:
    """The tensors of the file, and all names of the weights that are FP8 in it."""
    together: dict[object, list[str]] = {}
    for name, tensor in by_name.items():
        together.setdefault(memory_of(tensor), []).append(name)
    tensors: dict[str, Tensor] = {}
    in_fp8: set[str] = set()
    for names in together.values():
        tensor, users = by_name[names[0]], [gemms.get(name) for name in names]
        scales = users[0]
        # all users of the weight have to read its codes
        if scales is None or not all(users) or not plain.isdisjoint(names):
            tensors[names[0]] = _stored(names[0], tensor, dtype)
            continue
        in_fp8.update(names)
        for name in names:
            tensors[names[0]], of_name = in_file(name, tensor, gemms[name] or scales)
            for scale_name in of_name:
                if scale_name in by_name:
                    raise ValueError(f"export: the model has a tensor {scale_name!r}, a name needed for a scale.")
            tensors |= of_name
    return tensors, in_fp8


def _stored(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.dequantized() if isinstance(tensor, Fp8Parameter) else tensor
    stored = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
    if isinstance(tensor, nn.Parameter):
        check_finite(name, stored)
    # saving a view would also write the rest of its storage
    return stored.clone() if stored.untyped_storage().nbytes() != stored.nbytes else stored
