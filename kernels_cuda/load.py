"""From a kernel family to a kernel that can be launched on one device, and the record of its check."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from kernels_cuda.cache import cache_folder, check_folder, read_trusted, write
from kernels_cuda.compile import architecture, check_driver, check_nvrtc, compiled, source_key
from kernels_cuda.launch import Kernel


def load(family: str, defines: Sequence[str], layout: str, block: int, device: int, shared_bytes: int = 0) -> Kernel:
    """Compile a kernel, or take it from the cache, and load it.

    Args:
        family: name of the ``.cu`` file and of its kernel.
        defines: the macros that choose a variant.
        layout: of the kernel's argument struct, see :class:`~kernels_cuda.launch.Kernel`.
        block: threads of a block.
        device: index of the CUDA device.
        shared_bytes: dynamic shared memory of a block.

    Raises:
        KernelsUnavailable: if CuPy, NVRTC or the driver is missing or does not fit; the message says what to install.
        CompileError: if the source does not compile.
    """
    version = check_nvrtc(torch.cuda.get_device_capability(device))
    check_driver(_driver_version(), version)
    import cupy

    cubin = compiled(family, architecture(torch.cuda.get_device_capability(device)), defines)
    with torch.cuda.device(device), cupy.cuda.Device(device):
        # CuPy keeps modules by path and device: the hash in the file's name makes this one kernel
        function = cupy.RawModule(path=str(cubin)).get_function(family)
    return Kernel(function, layout, block, device, shared_bytes)


@functools.cache
def _driver_version() -> int:
    from cupy_backends.cuda.api import runtime

    return int(runtime.driverGetVersion())


def has_passed(family: str, defines: Sequence[str], device: int) -> bool:
    """Whether this kernel, of this source, has passed its check on such a device under this driver before."""
    with contextlib.suppress(OSError):
        check_folder(cache_folder())
        return read_trusted(_pass_file(family, defines, device)) is not None
    return False


def remember_pass(family: str, defines: Sequence[str], device: int) -> None:
    """Record a pass, so the next process skips the check. If nothing can be written, it runs again."""
    with contextlib.suppress(OSError):
        check_folder(cache_folder())
        write(_pass_file(family, defines, device), b"")


def forget_pass(family: str, defines: Sequence[str], device: int) -> None:
    """Delete the record of a pass, so the next process tests the kernel again."""
    with contextlib.suppress(OSError):
        _pass_file(family, defines, device).unlink(missing_ok=True)


def _pass_file(family: str, defines: Sequence[str], device: int) -> Path:
    key = source_key(family, architecture(torch.cuda.get_device_capability(device)), defines)
    place = f"{key} {torch.cuda.get_device_name(device)} {_driver_version()}"
    return cache_folder() / f"{family}-{hashlib.sha256(place.encode()).hexdigest()[:16]}.passed"
