"""All layouts by name: finds the layout of a folder, and layouts that can hold given weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fp8.runtime.choice import check_choice
from lightning_fp8.serialization.layouts.base import Config, Kind, Layout, Scheme, WritableLayout
from lightning_fp8.serialization.layouts.compressed_tensors import COMPRESSED_TENSORS
from lightning_fp8.serialization.layouts.fp8 import HF_FP8, VLLM
from lightning_fp8.serialization.layouts.modelopt import MODELOPT
from lightning_fp8.serialization.shards import read_json
from lightning_fp8.serialization.tensors import CONFIG_FILE, listed

LAYOUTS: dict[str | None, Layout] = {layout.name: layout for layout in (VLLM, HF_FP8, COMPRESSED_TENSORS, MODELOPT)}
WRITABLE = {name: layout for name, layout in LAYOUTS.items() if isinstance(layout, WritableLayout)}
_WORDS: dict[Kind, str] = {"tensor": "a weight", "row": "each row", "block": "each block", "group": "every 32 elements"}


def layout_to_write(name: str | None) -> WritableLayout:
    """The layout.

    Raises:
        ValueError: if no writable layout has this name.
    """
    if name is not None:
        check_choice("export: `layout`", name, (other for other in WRITABLE if other is not None))
    return WRITABLE[name]


def those_with(trait: Callable[[WritableLayout], bool]) -> str:
    """The arguments that choose a layout with this trait, for messages."""
    return " or ".join(f"`layout={layout.name!r}`" for layout in WRITABLE.values() if trait(layout))


def config_read(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The content of ``config.json`` with the ``quantization_config``, and the file that holds the latter.

    Raises:
        FileNotFoundError: if there is no ``config.json``.
        ValueError: if it is not a JSON object, or the model is not quantized.
    """
    file, config = folder / CONFIG_FILE, read_json(folder, CONFIG_FILE)
    if not file.is_file():
        raise FileNotFoundError(f"There is no exported model in {folder}: {CONFIG_FILE} is missing.")
    config = config if isinstance(config, dict) else {}
    quantization = config.get("quantization_config")
    for layout in LAYOUTS.values():
        if quantization is None and layout.config_file is not None:
            other = read_json(folder, layout.config_file)
            own = other.get("quantization") if isinstance(other, dict) else None
            if isinstance(own, dict):
                file, quantization = folder / layout.config_file, {**own, "quant_method": layout.method}
    if not isinstance(quantization, dict):
        raise ValueError(f"{file} has no `quantization_config`: the model there is not quantized. Load it as usual.")
    return file, {**config, "quantization_config": quantization}


def scheme_of(file: Path, quantization: Mapping[str, Any], names: Collection[str]) -> Scheme:
    """How weights are quantized.

    Args:
        file: the file that holds the config, for messages.
        quantization: the config.
        names: the names of all tensors in the folder.

    Raises:
        ValueError: for another quantization; the message says which.
    """
    config, readers = Config(file, quantization), {layout.method: layout.read for layout in LAYOUTS.values()}
    return readers[config.one_of("quant_method", readers)](config, names)


def kind_of_file(layout: WritableLayout, kinds: Mapping[str, Kind]) -> Kind:
    """The kind of scales that fits all weights of a file. A tensor's single scale can be repeated for rows or blocks.

    Raises:
        ValueError: if no kind fits, or the layout has no such scales.
    """
    by_kind = {kind: [name for name, of in kinds.items() if of == kind] for kind in _WORDS if kind in kinds.values()}
    if "group" not in by_kind and len(by_kind) > 1:
        # repeated where others have one for each row or block
        by_kind.pop("tensor", None)
    if len(by_kind) > 1:
        (first, firsts), (second, seconds) = [*by_kind.items()][:2]
        raise ValueError(
            f"export: weights with a scale for {_WORDS[first]} ({listed(firsts)}) and for {_WORDS[second]}"
            f" ({listed(seconds)}) cannot be written to one file: it has one kind of scale. Export the model in parts,"
            " or give one of the two kinds masters (`convert(model, frozen_weights='master')`)."
        )
    kind, names = next(iter(by_kind.items()), ("tensor", []))
    if kind not in layout.suffixes:
        raise ValueError(
            f"export: layout={layout.name!r} has no place for such scales, and these weights have one for"
            f" {_WORDS[kind]}: {listed(names)}. Pass {those_with(lambda other: kind in other.suffixes)}."
        )
    return kind


def check_plain(layout: WritableLayout, plain: Sequence[str], in_fp8: Collection[str]) -> None:
    """ValueError if transformers would mistake a layer in FP8 for a plain one, because it also compares path ends."""
    paths = [name.removesuffix("weight").rstrip(".") for name in in_fp8]
    wrong = [f"{path} (as {ending})" for ending in plain for path in paths if path.endswith(ending)]
    if wrong and layout.plain_by_end:
        raise ValueError(
            f"export: layout={layout.name!r} lists layers that are not in FP8, and its readers would find these among"
            f" them, whose paths end like theirs: {listed(wrong)}. Pass `layout={COMPRESSED_TENSORS.name!r}`, which"
            " takes whole paths."
        )
