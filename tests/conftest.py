from __future__ import annotations

import ctypes
import functools
import gc
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

# xdist's main process reads this file before it starts the workers: nothing here may import torch or Lightning for it
if TYPE_CHECKING:
    from host_kernels import HostKernel


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # files with slow tests come first, so that no worker is left with one when the others have finished
    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: item.path not in slow)
    import torch

    if torch.cuda.is_available():
        return
    without, needing = [], []
    for item in items:
        (needing if item.get_closest_marker("cuda") else without).append(item)
    config.hook.pytest_deselected(items=needing)
    items[:] = without


def pytest_configure() -> None:
    # imports and compilers create millions of objects, few of them garbage
    gc.set_threshold(10_000, 20, 20)


def pytest_collection_finish() -> None:
    # half a million objects that stay alive: later collections skip them
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    # a machine with a GPU may lack what the other tests import
    report = yield
    missing = re.search(r"ModuleNotFoundError: (No module named .*)", str(report.longrepr))
    if report.failed and missing and collector.config.option.markexpr == "cuda":
        report.outcome, report.longrepr = "skipped", (str(collector.path), 1, missing[1])
    return report


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _leave_nothing_behind() -> Iterator[None]:
    yield
    # what one file compiled, or prevented from being compiled, like a FLOP counter does, must not affect the next file
    if "torch._dynamo" in sys.modules:
        import torch

        torch.compiler.reset()
    # glibc keeps the freed memory of small models in fragments: hundreds of megabytes in a process that runs many files
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)


@pytest.fixture(autouse=True, scope="session")
def _usual_umask() -> None:
    # with umask 002, a default of some systems, the tests' folders could be no kernel caches: groups may write there
    os.umask(0o022)


@pytest.fixture(autouse=True, scope="session")
def _seeds_of_devices_that_are_there() -> None:
    import torch

    # for absent backends, each `torch.manual_seed` would format and keep its caller's stack: 3 ms per test, and memory
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None  # type: ignore[assignment]


@pytest.fixture(autouse=True, scope="session")
def _packages_are_searched_once() -> None:
    from lightning.fabric.utilities import registry

    # every Trainer searches the metadata of all installed packages for callbacks: 15 ms
    registry.entry_points = functools.cache(registry.entry_points)


@pytest.fixture(autouse=True, scope="session")
def _two_threads() -> None:
    import torch

    # but as many as there are for the large products that kernels on a GPU are compared with
    if not torch.cuda.is_available():
        torch.set_num_threads(min(2, torch.get_num_threads()))
    # Lightning says once per run that a loader has no workers
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes on one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def strict_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's FP8 products on the CPU refuse what they would refuse on a GPU; those in blocks are torch's, too."""
    import torch
    from strict_scaled_mm import replace_products

    from lightning_fp8.ops.cuda import plain
    from lightning_fp8.scalings.operand import Operand

    def in_blocks(a: Operand, b: Operand, bias: Any, dtype: torch.dtype, failure: Any = None) -> Any:
        # as on a GPU
        return plain.product_of_blocks(a, b, bias, dtype) if a.codes.numel() and b.codes.numel() else None

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*only once for all operators.*")
        replace_products(library)
    monkeypatch.setattr(plain, "scaled_mm_in_blocks", in_blocks)
    yield
    library._destroy()


@pytest.fixture
def host_kernels(strict_products: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The CUDA functions, with kernels that run on the CPU from their sources; gives the names of those loaded."""
    from host_kernels import HostKernel

    from lightning_fp8.ops.cuda import kernels

    loaded: list[str] = []

    def load(
        family: str, defines: Sequence[str], layout: str, block: int, device: int, shared_bytes: int = 0
    ) -> HostKernel:
        loaded.append(" ".join((family, *defines)))
        return HostKernel((family, tuple(defines)), layout, block, device, shared_bytes)

    monkeypatch.setattr(kernels.load, "load", load)
    monkeypatch.setattr(kernels.load, "has_passed", lambda *_: True)
    monkeypatch.setattr(kernels.load, "remember_pass", lambda *_: None)
    # nothing is compiled for a device
    monkeypatch.setattr(kernels, "compile_ahead", lambda *_: None)
    forget_kernels()
    yield loaded
    forget_kernels()


def forget_kernels() -> None:
    """What has been chosen and loaded is chosen and loaded again."""
    from lightning_fp8.ops.cuda import kernels, rule

    for function in (*vars(kernels).values(), rule.configuration_for):
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@pytest.fixture
def cuda_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs CPU tensors through ``ops.cuda``, also where torch's dispatcher calls."""
    monkeypatch.setattr("lightning_fp8.ops.library.cuda_on_cpu", True)


@pytest.fixture
def every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of tensors with one scale take every layout, as on a data-center Blackwell GPU."""
    monkeypatch.setattr("strict_scaled_mm.CAPABILITY", (10, 0))
    monkeypatch.setattr("lightning_fp8.ops.cuda.layouts.takes_every_layout", lambda device: True)


@pytest.fixture
def idle_half(cuda_functions: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same with kernels that do nothing: their results are allocated and not written."""
    from benchmarks.no_kernels import no_kernel
    from lightning_fp8.ops.cuda import kernels

    monkeypatch.setattr(kernels, "_obtain", no_kernel)
    forget_kernels()
    yield
    forget_kernels()


@pytest.fixture
def cuda_half(host_kernels: list[str], cuda_functions: None, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The same with kernels that run on the CPU; counts the launches of each."""
    from host_kernels import HostKernel

    launches: Counter[str] = Counter()
    launch = HostKernel.__call__

    def counting(self: HostKernel, grid: int, *arguments: int | float) -> None:
        launches[" ".join((self._function[0], *self._function[1]))] += 1
        launch(self, grid, *arguments)

    monkeypatch.setattr(HostKernel, "__call__", counting)
    return launches


@pytest.fixture
def grouped_half(cuda_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The same with Hopper's GEMMs over groups of rows."""
    from host_kernels import host_tensor_map

    from kernels_cuda import gemm
    from lightning_fp8.ops.cuda import groups

    monkeypatch.setattr(groups, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gemm, "tensor_map", host_tensor_map)
    groups._kernels.cache_clear()
    yield cuda_half
    groups._kernels.cache_clear()


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
