"""Fills a model with the tensors of a checkpoint: codes and scales as they are, or values in the model's dtypes."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.fp8_parameter import Fp8Parameter, from_codes
from lightning_fp8.modules.frozen_layers import replace_weight
from lightning_fp8.modules.gemm import Gemm
from lightning_fp8.modules.paths import named_modules, plain_path, without_wrappers
from lightning_fp8.ops.formats import E4M3
from lightning_fp8.scalings.per_block import BlockScaling
from lightning_fp8.scalings.recipe import Recipe
from lightning_fp8.serialization.layouts.base import Scheme
from lightning_fp8.serialization.names import Placed
from lightning_fp8.serialization.shards import Shards
from lightning_fp8.serialization.tensors import Scales, amax_of_scale, listed, state_tensors
from lightning_fp8.serialization.values import Scale, scale_of_pieces


@dataclass(frozen=True)
class Source:
    """A checkpoint and its place in a model.

    Attributes:
        shards: its files.
        config: the content of ``config.json``, with its ``quantization_config``.
        scheme: how its weights are quantized.
        placed: where its tensors are in the model.
        scales: the scales of its FP8 weights, by name.
        inputs: the stored scales of their inputs, and of a cache if there is one, by name; unchanged.
        exact: for an export of this package, the multipliers of all GEMMs, by the name of the weight.
        twins: further names under which the file repeats the scales of a weight, such as a tied one; each with the name
            of the weight.
    """

    shards: Shards
    config: Mapping[str, Any]
    scheme: Scheme
    placed: Placed
    scales: Mapping[str, Scale]
    inputs: Mapping[str, Tensor]
    exact: Mapping[str, Scales | None]
    twins: Mapping[str, str]

    @property
    def path(self) -> Path:
        """For messages."""
        return self.shards.path

    def recipe(self) -> Recipe:
        """The recipe that matches the scaling of weights and inputs best; in powers of two if all blocks are."""
        kind = self.scheme.recipe
        if kind is BlockScaling:
            return BlockScaling(power_of_2_scales=all(scale.is_power_of_2 for scale in self.scales.values()))
        return kind()

    def amax(self, name: str) -> Tensor | None:
        """An amax that gives the exact multiplier of a weight; None if only its reciprocal is known."""
        scales = self.exact.get(name)
        return None if scales is None else amax_of_scale(scales.weight)

    def values(self, name: str, tensor: Tensor) -> Tensor:
        """The values of a tensor of the checkpoint; in fp32 if it holds codes."""
        return self.scales[name].dequantized(tensor, self.amax(name)) if name in self.scales else tensor

    def scale_of(self, target: str) -> Scale | None:
        """The scale of a weight of the model; None if its parts have no common scale."""
        pieces = self.placed.by_target[target]
        shapes = [self.shards.stored[piece.name].shape for piece in pieces]
        return scale_of_pieces(pieces, [self.scales[part.name] for part in pieces], shapes, self.placed.shapes[target])


def assembled(source: Source, target: str, like: Tensor) -> Tensor:
    """A tensor of the model with the values of the checkpoint, in the dtype of ``like``."""
    pieces = {piece.name: piece for piece in source.placed.by_target[target]}
    result = torch.empty(like.shape, dtype=like.dtype)
    for name, tensor in source.shards.tensors(pieces):
        result[pieces[name].at] = source.values(name, tensor)[pieces[name].of].to(like.dtype)
    return result


def without_memory(model: nn.Module, names: Collection[str]) -> dict[str, torch.device]:
    """Put parameters that only one module holds on the meta device; returns where these were, by name."""
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    own = state_tensors(model, on_meta=True)
    alone = {name: own[name] for name in names if name in own and uses[id(own[name])] == 1}
    new: dict[int, Tensor] = {}
    for tensor in alone.values():
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        new[id(tensor)] = nn.Parameter(empty, requires_grad=False)
    _replace(model, new)
    return {name: _place(tensor) for name, tensor in alone.items()}


def fill(model: nn.Module, source: Source, kept: Mapping[str, list[Gemm]], devices: Mapping[str, torch.device]) -> None:
    """Read the whole checkpoint into the model.

    Args:
        model: the model.
        source: the checkpoint.
        kept: names of the weights to be kept in FP8 only, with their GEMMs.
        devices: where these will be.
    """
    pieces = source.placed.by_name
    left = Counter(piece.target for piece in source.placed.pieces)
    # tensors to be put together before the model gets them
    parts: dict[str, Tensor] = {}
    with torch.inference_mode(False), torch.no_grad():
        own = _with_memory(model, kept, devices)
        for name, tensor in source.shards.tensors(pieces):
            codes = tensor.view(torch.uint8) if name in source.scales else tensor
            is_value = any(piece.target not in kept for piece in pieces[name])
            values = source.values(name, tensor) if is_value else tensor
            for _, of, target, at in pieces[name]:
                weight = own[target]
                if target in kept:
                    if target not in parts:
                        parts[target] = torch.empty(weight.shape, dtype=torch.uint8, device=devices[target])
                    parts[target][at] = codes[of].to(devices[target])
                elif isinstance(weight, Fp8Parameter):
                    if target not in parts:
                        parts[target] = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
                    parts[target][at] = values[of].to(weight.device, weight.dtype)
                else:
                    weight[at].copy_(values[of])
                left[target] -= 1
                if not left[target] and target in kept:
                    _keep(source, target, weight, parts.pop(target), kept[target])
                elif not left[target] and target in parts:
                    weight.copy_(parts.pop(target))


def _with_memory(model: nn.Module, kept: Collection[str], devices: Mapping[str, torch.device]) -> dict[str, Tensor]:
    """The model's tensors by name; those on the meta device get memory, except those to be ``kept`` in FP8 only."""
    own = state_tensors(model, on_meta=True)
    new: dict[int, Tensor] = {}
    for name, tensor in own.items():
        if tensor.is_meta and name not in kept and id(tensor) not in new:
            place = devices.get(name, _place(tensor))
            replacement = torch.empty(tensor.shape, dtype=_dtype(model, name, tensor), device=place)
            if isinstance(tensor, nn.Parameter):
                replacement = nn.Parameter(replacement, requires_grad=tensor.requires_grad)
                replacement.__dict__.update(vars(tensor))
            new[id(tensor)] = replacement
    _replace(model, new)
    return {name: new.get(id(tensor), tensor) for name, tensor in own.items()}


def _keep(source: Source, target: str, former: Tensor, codes: Tensor, gemms: list[Gemm]) -> None:
    """Replace a weight by one that is kept in FP8 only."""
    # earlier checks have refused weights without their own scale
    scale = cast(Scale, source.scale_of(target))
    # the stored dtype, so that it can be written back unchanged
    dtype = source.shards.stored[source.scheme.scale_of(source.placed.by_target[target][0].name)].dtype
    values = scale.values[..., 0, 0] if scale.kind == "tensor" else scale.values
    first, scale_inv = gemms[0], values.to(codes.device, dtype)
    if first.k_by_n:
        codes, scale_inv = codes.mT, scale_inv.mT if scale_inv.dim() > 1 else scale_inv
    weight = from_codes(codes, scale_inv, former.dtype, first.weight_name, first.k_by_n, E4M3)
    replace_weight(cast(nn.Module, first.layer), gemms, former, weight)


def _dtype(model: nn.Module, name: str, tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor on the meta device; fp32 if the class of a transformers model requires it."""
    in_fp32 = getattr(without_wrappers(model), "_keep_in_fp32_modules_strict", None) or ()
    is_narrow = tensor.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if is_narrow and any(part in name for part in in_fp32) else tensor.dtype


def _place(tensor: Tensor) -> torch.device:
    """The device of a tensor, or the future device if it is on the meta device."""
    default = torch.get_default_device()
    return tensor.device if not tensor.is_meta else default if default.type != "meta" else torch.device("cpu")


def _replace(model: nn.Module, new: Mapping[int, Tensor]) -> None:
    """Replace parameters and buffers in all modules that hold them, by the ``id`` of the former ones."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            changed = {name: new[id(old)] for name, old in tensors.items() if old is not None and id(old) in new}
            tensors.update(cast(dict[str, Any], changed))
        if isinstance(module, Fp8Module):
            new_ids = {id(tensor) for tensor in new.values()}
            for gemm, weight in module.gemms():
                if id(weight) in new_ids:
                    gemm.on_sharding(weight)


def missing_buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Values for the buffers on the meta device that no file holds, made by the initialisation of transformers.

    Raises:
        ValueError: if it does not make them all; the message names the missing buffers and the remedy.
    """
    buffers: list[tuple[nn.Module, str, Tensor]] = []
    failed: list[str] = []
    initialisers = _initialisers(model)
    for path, module in named_modules(model):
        empty = {
            name: torch.full(buffer.shape, _unset(buffer), dtype=buffer.dtype, device=_place(buffer))
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
        }
        if not empty:
            continue
        if module in initialisers and not any(True for _ in module.parameters(recurse=False)):
            # a copy, so that the model stays as it is until all checks are made
            twin = copy.copy(module)
            twin.__dict__["_buffers"] = {**module._buffers, **empty}
            with torch.no_grad():
                initialisers[module](twin)
        for name, buffer in empty.items():
            unset = buffer.isnan() if buffer.is_floating_point() else buffer == _unset(buffer)
            if bool(unset.any()) or buffer.dtype == torch.bool:
                failed.append(".".join(filter(None, (plain_path(path), name))))
            buffers.append((module, name, buffer))
    if failed:
        raise ValueError(
            f"load_exported: {type(model).__name__} has buffers on the meta device that checkpoints do not hold"
            f" (`persistent=False`): {listed(failed)}. Build the model outside of `torch.device('meta')`, or set these"
            " buffers first."
        )
    return buffers


def _unset(buffer: Tensor) -> float:
    """A value that no initialisation would give to a buffer."""
    if buffer.dtype == torch.bool:
        return 0
    return float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min


def _initialisers(model: nn.Module) -> dict[nn.Module, Any]:
    """The function by which transformers initialises each module of its models."""
    modeling = sys.modules.get("transformers.modeling_utils")
    parents: Iterable[nn.Module] = model.modules() if modeling is not None else ()
    # from the innermost model, which comes last
    return {
        part: parent._init_weights
        for parent in parents
        if isinstance(parent, modeling.PreTrainedModel)  # type: ignore[union-attr]
        for part in parent.modules()
    }
