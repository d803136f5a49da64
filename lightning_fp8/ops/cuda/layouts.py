"""Whether FP8 products on a device take operands in every layout, so that no tensor needs a transposed payload.

Tensor cores of compute capability 8.9, 9.0 and 12.x multiply FP8 operands that are K-major only. Those of 10.x and 11.x
take every layout, in products of operands with one scale each: there the payload by columns is a view of that by rows.
Sources: TransformerEngine, ``is_non_tn_fp8_gemm_supported``; torch, ``_scaled_gemm`` in ``native/cuda/ScaledBlas.cpp``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels_cuda.gemm_variants import configurations
from lightning_fp8.ops import library
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.ops.operand import ALIGNMENT
from lightning_fp8.runtime.device import Gpu, gpu_of, is_capturing
from lightning_fp8.runtime.switch import as_torch_starts
from lightning_fp8.runtime.warn_once import warn_once

# major numbers of compute capabilities
_TAKE_EVERY_LAYOUT = (10, 11)


def needs_transposed_payload(device: torch.device, shape: Sequence[int], in_blocks: bool = False) -> bool:
    """Whether the payload by columns of a tensor of this ``shape`` must be a tensor of its own on the device.

    Elsewhere it is the payload by rows, transposed. That also needs sizes that are multiples of 16, which products
    take: a kernel pads a payload that it writes, and a view would be copied. Operands in blocks are always K-major.
    """
    if not (device.type == "cuda" or library.cuda_on_cpu):
        return False
    return in_blocks or not takes_every_layout(device) or any(size % ALIGNMENT != 0 for size in shape[-2:])


# dynamo calls this instead of tracing it: the probe waits for the device
@torch.compiler.assume_constant_result
def takes_every_layout(device: torch.device) -> bool:
    """Whether products of operands with one scale each take all four layouts, according to a probe; run once."""
    return _passes(device)


# dynamo calls this instead of tracing it: it asks the driver
@torch.compiler.assume_constant_result
def multiplies_as_mx(device: torch.device) -> bool:
    """Whether operands in blocks, with scales in powers of two, run as MX: where it is the only product of blocks."""
    gpu = _gpu_of(device)
    return gpu is not None and gpu.capability >= (10, 0) and not configurations(gpu.capability, in_blocks=True)


def as_taken(payload: Tensor) -> Tensor:
    """A payload as products take it here: K-major, or a transposed one as it is where every layout is taken."""
    if payload.is_contiguous():
        return payload
    is_transposed = payload.stride(0) == 1 and payload.stride(1) % ALIGNMENT == 0
    return payload if is_transposed and takes_every_layout(payload.device) else payload.contiguous()


def is_expected(device: torch.device) -> bool:
    """Whether products of such a device should take every layout, by its generation."""
    gpu = _gpu_of(device)
    return gpu is not None and gpu.capability[0] in _TAKE_EVERY_LAYOUT


def _gpu_of(device: torch.device) -> Gpu | None:
    """None for a GPU that is not there, too, which fake tensors may be on."""
    return gpu_of(device) if device.type != "cuda" or torch.cuda.is_available() else None


@functools.cache
def _passes(device: torch.device) -> bool:
    if not is_expected(device):
        return False
    if is_capturing(True):
        raise RuntimeError(
            "FP8 products are tested for the first time while a CUDA graph is captured, where the result cannot be"
            " read. Run a step of the same kind, forward and backward, before the capture."
        )
    failure = probe(device)
    if failure is not None:
        warn_once(
            f"FP8 products on {device} do not take every layout of their operands, as those of its generation should:"
            f" {failure}. Casts also write a transposed payload instead, with the same results."
        )
    return failure is None


@as_torch_starts()
def probe(device: torch.device) -> str | None:
    """What is wrong with products whose operands lie in any of the four ways; None if all equal those in fp32."""
    generator = torch.Generator().manual_seed(0)
    # sums are integers of at most 64 * 16: exact, and rounded to the output's dtype once
    a, b = (torch.randint(-4, 5, (size, 64), generator=generator).float() for size in (48, 32))
    expected, unit_scale = a @ b.t(), torch.ones((), device=device)
    cases = itertools.product((False, True), (False, True), ("e4m3", "e5m2"), (torch.bfloat16, torch.float32))
    for a_transposed, b_transposed, a_format, output in cases:
        a_fp8 = _laid_out(a, a_format, a_transposed).to(device)
        b_fp8 = _laid_out(b, "e4m3", b_transposed).to(device)
        layouts = " and ".join("MN-major" if transposed else "K-major" for transposed in (a_transposed, b_transposed))
        case = f"the product in {output} of operands in {a_format} and e4m3, {layouts}"
        try:
            product = torch._scaled_mm(a_fp8, b_fp8.mT, unit_scale, unit_scale, out_dtype=output)
        # cuBLASLt, the driver or torch may raise anything where they do not know a layout
        except RuntimeError as error:
            return f"{case}, raises {error}"
        if not torch.equal(product.cpu(), expected.to(output)):
            return f"{case}, has other sums"
    return None


def _laid_out(values: Tensor, format: str, transposed: bool) -> Tensor:
    codes = values.to(FORMATS[format].dtype)
    return codes.t().contiguous().t() if transposed else codes
