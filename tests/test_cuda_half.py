"""The CUDA half of the operators in place of the CPU's: the same layers, with kernels that run from their own sources.

What is left to a GPU is the hardware. GEMMs are ``torch._scaled_mm``'s own on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import sqnr
from torch import nn

from lightning_fp8 import convert, ops, scaling_state
from lightning_fp8.ops import cuda

OPERATORS = ("cast", "scaled_mm", "linear_backward", "update_scales")


@pytest.fixture
def cuda_half(host_kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Turns CPU tensors over to ``ops.cuda``; the names of the kernels that it loaded."""
    library = torch.library.Library("lightning_fp8", "IMPL")
    for name in OPERATORS:
        library.impl(name, getattr(cuda, name), "CPU", allow_override=True)
    monkeypatch.setattr(ops, "_K_MAJOR_DEVICES", {"cpu"})
    yield host_kernels
    library._destroy()


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def test_x(cuda_half: list[str]) -> None:
    model = convert(encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(3, 11, 32)).square().mean().backward()
        scaling_state(model).update()
        optimizer.step()
    print(cuda_half)
    assert 0
