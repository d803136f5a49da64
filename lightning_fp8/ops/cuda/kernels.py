"""The kernel for each operator: compiled at first use on a device, checked there against torch, and cached."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels_cuda import block_casts, casts, gemm, gemm_variants, load, scales
from kernels_cuda.compile import KernelsUnavailable, architecture, compile_ahead
from kernels_cuda.gemm_variants import Configuration
from kernels_cuda.launch import Kernel
from lightning_fp8.ops.activations import ACTIVATIONS
from lightning_fp8.ops.cuda import check
from lightning_fp8.ops.cuda.rule import backend
from lightning_fp8.runtime.device import gpu_of, is_capturing
from lightning_fp8.runtime.switch import as_torch_starts
from lightning_fp8.runtime.warn_once import warn_once

# the latest failure of a family on a device
_failures: dict[tuple[torch.device, str], str] = {}
_PLAIN = "torch's own operators take over, with the same results and more passes over memory."


# each activation, and its gradient
_OF_ACTIVATIONS = [
    (activation, backward)
    for activation in ("none", *ACTIVATIONS)
    for backward in (False, True)
    if not (backward and activation == "none")
]


class Variant(NamedTuple):
    """One kernel: how to compile and launch it, and its check, which takes the device and the kernel."""

    family: str
    defines: tuple[str, ...]
    layout: str
    block: int
    check: Callable[[torch.device, Kernel], str | None]
    shared_bytes: int = 0
    # what has a scale: "one", "blocks", "mx" or "groups"; and the dtype of a cast's input
    scales: str = "one"
    input: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """``"cast_transpose INPUT=Bf16 ..."``, as in messages."""
        return " ".join((self.family, *self.defines))


class Attempt(NamedTuple):
    """The result of compiling, loading and checking a kernel.

    Attributes:
        kernel: ready to launch; None if it must not be used.
        failure: the reason, else None.
        unavailable: whether the toolchain or the driver failed, which affects every kernel.
        loading_s: seconds that compiling, or reading the cache, and loading took.
        checking_s: seconds that the check took; None where it did not run.
        out_of_memory: whether memory ran out, which says nothing about the kernel.
    """

    kernel: Kernel | None
    failure: str | None
    unavailable: bool
    loading_s: float
    checking_s: float | None
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
        for configuration in gemm_variants.configurations(capability, in_blocks=True)
        for rows in (1, gemm.SCALE_ROWS)
        for output in gemm_variants.OUTPUTS
    ]
    of_mx = gemm_variants.mx_configuration(capability)
    if of_mx is not None:
        in_blocks += [_gemm_variant(of_mx, "e4m3", "e4m3", output, False, 1) for output in gemm_variants.OUTPUTS]
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
    # dgrad in bf16, wgrad in the parameters' dtype; no recipe multiplies two gradients
    pairs = [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")] if every else [("e5m2", "e4m3")]
    return [
        _gemm_variant(configuration, *pair, output, True)
        for configuration in gemm_variants.configurations(capability)
        for pair in pairs
        for output in gemm_variants.OUTPUTS
    ]


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


def _cast_variant(input: torch.dtype, format: str, activation: str, backward: bool) -> Variant:
    def run(device: torch.device, kernel: Kernel) -> str | None:
        return check.cast_transpose(device, kernel, input, format, activation, backward)

    defines = casts.variant(input, format, activation, backward)
    return Variant("cast_transpose", defines, casts.layout(defines), casts.THREADS, run, input=input)


def _block_cast_variant(input: torch.dtype, mx: bool, activation: str, backward: bool) -> Variant:
    def run(device: torch.device, kernel: Kernel) -> str | None:
        return check.cast_blocks(device, kernel, input, mx, activation, backward)

    defines = block_casts.variant(input, activation, backward)
    family = "cast_mx" if mx else "cast_blocks"
    layout = block_casts.layout(defines)
    return Variant(family, defines, layout, block_casts.THREADS, run, scales="mx" if mx else "blocks", input=input)


def _weights_variant(squares: bool, mx: bool = False) -> Variant:
    def run(device: torch.device, kernel: Kernel) -> str | None:
        return check.cast_weights(device, kernel, squares, mx)

    threads = block_casts.THREADS if squares or mx else casts.THREADS
    defines, layout = casts.weights_variant(squares, mx), casts.CAST_WEIGHTS_LAYOUT
    kind = "mx" if mx else "blocks" if squares else "one"
    return Variant("cast_weights", defines, layout, threads, run, scales=kind)


def _update_variant() -> Variant:
    return Variant("update_scales", (), scales.LAYOUT, scales.THREADS, check.update_scales)


def _gemm_variant(
    configuration: Configuration,
    a_format: str,
    b_format: str,
    output: torch.dtype,
    promote: bool,
    b_scale_rows: int = 0,
    grouped: str = "",
) -> Variant:
    def run(device: torch.device, kernel: Kernel) -> str | None:
        return check.gemm(device, kernel, configuration, a_format, b_format, output, promote, b_scale_rows, grouped)

    defines = gemm_variants.variant(configuration, a_format, b_format, output, promote, b_scale_rows, grouped)
    layout = configuration.blocks_layout if b_scale_rows and promote else configuration.layout
    layout = configuration.grouped_layout if grouped else layout
    kind = "one" if not b_scale_rows else "blocks" if promote else "mx"
    return Variant(configuration.family, defines, layout, configuration.threads, run, configuration.shared_bytes, kind)


def _obtain(variant: Variant, device: torch.device) -> Kernel | None:
    if backend() == "reference":
        return None
    if is_capturing(device.type == "cuda"):
        raise RuntimeError(
            f"The kernel {variant.name} is used for the first time while a CUDA graph is captured, where it can be"
            " neither loaded nor checked. Run a step of the same kind, forward and backward, before the capture."
        )
    gpu = gpu_of(device)
    if gpu is not None:
        _compile_ahead(variant, gpu.capability)
    attempt = try_kernel(variant, device)
    if attempt.out_of_memory:
        # an error, as for any operator, and not cached: the next use checks the kernel again
        raise torch.OutOfMemoryError(f"There was no memory to load and check {variant.name}: {attempt.failure}")
    if attempt.failure is not None:
        _failures[device, variant.family] = attempt.failure
    if attempt.unavailable:
        warn_once(f"{attempt.failure} Until then {_PLAIN}")
    elif attempt.failure is not None:
        said = f"The CUDA kernel {variant.name} is not used on {device}: {attempt.failure}. Instead {_PLAIN}"
        warnings.warn(said, stacklevel=2)
    return attempt.kernel


def _compile_ahead(variant: Variant, capability: tuple[int, int]) -> None:
    """Compile a kernel together with those that linear layers of the same recipe and dtype take."""
    together = {variant.name: variant, **{of.name: of for of in _of_a_layer(capability, variant.scales, variant.input)}}
    # a toolchain that is missing, or a source that does not compile: `try_kernel` says so
    with contextlib.suppress(Exception):
        compile_ahead([(of.family, of.defines) for of in together.values()], architecture(capability))


def _of_a_layer(capability: tuple[int, int], scales: str, input: torch.dtype) -> list[Variant]:
    """The kernels that a linear layer takes in training, with the formats of the default recipe and fp32 masters."""
    if scales == "blocks":
        gemms = [
            _gemm_variant(configuration, "e4m3", "e4m3", *of_product)
            for configuration in gemm_variants.configurations(capability, in_blocks=True)
            for of_product in ((input, True, gemm.SCALE_ROWS), (torch.float32, True, 1))
        ]
        return [_block_cast_variant(input, False, "none", False), _weights_variant(True), *gemms]
    if scales == "mx":
        of_mx = gemm_variants.mx_configuration(capability)
        outputs = (input, torch.float32) if of_mx is not None else ()
        gemms = [_gemm_variant(of_mx, "e4m3", "e4m3", output, False, 1) for output in outputs if of_mx is not None]
        return [_block_cast_variant(input, True, "none", False), _weights_variant(True, True), *gemms]
    gemms = [
        _gemm_variant(configuration, "e5m2", "e4m3", output, True)
        for configuration in gemm_variants.configurations(capability)
        for output in (input, torch.float32)
    ]
    casting = [_cast_variant(input, fmt, "none", False) for fmt in casts.FORMATS]
    return [*casting, _weights_variant(False), _update_variant(), *gemms]


def failure_of(device: torch.device, family: str) -> str | None:
    """Why a kernel of this family is not used on the device, if there is one and it was tried."""
    return _failures.get((device, family))


@as_torch_starts()
def try_kernel(variant: Variant, device: torch.device, check_again: bool = False) -> Attempt:
    """Compile a kernel or take it from the cache, load it and check it. Never raises or warns.

    Args:
        variant: see :func:`variants`.
        device: where it is to run.
        check_again: repeat a check that has passed before; if it now fails, the earlier pass is forgotten.
    """
    family, defines, index = variant.family, variant.defines, device.index or 0
    began = time.perf_counter()
    checking: float | None = None
    out_of_memory = False
    try:
        kernel = load.load(family, defines, variant.layout, variant.block, index, variant.shared_bytes)
        passed = load.has_passed(family, defines, index)
        if passed and not check_again:
            return Attempt(kernel, None, False, time.perf_counter() - began, None)
        checking = time.perf_counter()
        failure = variant.check(device, kernel)
    except KernelsUnavailable as error:
        return Attempt(None, str(error), True, time.perf_counter() - began, None)
    # whatever the compiler, the driver or a first launch raises: the kernel is not used, but the program continues
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "CUDA_ERROR_OUT_OF_MEMORY" in failure
    ended = time.perf_counter()
    loading, checked = (ended - began, None) if checking is None else (checking - began, ended - checking)
    if failure is not None:
        if checking is not None and passed and not out_of_memory:
            load.forget_pass(family, defines, index)
        return Attempt(None, failure, False, loading, checked, out_of_memory)
    load.remember_pass(family, defines, index)
    return Attempt(kernel, None, False, loading, checked)
