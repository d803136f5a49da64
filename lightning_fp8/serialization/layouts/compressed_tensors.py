"""``quant_method: compressed-tensors``, with scales of every kind: ``<layer>.weight_scale``, ``<layer>.input_scale``.

Sources: vllm-project/compressed-tensors 0.20, ``quantization/quant_config.py``, ``quant_args.py`` and
``quant_scheme.py`` (``FP8``, ``FP8_DYNAMIC``, ``FP8_BLOCK``, ``MXFP8``) and ``compressors/mxfp8/base.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from lightning_fp8.ops import e8m0
from lightning_fp8.ops.amaxes import BLOCK
from lightning_fp8.serialization.layouts.base import BLOCK_SIZE, Config, Kind, Scheme, WritableLayout

_NAME = "compressed-tensors"
_FLOAT, _MXFP8 = "float-quantized", "mxfp8-quantized"
# the kind of scales for each strategy, by format
_STRATEGIES: dict[str, dict[str, Kind]] = {
    _FLOAT: {"tensor": "tensor", "channel": "row", "block": "block"},
    _MXFP8: {"group": "group"},
}
_BY_KIND = {kind: (name, strategy) for name, kinds in _STRATEGIES.items() for strategy, kind in kinds.items()}


def _read(config: Config, names: Collection[str]) -> Scheme:
    is_mixed = config.values.get("format") == "mixed-precision"
    format_of_all = _FLOAT if is_mixed else config.one_of("format", _STRATEGIES)
    # with either of these, the file's weights differ from the model's
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
            weights.one_of("block_structure", (BLOCK_SIZE,))
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
    return Scheme(_NAME, tuple(kinds), static=static == {True}, has_cache=config.has_cache)


def _config(scheme: Scheme, plain: Sequence[str]) -> dict[str, Any]:
    (kind,) = scheme.kinds
    format_of_all, strategy = _BY_KIND[kind]
    codes: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    if kind == "group":
        codes |= {"group_size": e8m0.BLOCK, "scale_dtype": "torch.uint8"}
    weights = {**codes, "strategy": strategy, "dynamic": False}
    inputs: dict[str, Any] = {**codes, "strategy": "tensor", "dynamic": not scheme.static}
    if kind == "block":
        weights["block_structure"] = BLOCK_SIZE
        inputs |= {"strategy": "group", "group_size": BLOCK}
    elif kind == "group":
        inputs["strategy"] = "group"
    elif kind == "row" and not scheme.static:
        inputs["strategy"] = "token"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": _NAME,
        "format": format_of_all,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*plain],
    }


COMPRESSED_TENSORS = WritableLayout(
    name=_NAME,
    method=_NAME,
    read=_read,
    suffixes=dict.fromkeys(_BY_KIND, "_scale"),
    config=_config,
    single=(1,),
    ragged=True,
)
