"""The models of ``benchmarks.model_losses``, and what each learns: small transformers models, pairs, and graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from benchmarks.graph_networks import KINDS, communities, graph, network
from benchmarks.pairs import distances, pairs

VOCABULARY = 96
_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_EXPERTS = {"num_experts_per_tok": 2, "num_key_value_heads": 2, "intermediate_size": 128}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
_LATENT |= {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
# by class, the fields of its configuration
DECODERS: dict[str, dict[str, Any]] = {
    "GptOss": {**_EXPERTS, "num_local_experts": 4, "head_dim": 16},
    "Qwen3Moe": {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 64, "head_dim": 16},
    "GraniteMoe": {**_EXPERTS, "num_local_experts": 4},
    "DeepseekV3": _EXPERTS | _LATENT | {"n_routed_experts": 4, "moe_intermediate_size": 64, "first_k_dense_replace": 1},
    "Falcon": {"ffn_hidden_size": 256},
}
_LLAMA = {"num_key_value_heads": 2, "intermediate_size": 128}


class Task(NamedTuple):
    """A model, and what it learns.

    Attributes:
        build: gives the model with random weights.
        loss: of the model, for the batch of a seed and step; called under autocast.
        packages: that it needs, apart from those of the tests.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], Tensor]
    packages: tuple[str, ...] = ()


def decoder(name: str, **fields: Any) -> nn.Module:
    """A model of transformers with random weights; it takes up to ``VOCABULARY`` different tokens."""
    config = getattr(transformers, f"{name}Config")(**_SIZES, **(fields or DECODERS[name]))
    config._attn_implementation = "eager"
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def normalised_llama(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """A Llama with a parametrization in each of its linear layers."""
    model = decoder("Llama", **_LLAMA)
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        norm(layer)
    return model


def loss_of_tokens(model: nn.Module, seed: int, step: int) -> Tensor:
    """Three times in four a token follows from the one before it, else from nothing."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    tokens = torch.randint(VOCABULARY, (8, 32), generator=generator)
    follows = torch.rand(8, 32, generator=generator) < 0.75
    for at in range(1, 32):
        tokens[:, at] = torch.where(follows[:, at], (tokens[:, at - 1] * 7 + 5) % VOCABULARY, tokens[:, at])
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def loss_of_pairs(model: nn.Module, seed: int, step: int) -> Tensor:
    """Of the distances that the model does not see."""
    seen, bins, is_hidden = distances(1000 * seed + step)
    return nn.functional.cross_entropy(model(seen)[is_hidden].float(), bins[is_hidden])


def loss_of_graph(kind: str, model: nn.Module, seed: int, step: int) -> Tensor:
    """Of the classes of all nodes of a graph."""
    # PNA learns communities so unsteadily that five seeds hide what a precision costs; GCN and GAT learn few sums
    x, edges, labels = (graph if kind == "PNA" else communities)(1000 * seed + step)
    return nn.functional.cross_entropy(model(x, edges).float(), labels)


TASKS = {
    **{name: Task(partial(decoder, name), loss_of_tokens) for name in DECODERS},
    "LlamaWeightNorm": Task(partial(normalised_llama, parametrizations.weight_norm), loss_of_tokens),
    "LlamaSpectralNorm": Task(partial(normalised_llama, parametrizations.spectral_norm), loss_of_tokens),
    "Pairs": Task(pairs, loss_of_pairs),
    **{kind: Task(partial(network, kind), partial(loss_of_graph, kind), ("torch_geometric",)) for kind in KINDS},
}
