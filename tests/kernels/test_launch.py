"""Launching and loading up to the driver call, which is recorded."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy_stand_in
import pytest
import torch
from cupy_backends.cuda.api import driver, runtime

import kernels_cuda.load
from kernels_cuda import gemm
from kernels_cuda.compile import KernelsUnavailable, compiled
from kernels_cuda.gemm_variants import configurations
from kernels_cuda.launch import Kernel
from kernels_cuda.tensor_map import tensor_map

LAYOUT = "PPiif"
HOPPER = configurations((9, 0))[-1]
CURRENT_DEVICE = 0


def current_stream(device: int) -> int:
    """The current stream of each device."""
    return 1000 + device


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices that were made current."""
    switched: list[int] = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        switched.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", current_stream, raising=False)
    return switched


@pytest.mark.parametrize("device", [0, 1])
def test_a_launch_packs_its_arguments_and_follows_torchs_stream(
    devices: list[int], device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = Driver(monkeypatch)
    kernel = Kernel(cupy_stand_in.RawKernel(stub, "", "name"), LAYOUT, 256, device)

    def launch() -> None:
        for _ in range(3):
            kernel(12, 0xDEADBEEF00, 16, -3, 4, 0.5)

    threads = [in_a_thread(launch) for _ in range(2)]
    sizes, arguments = (12, 1, 1, 256, 1, 1), (0xDEADBEEF00, 16, -3, 4, 0.5)
    assert stub.launches == [(77 + device, sizes, 0, 1000 + device, 0, arguments)] * 6
    # each thread has got the context once; a launch switches to a device that is not the current one
    assert stub.contexts == [(thread, device) for thread in threads]
    assert set(devices) == {device}


@pytest.mark.usefixtures("devices")
def test_threads_do_not_mix_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Driver(monkeypatch)
    kernel = Kernel(cupy_stand_in.RawKernel(stub, "", "name"), LAYOUT, 32, 0)

    def run(number: int) -> None:
        for step in range(300):
            kernel(number + 1, number, step, number, step, float(number))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    found = {(launch[1][0] - 1, launch[5]) for launch in stub.launches}
    assert found == {(n, (n, step, n, step, float(n))) for n in range(8) for step in range(300)}


class Driver(cupy_stand_in.Driver):
    """Refuses calls from a thread without a context, as CUDA's driver does; the runtime creates contexts.

    Attributes:
        contexts: created by the runtime, in order: thread and device.
        launches: function, sizes, shared memory, stream, and the arguments read through the pointers.
        row_bytes: of each tensor map.
    """

    INVALID_VALUE, INVALID_CONTEXT = 1, 201

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.contexts: list[tuple[int, int]] = []
        self.row_bytes: list[int] = []
        self.launches: list[tuple[Any, ...]] = []
        self._thread = threading.local()
        monkeypatch.setattr(runtime, "setDevice", self._set_device)
        monkeypatch.setattr(driver, "launchKernel", self._launch)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: CURRENT_DEVICE)
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        tensor_map.cache_clear()
        monkeypatch.setattr("kernels_cuda.tensor_map._driver", lambda: self)

    def _set_device(self, device: int) -> None:
        self._thread.device = device
        self.contexts.append((threading.get_ident(), device))

    def _launch(self, function: int, *rest: int) -> None:
        if not hasattr(self._thread, "device"):
            raise RuntimeError("CUDA_ERROR_INVALID_CONTEXT")
        *sizes, shared, stream, pointers, extra = rest
        time.sleep(0)  # lets other threads run, as the driver's call does
        address = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))[0]
        arguments = struct.unpack(LAYOUT, ctypes.string_at(address, struct.calcsize(LAYOUT)))
        # alignment that tensor maps require
        assert address % 64 == 0
        self.launches.append((function, tuple(sizes), shared, stream, extra, arguments))

    def cuTensorMapEncodeTiled(self, *given: Any) -> int:  # noqa: N802
        if not hasattr(self._thread, "device"):
            return self.INVALID_CONTEXT
        columns, row_bytes = given[4][0], given[5][0]
        self.row_bytes.append(row_bytes)
        itemsize = {0: 1, 6: 2, 7: 4, 9: 2}[given[1]]
        return 0 if row_bytes % 16 == 0 and row_bytes >= columns * itemsize else self.INVALID_VALUE


def in_a_thread(work: Callable[[], None]) -> int:
    """Calls the function in a new thread, whose number it returns."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
        return pool.submit(threading.get_ident).result()


def test_the_first_tensor_map_of_a_thread_sets_the_context(devices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Driver(monkeypatch)
    kernel = Kernel(cupy_stand_in.RawKernel(stub, "", "name"), HOPPER.layout, HOPPER.threads, 1)
    del devices[:]
    operand, out = (torch.zeros(64, 128, dtype=torch.uint8), torch.ones(())), torch.zeros(64, 64)
    thread = in_a_thread(lambda: gemm.gemm(kernel, HOPPER, operand, operand, out))
    # the context of the kernel's device, although another is current, and no context for the current one
    assert stub.contexts == [(thread, 1)]
    assert set(devices) == {1}


@pytest.mark.usefixtures("devices")
def test_threads_do_not_mix_their_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's call releases the GIL between reading its arguments and writing the map."""
    stub = Driver(monkeypatch)
    together = threading.Barrier(2, timeout=60)

    def encode(map: ctypes.c_void_p, *given: Any) -> int:
        together.wait()
        ctypes.memmove(map, struct.pack("QQQ", *given[3], *given[4]), 24)
        together.wait()
        return 0

    monkeypatch.setattr(stub, "cuTensorMapEncodeTiled", encode)

    def make(rows: int) -> tuple[int, ...]:
        return struct.unpack("QQQ", tensor_map(0, 0, torch.uint8, rows, 128, 16 * rows, 64, 128)[:24])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(make, (16, 32))) == [(128, 16, 256), (128, 32, 512)]


@pytest.mark.usefixtures("devices")
def test_a_single_row_may_have_any_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Driver(monkeypatch)
    kernel = Kernel(cupy_stand_in.RawKernel(stub, "", "name"), HOPPER.layout, HOPPER.threads, 0)
    # contiguous by torch's rule, with a row stride of one element
    a, b = (torch.zeros(144, 1, dtype=torch.uint8).t() for _ in range(2))
    assert a.is_contiguous()
    assert a.stride(0) == 1
    out = torch.zeros(3, dtype=torch.bfloat16).as_strided((1, 3), (1, 1))
    one, rows = torch.ones(()), torch.zeros(3, 144, dtype=torch.uint8)
    in_a_thread(lambda: gemm.gemm(kernel, HOPPER, (a, one), (b, one), out[:, :1]))
    in_a_thread(lambda: gemm.gemm(kernel, HOPPER, (a, one), (rows, one), out))
    assert stub.row_bytes == [144, 144, 16, 144, 16]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, devices: list[int]) -> Driver:
    """CuPy without a driver."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(kernels_cuda.load, "_driver_version", lambda: 13000)
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path))
    return Driver(monkeypatch)


def test_loading_compiles_for_the_device_and_takes_the_kernel_there(stand_in: Driver, devices: list[int]) -> None:
    kernel = kernels_cuda.load.load("update_scales", (), "PPPPPiiif", 1024, 1)
    assert kernel.multiprocessors == 132
    cubin = compiled("update_scales", "sm_90a")
    assert stand_in.loaded == {(str(cubin), 1): cubin.read_bytes()}
    # once for the module and once for its kernel: both need the device's context
    assert devices == stand_in.entered == [1, 1]


@pytest.mark.parametrize(("shared_bytes", "asked"), [(0, None), (48 << 10, None), ((48 << 10) + 16, (48 << 10) + 16)])
def test_more_shared_memory_than_usual_is_asked_for(stand_in: Driver, shared_bytes: int, asked: int | None) -> None:
    kernel = kernels_cuda.load.load("update_scales", (), LAYOUT, 1024, 0, shared_bytes)
    assert stand_in.attributes == ([] if asked is None else [(77, asked)])
    assert kernel.resources["shared_bytes"] == 8448 + shared_bytes
    in_a_thread(lambda: kernel(3, 1, 2, 3, 4, 5.0))
    assert stand_in.launches[0][:3] == (77, (3, 1, 1, 1024, 1, 1), shared_bytes)


def test_kernels_of_one_family_are_kept_apart(stand_in: Driver) -> None:
    """CuPy keeps modules by path: that of another variant must be another one."""
    variants = [("SIZE=1",), ("SIZE=2",)]
    for defines in (*variants, *variants):
        kernels_cuda.load.load("update_scales", defines, LAYOUT, 256, 0)
    assert len({path for path, _ in stand_in.loaded}) == 2


def test_a_driver_that_is_too_old_is_named(stand_in: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_cuda.load, "_driver_version", lambda: 12080)
    with pytest.raises(KernelsUnavailable, match=r"12\.8 .*cupy-cuda12x"):
        kernels_cuda.load.load("update_scales", (), "PPPPPiiif", 1024, 0)
    assert stand_in.loaded == {}
