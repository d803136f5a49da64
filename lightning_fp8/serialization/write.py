"""Exports a trained model with FP8 weights and their scales, in layouts that other libraries read."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.modules.experts import Fp8Experts
from lightning_fp8.modules.fp8_parameter import Fp8Parameter
from lightning_fp8.modules.paths import named_modules
from lightning_fp8.ops.formats import CASTABLE_DTYPES, dtype_name
from lightning_fp8.runtime.switch import as_torch_starts
from lightning_fp8.serialization.config import config_of, output_embedding, plain_layers
from lightning_fp8.serialization.layouts.base import Scheme, WritableLayout
from lightning_fp8.serialization.layouts.registry import check_plain, kind_of_file, layout_to_write
from lightning_fp8.serialization.load import source_of
from lightning_fp8.serialization.scales import (
    Plan,
    check_finite,
    check_linear,
    in_whole_blocks,
    quantized,
    scales_to_write,
)
from lightning_fp8.serialization.shards import INDEX_FILE
from lightning_fp8.serialization.tensors import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    import_safetensors,
    memory_of,
    state_tensors,
    to_metadata,
)
from lightning_fp8.serialization.written_back import Base, Shard, written_back


@as_torch_starts()
def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    layout: str | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a trained model with FP8 weights and their scales: ``model.safetensors`` and ``config.json``.

    :mod:`lightning_fp8.serialization.layouts` lists the layouts, and :func:`lightning_fp8.load_exported` reads them. A
    weight kept in FP8 only is written with its own codes and scales, and never rounded again. Weights with masters get
    scales by the recipe, computed from their current values: one for each 128 x 128 block with
    :class:`~lightning_fp8.BlockScaling`, one for every 32 elements of a row with :class:`~lightning_fp8.MXScaling`,
    else one for each weight. Inputs get static scales from the histories of training if all layers have a history and
    none was moved to current scaling. Otherwise they get none, with a warning under
    :class:`~lightning_fp8.DelayedScaling`, and readers scale inputs by their own values. If weights have scales for
    blocks, inputs never have static scales.

    Some weights are not written in FP8 even if they run in FP8 here: weights with another reader (such as an embedding
    tied to the head), and the output embedding of a Hugging Face model, which vLLM does not quantize
    (vllm-project/vllm#40999). Layers that fell back or have fprop in bf16 are exported as plain layers. The following
    are too, with a warning: experts in 3-D parameters; under ``MXScaling``, weights with rows that are not multiples of
    32; under ``BlockScaling``, except in ``"compressed-tensors"``, weights with a master and sizes that are not
    multiples of 128. vLLM fuses q, k and v (also gate and up), with the largest of their scales, and accepts them only
    if all or none are in FP8.

    A base that ``load_exported(..., frozen=True)`` has read is written back under the names of its files, with the same
    codes and scales, in the same layout or in another. Weights that have changed, as by merging an adapter, are rounded
    to FP8 again, with scales of the same kind, and a warning names them. Tensors outside of FP8 are written in the
    model's dtypes; a warning counts tensors that have become narrower than in the files.

    Names are relative to ``model``: if a LightningModule wraps a Hugging Face model, export the latter. Tied weights
    are written once. In a distributed run call this on one process.

    Args:
        model: a converted model, or one that was read.
        path: a folder; created if needed.
        layout: ``"hf-fp8"``, the layout of DeepSeek-V3 and Qwen3, which transformers reads;
            ``"compressed-tensors"`` (``float-quantized``, or ``mxfp8-quantized`` with ``MXScaling``), which also
            supports scales of rows and incomplete blocks; None for the layout that was read, or else vLLM's ``fp8``,
            with metadata from which ``load_exported`` restores the scales bit for bit.
        dtype: dtype of floating point tensors that are not FP8: float32, bfloat16 or float16; None keeps the stored
            dtypes, and with them bit-identical outputs.
        overwrite: replace an existing export.

    Returns:
        The folder.

    Raises:
        ImportError: without ``safetensors``.
        FileExistsError: if the folder holds a model already.
        TypeError: for another ``dtype``, or an entry that is sharded or not a tensor.
        ValueError: for an unknown ``layout``, or a layout without a place for these scales or layers; for a model
            without FP8 layers, parameters that are not finite, a recipe whose forward is not E4M3, scales outside of
            2**-118 to 2**118, ``BlockScaling`` without a weight whose sizes are multiples of 128, two tensors with the
            same name, or a base that has other tensors than its checkpoint; the message names them.
    """
    import_safetensors()
    into = layout_to_write(layout)
    if dtype is not None and dtype not in CASTABLE_DTYPES:
        choices = ", ".join(map(dtype_name, CASTABLE_DTYPES))
        raise TypeError(f"export: `dtype` must be None or one of {choices}, got {dtype!r}.")
    folder, source = Path(path), source_of(model)
    if source is None:
        _check_folder(folder, overwrite, [WEIGHTS_FILE])
        tensors, metadata, config = _made(model, into, dtype)
        _write(folder, {WEIGHTS_FILE: lambda: (tensors, metadata)}, config)
        return folder
    base = Base(model, source)
    shards, config = written_back(base, into, dtype)
    _check_folder(folder, overwrite, shards)
    _write(folder, shards, config)
    base.warn()
    return folder


def _made(
    model: nn.Module, layout: WritableLayout, dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """The tensors, the metadata and the config of a model whose weights were not read from a checkpoint."""
    own = state_tensors(model)
    plain = output_embedding(model)
    plans = in_whole_blocks(scales_to_write(model, own), own, plain, layout)
    kind = kind_of_file(layout, {name: plan.kind for name, plan in plans.items() if plan is not None})
    scheme = layout.scheme(kind, any(plan is not None and plan.input is not None for plan in plans.values()))
    _note_experts(model)
    tensors, in_fp8 = _tensors(own, plans, plain, dtype, layout, scheme)
    check_linear(model, in_fp8, layout)
    not_fp8 = plain_layers(model, in_fp8)
    check_plain(layout, not_fp8, in_fp8)
    return tensors, _metadata(layout, plans), config_of(model, dtype, layout.config(scheme, not_fp8))


def _metadata(layout: WritableLayout, plans: Mapping[str, Plan | None]) -> dict[str, str]:
    """The exact scales, if the layout stores them and each weight has a scale that was computed here."""
    scales = {name: None if plan is None else plan.scales for name, plan in plans.items()}
    has_all = all(plan is None or scales[name] is not None for name, plan in plans.items())
    return to_metadata(scales) if layout.name is None and has_all else {"format": "pt"}


def _write(folder: Path, shards: Mapping[str, Shard], config: Mapping[str, Any]) -> None:
    """Write all files in a temporary folder inside ``folder``, then move them to their final paths, the config last."""
    save_file = import_safetensors().torch.save_file
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-") as unfinished:
        staging = Path(unfinished)
        for file, shard in shards.items():
            tensors, metadata = shard()
            save_file(tensors, staging / file, metadata)
            weight_map |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
        texts: dict[str, Any] = {CONFIG_FILE: config}
        if [*shards] != [WEIGHTS_FILE]:
            texts = {INDEX_FILE: {"metadata": {"total_size": total}, "weight_map": weight_map}, **texts}
        for file, content in texts.items():
            (staging / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        # the library writes files that only the owner can read
        mode = (staging / CONFIG_FILE).stat().st_mode
        # without a config, nothing can be mistaken for a model
        (folder / CONFIG_FILE).unlink(missing_ok=True)
        for file in (*shards, *texts):
            (staging / file).chmod(mode)
            (staging / file).replace(folder / file)


def _check_folder(folder: Path, overwrite: bool, shards: Collection[str]) -> None:
    names = {*shards} if [*shards] == [WEIGHTS_FILE] else {*shards, INDEX_FILE}
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"export: `path` must be a folder, and {folder} is a file.")
    other = sorted(file.name for file in folder.glob("*.safetensors*") if file.name not in names)
    if other:
        raise FileExistsError(
            f"export: {folder} holds weights of another model, which would be loaded together with these:"
            f" {', '.join(other[:3])}. Choose another folder."
        )
    existing = [name for name in sorted({*names, CONFIG_FILE}, reverse=True) if (folder / name).exists()]
    if existing and not overwrite:
        raise FileExistsError(
            f"export: {folder} holds {' and '.join(existing[:3])} already. Choose another folder, or pass"
            " `overwrite=True`."
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
    plans: Mapping[str, Plan | None],
    plain: set[str],
    dtype: torch.dtype | None,
    layout: WritableLayout,
    scheme: Scheme,
) -> tuple[dict[str, Tensor], set[str]]:
    """The tensors of the file, and all names of the weights that are FP8 in it."""
    together: dict[object, list[str]] = {}
    for name, tensor in by_name.items():
        together.setdefault(memory_of(tensor), []).append(name)
    tensors: dict[str, Tensor] = {}
    in_fp8: set[str] = set()
    for names in together.values():
        tensor = by_name[names[0]]
        users = {name: plan for name in names if (plan := plans.get(name)) is not None}
        # all users of the weight have to read its codes
        if len(users) < len(names) or not plain.isdisjoint(names):
            tensors[names[0]] = _stored(names[0], tensor, dtype)
            continue
        in_fp8.update(names)
        for name, plan in users.items():
            weight = quantized(tensor, plan)
            tensors[names[0]], scales = weight.codes, layout.tensors(scheme, name, weight)
            for scale_name in scales:
                if scale_name in by_name:
                    raise ValueError(f"export: the model has a tensor {scale_name!r}, a name needed for a scale.")
            tensors |= scales
    return tensors, in_fp8


def _stored(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.dequantized() if isinstance(tensor, Fp8Parameter) else tensor
    stored = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
    if isinstance(tensor, nn.Parameter):
        check_finite(name, stored)
    # saving a view would also write the rest of its storage
    return stored.clone() if stored.untyped_storage().nbytes() != stored.nbytes else stored
