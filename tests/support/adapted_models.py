"""Small models of ``transformers`` with adapters of ``peft``, converted before or after the adapters are added."""

from __future__ import annotations

from typing import Any

import torch
import transformer_models
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from lightning_fp8 import convert, scaling_state

TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "gate_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc", "c_proj"],
}
ORDERS = ["converted first", "adapted first", "plain"]


def base(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model that always has the same weights, and its batch."""
    torch.manual_seed(3)
    pair: tuple[nn.Module, dict[str, Tensor]] = getattr(transformer_models, name)()
    return pair


def with_adapters(model: nn.Module, name: str, **config: Any) -> PeftModel:
    """The model with nonzero adapters, always the same."""
    torch.manual_seed(4)
    settings = {"r": 16, "target_modules": TARGETS[name], "init_lora_weights": False, "fan_in_fan_out": name == "gpt2"}
    return get_peft_model(model, LoraConfig(**{**settings, **config}))  # type: ignore[arg-type]


def adapted(name: str, order: str, **config: Any) -> tuple[PeftModel, dict[str, Tensor]]:
    """A model with adapters; converted before or after they are added, or not at all."""
    model, batch = base(name)
    if order == "converted first":
        convert(model)
    peft_model = with_adapters(model, name, **config)
    if order == "adapted first":
        convert(peft_model)
    return peft_model.train(), batch


def step(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """The loss and the gradients of one forward and backward, after which the scales are updated."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    scaling_state(model).update()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def base_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that have adapters."""
    return [module for path, module in model.named_modules() if path.endswith(".base_layer")]


def adapter_layers(model: nn.Module) -> list[nn.Module]:
    """The small matrices, identified by PEFT's own names."""
    return [module for path, module in model.named_modules() if ".lora_" in path and isinstance(module, nn.Linear)]
