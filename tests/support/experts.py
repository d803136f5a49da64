"""Small experts and mixtures of experts of transformers 5, and the same experts as separate linear layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

pytest.importorskip("transformers.integrations.moe", reason="before transformers 5 experts are linear layers")

from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

EXPERTS, WIDTH, HIDDEN, TOKENS, TOP_K = 4, 32, 24, 12, 2
FORMS: dict[str, type[nn.Module]] = {
    "gate": MixtralExperts,
    "limited gate": DeepseekV4Experts,
    "no gate": NemotronHExperts,
    "transposed": AriaExperts,
    "transposed, biases, interleaved gate": GptOssExperts,
}


def experts(form: str = "gate", implementation: str = "eager") -> Any:
    """Experts with random weights."""
    config = SimpleNamespace(
        num_local_experts=EXPERTS, n_routed_experts=EXPERTS, hidden_size=WIDTH, intermediate_size=HIDDEN,
        moe_intermediate_size=HIDDEN, moe_num_experts=EXPERTS, moe_latent_size=None, hidden_act="silu",
        mlp_hidden_act="relu2", swiglu_alpha=1.7, swiglu_limit=20.0, _experts_implementation=implementation,
    )  # fmt: skip
    module = FORMS[form](config)
    for parameter in module.parameters():
        # the experts differ in their scales
        nn.init.normal_(parameter)
        parameter.data *= (0.1 * 3.0 ** torch.arange(EXPERTS)).view(-1, *[1] * (parameter.dim() - 1))
    return module


def routing(*without: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """``top_k_index [T, K]``, in which the experts ``without`` do not occur, and ``top_k_weights [T, K]``."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(TOKENS, EXPERTS, generator=generator)
    chances[:, list(without)] = -1.0
    return chances.topk(TOP_K).indices, torch.rand(TOKENS, TOP_K, generator=generator)


class Separate(nn.Module):
    """Experts with a gate as separate linear layers, with copies of the weights."""

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        for name in ("gate_up_proj", "down_proj"):
            weights = getattr(stacked, name).mT if stacked.is_transposed else getattr(stacked, name)
            layers = [nn.Linear(*reversed(weight.shape), bias=stacked.has_bias) for weight in weights]
            for number, layer in enumerate(layers):
                layer.weight.data.copy_(weights[number])
                if stacked.has_bias:
                    layer.bias.data.copy_(getattr(stacked, f"{name}_bias")[number])
            self.add_module(name, nn.ModuleList(layers))
        self.is_gpt_oss = isinstance(stacked, GptOssExperts)

    def gate(self, h: Tensor) -> Tensor:
        """Of gpt-oss: interleaved, limited to 20, with a sigmoid of 1.7 times its input; else concatenated, SiLU."""
        if not self.is_gpt_oss:
            a, b = h.chunk(2, dim=-1)
            return nn.functional.silu(a) * b
        a, b = h.unflatten(-1, (-1, 2)).unbind(-1)
        a, b = a.clamp(max=20.0), b.clamp(-20.0, 20.0)
        return (b + 1) * (a * torch.sigmoid(a * 1.7))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The definition, token by token and choice by choice; x ``[T, H]``."""
        outputs = [[torch.empty(0)] * TOP_K for _ in x]
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            places = (index == expert).nonzero().tolist()
            if places:
                y = down(self.gate(gate_up(torch.stack([x[token] for token, _ in places]))))
                for (token, choice), row in zip(places, y, strict=True):
                    outputs[token][choice] = row * weights[token, choice, None]
        return torch.stack([torch.stack(rows).sum(0) for rows in outputs]).to(x.dtype)

    def gradient(self, name: str, of: str = "weight") -> Tensor:
        """The gradient of the weights of all experts, ``[E, N, K]``, or biases; zeros for those without a token."""
        weights = [getattr(layer, of) for layer in getattr(self, name)]
        return torch.stack([torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights])


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
