"""Tensor maps, which describe a matrix in memory to Hopper's copy engine (TMA). The first one needs the driver."""

from __future__ import annotations

import ctypes
import functools

import torch

from kernels_cuda.launch import set_context

# CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion of cuda.h
_DATA_TYPES = {torch.uint8: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SWIZZLE_128B, _L2_PROMOTION_256B = 3, 3
_BYTES, _ALIGNMENT = 128, 64


@functools.lru_cache(maxsize=4096)
def tensor_map(
    device: int,
    address: int,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    row_bytes: int,
    box_rows: int,
    box_columns: int,
) -> bytes:
    """A matrix, copied in boxes with a 128-byte swizzle; elements outside it are read as 0 and not written.

    Args:
        device: index of the CUDA device that holds it.
        address: of the first element, a multiple of 16.
        dtype: uint8, fp16, bf16 or fp32.
        rows: of the matrix.
        columns: of the matrix.
        row_bytes: between rows, a multiple of 16; ignored for a single row, to which torch may give any stride.
        box_rows: of a box, at most 256.
        box_columns: of a box, 128 bytes.

    Raises:
        RuntimeError: if the driver refuses it.
    """
    set_context(device)
    if rows == 1:
        row_bytes = -(-columns * dtype.itemsize // 16) * 16
    memory = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    at = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        _DATA_TYPES[dtype],
        2,
        ctypes.c_void_p(address),
        (u64 * 2)(columns, rows),
        (u64 * 1)(row_bytes),
        (u32 * 2)(box_columns, box_rows),
        (u32 * 2)(1, 1),
        0,
        _SWIZZLE_128B,
        _L2_PROMOTION_256B,
        0,
    )
    if code:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled gave error {code} for a {dtype} matrix of {rows} x {columns} at {address:#x}, rows"
            f" {row_bytes} bytes apart, in boxes of {box_rows} x {box_columns}."
        )
    return ctypes.string_at(at, _BYTES)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
