"""Tensor maps, which describe a matrix in memory to Hopper's copy engine (TMA). The first one needs the driver."""

from __future__ import annotations

import ctypes
import functools
import threading

import torch

from kernels_cuda.launch import set_context

# CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion of cuda.h
_DATA_TYPES = {torch.uint8: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SWIZZLE_128B, _L2_PROMOTION_256B = 3, 3
_BYTES, _ALIGNMENT = 128, 64


class _Arrays(threading.local):
    """What the driver reads, and the map that it writes. One for each thread, as a call releases the GIL."""

    def __init__(self) -> None:
        u64, u32 = ctypes.c_uint64, ctypes.c_uint32
        self._memory = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
        self.map = -(-ctypes.addressof(self._memory) // _ALIGNMENT) * _ALIGNMENT
        self.sizes, self.row_bytes, self.box, self.steps = (u64 * 2)(), (u64 * 1)(), (u32 * 2)(), (u32 * 2)(1, 1)


_arrays = _Arrays()


# more than a large model has, 80 layers of 7 weights with 9 maps each: used in turn, they would evict each other
@functools.lru_cache(maxsize=16384)
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
    arrays, sizes, box = _arrays, _arrays.sizes, _arrays.box
    sizes[0], sizes[1], arrays.row_bytes[0], box[0], box[1] = columns, rows, row_bytes, box_columns, box_rows
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(arrays.map),
        _DATA_TYPES[dtype],
        2,
        ctypes.c_void_p(address),
        sizes,
        arrays.row_bytes,
        box,
        arrays.steps,
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
    return ctypes.string_at(arrays.map, _BYTES)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
