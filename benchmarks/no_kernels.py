"""The CUDA half of the package on CPU tensors, with kernels that do nothing: what the host does, and how often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels_cuda.launch import Kernel
from lightning_fp8 import ops
from lightning_fp8.ops import library
from lightning_fp8.ops.cuda import dispatch as cuda
from lightning_fp8.ops.cuda import gemm, kernels

# each operator of a device, and what serves it on CUDA
OPERATORS: list[tuple[library.Operator, Callable[..., Any]]] = [
    (ops.cast, cuda.cast),
    (ops.cast_weight, cuda.cast_weight),
    (ops.scaled_mm, gemm.scaled_mm),
    (ops.scaled_mm_add_, gemm.scaled_mm_add_),
    (ops.linear_backward, cuda.linear_backward),
    (ops.update_scales, cuda.update_scales),
]
# by which compiled graphs find it
_OVERRIDES = torch.library.Library("lightning_fp8", "IMPL")


class NoKernel(Kernel):
    """Packs its arguments as any kernel does, and launches nothing."""

    def _load(self) -> None:
        self._launch_kernel = self._set_context = lambda *_: None
        self._current_device = lambda: 0
        self._current_stream = lambda device: 0
        self._pointer, self.multiprocessors = 0, 132


def no_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: object, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    """The shape and dtype of ``torch._scaled_mm``, and no numbers."""
    columns = b.shape[1]
    return torch.empty_strided((a.shape[0], columns), (columns, 1), dtype=out_dtype, device=a.device)


def no_kernel(variant: kernels.Variant, device: torch.device) -> Kernel:
    """In the place of every kernel."""
    return NoKernel(None, variant.layout, variant.block, 0, variant.shared_bytes)


def serve_cpu(
    obtain: Callable[[kernels.Variant, torch.device], Kernel] = no_kernel,
    scaled_mm: Callable[..., Tensor] = no_scaled_mm,
) -> None:
    """Let the CUDA half serve CPU tensors, for the rest of the process, with these kernels and this FP8 GEMM."""
    for operator, implementation in OPERATORS:
        flat = library.with_flat_arguments(operator.signature, implementation)
        _OVERRIDES.impl(operator.signature.name, flat, "CPU", allow_override=True)
    library.cuda_on_cpu = True
    kernels._obtain = obtain  # type: ignore[assignment]
    torch._scaled_mm = scaled_mm  # type: ignore[assignment]
