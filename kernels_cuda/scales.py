"""The kernel that ends an optimizer step, from the host's side. Maths: ``update_scales.cu``."""

from __future__ import annotations

from torch import Tensor

from kernels_cuda.launch import Kernel

TENSORS_PER_BLOCK, THREADS = 8, 1024
LAYOUT = "PPPPPiiiif"


def update_scales(
    kernel: Kernel,
    amax: Tensor,
    amax_history: Tensor,
    scale: Tensor,
    fp8_max: Tensor,
    nonfinite_steps: Tensor,
    most_recent: bool,
    margin_factor: float,
) -> None:
    """One launch for all R tensors; arguments as for the operator ``lightning_fp8::update_scales``."""
    (length, delayed), tensors = amax_history.shape, len(amax)
    pointers = (tensor.data_ptr() for tensor in (amax, amax_history, scale, fp8_max, nonfinite_steps))
    kernel(-(-tensors // TENSORS_PER_BLOCK), *pointers, tensors, delayed, length, int(most_recent), margin_factor)
