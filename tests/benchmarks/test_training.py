"""The suites ``linear``, ``layer`` and ``train``: steps as a Trainer takes them, and how they are checked."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from benchmarks import memory, train, training
from benchmarks.settings import Setting
from benchmarks.training import Start, Task, Training
from lightning_fp8 import convert, scaling_state
from lightning_fp8.examples import ByteGPT
from lightning_fp8.examples.transformer_block import Block, initialize

CPU = torch.device("cpu")
FP32 = Setting(Precision)
LINEAR = Task(lambda: nn.Linear(32, 48), 64, (64, 32), 48)
GPT = Task(lambda: ByteGPT(1, 64, 2, 32), 256, text=lambda: train.text_of(train.TINY), learning_rate=1e-4)


def test_a_layers_numbers_are_those_in_fp64() -> None:
    def make() -> Block:
        block = Block(64, 4)
        initialize(block)
        return block

    made = Training(Task(make, 64, (2, 32, 64), 64), FP32, False, CPU)
    start = training.start_of(made)
    torch.manual_seed(0)
    block, x = make().double(), made.leaves["x"].detach().double().requires_grad_()
    y = block(x)
    generator = torch.Generator().manual_seed(1)
    torch.randn(2, 32, 64, generator=generator)
    y.backward(torch.randn(2, 32, 64, generator=generator).mul(1e-3).bfloat16().double())
    expected = {"x": x.grad, **{name: parameter.grad for name, parameter in block.named_parameters()}}
    assert set(start.gradients) == set(expected)
    for name, gradient in start.gradients.items():
        # a bias of the keys has no gradient except noise
        assert (gradient - expected[name]).norm() < 1e-5 * expected[name].norm()
    assert start.losses == pytest.approx(3 * [y.square().mean().item()], rel=1e-5)
    assert x.std() > 0.9


def test_steps_of_the_gpt_are_those_of_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_CLIPPED_TO", 0.05)
    made = Training(GPT, FP32, False, CPU)
    torch.manual_seed(0)
    model = ByteGPT(1, 64, 2, 32).double()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, betas=(0.9, 0.95))
    losses, gradients = [], {}
    for batches in train.text_of(train.TINY)[:2]:
        optimizer.zero_grad()
        # all micro-batches have the same length, so the mean of their losses is that of all windows
        loss = model.loss(batches.flatten(0, 1))
        loss.backward()
        # before they are clipped
        gradients = gradients or {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters()))
        assert norm > 0.05
        for parameter in model.parameters():
            parameter.grad.mul_(0.05 / norm)
        losses.append(loss.item())
        optimizer.step()
    start = training.start_of(Training(GPT, FP32, False, CPU))
    assert start.losses[:2] == [training._loss(made.step()) for _ in range(2)] == pytest.approx(losses, rel=1e-5)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    for got, expected, began in zip(made.model.parameters(), model.parameters(), before):
        assert (got - expected).norm() < 0.01 * (expected - began).norm() + 1e-7
    for name, gradient in gradients.items():
        assert (start.gradients[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8


def gradients(*values: float) -> dict[str, Tensor]:
    return {"a": torch.tensor(values[:2]), "b": torch.tensor(values[2:])}


# norms of 5, 1, and 5.1 together
REFERENCE = Start([2.0, 1.0], gradients(3.0, 4.0, 1.0))
SAME, LIMIT_B = gradients(3, 4, 1), 0.2 * 1 + 0.01 * math.sqrt(26)
WRONG = {
    "a lower loss": (Start([1.959, 1.0], SAME), "a loss of 1.9590 in step 1"),
    "a later loss": (Start([2.0, 1.021], SAME), "a loss of 1.0210 in step 2"),
    "NaN": (Start([math.nan, 1.0], SAME), "a loss of nan"),
    "no gradient": (Start([2.0, 1.0], {"a": SAME["a"]}), "no gradient of b of shape (1,)"),
    "a small one": (Start([2.0, 1.0], gradients(3, 4, 1 + 1.01 * LIMIT_B)), "a gradient of b that is 0.254 away"),
    "a large one": (Start([2.0, 1.0], gradients(3, 5.1, 1)), "a gradient of a that is 1.1 away"),
    "no number": (Start([2.0, 1.0], gradients(3, math.nan, 1)), "a gradient of a that is nan away"),
}


def test_starts_that_are_too_far_apart_or_close_enough() -> None:
    for start, words in WRONG.values():
        assert words in str(training.difference(start, REFERENCE))
    assert training.difference(Start([2.039, 0.981], gradients(3, 5.04, 1 + 0.99 * LIMIT_B)), REFERENCE) is None


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
