"""Which casts and products over groups of rows a CUDA device has."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels_cuda.gemm_variants import Configuration, grouped_configuration
from kernels_cuda.launch import Kernel
from lightning_fp8.ops.cuda.kernels import cast_kernel, gemm_kernel
from lightning_fp8.ops.operand import ALIGNMENT
from lightning_fp8.runtime.device import gpu_of

# rows of a group's wgrad that Hopper's copy engine stores at a time
_STORED_ROWS = 64


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; (0, 0) of another device."""
    gpu = gpu_of(device)
    return (0, 0) if gpu is None else gpu.capability


# dynamo calls this instead of tracing it: it compiles and tests kernels
@torch.compiler.assume_constant_result
def has_kernels(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    formats: tuple[str, str],
    sizes: Sequence[int],
) -> bool:
    """Whether a linear layer of groups runs on this device: all of its kernels are available and take its sizes.

    Args:
        device: of all tensors.
        dtypes: of x, of the output and of the weight.
        formats: of inputs and weights, and of gradients.
        sizes: K and N, in this order, of ``wgrad``'s output as it is stored.
    """
    if grouped_configuration(capability(device), True) is None:
        return False
    multiple = _STORED_ROWS if capability(device)[0] == 9 else ALIGNMENT
    if sizes[0] % multiple or sizes[1] % ALIGNMENT:
        return False
    return _kernels(device, dtypes, formats)


@functools.cache
def _kernels(device: torch.device, dtypes: tuple[torch.dtype, ...], formats: tuple[str, str]) -> bool:
    of_x, of_y, of_weight = dtypes
    fmt, of_dy = formats
    gemms = (
        ("rows", fmt, fmt, of_y, False),
        ("rows", of_dy, fmt, of_x, True),
        ("depth", of_dy, fmt, of_weight, True),
        ("depth", fmt, of_dy, of_weight, True),
    )
    casting = (cast_kernel(device, dtype, target, "none", False) for dtype, target in ((of_x, fmt), (of_y, of_dy)))
    return None not in (*(_gemm(device, *gemm) for gemm in gemms), *casting)


def _gemm(
    device: torch.device, grouped: str, a_format: str, b_format: str, output: torch.dtype, promote: bool
) -> tuple[Kernel, Configuration] | None:
    configuration = grouped_configuration(capability(device), promote)
    if configuration is None:
        return None
    kernel = gemm_kernel(device, configuration, a_format, b_format, output, promote, grouped=grouped)
    return None if kernel is None else (kernel, configuration)


def required(
    device: torch.device, grouped: str, a_format: str, b_format: str, output: torch.dtype, promote: bool
) -> tuple[Kernel, Configuration]:
    """A GEMM over groups by ``"rows"`` or ``"depth"``. Raises a RuntimeError if there is none."""
    plan = _gemm(device, grouped, a_format, b_format, output, promote)
    if plan is None:
        raise RuntimeError(f"There is no GEMM over groups by {grouped} with an output in {output} on {device}.")
    return plan
