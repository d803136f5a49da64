"""A small Llama as an FP8 checkpoint of each kind, whose codes would not come back from a cast of the values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fp8_checkpoints import (
    HF_FP8,
    HF_PER_TENSOR,
    compressed_tensors,
    in_linear,
    in_mxfp8,
    model_of,
    quantized,
    values_in_mx,
    write,
)
from fp8_numpy import code_values
from torch import Tensor

KINDS = ("tensor", "row", "block", "group")
STRATEGIES = {"tensor": "tensor", "row": "channel", "block": "block"}


def llama(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """Sizes that are no multiples of 128: in each dimension there is a block that is not complete."""
    return model_of("llama", dtype, **{"hidden_size": 144, "intermediate_size": 272, **changes})


def values(codes: Tensor, scale: Tensor) -> Tensor:
    """``code * scale`` in fp32, from the definition of FP8; a scale for the whole, each row, or 128 x 128; or in MX."""
    if scale.dtype == torch.uint8:
        return torch.from_numpy(values_in_mx(codes, scale))
    numbers = torch.from_numpy(code_values("e4m3")).float()[codes.view(torch.uint8).int()]
    scale = scale.float()
    if scale.dim() == 2 and scale.shape != (len(codes), 1):
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]
    return numbers * scale


def write_base(
    folder: Path,
    kind: str,
    *,
    static: bool = False,
    layout: str | None = None,
    shards: int = 1,
    scale_dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Write a checkpoint of :func:`llama`; returns the values of all its weights.

    Blocks are those of Hugging Face, other scales those of compressed-tensors, unless ``layout`` is another one.
    """
    layout = layout or ("hf-fp8" if kind == "block" else "compressed-tensors")
    model, as_transformers = llama(), layout == "hf-fp8"
    scale_name = "weight_scale_inv" if as_transformers else "weight_scale"
    of_input = ("activation_scale" if as_transformers else "input_scale") if static else None
    tensors = quantized(model.state_dict(), kind, scale_name, of_input, scale_dtype).tensors
    plain = {}
    for name, tensor in model.state_dict().items():
        plain[name] = tensor
        if in_linear(name, tensor):
            # as of a program that leaves room above the largest value: the largest code is 416
            codes = tensors[name].view(torch.uint8)
            codes -= ((codes & 0x7F) == 0x7E).to(torch.uint8)
            plain[name] = values(codes, tensors[name.removesuffix("weight") + scale_name])
    scheme = "static" if static else "dynamic"
    of_hf = HF_FP8 if kind == "block" else {**HF_PER_TENSOR, "activation_scheme": scheme}
    in_mx = kind in ("group", "square")
    of_others = in_mxfp8() if in_mx else compressed_tensors(STRATEGIES[kind], not static)
    write(folder, tensors, of_hf if as_transformers else of_others, model, shards)
    return plain
