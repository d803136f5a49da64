"""FP8 checkpoints as others publish them, cast with numpy: small models of transformers under their published names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from fp8_numpy import code_values
from mx_numpy import cast_in_mx
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

_SIZES = {"vocab_size": 96, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES, intermediate_size=256, head_dim=64),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_SIZES, intermediate_size=256, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2, head_dim=64
    ),
    # its files have other names than its modules
    "minimax_m2": lambda: transformers.MiniMaxM2Config(
        **_SIZES, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2, head_dim=64, rotary_dim=32
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**_SIZES, "num_key_value_heads": 4}, intermediate_size=256, moe_intermediate_size=128, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=128, kv_lora_rank=64,
        qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64, n_shared_experts=1,
    ),
}  # fmt: skip


def model_of(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A small model with random weights, also where transformers starts with constants."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(buf for buf in model.buffers() if buf.dim() == 1 and len(buf) == 4)):
            tensor.normal_(1.0 if tensor.dim() == 1 else 0.0, 0.1)
    return model.eval()


def published(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors under the names of published files; tied ones once."""
    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return revert_weight_conversion(model, {name: t for name, t in model.state_dict().items() if name in names})


@dataclass(frozen=True)
class Written:
    """What a checkpoint holds.

    Attributes:
        tensors: all of its tensors, by name.
        values: by the name of each FP8 weight, ``code * scale`` in fp32, computed in numpy.
    """

    tensors: dict[str, Tensor]
    values: dict[str, np.ndarray]


def cast(weight: Tensor, kind: str, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, np.ndarray]:
    """Codes, scales (multipliers of codes) and values; ``kind`` is ``tensor``, ``row`` or ``block``, or, in MX,
    ``group`` or ``square``, with the same scales in 32 rows."""
    x = weight.float().numpy()
    if kind in ("group", "square"):
        in_mx = cast_in_mx(x, kind == "square")
        codes, stored = (torch.from_numpy(array[: len(x)].copy()) for array in in_mx)
        return codes.view(torch.float8_e4m3fn), stored, values_in_mx(codes, stored)
    rows, columns = {"tensor": x.shape, "row": (1, x.shape[1]), "block": (128, 128)}[kind]
    amaxes = np.array([[np.abs(x[i : i + rows, j : j + columns]).max() for j in range(0, x.shape[1], columns)]
                       for i in range(0, x.shape[0], rows)])  # fmt: skip
    stored = torch.from_numpy(amaxes.astype(np.float32) / np.float32(448)).to(scale_dtype)
    of_elements = stored.float().numpy().repeat(rows, 0).repeat(columns, 1)[: x.shape[0], : x.shape[1]]
    codes = torch.from_numpy(np.clip(x / of_elements, -448, 448)).to(torch.float8_e4m3fn)
    values = code_values("e4m3")[codes.view(torch.uint8).numpy()].astype(np.float32) * of_elements
    return codes, stored.reshape(()) if kind == "tensor" else stored, values


def values_in_mx(codes: Tensor, scale: Tensor) -> np.ndarray:
    """``code * 2**(scale - 127)`` in fp32, a scale for every 32 elements of a row."""
    powers = np.exp2(scale.numpy().astype(np.float32) - 127).repeat(32, 1)[:, : codes.shape[1]]
    return code_values("e4m3")[codes.view(torch.uint8).numpy()].astype(np.float32) * powers


def in_linear(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is the weight of a layer that publishers quantize."""
    left = ("embed_tokens", "lm_head", ".gate.", "norm")
    return name.endswith("weight") and tensor.dim() == 2 and not any(part in name for part in left)


def quantized(
    tensors: Mapping[str, Tensor],
    kind: str = "block",
    scale_name: str = "weight_scale_inv",
    input_name: str | None = None,
    scale_dtype: torch.dtype = torch.float32,
) -> Written:
    """The tensors with those of linear layers in FP8, with scales, and static scales of inputs under ``input_name``."""
    entries: dict[str, Tensor] = {}
    values: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        entries[name] = tensor.detach().contiguous()
        if in_linear(name, tensor):
            path = name.removesuffix("weight")
            entries[name], entries[path + scale_name], values[name] = cast(tensor.detach(), kind, scale_dtype)
            if input_name is not None:
                entries[path + input_name] = torch.tensor(0.01)
    return Written(entries, values)


HF_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
HF_PER_TENSOR = {**HF_FP8, "activation_scheme": "static", "weight_block_size": None}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_quant_algo": None,
    "exclude_modules": ["lm_head"],
}


def compressed_tensors(strategy: str, dynamic: bool, **changes: Any) -> dict[str, Any]:
    """A config as ``llm-compressor`` writes it."""
    weights = {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        "group_size": None,
        "block_structure": [128, 128] if strategy == "block" else None,
        "observer": "minmax",
    }
    inputs = {**weights, "strategy": "token" if dynamic else "tensor", "dynamic": dynamic, "block_structure": None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*mlp.gate$"], "kv_cache_scheme": None,
            "global_compression_ratio": None, **changes}  # fmt: skip


def in_mxfp8(inputs: dict[str, Any] | None = None, weights: dict[str, Any] | None = None) -> dict[str, Any]:
    """A config of MXFP8, with changes."""
    config = compressed_tensors("group", True, format="mxfp8-quantized")
    group = config["config_groups"]["group_0"]
    changes = {"group_size": 32, "scale_dtype": "torch.uint8"}
    group["weights"] |= {**changes, **(weights or {})}
    group["input_activations"] |= {**changes, "strategy": "group", **(inputs or {})}
    return config


def write(folder: Path, tensors: Mapping[str, Tensor], quantization: Any, model: Any = None, shards: int = 1) -> Path:
    """Write a checkpoint; with several shards, tensors go to them in turn, so that no two neighbours are together."""
    folder.mkdir(exist_ok=True)
    config = {} if model is None else model.config.to_dict()
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
        return folder
    files = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    places = {name: files[at % shards] for at, name in enumerate(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if places[n] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
