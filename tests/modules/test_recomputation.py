"""Eager, compiled and activation-checkpointed training: the same losses, gradients and scales, bit for bit."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from small_models import small_mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import DelayedScaling, convert, scaling_state


class Stack(nn.Module):
    """Residual blocks, each called through ``around``, which may checkpoint it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(32), small_mlp(32), nn.Linear(16, 32)) for _ in range(3)]
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


@pytest.mark.parametrize(("inner", "outer"), [(False, None), (True, None), (True, False), (False, True)])
def test_activation_checkpointing_changes_nothing(inner: bool | None, outer: bool | None) -> None:
    plain = convert(Stack(), DelayedScaling(amax_history_len=4))
    recomputed = copy.deepcopy(plain)
    if inner is not None:
        recomputed.around = use(inner)
    if outer is not None:
        recomputed.outer = use(outer)
    assert_same(train(recomputed, recomputed), train(plain, plain))
    # every tensor once per step, however often it is computed
    assert (scaling_state(recomputed).amax_history > 0).sum(0).unique().tolist() == [3]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_training_changes_nothing(checkpointed: bool) -> None:
    torch._dynamo.reset()
    eager = convert(small_mlp(32))
    compiled = copy.deepcopy(eager)
    run: Any = partial(checkpoint, compiled, use_reentrant=False) if checkpointed else compiled
    # with the partition into forward and backward of inductor, which computes in another order than torch
    call = torch.compile(run, fullgraph=True, backend="aot_eager_decomp_partition")
    assert_same(train(compiled, call), train(eager, eager))


def test_compiled_forwards_before_their_backwards_and_an_update_between() -> None:
    torch._dynamo.reset()
    eager = convert(small_mlp(32))
    compiled = copy.deepcopy(eager)
    call = torch.compile(compiled, fullgraph=True, backend="aot_eager_decomp_partition")
    x = torch.randn(3, 8, 32)
    for run, model in ((eager, eager), (call, compiled)):
        run(x[0]).sum().backward()
        scaling_state(model).update()
        outputs = [run(x[1]), run(2 * x[2])]
        scaling_state(model).update()  # a change like that of another optimizer's step
        for y in outputs:
            y.sum().backward()
        scaling_state(model).update()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(eager.parameters(), compiled.parameters(), strict=True))
    assert torch.equal(scaling_state(eager).amax_history, scaling_state(compiled).amax_history)


@pytest.mark.parametrize(("reentrant", "convert_first"), [(True, False), (False, True)])
def test_checkpoint_wrapper(reentrant: bool, convert_first: bool) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    start = Stack()
    plain, wrapped = convert(copy.deepcopy(start)), copy.deepcopy(start)
    if convert_first:
        convert(wrapped)
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    apply_activation_checkpointing(
        wrapped,
        checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(module, checkpoint_impl=kind),
        check_fn=lambda module: module in set(wrapped.blocks),
    )
    convert(wrapped)
    assert scaling_state(wrapped).names == scaling_state(plain).names
    assert_same(train(wrapped, wrapped), train(plain, plain))


OPERATORS = torch.ops.lightning_fp8


@pytest.mark.parametrize("saved", ["linear layers", "casts", "everything"])
def test_selective_checkpointing(saved: str) -> None:
    """What a policy saves is not computed again; everything else is, and records nothing twice."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    chosen = {
        "linear layers": {OPERATORS.linear.default},
        "casts": {OPERATORS.cast.default},
        "everything": {OPERATORS.linear.default, OPERATORS.cast.default, torch.ops.aten.gelu.default},
    }[saved]
    calls: Counter[str] = Counter()

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        calls[f"{operator} {'again' if context.is_recompute else 'first'}"] += 1
        return CheckpointPolicy.MUST_SAVE if operator in chosen else CheckpointPolicy.PREFER_RECOMPUTE

    plain = convert(Stack())
    selective = copy.deepcopy(plain)
    selective.around = lambda f, x: checkpoint(
        f, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    )
    assert_same(train(selective, selective), train(plain, plain))
    # the policy was asked about our operators
    assert calls["lightning_fp8.linear.default first"] > 0


def test_evaluation_between_forward_and_backward() -> None:
    plain = convert(Stack())
    recomputed = copy.deepcopy(plain)
    recomputed.around = use(True)

    def with_evaluation(x: Tensor) -> Tensor:
        y = recomputed(x)
        amax = scaling_state(recomputed).amax.clone()
        recomputed.eval()
        with torch.no_grad():
            recomputed(10 * torch.randn(8, 32))
        recomputed.train()
        assert torch.equal(scaling_state(recomputed).amax, amax)
        return y

    assert_same(train(recomputed, with_evaluation), train(plain, plain))
