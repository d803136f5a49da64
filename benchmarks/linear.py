"""The suite ``linear``: eager forward and backward of linear layers and of linear - GELU - linear, including casts.

Whole iterations are timed on the wall clock, including host time: in eager training, small layers wait for the host.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import gemm, iteration
from benchmarks.baselines import torchao_precisions
from benchmarks.case import Case
from benchmarks.iteration import Precision
from lightning_fp8.conversion.convert import convert
from lightning_fp8.modules.feed_forward import fp8_feed_forward
from lightning_fp8.ops.cuda import kernels
from lightning_fp8.tools.timing import Variant


def cases(device: torch.device) -> list[Case]:
    """All cases of the suite; on the CPU tiny ones in place of training sizes."""
    if device.type != "cuda":
        return [Linear(64, 32, 48), FeedForward(64, 32, 96)]
    attention = [Linear(tokens, hidden, hidden) for hidden in (1024, 4096) for tokens in (2048, 8192)]
    return [*attention, Linear(8192, 4096, 16384), Linear(8192, 16384, 4096), FeedForward(8192, 4096, 16384)]


@dataclass(frozen=True)
class Linear:
    """A linear layer with a bias; its input and weights require gradients.

    Attributes:
        tokens: rows of the input.
        in_features: columns of the input.
        out_features: columns of the output.
    """

    tokens: int
    in_features: int
    out_features: int

    bytes = None

    @property
    def name(self) -> str:
        """Sizes."""
        return f"linear, {self.tokens} tokens, {self.in_features} -> {self.out_features}"

    @property
    def flops(self) -> int:
        """FLOPs of its three GEMMs."""
        return sum(one.flops for one in gemm.of_layer(self.tokens, self.in_features, self.out_features))

    def is_served(self, device: torch.device) -> bool:
        """Whether there are kernels for all of its casts, or none are expected."""
        return device.type != "cuda" or casts_are_served(device)

    def variants(self, device: torch.device) -> list[Variant]:
        """``lightning_fp8``, with changed weights and with unchanged ones (already cast), torchao, and bf16."""
        precisions = {
            "lightning_fp8": Precision(convert, in_fp8=True),
            "lightning_fp8 same weights": Precision(convert, in_fp8=True, weights_change=False),
            **torchao_precisions(device),
            **iteration.bf16_precisions(),
        }
        sizes = (self.in_features, self.out_features)
        return iteration.variants_of(lambda: nn.Linear(*sizes), (self.tokens, *sizes), precisions, device)


@dataclass(frozen=True)
class FeedForward:
    """Linear - GELU - linear with biases; its input and weights require gradients.

    Attributes:
        tokens: rows of the input.
        width: columns of the input and of the output.
        hidden: columns between the two.
    """

    tokens: int
    width: int
    hidden: int

    bytes = None

    @property
    def name(self) -> str:
        """Sizes."""
        return f"linear-GELU-linear, {self.tokens} tokens, {self.width} -> {self.hidden} -> {self.width}"

    @property
    def flops(self) -> int:
        """FLOPs of its six GEMMs."""
        return sum(one.flops for one in self._gemms)

    @property
    def _gemms(self) -> tuple[gemm.Gemm, ...]:
        up, down = (self.tokens, self.width, self.hidden), (self.tokens, self.hidden, self.width)
        return (*gemm.of_layer(*up), *gemm.of_layer(*down))

    def is_served(self, device: torch.device) -> bool:
        """Whether there are kernels for all of its casts and GEMMs, or none are expected."""
        if device.type != "cuda":
            return True
        return all(one.is_served(device) for one in self._gemms) and casts_are_served(device, "gelu")

    def variants(self, device: torch.device) -> list[Variant]:
        """``lightning_fp8`` with our GEMMs, and with cuBLASLt's; torchao and bf16."""
        precisions = {
            "lightning_fp8": Precision(functools.partial(_as_one, gemm="rawkernel"), in_fp8=True),
            "lightning_fp8 cublaslt": Precision(functools.partial(_as_one, gemm="cublaslt"), in_fp8=True),
            **torchao_precisions(device),
            **iteration.bf16_precisions(),
        }
        sizes = (self.tokens, self.width, self.width)
        return iteration.variants_of(lambda: Block(self.width, self.hidden), sizes, precisions, device)


class Block(nn.Module):
    """Linear - GELU - linear.

    Args:
        width: columns of the input and of the output.
        hidden: columns between the two.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.as_one = False

    def forward(self, x: Tensor) -> Tensor:
        """x ``[*, width]`` -> ``[*, width]``."""
        if self.as_one:
            return fp8_feed_forward(self.first, "gelu", self.second, x)  # type: ignore[arg-type]
        return self.second(F.gelu(self.first(x)))


def _as_one(block: Block, gemm: str) -> Block:
    block.as_one = True
    return convert(block, gemm=gemm)


def casts_are_served(device: torch.device, activation: str = "none") -> bool:
    """Whether there are kernels for the casts of inputs, gradients and weights, also through an activation."""
    between = set() if activation == "none" else {("e4m3", activation, False), ("e5m2", activation, True)}
    casts = {("e4m3", "none", False), ("e5m2", "none", False)} | between
    served = all(kernels.cast_kernel(device, torch.bfloat16, *cast) is not None for cast in sorted(casts))
    return served and kernels.weights_kernel(device, False) is not None
