"""Which kernel serves an operator: compiled at its first use on a device, tested there against the reference, kept."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence

import torch

from kernels_cuda import casts, load, scales
from kernels_cuda.compile import KernelsUnavailable
from kernels_cuda.launch import Kernel
from lightning_fp8.device import is_capturing
from lightning_fp8.ops import self_test

BACKENDS = ("auto", "reference")
_PLAIN = "torch's own operators take over, with the same results and more passes over memory."


@functools.cache
def backend() -> str:
    """``LIGHTNING_FP8_BACKEND``: ``auto``, or ``reference`` for plain torch on every device. Read once.

    Raises:
        ValueError: for any other value.
    """
    asked = os.environ.get("LIGHTNING_FP8_BACKEND", "auto")
    if asked not in BACKENDS:
        raise ValueError(f"LIGHTNING_FP8_BACKEND must be one of {', '.join(BACKENDS)}, got {asked!r}.")
    return asked


@functools.cache
def cast_kernel(
    device: torch.device, input: torch.dtype, format: str, activation: str, backward: bool
) -> Kernel | None:
    """The variant of ``cast_transpose`` for inputs of this dtype; None where torch's operators serve instead."""
    test = functools.partial(self_test.cast_transpose, device, input, format, activation, backward)
    defines = casts.variant(input, format, activation, backward)
    return _obtain("cast_transpose", defines, casts.CAST_TRANSPOSE_LAYOUT, casts.THREADS, device, test)


@functools.cache
def weights_kernel(device: torch.device) -> Kernel | None:
    """``cast_weights``, or None."""
    test = functools.partial(self_test.cast_weights, device)
    return _obtain("cast_weights", (), casts.CAST_WEIGHTS_LAYOUT, casts.THREADS, device, test)


@functools.cache
def update_kernel(device: torch.device) -> Kernel | None:
    """``update_scales``, or None."""
    test = functools.partial(self_test.update_scales, device)
    return _obtain("update_scales", (), scales.LAYOUT, scales.THREADS, device, test)


def _obtain(
    family: str,
    defines: Sequence[str],
    layout: str,
    block: int,
    device: torch.device,
    test: Callable[[Kernel], str | None],
) -> Kernel | None:
    if backend() == "reference":
        return None
    name = " ".join((family, *defines))
    index = device.index or 0
    if is_capturing(device):
        raise RuntimeError(
            f"The kernel {name} is used for the first time while a CUDA graph is captured, where it can be neither"
            " loaded nor tested. Run a step of the same kind, forward and backward, before the capture."
        )
    try:
        kernel = load.load(family, defines, layout, block, index)
        if load.has_passed(family, defines, index):
            return kernel
        failure = test(kernel)
    except KernelsUnavailable as error:
        _say_unavailable(str(error))
        return None
    # what the compiler, the driver or a first launch raises: all are reasons not to use this kernel, and none to stop
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    if failure is not None:
        warnings.warn(f"The CUDA kernel {name} is not used on {device}: {failure}. Instead {_PLAIN}", stacklevel=2)
        return None
    load.remember_pass(family, defines, index)
    return kernel


@functools.cache
def _say_unavailable(message: str) -> None:
    warnings.warn(f"{message} Until then {_PLAIN}", stacklevel=2)
