"""CuPy's ``RawModule`` and ``RawKernel`` without a driver: what they accept, when they load, and on which device.

Source: cupy/_core/raw.pyx of CuPy 13 and 14. The real classes call the driver in C, where nothing can be replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


class Driver:
    """What a driver would be asked.

    Attributes:
        device: the runtime's current device.
        loaded: content of each file that was loaded, by path and device. CuPy keeps modules by both.
        entered: devices made current through ``cupy.cuda.Device``.
        attributes: function attributes that were set: pointer and bytes of dynamic shared memory.
    """

    device = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded: dict[tuple[str, int], bytes] = {}
        self.entered: list[int] = []
        self.attributes: list[tuple[int, int]] = []
        monkeypatch.setattr("cupy.cuda.Device", self._device)
        monkeypatch.setattr("cupy.RawModule", lambda *args, **options: RawModule(self, *args, **options))

    @contextmanager
    def _device(self, index: int) -> Iterator[None]:
        self.entered.append(index)
        before, self.device = self.device, index
        yield
        self.device = before


class RawModule:
    def __init__(self, driver: Driver, code: str | None = None, *, path: str | None = None) -> None:
        if (code is None) == (path is None):
            raise TypeError("Exactly one of `code` and `path` keyword arguments must be given.")
        assert type(path) is str
        self._driver, self.file_path = driver, path

    def get_function(self, name: str) -> RawKernel:
        kernel = RawKernel(self._driver, self.file_path, name)
        # loads it
        assert kernel.kernel
        return kernel


class RawKernel:
    """Its pointer is another one on each device, and each property asks the driver about the current device."""

    num_regs = property(lambda self: self.kernel.ptr and 64)
    local_size_bytes = property(lambda self: self.kernel.ptr and 0)
    shared_size_bytes = property(lambda self: self.kernel.ptr and 8448)

    def __init__(self, driver: Driver, path: str, name: str) -> None:
        self._driver, self.file_path, self.name = driver, path, name

    @property
    def kernel(self) -> Any:
        key = self.file_path, self._driver.device
        self._driver.loaded.setdefault(key, Path(self.file_path).read_bytes() if self.file_path else b"")
        return SimpleNamespace(ptr=77 + self._driver.device)

    def _set_shared(self, size: int) -> None:
        self._driver.attributes.append((self.kernel.ptr, size))

    max_dynamic_shared_size_bytes = property(None, _set_shared)
