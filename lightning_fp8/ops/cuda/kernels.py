"""The kernel for each operator: compiled at first use on a device, tested there against the reference, and cached."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels_cuda import block_casts, casts, gemm, gemm_variants, load, scales
from kernels_cuda.compile import KernelsUnavailable
from kernels_cuda.gemm_variants import Configuration
from kernels_cuda.launch import Kernel
from lightning_fp8.ops.cuda import self_test, self_test_blocks, self_test_gemm
from lightning_fp8.ops.cuda.gemm_table import Choice
from lightning_fp8.runtime.device import is_capturing
from lightning_fp8.runtime.switch import as_torch_starts
from lightning_fp8.runtime.warn_once import warn_once

BACKENDS = ("auto", "reference")
_PLAIN = "torch's own operators take over, with the same results and more passes over memory."


# each activation, and its gradient
_OF_ACTIVATIONS = [
    (activation, backward)
    for activation in casts.ACTIVATIONS
    for backward in (False, True)
    if not (backward and activation == "none")
]


@functools.cache
def backend() -> str:
    """``LIGHTNING_FP8_BACKEND``: ``auto``, or ``reference`` for plain torch on every device. Read once.

    Raises:
        ValueError: for any other value.
    """
    name = os.environ.get("LIGHTNING_FP8_BACKEND", "auto")
    if name not in BACKENDS:
        raise ValueError(f"LIGHTNING_FP8_BACKEND must be one of {', '.join(BACKENDS)}, got {name!r}.")
    return name


class Variant(NamedTuple):
    """One kernel: how to compile and launch it, and its self-test, which takes the device and the kernel."""

    family: str
    defines: tuple[str, ...]
    layout: str
    block: int
    self_test: Callable[[torch.device, Kernel], str | None]
    shared_bytes: int = 0

    @property
    def name(self) -> str:
        """``"cast_transpose INPUT=Bf16 ..."``, as in messages."""
        return " ".join((self.family, *self.defines))


class Attempt(NamedTuple):
    """The result of compiling, loading and testing a kernel.

    Attributes:
        kernel: ready to launch; None if it must not be used.
        failure: the reason, else None.
        unavailable: whether the toolchain or the driver failed, which affects every kernel.
        loading_s: seconds that compiling, or reading the cache, and loading took.
        testing_s: seconds that the self-test took; None where it did not run.
        out_of_memory: whether memory ran out, which says nothing about the kernel.
    """

    kernel: Kernel | None
    failure: str | None
    unavailable: bool
    loading_s: float
    testing_s: float | None
    out_of_memory: bool = False


def variants(capability: tuple[int, int], every: bool = False) -> list[Variant]:
    """The kernels that training with the default recipe may use on GPUs of this compute capability.

    With ``every``, all that exist: other formats and outputs too.
    """
    of_casts = [
        _cast_variant(dtype, fmt, activation, backward)
        for dtype in casts.INPUTS
        for fmt in casts.FORMATS
        for activation, backward in _OF_ACTIVATIONS
    ]
    in_blocks = [
        _block_cast_variant(dtype, mx, *chosen)
        for mx in (False, True)
        for dtype in casts.INPUTS
        for chosen in _OF_ACTIVATIONS
    ]
    in_blocks += [_weights_variant(*kind) for kind in ((True, False), (False, True), (True, True))]
    in_blocks += [
        _gemm_variant(configuration, "e4m3", "e4m3", output, True, rows)
        for configuration in gemm_variants.configurations(capability, True)
        for rows in (1, gemm.SCALE_ROWS)
        for output in gemm_variants.OUTPUTS
    ]
    in_blocks += [
        _gemm_variant(configuration, "e4m3", "e4m3", output, False, 1)
        for configuration in gemm_variants.mx_configurations(capability)
        for output in gemm_variants.OUTPUTS
    ]
    grouped = [
        _gemm_variant(grouped_configuration, *pair, output, promote, grouped=how)
        for how, pair, promote in (
            ("rows", ("e4m3", "e4m3"), False),
            ("rows", ("e5m2", "e4m3"), True),
            ("depth", ("e5m2", "e4m3"), True),
            ("depth", ("e4m3", "e5m2"), True),
        )
        if (grouped_configuration := gemm_variants.grouped_configuration(capability, promote)) is not None
        for output in gemm_variants.OUTPUTS
    ]
    default = [*of_casts, _weights_variant(False), _update_variant(), *_gemm_variants(capability, every)]
    return [*default, *in_blocks, *grouped] if every else default


def _gemm_variants(capability: tuple[int, int], every: bool) -> list[Variant]:
    fast, promoted = (gemm_variants.configurations(capability, promote) for promote in (False, True))
    # no recipe multiplies two gradients
    pairs = [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")]
    outputs = tuple(gemm_variants.OUTPUTS)
    gemms = [
        _gemm_variant(configuration, *pair, output, False)
        for configuration in fast
        for pair in (pairs if every else [("e4m3", "e4m3")])
        for output in (outputs if every else (torch.bfloat16,))
    ]
    # dgrad in bf16; wgrad in the parameters' dtype
    gemms += [
        _gemm_variant(configuration, *pair, output, True)
        for configuration in promoted
        for pair in (pairs if every else [("e5m2", "e4m3")])
        for output in outputs
    ]
    return [*gemms, *(_sum_splits_variant(output) for output in outputs)] if gemms else []


@functools.cache
def cast_kernel(
    device: torch.device, input: torch.dtype, format: str, activation: str, backward: bool
) -> Kernel | None:
    """The variant of ``cast_transpose`` for inputs of this dtype; None where torch's operators are used instead."""
    if input not in casts.INPUTS:
        return None
    return _obtain(_cast_variant(input, format, activation, backward), device)


@functools.cache
def weights_kernel(device: torch.device, squares: bool, mx: bool = False) -> Kernel | None:
    """``cast_weights`` with the scales of :func:`kernels_cuda.casts.weights_variant`, or None."""
    return _obtain(_weights_variant(squares, mx), device)


@functools.cache
def block_cast_kernel(
    device: torch.device, input: torch.dtype, mx: bool = False, activation: str = "none", backward: bool = False
) -> Kernel | None:
    """The variant of ``cast_blocks``, or with ``mx`` of ``cast_mx``, for inputs of this dtype, or None."""
    return _obtain(_block_cast_variant(input, mx, activation, backward), device) if input in casts.INPUTS else None


@functools.cache
def update_kernel(device: torch.device) -> Kernel | None:
    """``update_scales``, or None."""
    return _obtain(_update_variant(), device)


@functools.cache
def gemm_kernel(
    device: torch.device,
    configuration: Configuration,
    a_format: str,
    b_format: str,
    output: torch.dtype,
    promote: bool,
    b_scale_rows: int = 0,
    grouped: str = "",
) -> Kernel | None:
    """The GEMM of this configuration, formats, output and accumulation, or None. For ``b_scale_rows`` and ``grouped``
    see :func:`kernels_cuda.gemm_variants.variant`."""
    return _obtain(_gemm_variant(configuration, a_format, b_format, output, promote, b_scale_rows, grouped), device)


@functools.cache
def sum_splits_kernel(device: torch.device, output: torch.dtype) -> Kernel | None:
    """``sum_splits`` for outputs of this dtype, or None."""
    return _obtain(_sum_splits_variant(output), device)


class Found(NamedTuple):
    """The kernels of a choice: the GEMM and, where K is split, the sum of the parts."""

    configuration: Configuration
    kernel: Kernel
    splits: int
    sum_kernel: Kernel | None


def kernels_of(
    choice: Choice,
    device: torch.device,
    a_format: str,
    b_format: str,
    output: torch.dtype,
    promote: bool,
    b_scale_rows: int = 0,
) -> Found | None:
    """The kernels for a choice; None for cuBLASLt, or if a kernel is not available. ``b_scale_rows``: see
    :func:`kernels_cuda.gemm_variants.variant`."""
    if choice.configuration is None:
        return None
    # parts of a sum are in fp32
    stored = output if choice.splits == 1 else torch.float32
    blocks = (b_scale_rows,) if b_scale_rows else ()
    kernel = gemm_kernel(device, choice.configuration, a_format, b_format, stored, promote, *blocks)
    sum_kernel = sum_splits_kernel(device, output) if choice.splits > 1 and kernel is not None else None
    if kernel is None or (choice.splits > 1 and sum_kernel is None):
        return None
    return Found(choice.configuration, kernel, choice.splits, sum_kernel)


def _cast_variant(input: torch.dtype, format: str, activation: str, backward: bool) -> Variant:
    def test(device: torch.device, kernel: Kernel) -> str | None:
        return self_test.cast_transpose(device, input, format, activation, backward, kernel)

    defines = casts.variant(input, format, activation, backward)
    return Variant("cast_transpose", defines, casts.layout(defines), casts.THREADS, test)


def _block_cast_variant(input: torch.dtype, mx: bool, activation: str, backward: bool) -> Variant:
    def test(device: torch.device, kernel: Kernel) -> str | None:
        return self_test_blocks.cast(device, input, kernel, mx, activation, backward)

    defines = block_casts.variant(input, activation, backward)
    family = "cast_mx" if mx else "cast_blocks"
    return Variant(family, defines, block_casts.layout(defines), block_casts.THREADS, test)


def _weights_variant(squares: bool, mx: bool = False) -> Variant:
    def test(device: torch.device, kernel: Kernel) -> str | None:
        if not squares and not mx:
            return self_test.cast_weights(device, kernel)
        return self_test_blocks.cast_weights(device, kernel, squares, mx)

    threads = block_casts.THREADS if squares or mx else casts.THREADS
    return Variant("cast_weights", casts.weights_variant(squares, mx), casts.CAST_WEIGHTS_LAYOUT, threads, test)


def _update_variant() -> Variant:
    return Variant("update_scales", (), scales.LAYOUT, scales.THREADS, self_test.update_scales)


def _gemm_variant(
    configuration: Configuration,
    a_format: str,
    b_format: str,
    output: torch.dtype,
    promote: bool,
    b_scale_rows: int = 0,
    grouped: str = "",
) -> Variant:
    def test(device: torch.device, kernel: Kernel) -> str | None:
        if grouped:
            return self_test_gemm.grouped(device, configuration, grouped, a_format, b_format, output, kernel)
        mx = bool(b_scale_rows) and not promote
        return self_test_gemm.gemm(device, configuration, a_format, b_format, output, kernel, b_scale_rows, mx)

    defines = gemm_variants.variant(configuration, a_format, b_format, output, promote, b_scale_rows, grouped)
    layout = configuration.blocks_layout if b_scale_rows and promote else configuration.layout
    layout = configuration.grouped_layout if grouped else layout
    return Variant(configuration.family, defines, layout, configuration.threads, test, configuration.shared_bytes)


def _sum_splits_variant(output: torch.dtype) -> Variant:
    def test(device: torch.device, kernel: Kernel) -> str | None:
        return self_test_gemm.sum_splits(device, output, kernel)

    defines = gemm_variants.sum_splits_variant(output)
    return Variant("sum_splits", defines, gemm_variants.SUM_SPLITS_LAYOUT, gemm_variants.SUM_SPLITS_THREADS, test)


def _obtain(variant: Variant, device: torch.device) -> Kernel | None:
    if backend() == "reference":
        return None
    if is_capturing(device.type == "cuda"):
        raise RuntimeError(
            f"The kernel {variant.name} is used for the first time while a CUDA graph is captured, where it can be"
            " neither loaded nor tested. Run a step of the same kind, forward and backward, before the capture."
        )
    attempt = try_kernel(variant, device)
    if attempt.out_of_memory:
        # an error, as for any operator, and not cached: the next use tests the kernel again
        raise torch.OutOfMemoryError(f"There was no memory to load and test {variant.name}: {attempt.failure}")
    if attempt.unavailable:
        warn_once(f"{attempt.failure} Until then {_PLAIN}")
    elif attempt.failure is not None:
        said = f"The CUDA kernel {variant.name} is not used on {device}: {attempt.failure}. Instead {_PLAIN}"
        warnings.warn(said, stacklevel=2)
    return attempt.kernel


@as_torch_starts()
def try_kernel(variant: Variant, device: torch.device, test_again: bool = False) -> Attempt:
    """Compile a kernel or take it from the cache, load it and test it. Never raises or warns.

    Args:
        variant: see :func:`variants`.
        device: where it is to run.
        test_again: repeat a self-test that has passed before; if it now fails, the earlier pass is forgotten.
    """
    family, defines, index = variant.family, variant.defines, device.index or 0
    began = time.perf_counter()
    testing: float | None = None
    out_of_memory = False
    try:
        kernel = load.load(family, defines, variant.layout, variant.block, index, variant.shared_bytes)
        passed = load.has_passed(family, defines, index)
        if passed and not test_again:
            return Attempt(kernel, None, False, time.perf_counter() - began, None)
        testing = time.perf_counter()
        failure = variant.self_test(device, kernel)
    except KernelsUnavailable as error:
        return Attempt(None, str(error), True, time.perf_counter() - began, None)
    # whatever the compiler, the driver or a first launch raises: the kernel is not used, but the program continues
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "CUDA_ERROR_OUT_OF_MEMORY" in failure
    ended = time.perf_counter()
    loading, tested = (ended - began, None) if testing is None else (testing - began, ended - testing)
    if failure is not None:
        if testing is not None and passed and not out_of_memory:
            load.forget_pass(family, defines, index)
        return Attempt(None, failure, False, loading, tested, out_of_memory)
    load.remember_pass(family, defines, index)
    return Attempt(kernel, None, False, loading, tested)
