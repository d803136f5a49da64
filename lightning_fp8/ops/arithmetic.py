"""The arithmetic of casts in torch's own operations, on any device: amaxes, saturated codes, the values of codes.

Nothing here waits for a GPU. On a CPU everything runs over parts of the rows, with temporaries of a few megabytes: the
operating system would map and clear temporaries as large as the tensors again and again, which can take longer than the
arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.ops.formats import Fp8Format
from lightning_fp8.ops.library import on_gpu
from lightning_fp8.ops.operand import columns_shape

CHUNK_ELEMENTS = 1 << 20


def saturated(x: Tensor, scale: Tensor, fmt: Fp8Format, amax: Tensor | None = None) -> Tensor:
    """``x * scale`` in fp32, saturated to ±max, rounded to nearest even, ``uint8``, contiguous. NaN stays NaN.

    ``amax``, if known, saves the saturating pass on a CPU over tensors that cannot saturate.
    """
    if on_gpu(x):
        return (x.float() * scale).clamp(-fmt.max, fmt.max).to(fmt.dtype).contiguous().view(torch.uint8)
    # `not <=` rather than `>`: a NaN amax says nothing about the other elements
    saturates = amax is None or not bool(amax * scale <= fmt.max)
    if x.numel() <= CHUNK_ELEMENTS and x.is_contiguous():
        return _scaled(x, scale, fmt, saturates).to(fmt.dtype).view(torch.uint8)
    codes = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    for rows in row_chunks(*x.shape):
        codes[rows] = _scaled(x[rows], scale, fmt, saturates)
    return codes.view(torch.uint8)


def _scaled(x: Tensor, scale: Tensor, fmt: Fp8Format, saturates: bool) -> Tensor:
    values = x * scale if x.dtype == torch.float32 else x.float().mul_(scale)
    return values.clamp_(-fmt.max, fmt.max) if saturates else values


def saturated_blocks(x: Tensor, scale: Tensor, fmt: Fp8Format, size: int, width: int) -> Tensor:
    """The same with a scale for every ``size`` elements of a row, ``[M, ceil(K/size)]`` -> ``[M, width]``, zeros beyond
    K, also where the scale is NaN."""
    codes, columns = torch.empty(len(x), width, dtype=fmt.dtype, device=x.device), x.shape[1]
    for rows in _chunks(x):
        values = (_blocks(x[rows], size).float() * scale[rows, :, None]).clamp_(-fmt.max, fmt.max)
        codes[rows, :columns] = values.flatten(1)[:, :columns]
    as_bytes = codes.view(torch.uint8)
    if width > columns:
        as_bytes[:, columns:] = 0
    return as_bytes


def block_amaxes(x: Tensor, size: int) -> Tensor:
    """``max|x|`` of every ``size`` elements of a row, ``[M, ceil(K/size)] float32``; NaN if any element is NaN."""
    # in fp32 before autocast sees them: it joins no numbers in fp16 and bf16
    return torch.cat([_blocks(x[rows], size).abs().amax(-1).float() for rows in _chunks(x)])


def square_amaxes(x: Tensor, size: int) -> Tensor:
    """The same for squares, ``[ceil(M/size), ceil(K/size)] float32``."""
    amaxes = block_amaxes(x, size)
    return F.pad(amaxes, (0, 0, 0, -len(amaxes) % size)).unflatten(0, (-1, size)).amax(1)


def largest(amaxes: Tensor) -> Tensor:
    """The largest amax of all blocks, ``[] float32``; 0 if there are none."""
    return amaxes.amax() if amaxes.numel() else amaxes.new_zeros(())


def largest_of_blocks(x: Tensor, counts: Sequence[int], block: int) -> Tensor:
    """The largest of nonnegative numbers ``[M, K]`` for each of ``counts`` parts: all of a dimension, each element of
    it, or each ``block`` of them."""
    for dim, count in enumerate(counts):
        size = x.shape[dim]
        if count != size:
            length = size if count == 1 else block
            missing = [-size % length if at == dim else other for at, other in enumerate(x.shape)]
            x = torch.cat((x, x.new_zeros(missing)), dim).unflatten(dim, (-1, length)).amax(dim + 1)
    return x


def of_rows(scales: Tensor, size: int, rows: int) -> Tensor:
    """Scales of squares, repeated for each row of a matrix; scales of rows stay unchanged."""
    return scales if len(scales) == rows else scales.repeat_interleave(size, 0)[:rows]


def per_element(scales: Tensor, size: int, x: Tensor) -> Tensor:
    """Scales ``[M or 1 or ceil(M/size), ceil(K/size) or 1]`` in a shape that expands to that of x ``[M, K]``."""
    for dim, count in enumerate(x.shape):
        if scales.shape[dim] not in (1, count):
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, count)
    return scales


def by_columns(codes: Tensor) -> Tensor:
    """Codes ``[M, K]`` -> codes of the transpose, contiguous, rows padded with zeros; for a stack, of each matrix."""
    *stack, rows, width = codes.shape
    columns = codes.new_empty(*stack, *columns_shape(rows, width))
    columns[..., :rows] = codes.mT
    columns[..., rows:] = 0
    return columns


def values(codes: Tensor, fmt: Fp8Format) -> Tensor:
    """The values of codes: ``[*] uint8`` -> ``[*] float32``."""
    return codes.view(fmt.dtype).float()


def _chunks(x: Tensor) -> list[slice]:
    """Slices of the rows that keep temporaries small on the CPU; one slice on a GPU, or if there are no rows."""
    return [slice(len(x))] if on_gpu(x) or not len(x) else row_chunks(*x.shape)


def _blocks(x: Tensor, size: int) -> Tensor:
    """``[rows, columns]`` -> ``[rows, ceil(columns/size), size]``, the last block of a row padded with zeros."""
    blocks = -(-x.shape[1] // size)
    return F.pad(x, (0, blocks * size - x.shape[1])).unflatten(1, (blocks, size))


def row_chunks(rows: int, columns: int) -> list[slice]:
    """Slices of about equal length that cover all rows."""
    chunks = rows * columns // CHUNK_ELEMENTS
    if chunks <= 1:
        return [slice(0, rows)] if rows else []
    step = -(-rows // chunks)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
