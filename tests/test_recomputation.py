"""Eager, compiled and activation-checkpointed training: the same losses, gradients and scales, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from conftest import small_mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import convert, describe, scaling_state
from lightning_fp8.examples import ByteGPT


class Stack(nn.Module):
    """Residual blocks, each through ``around``, which may checkpoint it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(32), small_mlp(32), nn.Linear(4, 32)) for _ in range(3)]
        )
        self.around: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] = lambda f, x: f(x)
        self.outer: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] = lambda f, x: f(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.body, x)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.around(block, x)
        return x


def use(reentrant: bool) -> Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]:
    return lambda f, x: checkpoint(f, x, use_reentrant=reentrant)


def train(model: nn.Module, call: Callable[[Tensor], Tensor], steps: int = 3, micro: int = 2) -> list[Tensor]:
    """Everything that must agree: losses, gradients and recorded amaxes of each step, and the scales after it."""
    generator, seen = torch.Generator().manual_seed(2), []
    optimizer, state = torch.optim.SGD(model.parameters(), lr=0.05), scaling_state(model)
    for _ in range(steps):
        for _ in range(micro):
            x = torch.randn(8, 32, generator=generator).requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = call(x).float().square().mean()
            loss.backward()
            seen += [loss.detach(), x.grad]
        seen += [p.grad.clone() for p in model.parameters()] + [state.amax.clone()]
        state.update()
        seen.append(state.scale.clone())
        optimizer.step()
        optimizer.zero_grad()
    return seen


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("inner", "outer"),
    [(False, None), (True, None), (False, False), (True, True), (True, False), (False, True), (None, True)],
)
def test_activation_checkpointing_changes_nothing(inner: bool | None, outer: bool | None) -> None:
    plain = convert(Stack())
    recomputed = copy.deepcopy(plain)
    if inner is not None:
        recomputed.around = use(inner)
    if outer is not None:
        recomputed.outer = use(outer)
    assert_same(train(recomputed, recomputed), train(plain, plain))
    # every tensor once per step, whatever was computed twice
    assert (scaling_state(recomputed).amax_history > 0).sum(0).unique().tolist() == [3]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_changes_nothing(backend: str) -> None:
    torch._dynamo.reset()
    # without LayerNorm, which inductor computes in another order than torch
    eager = convert(small_mlp(32))
    compiled = copy.deepcopy(eager)
    call = torch.compile(compiled, fullgraph=True, backend=backend)
    assert_same(train(compiled, call), train(eager, eager))


@pytest.mark.parametrize("reentrant", [False])
def test_compiled_and_checkpointed(reentrant: bool) -> None:
    torch._dynamo.reset()
    eager = convert(small_mlp(32))
    compiled = copy.deepcopy(eager)
    call = torch.compile(
        lambda x: checkpoint(compiled, x, use_reentrant=reentrant), fullgraph=True, backend="aot_eager"
    )
    assert_same(train(compiled, call), train(eager, eager))


def test_compiled_evaluation_and_no_recompilation() -> None:
    torch._dynamo.reset()
    model = convert(small_mlp(32))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(model, fullgraph=True, backend=counter)
    train(model, call, steps=2)
    after_two_steps = counter.frame_count
    train(model, call, steps=4)
    assert counter.frame_count == after_two_steps
    model.eval()
    x = torch.randn(4, 32)
    with torch.no_grad():
        assert torch.equal(call(x), model(x))


def test_all_layers_of_a_kind_share_one_graph() -> None:
    torch._dynamo.reset()
    model = convert(nn.Sequential(*[nn.Linear(32, 32) for _ in range(12)]))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for layer in model:
        layer.compile(fullgraph=True, backend=counter)
    train(model, model, steps=2)
    # one for the first layer, whose input takes part in the graph otherwise than those of the rest
    assert counter.frame_count <= 3


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_forwards_before_their_backwards_and_an_update_between(backend: str) -> None:
    torch._dynamo.reset()
    # ReLU: inductor computes GELU in fp32 by another formula than torch
    eager = convert(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)))
    compiled = copy.deepcopy(eager)
    call = torch.compile(compiled, fullgraph=True, backend=backend)
    x = torch.randn(3, 8, 32)
    for run, model in ((eager, eager), (call, compiled)):
        run(x[0]).sum().backward()
        scaling_state(model).update()
        outputs = [run(x[1]), run(2 * x[2])]
        scaling_state(model).update()  # as by another optimizer's step
        for y in outputs:
            y.sum().backward()
        scaling_state(model).update()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(eager.parameters(), compiled.parameters(), strict=True))
    assert torch.equal(scaling_state(eager).amax_history, scaling_state(compiled).amax_history)


def test_compiled_gpt_trains() -> None:
    torch._dynamo.reset()
    model = ByteGPT(layers=1, width=32, heads=2, context=16)
    convert(model)
    assert all(row.converted for row in describe(model))
    batch = torch.randint(0, 256, (2, 17), dtype=torch.uint8)
    other = copy.deepcopy(model)
    call: Any = torch.compile(model.loss, fullgraph=True)
    losses = []
    for run, state in ((other.loss, scaling_state(other)), (call, scaling_state(model))):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run(batch)
        loss.backward()
        state.update()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(scaling_state(model).scale, scaling_state(other).scale, rtol=5e-2, atol=0)
