"""A frozen base in FP8 under PEFT: LoRA and DoRA train as on masters, and merges lose nothing to rounding."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from frozen_models import ADAPTERS, frozen_weights
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lightning_fp8 import convert, scaling_state

IDS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))


def llama() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=64, tie_word_embeddings=True))


def gpt2() -> PreTrainedModel:
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, vocab_size=64, **dropouts))


def adapted(make: Callable[[], PreTrainedModel], **config: Any) -> Any:
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "down_proj"] if make is llama else ["c_attn", "c_proj"]
    config = {"r": 4, "target_modules": targets, "fan_in_fan_out": make is gpt2, **config}
    return peft.get_peft_model(make(), peft.LoraConfig(**config, init_lora_weights=False))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def losses(model: Any, steps: int = 3) -> list[float]:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.train()(input_ids=IDS, labels=IDS).loss
        loss.backward()
        scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    model.eval()
    return found


@pytest.mark.parametrize(("make", "safe"), [(llama, False), (gpt2, True)])
def test_merged_weights_are_not_rounded(make: Callable[[], PreTrainedModel], safe: bool, tmp_path: Path) -> None:
    model = convert(adapted(make), ignore_modules=ADAPTERS, frozen_weights="fp8")
    losses(model, steps=1)
    base = {name: weight.dequantized().clone() for name, weight in frozen_weights(model).items()}
    deltas = {
        f"{path}.base_layer.weight": layer.get_delta_weight("default").detach()
        for path, layer in model.named_modules()
        if hasattr(layer, "get_delta_weight")
    }
    before, scales = logits(model), scaling_state(model).state_dict()
    with model.disable_adapter():
        disabled = logits(model)
    assert not torch.equal(before, disabled)
    model.save_pretrained(tmp_path / "adapter")
    model.merge_adapter(safe_merge=safe)
    with pytest.warns(UserWarning, match="has been changed in place, as by merging an adapter"):
        logits(model)
    for name, weight in frozen_weights(model).items():
        assert weight.is_fp8 == (name not in deltas)
        if name in deltas:
            assert torch.equal(weight.dequantized(), base[name] + deltas[name])
    unmerged = copy.deepcopy(model)
    unmerged.unmerge_adapter()
    for name in deltas:
        assert torch.allclose(frozen_weights(unmerged)[name].dequantized(), base[name], rtol=0, atol=1e-7)
    convert(unmerged, ignore_modules=ADAPTERS)
    assert all(weight.is_fp8 for weight in frozen_weights(unmerged).values())
    # the histories belong to the merged weights no longer: all tensors have scales of their own
    assert (logits(unmerged) - before).norm() < 0.06 * before.norm()
    # the sum is saved in the masters' dtype, and loads into a plain model
    model.unmerge_adapter()
    sums = {name: frozen_weights(model)[name].dequantized() + delta for name, delta in deltas.items()}
    merged = model.merge_and_unload(safe_merge=safe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged.save_pretrained(tmp_path / "merged")
    plain = type(merged).from_pretrained(tmp_path / "merged")
    for name, expected in sums.items():
        path = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(plain.get_parameter(path), expected)
    # and the adapter loads onto another FP8 base
    torch.manual_seed(0)
    again = peft.PeftModel.from_pretrained(make(), tmp_path / "adapter")
    again = convert(again, ignore_modules=ADAPTERS, frozen_weights="fp8")
    again.eval()
    scaling_state(again).load_state_dict(scales)
    assert torch.equal(logits(again), before)
