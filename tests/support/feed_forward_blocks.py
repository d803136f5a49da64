"""Feed-forward blocks as models write them, with random weights; and the same without fusion."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8 import convert
from lightning_fp8.modules.class_swap import exchange_class
from lightning_fp8.modules.fused_blocks import Fp8FeedForward

WIDTH, HIDDEN = 32, 48


def sequential(activation: nn.Module, dropout: float | None = None, bias: bool = True) -> nn.Module:
    between = [] if dropout is None else [nn.Dropout(dropout)]
    parts = [nn.Linear(WIDTH, HIDDEN, bias), activation, *between, nn.Linear(HIDDEN, WIDTH, bias)]
    return nn.Sequential(nn.LayerNorm(WIDTH), *parts, nn.LayerNorm(WIDTH))


def gpt2(activation: str = "gelu_new", dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    mlp = GPT2MLP(HIDDEN, GPT2Config(n_embd=WIDTH, activation_function=activation, resid_pdrop=dropout))
    # BERT's own initialization leaves the biases at 0
    return nn.Sequential(mlp).apply(_with_biases)


def llama(activation: str = "silu", bias: bool = False) -> nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    return LlamaMLP(
        LlamaConfig(hidden_size=WIDTH, intermediate_size=HIDDEN, hidden_act=activation, mlp_bias=bias)
    ).apply(_with_biases)


def phi3(hidden: int = HIDDEN) -> nn.Module:
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3MLP

    return Phi3MLP(Phi3Config(hidden_size=WIDTH, intermediate_size=hidden, pad_token_id=0))


def vit(activation: str = "gelu") -> nn.Module:
    from transformers import ViTConfig
    from transformers.models.vit.modeling_vit import ViTMLP

    return ViTMLP(ViTConfig(hidden_size=WIDTH, intermediate_size=HIDDEN, hidden_act=activation))


class BertFeedForward(nn.Module):
    """The part of a BERT layer after its attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertLayer

        self.layer = BertLayer(
            BertConfig(hidden_size=WIDTH, intermediate_size=HIDDEN, num_attention_heads=2, hidden_dropout_prob=dropout)
        )
        # without parameters that get no gradient
        self.layer.attention = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer.feed_forward_chunk(x)


def encoder(activation: str = "gelu") -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, 0.0, activation, batch_first=True)


class Mine(nn.Module):
    """A user's copy of ViT's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.activation_fn, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, hidden_states: Tensor | None) -> Tensor:
        """With a docstring, and other annotations."""
        hidden_states = self.fc1(hidden_states)
        # and a comment
        hidden_states = self.activation_fn(hidden_states)
        hidden_states = self.fc2(hidden_states)
        return hidden_states


class Scaled(Mine):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 2 * self.fc2(self.activation_fn(self.fc1(hidden_states)))


class SequentialOfAnotherKind(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: sequential(nn.ReLU()),
    "gelu": lambda: sequential(nn.GELU(), dropout=0.0),
    "silu": lambda: sequential(nn.SiLU(), bias=False),
    "GPT-2": lambda: gpt2("gelu_pytorch_tanh"),
    "Llama": llama,
    "Llama with biases": lambda: llama(bias=True),
    "Phi-3": phi3,
    "ViT": vit,
    "BERT": BertFeedForward,
    "encoder layer": encoder,
}


def _with_biases(module: nn.Module) -> None:
    if getattr(module, "bias", None) is not None:
        nn.init.normal_(module.bias)


def converted(make: Callable[[], nn.Module], **settings: Any) -> nn.Module:
    """The converted block."""
    torch.manual_seed(0)
    return convert(make(), **settings)


def part_by_part(model: nn.Module) -> nn.Module:
    """A copy whose modules have separate subclasses, so that they run their own forwards."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, Fp8FeedForward):
            exchange_class(module, module.plain_class)
    return model
