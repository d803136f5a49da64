"""Small experts and mixtures of experts of transformers 5, and the same experts as separate linear layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

pytest.importorskip("transformers.integrations.moe", reason="before transformers 5 experts are linear layers")

from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

EXPERTS, WIDTH, HIDDEN, TOKENS, TOP_K = 4, 32, 24, 12, 2
FORMS: dict[str, type[nn.Module]] = {
    "gate": MixtralExperts,
    "limited gate": DeepseekV4Experts,
    "no gate": NemotronHExperts,
}


def experts(form: str = "gate", implementation: str = "eager") -> Any:
    """Experts with random weights."""
    config = SimpleNamespace(
        num_local_experts=EXPERTS, n_routed_experts=EXPERTS, hidden_size=WIDTH, intermediate_size=HIDDEN,
        moe_intermediate_size=HIDDEN, moe_latent_size=None, hidden_act="silu", mlp_hidden_act="relu2",
        swiglu_limit=20.0, _experts_implementation=implementation,
    )  # fmt: skip
    made = FORMS[form](config)
    for parameter in made.parameters():
        # the experts differ in their scales
        nn.init.normal_(parameter)
        parameter.data *= (0.1 * 3.0 ** torch.arange(EXPERTS))[:, None, None]
    return made


def routing(*without: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """``top_k_index [T, K]``, in which the experts ``without`` do not occur, and ``top_k_weights [T, K]``."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(TOKENS, EXPERTS, generator=generator)
    chances[:, list(without)] = -1.0
    return chances.topk(TOP_K).indices, torch.rand(TOKENS, TOP_K, generator=generator)


class Separate(nn.Module):
    """The experts of class ``MixtralExperts`` as separate linear layers, with copies of the weights."""

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        for name in ("gate_up_proj", "down_proj"):
            layers = [nn.Linear(*reversed(weight.shape), bias=False) for weight in getattr(stacked, name)]
            for layer, weight in zip(layers, getattr(stacked, name), strict=True):
                layer.weight.data.copy_(weight)
            self.add_module(name, nn.ModuleList(layers))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The definition, token by token and choice by choice; x ``[T, H]``."""
        outputs = [[torch.empty(0)] * TOP_K for _ in x]
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            places = (index == expert).nonzero().tolist()
            if places:
                a, b = gate_up(torch.stack([x[token] for token, _ in places])).chunk(2, dim=-1)
                y = down(nn.functional.silu(a) * b)
                for (token, choice), row in zip(places, y, strict=True):
                    outputs[token][choice] = row * weights[token, choice, None]
        return torch.stack([torch.stack(rows).sum(0) for rows in outputs]).to(x.dtype)

    def gradient(self, name: str) -> Tensor:
        """The gradient of the weights of all experts, ``[E, N, K]``; zeros for those without a token."""
        weights = [layer.weight for layer in getattr(self, name)]
        return torch.stack([torch.zeros_like(one) if one.grad is None else one.grad for one in weights])


def mixtral(**settings: Any) -> Any:
    """A Mixtral of 2 layers with 4 experts each; 79% of the parameters are experts."""
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=16, bos_token_id=1, eos_token_id=2,
        **settings,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def token_batch(seed: int = 0) -> dict[str, Tensor]:
    """Token ids that are also the labels."""
    ids = torch.randint(96, (4, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}
