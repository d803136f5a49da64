"""The ``.cu`` sources run as host C++ and equal the reference bit for bit. No GPU takes part."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kernels_cuda import source
from lightning_fp8 import DelayedScaling, ScalingState

# A kernel without shared memory and barriers is a loop over its threads.
SHIM = """
struct dim3_ { int x; };
static dim3_ blockIdx, blockDim, threadIdx;
#define __global__
"""
LAUNCH = """
extern "C" void launch(int grid, int block, float* amax, float* history, float* scale, const float* fp8_max,
                       long long* nonfinite, int tensors, int length, int most_recent, float margin_factor) {
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x)
            update_scales(amax, history, scale, fp8_max, nonfinite, tensors, length, most_recent, margin_factor);
}
"""


@pytest.fixture(scope="module")
def update_scales(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler to run the kernel's source on the CPU")
    folder: Path = tmp_path_factory.mktemp("host")
    (folder / "kernel.cpp").write_text(SHIM + source("update_scales") + LAUNCH)
    command = [
        compiler,
        "-O1",
        "-Wall",
        "-Werror",
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
        "-o",
        "kernel.so",
        "kernel.cpp",
    ]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


@pytest.mark.parametrize("tensors", [1, 3, 85])
@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(amax_history_len=4),
        DelayedScaling(amax_history_len=1),
        DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent"),
        DelayedScaling(amax_history_len=4, margin=2),
        DelayedScaling(amax_history_len=4, margin=127),
    ],
    ids=lambda recipe: f"{recipe.amax_compute_algo}-{recipe.amax_history_len}-{recipe.margin}",
)
def test_update_scales(update_scales: ctypes.CDLL, recipe: DelayedScaling, tensors: int) -> None:
    modules = [str(index) for index in range(-(-tensors // 3))]
    expected, actual = ScalingState(modules, recipe), ScalingState(modules, recipe)
    count = len(expected.names)
    special = torch.tensor([0.0, math.inf, math.nan, 1e-44, 1e30, 3.4e38, 1.0])
    for step in range(9):
        amax = torch.rand(count) * 10.0 ** torch.randint(-6, 6, (count,))
        chosen = torch.rand(count) < 0.4
        amax[chosen] = special[torch.randint(0, len(special), (int(chosen.sum()),))]
        expected.amax.copy_(amax)
        actual.amax.copy_(amax)
        expected.update()
        pointers = (actual.amax, actual.amax_history, actual.scale, actual.fp8_max, actual.nonfinite_steps)
        update_scales.launch(
            -(-count // 32), 32, *(ctypes.c_void_p(tensor.data_ptr()) for tensor in pointers),
            count, recipe.amax_history_len, int(recipe.amax_compute_algo == "most_recent"),
            ctypes.c_float(2.0**recipe.margin),
        )  # fmt: skip
        for name in ("amax", "amax_history", "scale", "nonfinite_steps"):
            assert torch.equal(getattr(actual, name), getattr(expected, name)), (step, name)


def test_unknown_source_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="no kernel source 'cast'; there are: update_scales"):
        source("cast")
