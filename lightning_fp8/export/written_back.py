"""Writes a base as it was read: its files again, byte for byte where nothing has changed; or its tensors, renamed.

The names are those of the files, also where transformers merges their tensors into others, such as those of experts.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.export.fill import Source
from lightning_fp8.export.layout import CONFIG_FILE, listed, memory_of, state_tensors
from lightning_fp8.export.names import Piece
from lightning_fp8.export.published import (
    COMPRESSED_TENSORS,
    HF_FP8,
    Layout,
    Quantized,
    check_plain,
    kind_of_file,
    quantization_config,
    tensors_of,
)
from lightning_fp8.export.scales import as_stored, check_finite
from lightning_fp8.export.shards import header_of
from lightning_fp8.export.values import Scale, in_grid, rounded
from lightning_fp8.modules.fp8_parameter import Fp8Parameter, is_held
from lightning_fp8.ops.formats import E4M3, dtype_name

Write = Callable[[Path], None]


class Base:
    """The tensors of a checkpoint as the model holds them now.

    Args:
        model: the model that :func:`lightning_fp8.load_exported` read the checkpoint into.
        source: the checkpoint.

    Attributes:
        rounded: by name, tensors of the files that have changed and were rounded again, and how.

    Raises:
        ValueError: if the model has other tensors than the checkpoint; the message names them.
    """

    def __init__(self, model: nn.Module, source: Source) -> None:
        self.source = source
        self.rounded: dict[str, str] = {}
        self._own = {name: tensor for name, (_, tensor) in state_tensors(model).items()}
        self._pieces = source.placed.by_name
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
        """The codes of a part of a weight; None if they or their scale are not those of the checkpoint any more."""
        weight = self._own[piece.target]
        if not is_held(weight) or weight.content.largest is not None:
            return None
        (payload, scale_inv), shape = as_stored(weight.content), tuple(weight.shape)
        there, here = (
            in_grid(index, scale.kind, size)
            for index, size in ((piece.of, self.source.shards.stored[piece.name].shape), (piece.at, shape))
        )
        is_same = there is not None and here is not None and scale_inv[here].cpu().equal(scale.values[there])
        return payload[piece.at].cpu() if is_same else None

    def _rounded(self, name: str, former: Scale) -> tuple[Tensor, Scale]:
        values = self._values(name, torch.float32)
        check_finite(name, values)
        # of a part of a weight that has changed elsewhere, or one with a master since
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
        """A tensor of the files that is not in FP8, in their dtype."""
        dtype = self.source.shards.stored[name].dtype
        tensor = self._values(name, dtype)
        check_finite(name, tensor)
        if not all(tensor[p.of].to(self._own[p.target].dtype).equal(self._part(p)) for p in self._pieces[name]):
            self.rounded[name] = f"to {dtype_name(dtype)}"
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

    def names(self) -> Iterator[tuple[str, bool]]:
        """Each tensor of the files that the model has, scales apart, and whether it is in FP8."""
        for name in self._pieces:
            yield name, name in self.source.scales

    def warn(self) -> None:
        """Say what was rounded again."""
        if self.rounded:
            described = listed([f"{name} ({how})" for name, how in self.rounded.items()])
            warnings.warn(
                f"export: {len(self.rounded)} tensors have changed since they were read from {self.source.path}, and"
                f" were rounded again to what they are there: {described}.",
                stacklevel=4,
            )


def files_of(base: Base) -> dict[str, Write]:
    """The files of the checkpoint by name, each with a function that writes it.

    Raises:
        ValueError: if the files have tensors that the model has no place for, and are not where they were.
    """
    shards = base.source.shards
    files = {shards.stored[name].file: name for name in base.source.placed.left_out}
    gone = [name for file, name in files.items() if not file.is_file() or header_of(file) != shards.headers[file]]
    if gone:
        raise ValueError(
            f"export: the model has no place for some tensors of {base.source.path}, which are copied from there, and"
            f" their files are not there any more: {listed(gone)}. Put them back, or pass a `layout` that is not that"
            " of the files, which leaves these tensors out."
        )
    weights = {file.name: _writer(base, file) for file in shards.headers}
    return {**weights, **{name: _text(content) for name, content in shards.texts.items()}}


def _text(content: bytes) -> Write:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def _writer(base: Base, file: Path) -> Write:
    """Writes a safetensors file with the header that it had: the tensors follow in the order of their offsets."""
    source, header = base.source, base.source.shards.headers[file]
    entries = json.loads(header[8:])
    entries.pop("__metadata__", None)
    in_order = sorted(entries, key=lambda name: entries[name]["data_offsets"][0])
    # scales follow from their weights, of which one may come later
    scales = {source.scheme.scale_of(name): name for name in source.scales}
    scales |= {source.scheme.scale_of(twin): name for twin, name in source.twins.items()}

    def write(path: Path) -> None:
        with path.open("wb") as out:
            out.write(header)
            for name in in_order:
                stored = source.shards.stored[name]
                tensor = _tensor(base, name, scales).to(stored.dtype).reshape(stored.shape)
                out.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)

    return write


def _tensor(base: Base, name: str, scales: Mapping[str, str]) -> Tensor:
    source = base.source
    if name in source.scales:
        return base.codes(name)[0]
    if name in scales:
        return base.codes(scales[name])[1].values
    if name in source.inputs:
        return source.inputs[name]
    if name in source.placed.left_out:
        return next(iter(source.shards.tensors([name])))[1]
    return base.plain(name)


def layout_of(source: Source) -> str | None:
    """The name of the layout of a checkpoint, as :func:`lightning_fp8.export` calls it; None if it has none there."""
    config = json.loads(source.shards.texts[CONFIG_FILE])
    method = (config.get("quantization_config") or {}).get("quant_method")
    as_transformers = method == "fp8" and source.scheme.suffix == "_scale_inv"
    return method if method == COMPRESSED_TENSORS else HF_FP8 if as_transformers else None


def renamed(base: Base, layout: Layout, dtype: torch.dtype | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of the checkpoint in another layout, under its names; and its config.

    The codes and scales are the same. Tensors that the model has no place for are left out, with a warning.
    """
    source = base.source
    kind = kind_of_file(layout, {name: scale.kind for name, scale in source.scales.items()})
    scheme = layout.scheme(kind, source.scheme.static)
    tensors: dict[str, Tensor] = {}
    plain = []
    for name, in_fp8 in base.names():
        if in_fp8:
            tensors[name], scale = base.codes(name)
            for user in (name, *(twin for twin, of in source.twins.items() if of == name)):
                weight = Quantized(tensors[name], scale.values, source.inputs.get(source.scheme.input_of(user)))
                tensors |= tensors_of(layout, scheme, user, weight)
            continue
        tensor = base.plain(name)
        tensors[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        plain += [name.removesuffix(".weight")] if name.endswith(".weight") and tensor.dim() == 2 else []
    check_plain(layout, plain, list(source.scales))
    left_out = sorted({*source.placed.left_out, *filter(source.scheme.is_of_cache, source.inputs)})
    if left_out:
        warnings.warn(
            f"export: tensors that the model has no place for are left out: {listed(left_out)}.", stacklevel=3
        )
    config = json.loads(source.shards.texts[CONFIG_FILE])
    if dtype is not None:
        config.update({key: dtype_name(dtype) for key in ("dtype", "torch_dtype") if key in config})
    return tensors, {**config, "quantization_config": quantization_config(layout, scheme, plain)}
