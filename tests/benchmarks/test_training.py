"""The suites ``linear``, ``layer`` and ``train``: steps as a Trainer takes them, and how they are checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from benchmarks import memory, training
from benchmarks.settings import Setting
from benchmarks.training import Task
from lightning_fp8 import convert, scaling_state

CPU = torch.device("cpu")
FP32 = Setting(Precision)
LINEAR = Task(lambda: nn.Linear(32, 48), 64, (64, 32), 48)


def weakened(model: nn.Module) -> nn.Module:
    model.weight.data.mul_(0.5)
    return model


def backwards(model: nn.Module) -> nn.Module:
    model.register_full_backward_hook(lambda module, into, out: (-into[0],))
    return model


@pytest.mark.parametrize(
    ("change", "words"), [(weakened, "a loss of"), (backwards, "a gradient of x"), (lambda model: model, None)]
)
def test_a_wrong_result_is_named(change: Callable[[nn.Module], nn.Module], words: str | None) -> None:
    (variant,) = training.variants(LINEAR, {"theirs": FP32._replace(prepare=change)}, CPU)
    assert words in str(variant.check()) if words else variant.check() is None


def test_saved_bytes_by_hand() -> None:
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    x = torch.randn(8, 16, requires_grad=True)
    # both keep x, 8 * 16 * 4 bytes, once
    assert memory.saved_bytes(nn.ModuleList([first, second]), lambda: first(x) + second(x)) == 512
    # and a GELU its input
    assert memory.saved_bytes(first, lambda: nn.functional.gelu(first(x))) == 1024
    weight = first.weight.detach()
    assert memory.bytes_of([weight, weight[2:], weight.t()]) == 1024


def test_what_is_kept_anyway_is_not_saved() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16).bfloat16()
    model = convert(nn.Sequential(nn.Linear(16, 16)))
    for _ in range(2):
        model(x).float().sum().backward()
        scaling_state(model).update()
    # the FP8 input with its inverse scale in fp32
    assert memory.saved_bytes(model, lambda: model(x)) == 8 * 16 + 4
    # the weight with its inverse scale, in the only layout used on a CPU, and the bias in 16 bits
    assert memory.bytes_of(memory.weight_copies(model)) == 256 + 4 + 32
