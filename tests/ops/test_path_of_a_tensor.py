"""The files that an input passes through, from a layer's forward to the launch that casts it."""

from __future__ import annotations

import gc
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from limits import limit
from repository import ROOT
from torch import Tensor, nn

from lightning_fp8 import convert, scaling_state
from lightning_fp8.ops import reference

PACKAGE = ROOT / "lightning_fp8"
ROOMS = ["lightning_fp8/modules", "lightning_fp8/ops", "lightning_fp8/ops/cuda", "kernels_cuda"]


def takes(frame: FrameType, x: Tensor) -> bool:
    """Whether x, identified by its memory, is an argument of this call, possibly inside a container."""
    names, rest, _, values = inspect.getargvalues(frame)
    found = [values.get(name) for name in (*names, *([rest] if rest else []))]
    tensors = [one for value in found for one in (value if isinstance(value, tuple) else (value,))]
    return any(isinstance(one, Tensor) and one.numel() > 0 and one.data_ptr() == x.data_ptr() for one in tensors)


def files_on_the_way(layer: nn.Module, x: Tensor) -> list[str]:
    """The package's files whose functions take x, in the order of their first call."""
    files: dict[str, None] = {}

    def watch(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and takes(frame, x):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(("lightning_fp8/", "kernels_cuda/")):
                files[name] = None

    sys.setprofile(watch)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return list(files)


def test_few_files_from_top_to_bottom(cuda_half: Counter[str]) -> None:
    layer = convert(nn.Sequential(nn.Linear(32, 32)))[0]
    x = torch.randn(16, 32, requires_grad=True)
    for _ in range(2):
        layer(x).sum().backward()
        scaling_state(layer).update()
    # casts the weight
    layer(x)
    cuda_half.clear()
    files = files_on_the_way(layer, x)
    assert sum(cuda_half.values()) == 1
    assert files[0] == "lightning_fp8/modules/linear.py"
    files = files[: files.index("kernels_cuda/casts.py") + 1]
    assert len(files) <= limit("tests/ops/test_path_of_a_tensor.py")
    rooms = [name.rpartition("/")[0] for name in files]
    assert rooms == sorted(rooms, key=ROOMS.index)


def calls_of(run: Callable[[], object]) -> int:
    """How often functions of the package are called, other than by the garbage collector."""
    calls = 0

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE)

    gc.collect()
    gc.disable()
    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """A linear layer in its fourth step, with a kept weight."""
    # a CPU that multiplies bf16 is told so around each product, by five calls that no other device makes
    monkeypatch.setattr(reference, "_HAS_BF16_GEMM", False)
    torch.manual_seed(0)
    model, x = convert(nn.Sequential(nn.Linear(64, 64))), torch.randn(32, 64, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(x).sum().backward()
        scaling_state(model).update()
        optimizer.step()
    model(x)
    return model, optimizer, x


@pytest.mark.parametrize("what", ["forward", "backward", "step"])
def test_calls(what: str, steady: tuple[nn.Module, torch.optim.Optimizer, Tensor]) -> None:
    model, optimizer, x = steady
    if what == "forward":
        calls = calls_of(lambda: model(x))
    elif what == "backward":
        y = model(x).sum()
        calls = calls_of(y.backward)
    else:
        state = scaling_state(model)
        model(x).sum().backward()
        calls = calls_of(lambda: (state.update(), optimizer.step()))
    print(f"{what}: {calls} calls")
    assert 0 < calls <= limit("tests/ops/test_path_of_a_tensor.py", what)
