"""``config.json`` of an exported model: how its weights are quantized, in vLLM's terms, and which layers stay plain.

Source: vllm-project/vllm, ``model_executor/layers/quantization/fp8.py``, ``Fp8Config.from_config`` and, for
``ignored_layers`` (whole module paths), ``utils/quant_utils.py``, ``is_layer_skipped``. Hugging Face's
``FineGrainedFP8Config`` reads the same keys.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.paths import named_modules, without_wrappers
from lightning_fp8.ops.formats import dtype_name
from lightning_fp8.serialization.tensors import joined, weight_name


def config_of(model: nn.Module, dtype: torch.dtype | None, quantization: dict[str, Any]) -> dict[str, Any]:
    """The Hugging Face config, if the model has one, with ``quantization_config`` added.

    Args:
        model: the converted model.
        dtype: the dtype of the weights that are not in FP8; None if they keep the dtype in which they are stored.
        quantization: how the FP8 weights are quantized.
    """
    root = without_wrappers(model)
    to_dict = getattr(getattr(root, "config", None), "to_dict", None)
    config: dict[str, Any] = to_dict() if callable(to_dict) else {}
    if "architectures" in config:
        # unset if the model was never loaded or saved
        config["architectures"] = config["architectures"] or [type(root).__name__]
    if dtype is not None:
        config.update({key: dtype_name(dtype) for key in ("dtype", "torch_dtype") if key in config})
    return {**config, "quantization_config": quantization}


def output_embedding(model: nn.Module) -> set[str]:
    """Name of the weight of a Hugging Face model's output embedding; empty if there is none."""
    getter = getattr(without_wrappers(model), "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    return {joined(path, "weight") for path, layer in named_modules(model) if head is not None and layer is head}


def plain_layers(model: nn.Module, in_fp8: Collection[str]) -> list[str]:
    """Paths of the linear layers whose weights are not FP8 in the file; for an attention, ``<path>.<projection>``."""
    plain: list[str] = []
    for path, layer, *_ in conversion_plan(model).layers:
        gemms = layer.fp8 if isinstance(layer, Fp8Module) and not layer.weights_are_stacked else ("",)
        plain += [joined(path, gemm) for gemm in gemms if weight_name(path, gemm) not in in_fp8]
    return plain
