"""What the doctor diagnoses, from values as machines would give them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_pages import bare_machine, rows, value
from lightning.fabric import Fabric

import lightning_fp8
from kernels_cuda.cache import cache_folder
from kernels_cuda.compile import KernelsUnavailable
from lightning_fp8.ops.cuda import kernels
from lightning_fp8.tools.doctor import Diagnosis, KernelCheck, Problem, hardware, kernel_checks, precisions, software

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with bare_machine(tmp_path, monkeypatch):
        yield


# --- GPUs and toolchain ---

NO_NVRTC = KernelsUnavailable("No NVRTC library. Run `pip install nvidia-cuda-nvrtc`. (OSError: libnvrtc.so.13)")
NO_CUPY = KernelsUnavailable("Needs CuPy, which is not installed. Run `pip install cupy-cuda13x`.")
OLD_DRIVER = (
    "Update the driver, or run `pip uninstall -y cupy-cuda13x nvidia-cuda-nvrtc`, then"
    " `pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12`."
)
ONE_CUPY = "pip uninstall -y cupy-cuda13x cupy-cuda12x, then pip install cupy-cuda13x"
CUPY_13, TWO_CUPYS = {"cupy-cuda13x": "14.2"}, {"cupy-cuda13x": "14.2", "cupy-cuda12x": "13.0"}
TOOLCHAINS = {
    "fine": (13000, CUPY_13, (13, 0), True, True, []),
    "no NVRTC": (13000, CUPY_13, NO_NVRTC, True, False, ["Run `pip install nvidia-cuda-nvrtc`."]),
    "no CuPy, CUDA 13": (13000, {}, NO_CUPY, True, False, ["pip install cupy-cuda13x"]),
    "no CuPy, CUDA 12": (12080, {}, NO_CUPY, True, False, ["pip install cupy-cuda12x"]),
    "no CuPy, nothing to compile": (0, {}, NO_CUPY, False, False, []),
    "broken": (12080, CUPY_13, OSError("x"), True, False, ["pip install --force-reinstall cupy-cuda12x"]),
    "NVRTC newer than the driver": (12080, CUPY_13, (13, 5), True, False, [OLD_DRIVER]),
    "two": (13000, TWO_CUPYS, (13, 0), True, True, [ONE_CUPY]),
}  # fmt: skip


@pytest.mark.parametrize("case", TOOLCHAINS)
def test_toolchains(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, packages, nvrtc, compiles, ready, todo = TOOLCHAINS[case]

    def version() -> tuple[int, int]:
        if isinstance(nvrtc, Exception):
            raise nvrtc
        return nvrtc

    monkeypatch.setattr(hardware, "driver_cuda", lambda: driver)
    monkeypatch.setattr(hardware, "driver_version", lambda: "580.65" if driver else None)
    monkeypatch.setattr(hardware, "package_version", packages.get)
    monkeypatch.setattr(hardware, "nvrtc_version", version)
    found = Diagnosis()
    assert hardware.describe(found, [GPU] if driver else [], compiles) == ready
    assert [problem.do for problem in found.problems] == todo
    assert {problem.status for problem in found.problems} == ({1} if todo else set())
    assert not any("pip install" in problem.what for problem in found.problems)
    named = f"580.65, CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else "none"
    assert value(found, "GPU and toolchain", "driver") == named
    installed = ", ".join(" ".join(one) for one in packages.items()) or "not installed"
    assert value(found, "GPU and toolchain", "CuPy") == installed


@pytest.mark.parametrize(
    ("cuda", "driver", "do"),
    [(None, 12080, "whl/cu126"), (None, 13000, "whl/cu130"), ("13.0", 12080, "unset CUDA_VISIBLE_DEVICES")],
)
def test_a_gpu_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch, cuda: str | None, driver: int, do: str) -> None:
    monkeypatch.setattr(hardware, "driver_version", lambda: "570.1")
    monkeypatch.setattr(hardware, "driver_cuda", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = Diagnosis()
    hardware.describe(found, [], False)
    assert found.problems[-1].status == 1
    assert ("built for CUDA 13.0, cannot use it" if cuda else "built without CUDA") in found.problems[-1].what
    assert do in found.problems[-1].do


@pytest.mark.parametrize(
    ("visible", "fit", "status", "do"),
    [
        (None, "01", 0, None),
        (None, "12", 1, "export CUDA_VISIBLE_DEVICES=1,2"),
        ("4,6,7", "12", 1, "export CUDA_VISIBLE_DEVICES=6,7"),
        (None, "", 2, 'Trainer(precision="bf16-mixed"), or a newer GPU.'),
    ],
)
def test_gpus_before_fp8(
    visible: str | None, fit: str, status: int, do: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_device(device: torch.device) -> None:
        if str(device.index) not in fit:
            raise RuntimeError(f"{device} is too old")

    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(hardware, "check_device", check_device)
    devices = [torch.device("cuda", index) for index in range(3 if status else 2)]
    found, old = Diagnosis(), [device for device in devices if str(device.index) not in fit]
    assert hardware.unfit(found, devices) == {*old}
    assert found.problems == [Problem(status, f"{device} is too old", str(do)) for device in old]


@pytest.mark.parametrize(("capability", "failure"), [((9, 0), None), ((10, 0), None), ((10, 0), "other sums")])
def test_layouts_of_operands(capability: tuple[int, int], failure: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(hardware.layouts, "probe", lambda _: failure)
    found = Diagnosis()
    hardware.describe(found, [GPU], False)
    is_one = capability == (10, 0) and failure is None
    cell = value(found, "GPU and toolchain", "FP8 operands on cuda:0")
    assert cell.endswith("casts write one payload" if is_one else "casts write a payload and its transpose")
    assert cell.startswith("every layout" if is_one else "FAILED" if failure else "K-major")
    said = [problem for problem in found.problems if "every layout" in problem.what]
    assert [problem.status for problem in said] == [1] * bool(failure)


# --- precisions ---


def described(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    *,
    is_unfit: bool = False,
    compile: bool = False,
    checks: list[KernelCheck] | None = None,
    gemm: Any = lambda _: None,
) -> tuple[Diagnosis, dict[str, dict[str, str]]]:
    """The diagnosis, and the GPU's rows by precision."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(precisions, "gemm", gemm)
    found = Diagnosis(kernels=checks or [])
    kernels.backend.cache_clear()
    precisions.describe(found, [GPU], {GPU} if is_unfit else (), True, compile)
    return found, {row["precision"]: row for row in rows(found, "Precisions") if row["device"] == "cuda:0"}


TESTED, NO_KERNEL = "own kernels (tested at first use)", "no: fp8-block has no kernel here"


@pytest.mark.parametrize(
    ("capability", "cuda", "backend", "expected"),
    [
        ((9, 0), "12.6", "auto", ("yes", TESTED, TESTED)),
        ((8, 9), "13.0", "auto", ("yes", TESTED, TESTED)),
        ((9, 0), "12.9", "reference", ("yes", "torch's operators", "torch's scaled_mm (cuBLASLt)")),
        ((9, 0), "12.8", "reference", (NO_KERNEL, "-", "-")),
        ((12, 0), "13.0", "reference", (NO_KERNEL, "-", "-")),
        ((10, 0), "13.0", "auto", (NO_KERNEL, "-", "-")),
        ((8, 6), "13.0", "auto", ("no: compute capability 8.6", "-", "-")),
        ((7, 5), "13.0", "auto", ("no: compute capability 7.5", "-", "-")),
    ],
)
def test_blocks_run_on_kernels_on_cublaslt_or_not(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cuda: str, backend: str, expected: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("LIGHTNING_FP8_BACKEND", backend)
    _, found = described(monkeypatch, capability, is_unfit=capability < (8, 9))
    row = found["fp8-block"]
    assert (row["runs"].split(": light")[0], row["casts"], row["GEMMs"]) == expected
    if expected[0] == NO_KERNEL:
        instead = "BlockScaling(power_of_2_scales=True)" if capability[0] == 10 else "precision='fp8-current'"
        assert f"got {capability[0]}.{capability[1]} and CUDA {cuda}. Use {instead}" in row["runs"]
    assert found["fp8-current"] == {**found["fp8-delayed"], "precision": "fp8-current"}
    assert found["bf16-true"]["runs"] == ("yes" if capability >= (8, 0) else expected[0])


CUBLASLT, NO_MX = "torch's scaled_mm (cuBLASLt)", "no: fp8-mx has no product here"


@pytest.mark.parametrize(
    ("capability", "backend", "expected"),
    [
        ((9, 0), "auto", (NO_MX, "-", "-")),
        ((10, 0), "auto", ("yes", TESTED, CUBLASLT)),
        ((12, 0), "auto", ("yes", TESTED, TESTED)),
        ((12, 0), "reference", ("yes", "torch's operators", CUBLASLT)),
    ],
)
def test_mx_runs_on_a_kernel_on_cublaslt_or_not(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], backend: str, expected: tuple[str, ...]
) -> None:
    monkeypatch.setenv("LIGHTNING_FP8_BACKEND", backend)
    row = described(monkeypatch, capability)[1]["fp8-mx"]
    assert (row["runs"].split(": it")[0], row["casts"], row["GEMMs"]) == expected


def checked(kernel: str, failure: str | None = None, self_test: str = "passed", **others: Any) -> KernelCheck:
    taken = None if failure else {"registers": 64, "local_bytes": 0, "shared_bytes": 8448}
    fields = {"compiled": "compiled", "compile_s": 0.5, "self_test_s": 0.25, "resources": taken, **others}
    return KernelCheck(kernel, "cuda:0", self_test=self_test, failure=failure, **fields)


def test_kernels_and_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the checks: their table, one problem for each kind of failure, and what serves casts and scales."""
    lost = {"compiled": "failed", "self_test": "not run: not loaded", "self_test_s": None, "compile_s": 0.0}
    checks = [
        *(checked(f"cast_transpose INPUT=Bf16 N={at}") for at in range(2)),
        *(checked(f"cast_transpose INPUT=Fp32 N={at}", "wrong codes", "failed") for at in range(6)),
        checked("update_scales", "CUDA_ERROR", **lost),
    ]
    found, taken = Diagnosis(), "64 registers, local 0 B, shared 8448 B"
    kernel_checks.note(found, checks)
    assert found.kernels == checks
    assert [tuple(row.values()) for row in rows(found, "Kernels")] == [
        ("cuda:0", "cast_transpose Bf16", "2 compiled: 1.00 s", "2 passed: 0.50 s", taken),
        ("cuda:0", "cast_transpose Fp32", "6 compiled: 3.00 s", "6 failed: 1.50 s", "-"),
        ("cuda:0", "update_scales", "1 failed: 0.00 s", "not run: not loaded", "-"),
    ]  # fmt: skip
    assert [problem.what for problem in found.problems] == [
        ", ".join(f"cast_transpose INPUT=Fp32 N={at}" for at in range(4))
        + " and 2 more did not pass on cuda:0: wrong codes",
        "update_scales cannot be compiled or loaded for cuda:0: CUDA_ERROR",
    ]
    assert all("doctor --json" in problem.do for problem in found.problems)
    cells = []
    for mine in (checks, checks[:2], checks[2:]):
        row = described(monkeypatch, (9, 0), compile=True, checks=mine)[1]["fp8-delayed"]
        cells.append((row["runs"], row["casts"], row["scales"]))
    assert cells[0] == ("yes", "own kernels, torch's operators for 6 of 8", "torch's operators")
    assert [casts for _, casts, _ in cells[1:]] == ["own kernels", "torch's operators"]
    quick = described(monkeypatch, (9, 0), checks=checks)[1]["fp8-delayed"]["casts"]
    assert quick == "own kernels (not tested: --quick)"


def test_gemm_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_checks.gemm(CPU) is None
    real = kernel_checks.plain.scaled_mm
    monkeypatch.setattr(kernel_checks.plain, "scaled_mm", lambda *args: real(*args) * 1.01)
    found, cells = described(monkeypatch, (9, 0), gemm=lambda _: kernel_checks.gemm(CPU))
    assert [cells["fp8-delayed"][key] for key in ("runs", "GEMMs")] == ["no", "FAILED"]
    (problem,) = found.problems
    assert problem.status == 2
    assert problem.what.endswith("does not work on cuda:0: another result than the same product in fp32")


# --- versions and settings ---


@pytest.mark.parametrize(("package", "status"), [("torch", 2), ("lightning", 1), ("torchmetrics", 1)])
def test_what_is_too_old(monkeypatch: pytest.MonkeyPatch, package: str, status: int) -> None:
    monkeypatch.setattr(software, "requires", lambda _: [f"{package}>=99", "rich>=99; extra == 'cli'"])
    found = Diagnosis()
    software.versions(found)
    assert [(one.status, one.do) for one in found.problems] == [(status, f"pip install --upgrade '{package}>=99'")]


def test_a_lightning_without_the_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    def register() -> None:
        raise RuntimeError("lightning 9.0 has no `_AcceleratorConnector`")

    version = software.package_version
    monkeypatch.setattr(software, "package_version", lambda name: None if name == "plotly" else version(name))
    monkeypatch.setattr(software, "registered", frozenset)
    monkeypatch.setattr(software, "register", register)
    found = Diagnosis()
    software.versions(found)
    assert value(found, "Versions", "precision strings") == "not registered with Lightning"
    assert value(found, "Versions", "plotly") == "not installed (optional: pip install plotly)"
    (problem,) = found.problems
    assert problem.status == 2
    assert "lightning 9.0 has no" in problem.what
    assert "Fp8Precision()" in problem.do


def test_bf16_plugins_that_are_left_to_lightning() -> None:
    found = Diagnosis()
    try:
        lightning_fp8.plugins.register(bf16=False)
        software.versions(found)
        # the examination changes nothing
        plugin = Fabric(accelerator="cpu", precision="bf16-mixed").strategy.precision
    finally:
        lightning_fp8.plugins.register(bf16=True)
    assert value(found, "Versions", "precision strings") == (
        "registered with Lightning: fp8-block, fp8-current, fp8-delayed, fp8-mx;"
        " bf16-mixed and bf16-true: Lightning's own"
    )
    assert type(plugin).__module__.startswith("lightning.fabric.")


@pytest.mark.parametrize(
    ("backend", "has_gpu", "status"),
    [("reference", True, 1), ("reference", False, 0), ("cuda", True, 2), ("cuda", False, 1), ("auto", True, 0)],
)
def test_backend(monkeypatch: pytest.MonkeyPatch, backend: str, has_gpu: bool, status: int) -> None:
    monkeypatch.setenv("LIGHTNING_FP8_BACKEND", backend)
    found = Diagnosis()
    software.settings(found, has_gpu)
    expected = [(status, "unset LIGHTNING_FP8_BACKEND")] * bool(status)
    assert [(problem.status, problem.do) for problem in found.problems] == expected
    assert value(found, "Settings", "LIGHTNING_FP8_BACKEND").strip("'").startswith(backend)


@pytest.mark.parametrize("kind", ["below a file", "read-only"])
def test_a_cache_that_cannot_be_written(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(dir: Path) -> None:
        assert dir == cache_folder()
        raise PermissionError(13, "Permission denied")

    if kind == "below a file":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path / "file" / "below"))
    else:
        cache_folder().mkdir(mode=0o500)
        # root may write everywhere
        monkeypatch.setattr(software.tempfile, "TemporaryFile", refused)
    found = Diagnosis()
    software.settings(found, False)
    (problem,) = found.problems
    why = "Not a directory" if kind == "below a file" else "Permission denied"
    assert problem.status == 1
    assert why in problem.what
    assert problem.do.startswith("export LIGHTNING_FP8_CACHE_DIR=")
    assert f"not writable ([Errno {20 if kind == 'below a file' else 13}]" in value(
        found, "Settings", "LIGHTNING_FP8_CACHE_DIR"
    )
