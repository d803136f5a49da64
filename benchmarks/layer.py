"""The suites ``linear``, ``layer`` and ``experts``: forward and backward of layers in training, in each precision.

``linear`` has linear layers and linear - GELU - linear with biases, eager. ``layer`` has one causal transformer layer,
eager and compiled: the block of the example GPT, of which the models of the suite ``train`` are made. All its GEMMs are
plain linear layers, which every variant converts; in torch's own encoder layer, torchao would leave the attention's
input projection in bf16. ``experts`` has those of a mixture, in all precisions with one product for all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks import gemm
from benchmarks.harness import Case
from benchmarks.settings import BF16, Setting, settings, with_kept_weights
from benchmarks.timing import Variant, copies_for
from benchmarks.training import Task, casts_are_served, variants
from lightning_fp8.examples.transformer_block import Block, initialize
from lightning_fp8.ops.cuda.groups import has_kernels


def linear_cases(device: torch.device) -> list[Case]:
    """The suite ``linear``; on the CPU tiny ones in place of training sizes."""
    if device.type != "cuda":
        return [linear(64, 32, 48), feed_forward(64, 32, 96)]
    attention = [linear(tokens, hidden, hidden) for hidden in (1024, 4096) for tokens in (2048, 8192)]
    return [*attention, linear(8192, 4096, 16384), linear(8192, 16384, 4096), feed_forward(8192, 4096, 16384)]


def cases(device: torch.device) -> list[Case]:
    """The suite ``layer``; on the CPU tiny, in place of 4096 wide with 8 sequences of 2048 tokens."""
    sizes = (4096, 32, 8, 2048) if device.type == "cuda" else (64, 4, 2, 32)
    return [transformer_layer(*sizes, compiled) for compiled in (False, True)]


def experts_cases(device: torch.device) -> list[Case]:
    """The suite ``experts``: the sizes of OLMoE 1B-7B; on the CPU tiny ones."""
    return [experts(8192, 2048, 1024, 64, 8) if device.type == "cuda" else experts(48, 64, 64, 4, 2)]


def linear(tokens: int, in_features: int, out_features: int) -> Case:
    """A linear layer."""
    gemms = gemm.of_layer(tokens, in_features, out_features)
    task = Task(lambda: nn.Linear(in_features, out_features), tokens, (tokens, in_features), out_features)
    name = f"linear, {tokens} tokens, {in_features} -> {out_features}"
    return _case(name, task, with_kept_weights, casts_are_served, gemms)


def feed_forward(tokens: int, width: int, hidden: int) -> Case:
    """Linear - GELU - linear."""
    gemms = (*gemm.of_layer(tokens, width, hidden), *gemm.of_layer(tokens, hidden, width))

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def is_served(device: torch.device) -> bool:
        return all(product.is_served(device) for product in gemms) and casts_are_served(device, "gelu")

    name = f"linear-GELU-linear, {tokens} tokens, {width} -> {hidden} -> {width}"
    return _case(name, Task(make, tokens, (tokens, width), width), settings, is_served, gemms)


def transformer_layer(width: int, heads: int, batch: int, time: int, compiled: bool) -> Case:
    """A transformer layer."""

    def make() -> nn.Module:
        block = Block(width, heads)
        initialize(block)
        return block

    name = f"layer {width} wide, {batch} x {time} tokens, {'compiled' if compiled else 'eager'}"
    task = Task(make, batch * time, (batch, time, width), width, compiled=compiled)
    return _case(name, task, settings, casts_are_served)


class Experts(nn.Module):
    """Experts with a gate, and a routing at random that stays the same."""

    def __init__(self, tokens: int, width: int, hidden: int, number: int, top_k: int) -> None:
        from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

        super().__init__()
        config = MixtralConfig(num_local_experts=number, hidden_size=width, intermediate_size=hidden)
        config._experts_implementation = "grouped_mm"
        self.experts = MixtralExperts(config)
        for weight in self.experts.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        weights, index = torch.rand(tokens, number).softmax(-1).topk(top_k)
        self.register_buffer("index", index, persistent=False)
        self.register_buffer("weights", weights, persistent=False)
        self.casts_weights = False

    def forward(self, x: Tensor) -> Tensor:
        """``[T, H]`` for x ``[T, H]``."""
        routed = (x, self.index, self.weights)
        if not self.casts_weights:
            return self.experts(*routed)  # type: ignore[no-any-return]
        weights = {name: weight.to(x.dtype) for name, weight in self.experts.named_parameters()}
        return functional_call(self.experts, weights, routed)  # type: ignore[no-any-return]


def experts(tokens: int, width: int, hidden: int, number: int, top_k: int) -> Case:
    """The experts of a mixture."""

    def cast_weights(model: nn.Module) -> nn.Module:
        # autocast leaves products of groups in fp32
        model.casts_weights = True  # type: ignore[assignment]
        return model

    def with_casts(device: torch.device) -> dict[str, Setting]:
        # torchao leaves experts in bf16
        setups = {name: setup for name, setup in with_kept_weights(device).items() if not name.startswith("torchao")}
        return setups | {name: setups[name]._replace(prepare=cast_weights) for name in (BF16,) if name in setups}

    def is_served(device: torch.device) -> bool:
        dtypes = (torch.bfloat16, torch.bfloat16, torch.float32)
        return has_kernels(device, dtypes, ("e4m3", "e5m2"), (width, hidden))

    name = f"experts, {tokens} tokens, {top_k} of {number}, {width} -> {hidden}"
    task = Task(lambda: Experts(tokens, width, hidden, number, top_k), tokens, (tokens, width), width)
    return _case(name, task, with_casts, is_served)


def _case(
    name: str,
    task: Task,
    settings: Callable[[torch.device], dict[str, Setting]],
    is_served: Callable[[torch.device], bool],
    gemms: Sequence[gemm.Gemm] = (),
) -> Case:
    def case_variants(device: torch.device) -> list[Variant]:
        # input and output in bf16, their gradients too
        copies = copies_for(4 * task.tokens * (task.shape[-1] + task.out_features), device)
        return variants(task._replace(copies=copies), settings(device), device)

    return Case(name, case_variants, is_served, flops=sum(product.flops for product in gemms) or None)
