"""The update of the scales on a CUDA device: one launch where there is a kernel, else torch's own operations."""

from __future__ import annotations

from torch import Tensor

from kernels_cuda import scales
from lightning_fp8.ops import amaxes
from lightning_fp8.ops.cuda.kernels import update_kernel


def update_scales(
    amax: Tensor,
    amax_history: Tensor,
    scale: Tensor,
    fp8_max: Tensor,
    nonfinite_steps: Tensor,
    most_recent: bool,
    margin_factor: float,
) -> None:
    """See the operator ``lightning_fp8::update_scales``."""
    kernel = update_kernel(amax.device)
    if kernel is None:
        amaxes.update_scales(amax, amax_history, scale, fp8_max, nonfinite_steps, most_recent, margin_factor)
    elif amax.numel():
        scales.update_scales(kernel, amax, amax_history, scale, fp8_max, nonfinite_steps, most_recent, margin_factor)
