"""FP8 products by ``torch._scaled_mm`` and ``torch.nn.functional.scaled_mm``; nothing here waits for a GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.ops import e8m0
from lightning_fp8.ops.cuda import check
from lightning_fp8.ops.cuda.layouts import as_taken
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.ops.operand import ALIGNMENT
from lightning_fp8.runtime.device import gpu_of, is_capturing
from lightning_fp8.runtime.switch import as_torch_starts

if TYPE_CHECKING:
    from lightning_fp8.scalings.operand import Operand

# the first compute capability whose tensor cores take scales in E8M0
_MX = (10, 0)


def scaled_mm(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, fast_accumulation: bool) -> Tensor:
    """The product of operands with one scale each. Sizes that cuBLASLt does not support are padded with zeros."""
    (m, k), n = a.codes.shape, b.codes.shape[0]
    if not (m and n and k):
        empty = torch.zeros(m, n, dtype=out_dtype, device=a.codes.device)
        return empty if bias is None else empty + bias.to(out_dtype)
    missing = -n % ALIGNMENT
    a = a._replace(codes=padded(a.codes))
    b = b._replace(codes=padded(b.codes, missing))
    bias = F.pad(bias, (0, missing)) if missing and bias is not None else bias
    out = aligned_mm(a, b, bias, out_dtype, fast_accumulation)
    return out[:, :n].contiguous() if missing else out


def aligned_mm(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, fast_accumulation: bool) -> Tensor:
    """The same for sizes that cuBLASLt supports: none is 0, and N and K are multiples of 16."""
    fused = None
    # torch adds a bias in the GEMM's own epilogue, in fp32, if bias and result have the same 16-bit dtype
    if bias is not None and out_dtype != torch.float32:
        # cuBLASLt reads it without its stride; a `.to` that does nothing takes the host as long as an allocation
        fused = bias if bias.dtype == out_dtype and bias.is_contiguous() else bias.to(out_dtype).contiguous()
    (a_codes, a_scale, a_scaling), (b_codes, b_scale, b_scaling) = a, b
    out = torch._scaled_mm(
        (a_codes if a_codes.is_contiguous() else as_taken(a_codes)).view(a_scaling.fp8.dtype),
        (b_codes if b_codes.is_contiguous() else as_taken(b_codes)).view(b_scaling.fp8.dtype).mT,
        a_scale,
        b_scale,
        fused,
        out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )
    return out if bias is None or fused is not None else out.add_(bias)


def scaled_mm_in_blocks(
    a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, failure: str | None = None
) -> Tensor | None:
    """The product of operands in blocks of 128; None if there is no GPU, or a size is 0.

    Args:
        failure: why a kernel of ours is not used, if there is one and it was tried.

    Raises:
        RuntimeError: on a GPU for which cuBLASLt has no such product.
    """
    gpu, (m, k), n = gpu_of(a.codes.device), a.codes.shape, b.codes.shape[0]
    if gpu is None or not (m and n and k):
        return None
    check_blocks(gpu.capability, torch.version.cuda, failure)
    return product_of_blocks(a, b, bias, out_dtype)


def product_of_blocks(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """The same by ``torch.nn.functional.scaled_mm``; sizes that cuBLASLt does not support are padded with zeros.

    Partial sums of 128 along K are added up in fp32 in any case.
    """
    m, n = len(a.codes), len(b.codes)
    a_codes, a_scales, a_kind = as_torch_takes(a, 4)
    b_codes, b_scales, b_kind = as_torch_takes(b, ALIGNMENT)
    scales = a_scales, a_kind, b_scales, b_kind
    return _by_torch(a_codes, b_codes, scales, bias, out_dtype, (m, n))


def _by_torch(
    a_codes: Tensor,
    b_codes: Tensor,
    scales: Sequence[Any],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    shape: tuple[int, int],
) -> Tensor:
    """``torch.nn.functional.scaled_mm`` of padded operands, ``shape`` without padding, with a bias added in fp32."""
    dtype = out_dtype if bias is None else torch.float32
    whole: Tensor = F.scaled_mm(a_codes, b_codes.mT, *scales, output_dtype=dtype)  # type: ignore[misc]
    out = whole[: shape[0], : shape[1]]
    return out.contiguous() if bias is None else (out + bias.to(out_dtype)).to(out_dtype)


def scaled_mm_mx(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor | None:
    """The product of operands with scales in E8M0 for every 32 along K; None if there is no GPU, or a size is 0.

    Raises:
        RuntimeError: on a GPU whose tensor cores do not multiply such operands, or on which the product is wrong.
    """
    gpu, (m, k), n = gpu_of(a.codes.device), a.codes.shape, b.codes.shape[0]
    if gpu is None or not (m and n and k):
        return None
    check_mx_product(a.codes.device)
    return product_of_mx(a[:2], b[:2], bias, out_dtype, (a.scaling.format, b.scaling.format))


def product_of_mx(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    formats: tuple[str, str] = ("e4m3", "e4m3"),
) -> Tensor:
    """The same by ``torch.nn.functional.scaled_mm``, of codes and tiles of scales each; sizes that cuBLASLt does not
    support are padded with zeros."""
    m, n = len(a[0]), len(b[0])
    a_codes, b_codes = (mx_payload(of[0], fmt, ALIGNMENT) for of, fmt in zip((a, b), formats, strict=True))
    kind, order = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    a_scales, b_scales = (of[1].view(torch.float8_e8m0fnu) for of in (a, b))
    scales = a_scales, kind, b_scales, kind, order, order
    return _by_torch(a_codes, b_codes, scales, bias, out_dtype, (m, n))


def has_mx(device: torch.device) -> bool:
    """Whether the tensor cores of a GPU multiply operands in MX; a CPU stands in for one."""
    gpu = gpu_of(device)
    return gpu is None or gpu.capability >= _MX


def mx_payload(payload: Tensor, format: str, multiple: int) -> Tensor:
    """The codes of an operand with both sizes padded with zeros, K to whole blocks and rows to a ``multiple``."""
    added = -payload.shape[1] % e8m0.BLOCK, -len(payload) % multiple
    return F.pad(payload, (0, added[0], 0, added[1])).view(FORMATS[format].dtype)


@functools.cache
@as_torch_starts()
def check_mx_product(device: torch.device) -> None:
    """RuntimeError unless :func:`product_of_mx` gives the exact results of small cases here. Waits, once per device."""
    gpu = gpu_of(device)
    if gpu is not None:
        check_mx(gpu.capability)
    if is_capturing(device.type == "cuda"):
        raise RuntimeError(
            "The product of fp8-mx is used for the first time while a CUDA graph is captured, where it cannot be"
            " tested. Run a step of the same kind, forward and backward, before the capture."
        )
    try:
        a, b, expected = check.product_of_mx(device)
        failure = None if torch.equal(product_of_mx(a, b, None, torch.float32), expected) else "it gave other sums"
    except torch.OutOfMemoryError:
        raise
    # whatever torch and cuBLASLt raise where they do not know this product
    except Exception as error:
        failure = f"it raised {type(error).__name__}: {error}"
    if failure is not None:
        raise RuntimeError(
            f"fp8-mx cannot run on {device}: torch.nn.functional.scaled_mm does not multiply its operands right"
            f" ({failure}). Update torch (`pip install --upgrade torch`), or use precision='fp8-current' here."
        )


def check_mx(capability: tuple[int, int]) -> None:
    """RuntimeError unless tensor cores multiply operands with scales in E8M0 on such a GPU, as cuBLASLt lets them.

    Source: cuBLAS, "Scaling Mode Support Overview", where 32-element 1D block scaling has compute capability 10.0+.
    """
    if capability < _MX:
        raise RuntimeError(
            "fp8-mx has no product here: it needs tensor cores that take a scale for every 32 elements, as those of"
            " compute capability 10.0 and newer (Blackwell: B200, B300, RTX 50 series), got"
            f" {capability[0]}.{capability[1]}. Use precision='fp8-block' or 'fp8-current' here."
        )


def multiplies_blocks(a: Operand, b: Operand) -> bool:
    """Whether :func:`scaled_mm_in_blocks` takes operands of these formats here: cuBLASLt knows blocks in E4M3 only."""
    gpu = gpu_of(a.codes.device)
    is_known = gpu is None or _has_blocks(gpu.capability, torch.version.cuda)
    return is_known and a.scaling.format == b.scaling.format == "e4m3"


def _has_blocks(capability: tuple[int, int], cuda: str | None) -> bool:
    return capability[0] == 9 and tuple(map(int, (cuda or "0.0").split(".")[:2])) >= (12, 9)


def check_blocks(capability: tuple[int, int], cuda: str | None, failure: str | None = None) -> None:
    """RuntimeError unless cuBLASLt multiplies operands in blocks on such a GPU with this CUDA version of torch.

    ``failure`` says why a kernel of ours is not used that exists.
    """
    if not _has_blocks(capability, cuda):
        of_powers = "BlockScaling(power_of_2_scales=True), which runs as MX, 'fp8-mx' or 'fp8-current'"
        instead = of_powers if capability[0] in (10, 11) else "precision='fp8-current'"
        ours = "lightning_fp8's need CuPy and a GPU of compute capability 8.9, 9.0 or 12.x"
        if failure is not None:
            ours = f"lightning_fp8's exists and is not used ({failure.rstrip('.')})"
        raise RuntimeError(
            f"fp8-block has no kernel here: {ours},"
            " cuBLASLt's need a GPU of compute capability 9.0 (H100, H200), and torch built for CUDA 12.9 or newer; got"
            f" {capability[0]}.{capability[1]} and CUDA {cuda}. Use {instead} here."
        )


def as_torch_takes(operand: Operand, multiple: int) -> tuple[Tensor, Tensor, F.ScalingType]:
    """An operand in blocks as ``torch.nn.functional.scaled_mm`` takes it: payload, scales, and the kind of its blocks.

    Rows are padded to a multiple of ``multiple``. Scales of 1 x 128 blocks are column-major, and cuBLASLt reads them as
    if their number of rows were a multiple of four; those of squares are transposed, and padded to a multiple of four
    along K.
    """
    payload, scale_inv, scaling = operand
    missing, by_rows = -len(payload) % multiple, len(scale_inv) == len(payload)
    scales, added = (scale_inv.t(), missing) if by_rows else (scale_inv, -scale_inv.shape[1] % 4)
    scales = F.pad(scales, (0, added)) if added else scales.contiguous()
    kind = F.ScalingType.BlockWise1x128 if by_rows else F.ScalingType.BlockWise128x128
    return padded(payload, missing).contiguous().view(FORMATS[scaling.format].dtype), scales.t(), kind


def padded(payload: Tensor, rows: int = 0) -> Tensor:
    """The payload with additional rows of zeros, and its columns padded to cuBLASLt's alignment."""
    columns = -payload.shape[1] % ALIGNMENT
    # padding by nothing would copy
    return F.pad(payload, (0, columns, 0, rows)) if rows or columns else payload
