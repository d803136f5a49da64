"""How the weights of a checkpoint are quantized, by its config.

========================  ===============================  ====================  ==================
config                    scale of ``<layer>.weight``      one for each          scale of the input
========================  ===============================  ====================  ==================
``fp8``, with blocks      ``<layer>.weight_scale_inv``     128 x 128             none
``fp8``, as vLLM          ``<layer>.weight_scale``         tensor                ``input_scale``
``fp8``, as transformers  ``<layer>.weight_scale_inv``     tensor                ``activation_scale``
``compressed-tensors``    ``<layer>.weight_scale``         tensor, row or block  ``input_scale``
the same, in MXFP8        ``<layer>.weight_scale``         32 of a row, in E8M0  none
``modelopt``              ``<layer>.weight_scale``         tensor                ``input_scale``
========================  ===============================  ====================  ==================

All are multipliers of codes: ``weight = code * scale``. Inputs that are scaled by their own values (dynamic ones) have
no scale. Which weights are in FP8 is known from their dtypes, so lists of layers that are not (``ignore``) have no
effect.

Sources: transformers, ``integrations/finegrained_fp8.py``; vllm-project/vllm, ``quantization/fp8.py``;
compressed-tensors, ``quantization/quant_config.py``; NVIDIA/Model-Optimizer, ``export/unified_export_hf.py``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_fp8.export.layout import CONFIG_FILE
from lightning_fp8.export.shards import read_json
from lightning_fp8.ops import e8m0
from lightning_fp8.ops.amaxes import BLOCK
from lightning_fp8.scaling.recipe import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, Recipe

# a group is 32 elements of a row, and its scale a power of two in one byte
Kind = Literal["tensor", "row", "block", "group"]
FLOAT_QUANTIZED, MXFP8_QUANTIZED = "float-quantized", "mxfp8-quantized"
_BLOCKS = [BLOCK, BLOCK]
_MODELOPT_FILE = "hf_quant_config.json"
# of compressed-tensors, by its formats
_STRATEGIES: dict[str, dict[str, Kind]] = {
    FLOAT_QUANTIZED: {"tensor": "tensor", "channel": "row", "block": "block"},
    MXFP8_QUANTIZED: {"group": "group"},
}
_WORDS: dict[Kind, str] = {
    "tensor": "single numbers",
    "row": "a column with a number for each row",
    "block": f"a matrix with a number for each block of {BLOCK} x {BLOCK}",
    "group": f"a matrix in uint8 with a number for every {e8m0.BLOCK} elements of a row",
}
_OF_CACHES = (".k_scale", ".v_scale", ".q_scale")


@dataclass(frozen=True)
class Scheme:
    """How the weights of a checkpoint are quantized.

    Attributes:
        kinds: for what a weight has one scale each: for the tensor, each row, each block, or each group.
        suffix: what follows the name of a weight in that of its scale.
        input_name: what the name of its input's scale has in place of ``weight``.
        static: whether inputs have scales.
        has_cache: whether the file may hold scales of an FP8 cache of keys and values, which training has no use for.
    """

    kinds: tuple[Kind, ...]
    suffix: str = "_scale"
    input_name: str = "input_scale"
    static: bool = False
    has_cache: bool = False

    @property
    def in_words(self) -> str:
        """What a scale may be."""
        return " or ".join(_WORDS[kind] for kind in self.kinds)

    @property
    def recipe(self) -> type[Recipe]:
        """The recipe that scales weights and inputs alike, or most nearly."""
        if self.in_e8m0:
            return MXScaling
        return BlockScaling if "block" in self.kinds else DelayedScaling if self.static else CurrentScaling

    @property
    def in_e8m0(self) -> bool:
        """Whether the scales of weights are powers of two in one byte."""
        return "group" in self.kinds

    def scale_of(self, weight: str) -> str:
        """Name of a weight's scale."""
        return weight + self.suffix

    def input_of(self, weight: str) -> str:
        """Name of the scale of a weight's input."""
        return weight.removesuffix("weight") + self.input_name

    def is_of_cache(self, name: str) -> bool:
        """Whether a tensor is a scale of a cache."""
        return self.has_cache and name.endswith(_OF_CACHES)

    def kind_of(self, weight: tuple[int, ...], scale: tuple[int, ...]) -> Kind | None:
        """The kind of a scale of this shape for a weight of this shape; None if it is of none of the kinds.

        >>> Scheme(("row", "block")).kind_of((300, 200), (3, 2))
        'block'
        """
        if len(weight) < 2:
            return None
        *experts, rows, columns = weight
        fitting: dict[Kind, list[tuple[int, ...]]] = {
            "tensor": [tuple(experts), (*experts, 1), (*experts, 1, 1)],
            "row": [(*experts, rows, 1)],
            "block": [(*experts, -(-rows // BLOCK), -(-columns // BLOCK))],
            "group": [(*experts, rows, -(-columns // e8m0.BLOCK))],
        }
        return next((kind for kind in self.kinds if scale in fitting[kind]), None)


def config_read(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The content of ``config.json``, with its ``quantization_config``; and the file that this is in.

    Raises:
        FileNotFoundError: if there is no ``config.json``.
        ValueError: if it is no JSON object, or the model is not quantized.
    """
    file, config = folder / CONFIG_FILE, read_json(folder, CONFIG_FILE)
    if not file.is_file():
        raise FileNotFoundError(f"There is no exported model in {folder}: {CONFIG_FILE} is missing.")
    config = config if isinstance(config, dict) else {}
    quantization = config.get("quantization_config")
    if quantization is None:
        other = read_json(folder, _MODELOPT_FILE)
        of_modelopt = other.get("quantization") if isinstance(other, dict) else None
        if isinstance(of_modelopt, dict):
            file, quantization = folder / _MODELOPT_FILE, {**of_modelopt, "quant_method": "modelopt"}
    if not isinstance(quantization, dict):
        raise ValueError(f"{file} has no `quantization_config`: the model there is not quantized. Load it as usual.")
    return file, {**config, "quantization_config": quantization}


def scheme_of(file: Path, quantization: Mapping[str, Any], names: Collection[str]) -> Scheme:
    """How weights are quantized.

    Args:
        file: for messages, the file that holds the config.
        quantization: the config.
        names: of all tensors in the folder.

    Raises:
        ValueError: for another quantization; the message says which.
    """
    reader = _Config(file, quantization)
    method = reader.one_of("quant_method", ("fp8", "compressed-tensors", "modelopt"))
    return {"fp8": _fp8, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt}[method](reader, names)


@dataclass(frozen=True)
class _Config:
    """A part of a config, with the place where it is, for messages."""

    file: Path
    values: Mapping[str, Any]
    place: str = "quantization_config"

    def one_of(self, key: str, choices: Collection[Any]) -> Any:
        value = self.values.get(key)
        # 1 equals True, and a list is not hashable
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            expected = " or ".join(map(repr, choices))
            raise ValueError(
                f"{self.file}: `{self.place}` must have {key}={expected}, got {reprlib.repr(value)}. `load_exported`"
                " reads weights in E4M3, quantized as docs/fp8-checkpoints.md lists."
            )
        return value

    def part(self, key: str) -> _Config:
        value, place = self.values.get(key), f"{self.place}.{key}"
        if not isinstance(value, dict):
            raise ValueError(f"{self.file}: `{place}` must be an object, got {reprlib.repr(value)}.")
        return _Config(self.file, value, place)

    @property
    def has_cache(self) -> bool:
        return any(self.values.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo"))


def _fp8(config: _Config, names: Collection[str]) -> Scheme:
    blocks = config.one_of("weight_block_size", (None, _BLOCKS))
    static = config.one_of("activation_scheme", ("static", "dynamic")) == "static"
    as_transformers = blocks is not None or any(name.endswith("_scale_inv") for name in names)
    return Scheme(
        ("block",) if blocks else ("tensor",),
        "_scale_inv" if as_transformers else "_scale",
        "activation_scale" if any(name.endswith("activation_scale") for name in names) else "input_scale",
        static,
        config.has_cache,
    )


def _compressed_tensors(config: _Config, names: Collection[str]) -> Scheme:
    is_mixed = config.values.get("format") == "mixed-precision"
    format_of_all = FLOAT_QUANTIZED if is_mixed else config.one_of("format", _STRATEGIES)
    # with either, the weights of the file are not those of the model
    config.one_of("transform_config", (None, {}))
    if config.values.get("sparsity_config"):
        config.part("sparsity_config").one_of("format", ("dense",))
    kinds: dict[Kind, None] = {}
    static: set[bool] = set()
    groups = config.part("config_groups")
    for name in groups.values:
        group = groups.part(name)
        has_format = group.values.get("format") is not None
        strategies = _STRATEGIES[group.one_of("format", _STRATEGIES) if has_format else format_of_all]
        weights = group.part("weights")
        expected = {"num_bits": (8,), "type": ("float",), "symmetric": (True, None), "dynamic": (False, None)}
        for key, choices in expected.items():
            weights.one_of(key, choices)
        kind = strategies[weights.one_of("strategy", strategies)]
        if kind == "block":
            weights.one_of("block_structure", (_BLOCKS,))
        elif kind == "group":
            weights.one_of("group_size", (e8m0.BLOCK,))
            weights.one_of("scale_dtype", ("torch.uint8",))
        kinds[kind] = None
        is_static = False
        if group.values.get("input_activations") is not None:
            inputs = group.part("input_activations")
            inputs.one_of("num_bits", (8,))
            is_static = not inputs.one_of("dynamic", (True, False))
            if is_static:
                inputs.one_of("strategy", ("tensor",))
        static.add(is_static)
    if "group" in kinds and (len(kinds) > 1 or True in static):
        raise ValueError(
            f"{config.file}: the groups of `{groups.place}` must all be in MXFP8, with dynamic inputs, or none of them."
        )
    if len(static) != 1:
        raise ValueError(f"{config.file}: the groups of `{groups.place}` must all have static inputs, or none of them.")
    return Scheme(tuple(kinds), static=static == {True}, has_cache=config.has_cache)


def _modelopt(config: _Config, names: Collection[str]) -> Scheme:
    config.one_of("quant_algo", ("FP8",))
    return Scheme(("tensor",), static=True, has_cache=config.has_cache)
