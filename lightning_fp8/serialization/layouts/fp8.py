"""``quant_method: fp8``: the form that vLLM reads, and the form that transformers reads, as in DeepSeek-V3 and Qwen3.

==========  ======  ============================  ============================  ==========================
layout      kind    scale of ``<layer>.weight``   static scale of its input     layers without scale
==========  ======  ============================  ============================  ==========================
None        tensor  ``<layer>.weight_scale``      ``<layer>.input_scale``       ``ignored_layers``
None        block   ``<layer>.weight_scale_inv``                                ``ignored_layers``
``hf-fp8``  tensor  ``<layer>.weight_scale_inv``  ``<layer>.activation_scale``  ``modules_to_not_convert``
``hf-fp8``  block   ``<layer>.weight_scale_inv``                                ``modules_to_not_convert``
==========  ======  ============================  ============================  ==========================

``Conv1D`` keeps its ``[K, N]``, as vLLM's GPT-2 expects, and the projection ``in_proj`` of an attention has the scales
``in_proj_weight_scale`` and ``in_proj_input_scale``.

Sources: vllm-project/vllm, ``model_executor/layers/quantization/fp8.py`` (``Fp8Config``, ``Fp8LinearMethod``),
``utils/quant_utils.py`` (``is_layer_skipped``: whole paths), ``model_executor/parameter.py``
(``PerTensorScaleParameter``: a scale is ``[]`` or ``[1]``) and ``model_executor/models/utils.py``, which maps
transformers' names to its own; huggingface/transformers 5.23, ``integrations/finegrained_fp8.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from lightning_fp8.serialization.layouts.base import BLOCK_SIZE, Config, Scheme, WritableLayout

_SCALE, _INV = "_scale", "_scale_inv"


def _read(config: Config, names: Collection[str]) -> Scheme:
    blocks = config.one_of("weight_block_size", (None, BLOCK_SIZE))
    static = config.one_of("activation_scheme", ("static", "dynamic")) == "static"
    as_transformers = blocks is not None or any(name.endswith(_INV) for name in names)
    return Scheme(
        HF_FP8.name if as_transformers else VLLM.name,
        ("block",) if blocks else ("tensor",),
        _INV if as_transformers else _SCALE,
        "activation_scale" if any(name.endswith("activation_scale") for name in names) else "input_scale",
        static,
        config.has_cache,
    )


def _config(scheme: Scheme, **entries: Any) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "static" if scheme.static else "dynamic",
        "weight_block_size": BLOCK_SIZE if scheme.kinds == ("block",) else None,
        **entries,
    }


def _of_vllm(scheme: Scheme, plain: Sequence[str]) -> dict[str, Any]:
    return _config(scheme, ignored_layers=[*plain])


def _of_transformers(scheme: Scheme, plain: Sequence[str]) -> dict[str, Any]:
    return _config(scheme, fmt="e4m3", modules_to_not_convert=[*plain])


VLLM = WritableLayout(
    name=None,
    method="fp8",
    read=_read,
    suffixes={"tensor": _SCALE, "block": _INV},
    config=_of_vllm,
    linear_only=False,
)
# transformers 5.23 computes the size of a block from the number of scales when it dequantizes
HF_FP8 = WritableLayout(
    name="hf-fp8",
    method="fp8",
    read=_read,
    suffixes={"tensor": _INV, "block": _INV},
    config=_of_transformers,
    input_name="activation_scale",
    plain_by_end=True,
)
