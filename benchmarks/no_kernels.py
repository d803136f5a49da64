"""The CUDA half of the package on CPU tensors, with kernels that do nothing, to measure the host's work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernels_cuda.launch import Kernel
from lightning_fp8 import scaling_state
from lightning_fp8.ops import library
from lightning_fp8.ops.cuda import kernels


class NoKernel(Kernel):
    """Packs its arguments like any kernel, but launches nothing."""

    def _load(self) -> None:
        self._launch_kernel = self._set_context = lambda *_: None
        self._current_device = lambda: 0
        self._current_stream = lambda device: 0
        self._pointer, self.multiprocessors = 0, 132


def no_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: object, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    """An uninitialized tensor with the shape and dtype of ``torch._scaled_mm``'s result."""
    columns = b.shape[1]
    return torch.empty_strided((a.shape[0], columns), (columns, 1), dtype=out_dtype, device=a.device)


def no_kernel(variant: kernels.Variant, device: torch.device) -> Kernel:
    """The replacement of every kernel."""
    return NoKernel(None, variant.layout, variant.block, 0, variant.shared_bytes)


def serve_cpu(
    obtain: Callable[[kernels.Variant, torch.device], Kernel] = no_kernel,
    scaled_mm: Callable[..., Tensor] = no_scaled_mm,
) -> None:
    """Let the CUDA half serve CPU tensors, for the rest of the process, with these kernels and this FP8 GEMM."""
    library.cuda_on_cpu = True
    kernels._obtain = obtain  # type: ignore[assignment]
    torch._scaled_mm = scaled_mm  # type: ignore[assignment]


def set_steady_state(model: nn.Module) -> None:
    """Fill every tensor's history as a training step does; kernels that do nothing do not write it."""
    state = scaling_state(model)
    state.amax_history.fill_(1)
    state.model._known[:] = True


class LlamaBlock(nn.Module):
    """A layer of Hugging Face's Llama; x ``[batch, time, width]``."""

    def __init__(self, width: int, hidden: int, heads: int, time: int) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        super().__init__()
        sizes: Any = {"num_attention_heads": heads, "num_key_value_heads": heads}
        config = LlamaConfig(hidden_size=width, intermediate_size=hidden, **sizes)
        config._attn_implementation = "sdpa"
        self.layer = LlamaDecoderLayer(config, 0)
        with torch.no_grad():
            self.rotary = LlamaRotaryEmbedding(config)(torch.zeros(1, time, width), torch.arange(time)[None])

    def forward(self, x: Tensor) -> Tensor:
        """x -> the same shape."""
        y = self.layer(x, position_embeddings=self.rotary)
        return y[0] if isinstance(y, tuple) else y
