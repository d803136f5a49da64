"""Writes a base with its original codes and scales, in its own layout or another.

It uses the names of the files, even if transformers merges their tensors into others, such as the tensors of experts.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.modules.fp8_parameter import Fp8Parameter, is_held
from lightning_fp8.ops.formats import E4M3, dtype_name
from lightning_fp8.serialization.fill import Source
from lightning_fp8.serialization.layouts.base import Quantized, WritableLayout, grid_of
from lightning_fp8.serialization.layouts.registry import check_plain, kind_of_file
from lightning_fp8.serialization.names import Piece
from lightning_fp8.serialization.scales import as_stored, check_finite
from lightning_fp8.serialization.tensors import listed, memory_of, state_tensors, to_metadata
from lightning_fp8.serialization.values import Scale, in_grid, rounded

# the tensors of a file, and its metadata
Shard = Callable[[], tuple[dict[str, Tensor], dict[str, str]]]


class Base:
    """The tensors of a checkpoint as the model holds them now.

    Args:
        model: the model that :func:`lightning_fp8.load_exported` read the checkpoint into.
        source: the checkpoint.

    Attributes:
        names: the names of the files' tensors that the model has, without scales.
        rounded: weights that have changed and were rounded to FP8 again, by name, and how.

    Raises:
        ValueError: if the model has other tensors than the checkpoint; the message names them.
    """

    def __init__(self, model: nn.Module, source: Source) -> None:
        self.source = source
        self.rounded: dict[str, str] = {}
        self._own = state_tensors(model)
        self._narrower: Counter[str] = Counter()
        self._pieces = source.placed.by_name
        self.names = list(self._pieces)
        targets = dict.fromkeys(piece.target for piece in source.placed.pieces)
        there = {memory_of(tensor) for name, tensor in self._own.items() if name in targets}
        extra = [name for name, tensor in self._own.items() if name not in targets and memory_of(tensor) not in there]
        extra += [name for name in targets if name not in self._own]
        if extra:
            raise ValueError(
                f"export: the model was read from {source.path}, and only it, or only that checkpoint, has these"
                f" tensors: {listed(extra)}. If they belong to adapters of PEFT, call `merge_and_unload()` or"
                " `unload()`, and export what it returns."
            )

    def codes(self, name: str) -> tuple[Tensor, Scale]:
        """An FP8 tensor of the files, ``float8_e4m3fn``, and its scale; rounded again if its values have changed."""
        scale, shape = self.source.scales[name], self.source.shards.stored[name].shape
        codes = torch.empty(shape, dtype=torch.uint8)
        for piece in self._pieces[name]:
            part = self._unchanged(piece, scale)
            if part is None:
                return self._rounded(name, scale)
            codes[piece.of] = part
        return codes.view(E4M3.dtype), scale

    def _unchanged(self, piece: Piece, scale: Scale) -> Tensor | None:
        """The codes of a part of a weight; None if they or their scale differ from the checkpoint by now."""
        weight = self._own[piece.target]
        if not is_held(weight) or weight.content.largest is not None:
            return None
        (payload, scale_inv), shape = as_stored(weight.content), tuple(weight.shape)
        if scale_inv.numel() != math.prod(grid_of(scale.kind, shape)):
            return None
        there = in_grid(piece.of, scale.kind, self.source.shards.stored[piece.name].shape)
        here, held = in_grid(piece.at, scale.kind, shape), Scale.of(scale.kind, shape, scale_inv).values
        is_same = there is not None and here is not None and held[here].cpu().equal(scale.values[there])
        return payload[piece.at].cpu() if is_same else None

    def _rounded(self, name: str, former: Scale) -> tuple[Tensor, Scale]:
        values = self._values(name, torch.float32)
        check_finite(name, values)
        # part of a weight that has changed elsewhere, or that has got a master
        codes, own = former.codes(values), self._own[self._pieces[name][0].target]
        if former.dequantized(codes).to(own.dtype).float().equal(values):
            return codes, former
        dtype = self.source.shards.stored[self.source.scheme.scale_of(name)].dtype
        codes, scale = rounded(values, former, dtype)
        error = (scale.dequantized(codes) - values).norm() / values.norm()
        if error > 0:
            self.rounded[name] = f"relative RMS error {float(error):.2%}"
        return codes, scale

    def plain(self, name: str) -> Tensor:
        """A tensor of the files that is not in FP8, in the model's dtype."""
        pieces = self._pieces[name]
        held = functools.reduce(torch.promote_types, (self._own[piece.target].dtype for piece in pieces))
        tensor = self._values(name, held)
        check_finite(name, tensor)
        stored = self.source.shards.stored[name].dtype
        if torch.promote_types(held, stored) != held:
            self._narrower[f"{dtype_name(stored)} to {dtype_name(held)}"] += 1
        return tensor

    def _values(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(self.source.shards.stored[name].shape, dtype=dtype)
        for piece in self._pieces[name]:
            tensor[piece.of] = self._part(piece).to(dtype)
        return tensor

    def _part(self, piece: Piece) -> Tensor:
        weight = self._own[piece.target].detach()
        weight = weight.dequantized() if isinstance(weight, Fp8Parameter) else weight
        return weight[piece.at].cpu()

    def warn(self) -> None:
        """Warn about tensors that were rounded again or have lost bits."""
        if self.rounded:
            described = listed([f"{name} ({how})" for name, how in self.rounded.items()])
            warnings.warn(
                f"export: {len(self.rounded)} tensors have changed since they were read from {self.source.path}, and"
                f" were rounded to FP8 again: {described}.",
                stacklevel=4,
            )
        if self._narrower:
            counts = ", ".join(f"{count} from {dtypes}" for dtypes, count in self._narrower.items())
            warnings.warn(
                f"export: {sum(self._narrower.values())} tensors are narrower now than in {self.source.path}, because"
                f" the model holds them so: {counts}. To keep all bits, load the files into a model with their dtypes.",
                stacklevel=4,
            )


def written_back(
    base: Base, layout: WritableLayout, dtype: torch.dtype | None
) -> tuple[dict[str, Shard], dict[str, Any]]:
    """The files of a checkpoint, with the same codes and scales under the same names; and its config.

    Args:
        base: the checkpoint.
        layout: gives the names of the scales; if it is None or the files' own layout, these are the names in the files.
        dtype: the dtype of tensors that are not in FP8; None to keep the model's dtypes.

    Tensors without a place in the model are left out, with a warning.
    """
    source, stored = base.source, base.source.shards.stored
    config, left_out = {**source.config}, sorted(source.placed.left_out)
    caches = [name for name in source.inputs if source.scheme.is_of_cache(name)]
    scheme = None
    if layout.name not in (None, source.scheme.layout):
        kind = kind_of_file(layout, {name: scale.kind for name, scale in source.scales.items()})
        scheme = layout.scheme(kind, source.scheme.static)
        two_dim = [name for name in base.names if name not in source.scales and len(stored[name].shape) == 2]
        plain = [name.removesuffix(".weight") for name in two_dim if name.endswith(".weight")]
        check_plain(layout, plain, list(source.scales))
        config = {**config, "quantization_config": layout.config(scheme, plain)}
        left_out, caches = sorted([*left_out, *caches]), []
    if left_out:
        warnings.warn(
            f"export: tensors that the model has no place for are left out: {listed(left_out)}.", stacklevel=3
        )
    if dtype is not None:
        config = {**config, **{key: dtype_name(dtype) for key in ("dtype", "torch_dtype") if key in config}}
    names: dict[str, list[str]] = {}
    for name in (*base.names, *caches):
        names.setdefault(stored[name].file.name, []).append(name)

    def shard(in_file: list[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
        tensors: dict[str, Tensor] = {}
        for name in in_file:
            if name in source.inputs:
                tensors[name] = source.inputs[name]
            elif name not in source.scales:
                tensor = base.plain(name)
                tensors[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            else:
                tensors[name], scale = base.codes(name)
                for user in (name, *(twin for twin, of in source.twins.items() if of == name)):
                    of_input = source.inputs.get(source.scheme.input_of(user))
                    weight = Quantized(tensors[name], scale.values, of_input)
                    tensors |= layout.tensors(scheme, user, weight) if scheme else _as_read(source, user, weight)
        # the exact scales of an export, which belong to its codes
        is_same = scheme is None and source.exact and not base.rounded
        return tensors, to_metadata(source.exact) if is_same else {"format": "pt"}

    return {file: functools.partial(shard, in_file) for file, in_file in names.items()}, config


def _as_read(source: Source, name: str, weight: Quantized) -> dict[str, Tensor]:
    """The scales of a weight with the names, dtypes and shapes of the files."""
    scale, of_input = source.scheme.scale_of(name), source.scheme.input_of(name)
    stored = source.shards.stored[scale]
    # a weight with several names repeats its scales for each, and safetensors refuses tensors that share memory
    tensors = {scale: weight.scale_inv.to(stored.dtype).reshape(stored.shape).clone()}
    return tensors if weight.input_scale_inv is None else {**tensors, of_input: weight.input_scale_inv}
