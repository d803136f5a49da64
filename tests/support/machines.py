"""Machines that we do not have, as torch, CuPy and the driver would report them. Kernels run from their sources."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from host_kernels import HostKernel, host_tensor_map

from kernels_cuda import compile as compiling
from kernels_cuda import gemm
from kernels_cuda.compile import check_driver, check_nvrtc
from lightning_fp8.ops.cuda import kernels, rule
from lightning_fp8.runtime import device, environment
from lightning_fp8.runtime.device import Gpu
from lightning_fp8.tools import doctor

RTX_4090, RTX_5090 = Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128), Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170)
A100, H100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108), Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132)
B200, B300 = Gpu("NVIDIA B200", (10, 0), 148), Gpu("NVIDIA B300", (10, 3), 148)
THOR, MI300X = Gpu("NVIDIA Thor", (11, 0), 20), Gpu("AMD Instinct MI300X", (9, 4), 304)


@dataclass
class Machine:
    """Versions as ``torch.version.cuda``, NVRTC and ``cuDriverGetVersion`` give them; no NVRTC without CuPy."""

    gpu: Gpu
    cuda: str | None = "13.0"
    hip: str | None = None
    cupy: str | None = "cupy-cuda13x"
    nvrtc: tuple[int, int] = (13, 0)
    driver: int = 13000


def run_as(gpu: Gpu | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU runs products as this GPU does, by kernels from their sources."""
    monkeypatch.setattr(device, "stand_in", gpu)
    monkeypatch.setattr(gemm, "tensor_map", host_tensor_map)
    rule.configuration_for.cache_clear()


def pretend(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the CUDA half of the operators on a CPU, and for the doctor."""
    run_as(machine.gpu, monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", machine.cuda)
    monkeypatch.setattr(torch.version, "hip", machine.hip)
    binding, driver = ModuleType("nvrtc"), ModuleType("driver")
    binding.getVersion = lambda: machine.nvrtc  # type: ignore[attr-defined]
    major = 0 if machine.cupy is None else int(machine.cupy.removeprefix("cupy-cuda")[:2])
    driver.get_build_version = lambda: 1000 * major  # type: ignore[attr-defined]
    names = "cupy_backends.cuda.libs.nvrtc", "cupy_backends.cuda.api.driver"
    for name, module in zip(names, (binding, driver), strict=True):
        monkeypatch.setitem(sys.modules, name, None if machine.cupy is None else module)
    compiling.nvrtc_version.cache_clear()

    def load(
        family: str, defines: Sequence[str], layout: str, block: int, index: int, shared_bytes: int = 0
    ) -> HostKernel:
        check_driver(machine.driver, check_nvrtc(machine.gpu.capability))
        return HostKernel((family, tuple(defines)), layout, block, index, shared_bytes)

    monkeypatch.setattr(kernels.load, "load", load)
    for module in (doctor, environment):
        monkeypatch.setattr(module, "driver_cuda", lambda: machine.driver)
        monkeypatch.setattr(module, "driver_version", lambda: "580.65" if machine.driver else None)
    versions = {machine.cupy: "14.0"}
    real = environment.package_version
    monkeypatch.setattr(doctor, "package_version", lambda name: versions.get(name) if "cupy" in name else real(name))
