"""The first minute on machines that we do not have.

What torch, CuPy and the driver report is simulated, and kernels run from their sources on the CPU: no GPU's arithmetic,
compiler or driver is part of this.
"""

from __future__ import annotations

import os
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from machines import A100, B200, H100, MI300X, RTX_4090, RTX_5090, Machine, pretend
from processes import all_end_well, as_ranks
from torch import nn
from warm import run_warm

from kernels_cuda import compile as compiling
from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, convert
from lightning_fp8.ops.cuda import groups, kernels, plain, rule
from lightning_fp8.runtime.warn_once import warn_once
from lightning_fp8.tools import doctor

FP8 = ("fp8-delayed", "fp8-current", "fp8-block", "fp8-mx")
MACHINES = {
    "RTX 4090": Machine(RTX_4090),
    "RTX 5090": Machine(RTX_5090),
    "A100": Machine(A100),
    "H100": Machine(H100),
    "B200": Machine(B200),
    "MI300X": Machine(MI300X, cuda=None, hip="6.4", cupy=None, driver=0),
    "no CuPy": Machine(H100, cupy=None),
    "no CuPy on a 4090": Machine(RTX_4090, cupy=None),
    "CuPy for a newer CUDA than the driver's": Machine(H100, cuda="12.8", driver=12080),
    "an old driver": Machine(RTX_4090, cuda="12.6", driver=11080),
    "an old NVRTC": Machine(RTX_5090, cuda="12.6", cupy="cupy-cuda12x", nvrtc=(12, 6), driver=12090),
}
# the exit status, the precisions that run, and a part of the line to paste
FOUND: dict[str, tuple[int, tuple[str, ...], str | None]] = {
    "RTX 4090": (0, FP8[:3], None),
    "RTX 5090": (0, FP8, None),
    "A100": (2, (), 'precision="bf16-mixed"'),
    "H100": (0, FP8[:3], None),
    "B200": (0, (FP8[0], FP8[1], FP8[3]), None),
    "MI300X": (2, (), 'precision="bf16-mixed"'),
    "no CuPy": (1, FP8[:3], "pip install cupy-cuda13x"),
    "no CuPy on a 4090": (1, FP8[:2], "pip install cupy-cuda13x"),
    "CuPy for a newer CUDA than the driver's": (1, FP8[:2], "pip uninstall -y cupy-cuda13x"),
    "an old driver": (1, FP8[:2], "Update the driver"),
    "an old NVRTC": (1, (FP8[0], FP8[1], FP8[3]), "'nvidia-cuda-nvrtc-cu12>=12.8'"),
}
# before a fixture lets a CPU multiply blocks
IN_BLOCKS = plain.scaled_mm_in_blocks
RECIPES = {
    "fp8-delayed": DelayedScaling(),
    "fp8-current": CurrentScaling(),
    "fp8-block": BlockScaling(),
    "fp8-mx": MXScaling(),
}


@pytest.fixture(params=MACHINES)
def name(
    request: pytest.FixtureRequest, cuda_half: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[str]:
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(plain, "scaled_mm_in_blocks", IN_BLOCKS)
    monkeypatch.setattr("strict_scaled_mm.CAPABILITY", MACHINES[request.param].gpu.capability)
    pretend(MACHINES[request.param], monkeypatch)
    caches = groups._kernels, warn_once, plain.check_mx_product
    for cache in caches:
        cache.cache_clear()
    yield request.param
    for cache in caches:
        cache.cache_clear()


def test_the_doctor_says_what_runs_and_what_to_paste(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = doctor.examine(try_kernels=False)
    status, runs, line = FOUND[name]
    assert found.status == status, str(found)
    (of_gpu,) = (precisions for device, precisions in found.runs.items() if MACHINES[name].gpu.name in device)
    assert {precision for precision in FP8 if of_gpu[precision].startswith("yes")} == {*runs}
    assert ("own" in of_gpu["fp8-delayed"]) == (status == 0)
    assert (of_gpu["bf16-mixed"] == "yes") is True
    said = [problem.do for problem in found.problems]
    assert said == [] if line is None else len(said) == 1
    assert line is None or line in said[0]
    # one screen
    assert len(str(found).splitlines()) < 24


@pytest.mark.parametrize("precision", RECIPES)
def test_the_first_step(name: str, precision: str, cuda_half: Counter[str]) -> None:
    """It trains as on a CPU by the kernels that the doctor names, or is refused by name before anything runs."""
    torch.manual_seed(0)
    x, weight, dy = torch.randn(64, 128), torch.randn(128, 128), torch.randn(64, 128)
    layer = nn.Linear(128, 128, bias=False)
    layer.weight.data.copy_(weight)
    _, runs, line = FOUND[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if precision not in runs:
            with pytest.raises(RuntimeError, match=r"FP8 training|fp8-block|fp8-mx"):
                step(convert(layer, RECIPES[precision]), x, dy)
            return
        gradients = step(convert(layer, RECIPES[precision]), x, dy)
    said = [str(warning.message) for warning in caught if "lightning_fp8" in str(warning.filename)]
    assert len(said) == (line is not None), said
    assert line is None or line in said[0]
    exact = dy @ weight, dy.t() @ x
    for gradient, expected in zip(gradients, exact, strict=True):
        assert (gradient - expected).norm() / expected.norm() < 0.06
    launched = {kernel.split()[0] for kernel in cuda_half}
    has_own_casts = line is None
    assert any(family.startswith("cast") for family in launched) == has_own_casts
    capability = MACHINES[name].gpu.capability
    own = {
        "fp8-delayed": {(9, 0)},
        "fp8-current": {(9, 0)},
        "fp8-block": {(8, 9), (9, 0), (12, 0)},
        "fp8-mx": {(12, 0)},
    }
    is_own = has_own_casts and capability in own[precision]
    assert any(family.startswith("gemm") for family in launched) == is_own


def step(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    layer(leaf).backward(dy)
    assert leaf.grad is not None
    return leaf.grad, next(layer.parameters()).grad  # type: ignore[return-value]


def test_a_kernel_that_fails_its_check_is_called_that(cuda_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "scaled_mm_in_blocks", IN_BLOCKS)
    pretend(MACHINES["RTX 4090"], monkeypatch)
    monkeypatch.setattr(kernels.load, "has_passed", lambda *_: False)
    monkeypatch.setattr(kernels.check, "gemm", lambda *_: "its check gave 3 of 4 other numbers in sums")
    layer = convert(nn.Linear(128, 128, bias=False), BlockScaling())
    with pytest.warns(UserWarning, match=r"gemm_sm89.*3 of 4"), pytest.raises(RuntimeError, match=r"exists.*3 of 4"):
        layer(torch.randn(16, 128))


def test_a_gpu_that_is_asked_for_a_kernel_that_it_has_not(
    cuda_half: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(MACHINES["RTX 4090"], monkeypatch)
    monkeypatch.setattr(rule, "backend", lambda: "kernels")
    with pytest.raises(RuntimeError, match=r"no GEMM kernel.*RTX 4090.*cuBLASLt"):
        convert(nn.Linear(32, 32))(torch.randn(16, 32))


@pytest.mark.parametrize("version", [(12, 4), (12, 6), (12, 8), (12, 9), (13, 0)])
def test_each_architecture_has_its_least_nvrtc(version: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "nvrtc_version", lambda: version)
    monkeypatch.setattr(compiling, "_cuda_of_cupy", lambda: version[0])
    # by the release notes of CUDA
    least = {"8.9": (12, 4), "9.0": (12, 4), "10.0": (12, 8), "12.0": (12, 8), "10.3": (12, 9), "12.1": (12, 9)}
    least["11.0"] = (13, 0)
    for dotted, needed in least.items():
        capability = tuple(map(int, dotted.split(".")))
        if version >= needed:
            assert compiling.check_nvrtc(capability) == version
        else:
            with pytest.raises(compiling.KernelsUnavailable, match=rf"{needed[0]}\.{needed[1]} or newer.*pip install"):
                compiling.check_nvrtc(capability)


def rank(folder: Path) -> None:
    os.environ["LIGHTNING_FP8_CACHE_DIR"] = str(folder)
    with (folder / f"said{os.environ['RANK']}").open("w") as said, redirect_stderr(said):
        compiling.compile_ahead([("update_scales", ()), ("cast_weights", ())], "sm_90a")


def test_two_ranks_that_start_at_once_compile_once(tmp_path: Path) -> None:
    with as_ranks(rank, 2, tmp_path) as ranks:
        all_end_well(ranks, tmp_path)
    said = [(tmp_path / f"said{number}").read_text() for number in range(2)]
    assert sum("compiling 2 kernels for sm_90a" in text for text in said) == 1
    assert len(list(tmp_path.glob("*.cubin"))) == 2


def test_a_home_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("LIGHTNING_FP8_CACHE_DIR", str(tmp_path / "home" / "cache"))
    with pytest.warns(UserWarning, match="LIGHTNING_FP8_CACHE_DIR") as said:
        compiling.compile_ahead([("update_scales", ())], "sm_90a")
    assert len(said) == 1
    assert compiling.compiled("update_scales", "sm_90a").is_file()
    (problem,) = (p for p in doctor.examine(try_kernels=False).problems if "LIGHTNING_FP8_CACHE_DIR" in p.do)
    assert problem.status == 1


WINDOWS = """
    import os, sys
    sys.modules["fcntl"] = None
    del os.geteuid, os.O_NOFOLLOW
    import lightning_fp8, torch
    from lightning_fp8.tools.doctor import examine
    layer = lightning_fp8.convert(torch.nn.Linear(32, 32))
    layer(torch.randn(16, 32)).sum().backward()
    found = examine(try_kernels=False)
    print(found.status, found.runs["CPU"]["fp8-delayed"])
"""


def test_without_what_windows_lacks(tmp_path: Path) -> None:
    ran = run_warm("-c", textwrap.dedent(WINDOWS), env={**os.environ, "LIGHTNING_FP8_CACHE_DIR": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("0 ")
