"""FP8 checkpoints of transformers' models: our values are those of transformers' own loader, bit for bit."""

from __future__ import annotations

from pathlib import Path

import fp8_checkpoints
import pytest
import torch
import transformers
from fp8_checkpoints import HF_FP8, model_of, published, quantized, write
from pairwise import pairwise
from torch import nn

from lightning_fp8 import convert, load_exported, scaling_state
from lightning_fp8.modules.fp8_parameter import Fp8Parameter
from lightning_fp8.scalings.per_block import BlockScaling


def own_loader(folder: Path, dtype: torch.dtype) -> nn.Module:
    """What transformers reads, dequantized."""
    config = transformers.FineGrainedFP8Config(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)


def empty(name: str, how: str, dtype: torch.dtype) -> nn.Module:
    """A model to load into."""
    if how == "meta":
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(fp8_checkpoints.CONFIGS[name](), dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_config(fp8_checkpoints.CONFIGS[name](), dtype=dtype)
    for name in model._keep_in_fp32_modules_strict or ():
        for part in model.modules():
            if name in part._buffers:
                # as in `from_pretrained`, unlike `from_config`
                part._buffers[name] = part._buffers[name].float()
    return model if how == "plain" else convert(model, BlockScaling())


def in_fp8(model: nn.Module) -> dict[str, Fp8Parameter]:
    return {name: one for name, one in model.named_parameters() if isinstance(one, Fp8Parameter)}


def same_state(model: nn.Module, expected: nn.Module) -> None:
    found = model.state_dict()
    assert found.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    for (name, one), (_, other) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("name", "how", "frozen"), pairwise([*fp8_checkpoints.CONFIGS], ["meta", "plain", "converted"], [True, False])
)
def test_values_are_those_of_transformers(name: str, how: str, frozen: bool, tmp_path: Path) -> None:
    dtype = torch.float32 if how == "plain" else torch.bfloat16
    # tensors outside of FP8 keep the dtype of the file in transformers, and the model's dtype here
    model = model_of(name, dtype)
    write(tmp_path, quantized(published(model), scale_dtype=torch.bfloat16).tensors, HF_FP8, model, shards=3)
    loaded = load_exported(empty(name, how, dtype), tmp_path, frozen=frozen)
    same_state(loaded, own_loader(tmp_path, dtype))
    assert isinstance(scaling_state(loaded).recipe, BlockScaling)
    held = in_fp8(loaded)
    assert bool(held) == frozen
    assert all(one.requires_grad != frozen for one in loaded.parameters())
    if frozen:
        bytes_held = sum(one.payload.nbytes + one.scale_inv.nbytes for one in held.values())
        assert bytes_held <= 1.02 * sum(one.numel() for one in held.values())
        with torch.no_grad():
            tokens = torch.arange(12)[None]
            assert loaded(tokens).logits.isfinite().all()
