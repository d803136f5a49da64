"""FP8 checkpoints as others publish them, written without our code: quantized in numpy, with the usual names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp8_numpy
import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

KINDS = ("tensor", "row", "block")
# no multiples of 128: in each dimension there is a block that is not complete
HIDDEN, INTERMEDIATE = 144, 272


def llama(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.1,
        dtype=dtype,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def quantized(weight: Tensor, kind: str, headroom: float = 1.0) -> tuple[Tensor, Tensor]:
    """Codes ``[N, K]`` and the scales of this kind; with ``headroom`` the codes do not reach the largest one."""
    rows, columns = {"tensor": weight.shape, "row": (1, weight.shape[1]), "block": (128, 128)}[kind]
    _, scale_inv = fp8_numpy.cast_in_blocks(weight.float().numpy(), "e4m3", rows, columns)
    scale_inv = scale_inv * np.float32(headroom)
    of_elements = scale_inv.repeat(rows, 0).repeat(columns, 1)[: weight.shape[0], : weight.shape[1]]
    codes = fp8_numpy.saturating_cast(weight.float().numpy(), np.float32(1) / of_elements, "e4m3")
    scale = torch.from_numpy(scale_inv)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), scale.reshape(()) if kind == "tensor" else scale


def values(codes: Tensor, scale: Tensor) -> Tensor:
    """``code * scale`` in fp32, from the definition of FP8."""
    numbers = fp8_numpy.code_values("e4m3")[codes.view(torch.uint8).numpy()].astype(np.float32)
    scales = scale.float().numpy()
    if scales.ndim == 2 and scales.shape != (len(numbers), 1):
        scales = scales.repeat(128, 0).repeat(128, 1)[: numbers.shape[0], : numbers.shape[1]]
    return torch.from_numpy(numbers * scales)


def is_quantized(name: str) -> bool:
    return "_proj" in name


def write(
    folder: Path,
    kind: str,
    state: dict[str, Tensor] | None = None,
    *,
    static: bool = False,
    layout: str | None = None,
    shards: int = 1,
    config: Any = None,
    scale_dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Write a checkpoint, by default of :func:`llama`; returns the values of all its weights.

    Blocks are those of Hugging Face, other scales those of compressed-tensors, unless ``layout`` is another one.
    """
    model = llama() if state is None else None
    layout = layout or ("hf-fp8" if kind == "block" else "compressed-tensors")
    of_weight, of_input = ("_scale_inv", "activation_scale") if layout == "hf-fp8" else ("_scale", "input_scale")
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, weight in (model.state_dict() if model is not None else state or {}).items():
        if not is_quantized(name):
            tensors[name] = plain[name] = weight.clone()
            continue
        # as of a program that leaves room: these codes would not come back from a cast of the values
        codes, scale = quantized(weight, kind, headroom=1.5)
        scale = scale.to(scale_dtype)
        tensors |= {name: codes, f"{name}{of_weight}": scale}
        if static:
            tensors[name.removesuffix("weight") + of_input] = torch.tensor(0.013)
        plain[name] = values(codes, scale)
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    parts = [names[at::shards] for at in range(shards)]
    files = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    )
    for file, part in zip(files, parts, strict=True):
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    if shards > 1:
        of_names = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        index = {"metadata": {"total_size": 1}, "weight_map": of_names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    base = config if config is not None else (model or llama()).config
    quantization = _hugging_face(kind, static) if layout == "hf-fp8" else _compressed(kind, static)
    (folder / "config.json").write_text(json.dumps({**base.to_dict(), "quantization_config": quantization}))
    return plain


def _hugging_face(kind: str, static: bool) -> dict[str, Any]:
    blocks = [128, 128] if kind == "block" else None
    scheme = "static" if static else "dynamic"
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": scheme, "weight_block_size": blocks}


def _compressed(kind: str, static: bool) -> dict[str, Any]:
    codes = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**codes, "dynamic": False, "strategy": "channel" if kind == "row" else kind}
    if kind == "block":
        weights["block_structure"] = [128, 128]
    inputs = {**codes, "dynamic": not static, "strategy": "tensor" if static else "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    method = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
    return {**method, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def with_values(plain: dict[str, Tensor], make: Callable[[], nn.Module] = llama) -> nn.Module:
    """A plain model with these values, frozen."""
    model = make()
    model.load_state_dict(plain)
    return model.requires_grad_(False)
