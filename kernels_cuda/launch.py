"""Launching: torch's current stream on the tensors' device, all arguments in one prepacked struct."""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

import torch
from torch import Tensor

# more than any kernel's arguments take; the limit of all devices is 4096
_ARGUMENT_BYTES = 1024
# alignment of the struct, required by the tensor maps in it
_ALIGNMENT = 64
# shared memory that a block may have without a function attribute
_UNASKED_SHARED_BYTES = 48 << 10


class _Packed(threading.local):
    """The launch buffers of one thread.

    The driver copies the arguments before the launch returns, so the buffer is free again then. Autograd launches from
    its own threads, and a launch releases the GIL: hence one buffer per thread.

    Attributes:
        place: a buffer to pack arguments in, the offset of the first byte, and the address of the one-element array of
            pointers that the driver reads. One tuple, because each access to thread-local data takes time.
        devices: devices whose context has been set in the thread.
    """

    def __init__(self) -> None:
        buffer = ctypes.create_string_buffer(_ARGUMENT_BYTES + _ALIGNMENT)
        offset = -ctypes.addressof(buffer) % _ALIGNMENT
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer) + offset)
        self.place = (buffer, offset, ctypes.addressof(self._pointers))
        self.devices: set[int] = set()


_packed = _Packed()


def address(tensor: Tensor | None) -> int:
    """Where a tensor's elements begin, for an argument struct; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def set_context(device: int) -> None:
    """Set a device's context in this thread, once per thread and device: driver functions fail without one.

    A thread gets its context with its first runtime call, which may come after our first launch: torch's allocator
    makes no such call for cached memory.
    """
    if device not in _packed.devices:
        from cupy_backends.cuda.api import runtime

        with torch.cuda.device(device):
            runtime.setDevice(device)
        _packed.devices.add(device)


class Kernel:
    """A kernel ready to launch on one device. Its only parameter is a struct, by value.

    Args:
        function: CuPy's ``RawKernel``. A launch passes its pointer to the driver, which takes the host less time.
        layout: format of the struct, as for Python's ``struct``, native and aligned.
        block: threads of a block.
        device: index of the CUDA device.
        shared_bytes: dynamic shared memory of a block.

    Attributes:
        device: index of the CUDA device.
        multiprocessors: the device's number of multiprocessors.
        resources: ``registers`` and ``local_bytes`` of a thread, and ``shared_bytes`` of a block, as the driver says;
            local memory is where spilled registers go.
    """

    multiprocessors: int
    resources: dict[str, int]

    def __init__(self, function: Any, layout: str, block: int, device: int, shared_bytes: int = 0) -> None:
        self._layout = struct.Struct(layout)
        self._block = block
        self.device = device
        self._shared_bytes = shared_bytes
        self._function = function
        self._load()

    def _load(self) -> None:
        from cupy.cuda import Device
        from cupy_backends.cuda.api import driver

        self._launch_kernel = driver.launchKernel
        self._set_context = set_context
        self._current_device = torch.cuda.current_device
        # torch's public API for the same number creates a Stream object first
        self._current_stream = torch._C._cuda_getCurrentRawStream
        with torch.cuda.device(self.device), Device(self.device):
            function = self._function
            self._pointer: int = function.kernel.ptr
            if self._shared_bytes > _UNASKED_SHARED_BYTES:
                function.max_dynamic_shared_size_bytes = self._shared_bytes
            self.resources = {
                "registers": function.num_regs,
                "local_bytes": function.local_size_bytes,
                "shared_bytes": function.shared_size_bytes + self._shared_bytes,
            }
        self.multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count

    def __call__(self, grid: int, *arguments: int | float | bytes) -> None:
        """Launch ``grid`` blocks, after all work that torch has queued on its current stream. Does not synchronise."""
        device = self.device
        self._set_context(device)
        buffer, offset, pointers = _packed.place
        self._layout.pack_into(buffer, offset, *arguments)
        stream, shared = self._current_stream(device), self._shared_bytes
        launch = (self._pointer, grid, 1, 1, self._block, 1, 1, shared, stream, pointers, 0)
        if self._current_device() == device:
            self._launch_kernel(*launch)
        else:
            with torch.cuda.device(device):
                self._launch_kernel(*launch)
