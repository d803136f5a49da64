"""Gradients that nobody records (saliency, attacks, forces, guidance, frozen encoders): never clipped by a history."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experts import WIDTH, experts, routing
from torch import Tensor, nn

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, convert, feed_forward, scaling_state

ROWS = 24
# much larger than the loss of the training, as a sum over a batch is than a mean
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "saliency": lambda y: 100 * y.sum(),
    "forces": lambda y: 1000 * y.square().sum(),
    "guidance": lambda y: 100 * F.log_softmax(y, -1)[..., 0].sum(),
}


class Called(nn.Module):
    """A module that a function calls."""

    def __init__(self, call: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.call = call
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def of_experts(model: Any, x: Tensor) -> Tensor:
    index, weights = routing()
    return model.experts(x[: len(index)], index, weights)


def linear_layers() -> dict[str, nn.Module]:
    return {"gate": nn.Linear(WIDTH, 64), "up": nn.Linear(WIDTH, 64), "down": nn.Linear(64, WIDTH)}


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)),
    "feed_forward": lambda: Called(lambda m, x: feed_forward(m.up, F.gelu, m.down, x), **linear_layers()),
    "gated": lambda: Called(lambda m, x: feed_forward((m.gate, m.up), F.silu, m.down, x), **linear_layers()),
    "attention": lambda: Called(
        lambda m, x: m.attention(x[None], x[None], x[None])[0][0],
        attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    ),
    "experts": lambda: Called(of_experts, experts=experts()),
}


def trained(kind: str, recipe: Any) -> tuple[nn.Module, nn.Module]:
    """A converted model after a few steps with small gradients, and the plain one with the same weights."""
    torch.manual_seed(0)
    plain = KINDS[kind]()
    model = convert(copy.deepcopy(plain), recipe)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(3):
        model(torch.randn(ROWS, WIDTH)).square().mean().mul(1e-3).backward()
        scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
    plain.load_state_dict(model.state_dict())
    return model.eval(), plain.eval()


def input_gradient(call: Callable[[Tensor], Tensor], loss: Callable[[Tensor], Tensor]) -> Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(call(x)), x)
    return gradient


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_evaluation(kind: str) -> None:
    errors: dict[str, list[float]] = {}
    for recipe in (DelayedScaling(), CurrentScaling()):
        model, plain = trained(kind, recipe)
        state = scaling_state(model)
        before = {name: getattr(state, name).clone() for name in ("amax_history", "nonfinite_steps")}
        errors[recipe.precision] = [
            error(input_gradient(model, loss), input_gradient(plain, loss)) for loss in LOSSES.values()
        ]
        assert all(torch.equal(getattr(state, name), value) for name, value in before.items())
        assert not state.amax[: state.delayed].any()
    assert max(errors["fp8-current"]) < 0.12
    for delayed, current in zip(errors["fp8-delayed"], errors["fp8-current"]):
        assert delayed < 1.3 * current + 0.01


def test_compiled() -> None:
    torch.compiler.reset()
    model, plain = trained("gated", DelayedScaling())
    compiled = torch.compile(model, backend="aot_eager")
    expected = input_gradient(plain, LOSSES["saliency"])
    assert error(input_gradient(compiled, LOSSES["saliency"]), expected) < 0.12


@pytest.mark.parametrize("kind", KINDS)
def test_cuda_half(kind: str, cuda_half: Counter[str]) -> None:
    gradients, launches = {}, {}
    for recipe in (DelayedScaling(), CurrentScaling()):
        model, plain = trained(kind, recipe)
        y = model(x := torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_())
        cuda_half.clear()
        (gradients[recipe.precision],) = torch.autograd.grad(LOSSES["saliency"](y), x)
        launches[recipe.precision] = Counter(cuda_half)
        assert error(gradients[recipe.precision], input_gradient(plain, LOSSES["saliency"])) < 0.12
    # each gradient is measured in one launch before its cast
    assert launches["fp8-delayed"] == launches["fp8-current"]


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(), CurrentScaling(), BlockScaling(), MXScaling()], ids=lambda one: one.precision
)
def test_a_frozen_encoder_in_evaluation(recipe: Any) -> None:
    """A prompt is trained through an encoder that never records, beside a head that does."""
    plain = nn.ModuleDict({"encoder": KINDS["linear"](), "head": nn.Linear(WIDTH, 16)})
    model = convert(copy.deepcopy(plain), recipe)
    state = scaling_state(model)
    for factor in (1.0, 1.0, 3000.0):
        gradients = []
        for one in (plain, model):
            one.train()
            one["encoder"].eval().requires_grad_(False)
            prompt = torch.ones(ROWS, WIDTH).tril().requires_grad_()
            hidden = one["encoder"](prompt)
            (factor * hidden.square().sum() + one["head"](hidden).square().mean()).backward()
            gradients.append(prompt.grad)
        assert error(gradients[1], gradients[0]) < 0.12
        state.update()
    if recipe.from_history:
        recorded = {name for name, filled in zip(state.names, state.amax_history[0] > 0) if filled}
        assert recorded == {"head.input", "head.grad_output"}
