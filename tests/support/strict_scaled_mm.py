"""Stand-in of ``torch._scaled_mm`` and ``torch.nn.functional.scaled_mm`` on the CPU, as strict as they are on a GPU.

Every check names the function of torch 2.11 to 2.13 that it comes from, in ``aten/src/ATen/native/cuda/ScaledBlas.cpp``
where no other file is named. What only cuBLASLt checks, or reads without a check, is marked cuBLASLt. Bias and scales
are read as cuBLASLt reads them, from their first element on, whatever the tensors' strides. Products are in fp64, and
rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ScalingType = F.ScalingType
# a Hopper GPU: the only one that multiplies operands in blocks; tests may replace it by a Blackwell one
CAPABILITY = (9, 0)
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)
# cuBLASLt: operands and the scales of blocks begin, and rows of operands lie, at multiples of so many bytes
ALIGNMENT = 16
# cuBLASLt: the pitch of the scales of 1 x 128 blocks, see `get_scale_shape` in TransformerEngine's
# pytorch/tensor/float8_blockwise_tensor.py; torch's checks do not know of it
PITCH = 4


class RefusedError(RuntimeError):
    """Something that a GPU would not compute."""


def replace_products(library: torch.library.Library) -> None:
    """Compute FP8 products of CPU tensors here; until the library, for ``aten``, is destroyed."""
    library.impl("_scaled_mm", scaled_mm, "CPU", allow_override=True)
    library.impl("_scaled_mm_v2", scaled_mm_v2, "CPU", allow_override=True)


def scaled_mm(
    self: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """``aten::_scaled_mm``: the shapes of the scales say what each is for."""
    _check_architecture()
    _check_shapes(self, mat2)
    # get_joint_scaling: is_tensorwise_scaling, is_rowwise_scaling; blocks are left to `scaled_mm_v2`, which knows more
    for scale in (scale_a, scale_b):
        _require(scale.dtype == torch.float32, f"get_joint_scaling: scales are float32, not {scale.dtype}")
    (m, _), n = self.shape, mat2.shape[1]
    if scale_a.numel() == scale_b.numel() == 1:
        scales = _tensor_wise(scale_a), _tensor_wise(scale_b)
    else:
        shapes = scale_a.shape == (m, 1), scale_b.shape == (1, n)
        contiguous = scale_a.is_contiguous() and scale_b.is_contiguous()
        _require(all(shapes) and contiguous, "get_joint_scaling: Invalid scaling configuration")
        scales = _in_memory(scale_a, (m, 1), (1, 1)), _in_memory(scale_b, (n, 1), (1, 1))
    _require(scale_result is None, "_scaled_mm_out_cuda: scale_result is for FP8 outputs")
    out_dtype = _check_dtypes(self, mat2, out_dtype)
    _check_bias(bias, n, out_dtype)
    if 0 in (m, n, self.shape[1]):
        return _of_nothing(self, mat2, out_dtype)
    return _product(self, mat2, *scales, bias, out_dtype)


def scaled_mm_v2(
    self: Tensor,
    mat2: Tensor,
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """``aten::_scaled_mm_v2``, which ``torch.nn.functional.scaled_mm`` calls: recipes say what each scale is for."""
    _check_architecture()
    (m, k), n = self.shape, mat2.shape[1]
    # _scaled_mm_cuda_v2_out checks nothing else of an empty product
    if 0 in (m, n, k):
        return _of_nothing(self, mat2, out_dtype or self.dtype)
    _check_shapes(self, mat2)
    out_dtype = _check_dtypes(self, mat2, out_dtype)
    _check_bias(bias, n, out_dtype)
    one_each = len(scale_a) == len(recipe_a) == len(scale_b) == len(recipe_b) == 1
    _require(one_each and not contraction_dim, "find_scaled_gemm_impl: one scale and one recipe for each operand")
    kinds = ScalingType(recipe_a[0]), ScalingType(recipe_b[0])
    of_a, of_b = scale_a[0], scale_b[0]
    in_mx = kinds == (ScalingType.BlockWise1x32,) * 2
    for scale in (of_a, of_b):
        wanted = torch.float8_e8m0fnu if in_mx else torch.float32
        _require(scale.dtype == wanted, f"find_scaled_gemm_impl: scales are {wanted}, not {scale.dtype}")
    if in_mx:
        # check_mxfp8_recipe, native/ScaledBlasUtils.cpp
        both = self.dtype == mat2.dtype == torch.float8_e4m3fn
        _require(both, f"check_mxfp8_recipe: operands are float8_e4m3fn, not {self.dtype}, {mat2.dtype}")
        _require(CAPABILITY >= (10, 0), "cuBLASLt: no scales for every 32 elements before compute capability 10.0")
        # check_swizzle_lengths, _scaled_mxfp8_mxfp8
        orders = [*swizzle_a, *swizzle_b]
        tiles = orders == [F.SwizzleType.SWIZZLE_32_4_4.value] * 2
        _require(tiles, f"_scaled_mxfp8_mxfp8: scales must be swizzled to SWIZZLE_32_4_4, got {orders}")
        scales = _in_tiles(self, of_a), _in_tiles(mat2.t(), of_b)
    else:
        scales = _in_blocks(self, of_a, kinds[0]), _in_blocks(mat2.t(), of_b, kinds[1])
        # check_deepseek_recipe, native/ScaledBlasUtils.cpp
        both = self.dtype == mat2.dtype == torch.float8_e4m3fn
        _require(both, f"check_deepseek_recipe: operands in blocks are float8_e4m3fn, not {self.dtype}, {mat2.dtype}")
        is_valid = ScalingType.BlockWise1x128 in kinds
        _require(is_valid, f"find_scaled_gemm_impl: Invalid scaling configuration: {kinds[0].name} x {kinds[1].name}")
        # _check_deepseek_support
        _require(CAPABILITY[0] == 9, "_check_deepseek_support: DeepSeek style scaling only supported in CUDA for SM90")
    return _product(self, mat2, *scales, bias, out_dtype)


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise RefusedError(rule)


def _check_architecture() -> None:
    # scaled_mm_arch_allowed, ScaledBlasDeviceUtils.cpp
    _require(CAPABILITY >= (8, 9), f"scaled_mm_arch_allowed: not on compute capability {CAPABILITY}")


def _check_shapes(a: Tensor, b: Tensor) -> None:
    # _scaled_mm_out_cuda; for _scaled_mm_v2 also _check_scaled_mm_sizes_v2, torch/_meta_registrations.py
    _require(a.dim() == b.dim() == 2, f"_scaled_mm_out_cuda: matrices, not {a.dim()} and {b.dim()} dimensions")
    _require(a.shape[1] == b.shape[0], f"_scaled_mm_out_cuda: {tuple(a.shape)} x {tuple(b.shape)}")
    multiples = not any(size % 16 for size in (a.shape[1], *b.shape))
    _require(multiples, f"_scaled_mm_out_cuda: K and N of {tuple(a.shape)} x {tuple(b.shape)} are multiples of 16")


def _check_dtypes(a: Tensor, b: Tensor, output: torch.dtype | None) -> torch.dtype:
    # _scaled_mm_out_cuda, _scaled_mm_cuda_v2_out
    fp8 = a.dtype in FORMATS and b.dtype in FORMATS
    _require(fp8, f"_scaled_mm_out_cuda: Expected Float8 matrices, got {a.dtype} and {b.dtype}")
    e5m2 = a.dtype == b.dtype == torch.float8_e5m2
    _require(not e5m2, "_scaled_mm_out_cuda: Multiplication of two Float8_e5m2 matrices is not supported")
    # without one, the result would be in FP8
    if output not in OUTPUTS:
        raise RefusedError(f"cuBLASLt: no result in {output}")
    return output


def _check_bias(bias: Tensor | None, n: int, output: torch.dtype) -> None:
    if bias is None:
        return
    # _scaled_mm_out_cuda, _scaled_mm_cuda_v2_out
    _require(bias.numel() == n, f"_scaled_mm_out_cuda: Bias must be size {n} but got {bias.numel()}")
    _require(output != torch.float32, "_scaled_mm_out_cuda: Bias is not supported when out_dtype is set to Float32")
    _require(bias.dtype == output, f"_scaled_mm_out_cuda: Bias must be {output}, but got {bias.dtype}")
    # `bias->data_ptr()`, given to cuBLASLt without the stride
    _require(bias.is_contiguous(), f"scaled_gemm (cuda/CUDABlas.cpp): a bias of strides {bias.stride()} is misread")


def _of_nothing(a: Tensor, b: Tensor, output: torch.dtype) -> Tensor:
    # _scaled_mm_out_cuda, _scaled_mm_cuda_v2_out: zeros where K is 0, even with a bias
    return a.new_zeros(a.shape[0], b.shape[1], dtype=output)


def _tensor_wise(scale: Tensor) -> Tensor:
    return _in_memory(scale, (1, 1), (1, 1))


def _in_blocks(operand: Tensor, scale: Tensor, kind: F.ScalingType) -> Tensor:
    """The scales of ``[rows, K]`` as the GPU reads them -> ``[rows, ceil(K/128)]``."""
    rows, blocks = len(operand), -(-operand.shape[1] // 128)
    _require(scale.data_ptr() % ALIGNMENT == 0, "cuBLASLt: scales of blocks begin at multiples of 16 bytes")
    if kind == ScalingType.BlockWise1x128:
        # _scaled_block1x128_block1x128, _scaled_block128x128_block1x128, _scaled_block1x128_block128x128
        _check_scale(scale, (rows, blocks), rows)
        return _in_memory(scale, (rows, blocks), (1, _up_to(PITCH, rows)))
    _require(kind == ScalingType.BlockWise128x128, f"find_scaled_gemm_impl: no such recipe here: {kind.name}")
    # _scaled_block128x128_block1x128, _scaled_block1x128_block128x128: transposed, K padded to four blocks
    pitch, squares = _up_to(4, blocks), -(-rows // 128)
    _check_scale(scale, (pitch, squares), pitch)
    return _in_memory(scale, (squares, blocks), (pitch, 1)).repeat_interleave(128, 0)[:rows]


def _in_tiles(operand: Tensor, scale: Tensor) -> Tensor:
    """The scales of ``[rows, K]`` as the GPU reads them, tile by tile -> ``[rows, K]``."""
    (rows, k), blocks = operand.shape, -(-operand.shape[1] // 32)
    size = _up_to(128, rows) * _up_to(4, blocks)
    _require(scale.numel() == size, f"_scaled_mxfp8_mxfp8: scale should have {size} elements, got {scale.numel()}")
    _require(scale.is_contiguous(), "_scaled_mxfp8_mxfp8: both scales should be contiguous")
    # the layouts of cuBLASLt: whole blocks along K, K-major
    _require(k % 32 == 0, f"cuBLASLt: K of {k} is a multiple of 32")
    _require(operand.stride(1) == 1, "cuBLASLt: operands with scales for every 32 elements are K-major")
    _require(scale.data_ptr() % ALIGNMENT == 0, "cuBLASLt: scales of blocks begin at multiples of 16 bytes")
    row, block = torch.arange(rows)[:, None], torch.arange(blocks)
    tile = row // 128 * (_up_to(4, blocks) // 4) + block // 4
    codes = scale.view(torch.uint8)[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4]
    powers = torch.exp2(codes.double() - 127)
    return torch.where(codes == 255, float("nan"), powers).repeat_interleave(32, 1)


def _check_scale(scale: Tensor, shape: tuple[int, int], pitch: int) -> None:
    _require(scale.shape == shape, f"_scaled_block: scale must have shape {shape}, got {tuple(scale.shape)}")
    strides = scale.stride(0) == 1 and (scale.stride(1) == pitch or (shape[1] == 1 and scale.stride(1) == 1))
    _require(strides, f"_scaled_block: scale must have strides {(1, pitch)}, got {scale.stride()}")


def _in_memory(tensor: Tensor, shape: tuple[int, int], strides: tuple[int, int]) -> Tensor:
    """What lies in memory from the tensor's first element on."""
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    missing = last + 1 - tensor.untyped_storage().nbytes() // tensor.itemsize
    _require(missing <= 0, f"cuBLASLt: reads {missing} numbers past the end of a tensor of shape {tuple(tensor.shape)}")
    return torch.as_strided(tensor, shape, strides)


def _product(
    a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None, output: torch.dtype
) -> Tensor:
    """Scales are ``[rows or 1, blocks along K or 1]``, or for each element."""
    # _scaled_gemm, with the layouts of cublasCommonArgs, cuda/cuBlasCommonArgs.h
    by_rows = _lies_by_rows(a), not _lies_by_rows(b)
    # torch asks on Hopper; on Ada, cuBLASLt knows no other layout
    is_supported = all(by_rows) or CAPABILITY[0] in (10, 11)
    _require(is_supported, "_scaled_gemm: Only multiplication of row-major and column-major matrices is supported")
    values = []
    for operand, scales, k_major in ((a, a_scales, by_rows[0]), (b.t(), b_scales, by_rows[1])):
        k = operand.shape[1]
        width, pitch = (k, operand.stride(0)) if k_major else (len(operand), operand.stride(1))
        fits = pitch >= width and pitch % ALIGNMENT == 0
        _require(fits, f"cuBLASLt: rows of {width} bytes cannot lie {pitch} bytes apart")
        _require(operand.data_ptr() % ALIGNMENT == 0, "cuBLASLt: operands begin at multiples of 16 bytes")
        along_k = scales if scales.shape[1] in (1, k) else scales.repeat_interleave(128, 1)[:, :k]
        values.append(operand.double() * along_k)
    out = values[0] @ values[1].t()
    return (out if bias is None else out + bias.flatten()).to(output)


def _lies_by_rows(matrix: Tensor) -> bool:
    # prepare_matrix_for_cublas
    (rows, columns), (row, column) = matrix.shape, matrix.stride()
    if matrix.is_contiguous() or matrix.t().is_contiguous():
        return matrix.is_contiguous()
    if row == 1 and column >= max(1, rows):
        return False
    _require(column == 1 and row >= max(1, columns), "prepare_matrix_for_cublas: torch would copy an operand")
    return True


def _up_to(multiple: int, size: int) -> int:
    return -(-size // multiple) * multiple
