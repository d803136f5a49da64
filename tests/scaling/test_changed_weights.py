"""Weights changed other than by an optimizer. tests/modules/test_weight_cache.py has each kind of change, and the state
machine their sequences."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from small_models import small_mlp
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fp8 import (
    DelayedScaling,
    convert,
    scaling_state,
    unconvert,
)

STEPS = 8


def error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to the norm of the expected result."""
    return ((actual - expected).double().norm() / expected.double().norm()).item()


def trained(model: nn.Module) -> nn.Module:
    convert(model, DelayedScaling(amax_history_len=16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        y = model(torch.randn(64, 32))
        # of the size of the gradients below
        y.backward(torch.randn(y.shape))
        scaling_state(model).update()
        optimizer.step()
    return model


def test_a_bias_alone_belongs_to_its_layer() -> None:
    model = trained(small_mlp())
    model.load_state_dict({"2.bias": torch.randn(16)}, strict=False)
    history = scaling_state(model).amax_history
    assert (history > 0).any(0).tolist() == [True, False] * 2


def test_nothing_is_kept_alive() -> None:
    model = trained(nn.Linear(32, 48))
    former = weakref.ref(model.weight)
    model.weight = nn.Parameter(torch.randn(48, 32))
    model(torch.randn(4, 32))
    assert former() is None


def test_compiled_layers_see_other_weights_before_them() -> None:
    torch._dynamo.reset()
    model, x = trained(small_mlp()).eval(), torch.randn(64, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for factor in (8.0, 1 / 64):
            compiled(x)
            for parameter in model.parameters():
                parameter.mul_(factor)
            plain = unconvert(copy.deepcopy(model))
            expected, fresh = plain(x), convert(copy.deepcopy(plain))
            assert error(compiled(x), expected) <= 1.02 * error(fresh(x), expected) < 0.1


@pytest.mark.parametrize("parameters", [False, True])
def test_an_evaluation_with_lent_weights_is_as_exact_as_with_their_own_scales(parameters: bool) -> None:
    model, plain, x = trained(small_mlp()).eval(), small_mlp(), torch.randn(64, 32)
    histories = scaling_state(model).amax_history.clone()
    with torch.no_grad():
        own = model(x)
        for factor in (30.0, 0.02):
            lent = {name: weight * factor for name, weight in small_mlp().state_dict().items()}
            plain.load_state_dict(lent)
            given = {name: nn.Parameter(weight) for name, weight in lent.items()} if parameters else lent
            assert error(functional_call(model, given, x), plain(x)) < 0.1
            assert torch.equal(model(x), own)
    assert torch.equal(scaling_state(model).amax_history, histories)


def test_training_with_lent_weights_has_histories() -> None:
    model = convert(small_mlp(), DelayedScaling(amax_history_len=16))
    lent = {name: weight.clone().requires_grad_() for name, weight in model.state_dict().items()}
    optimizer = torch.optim.SGD(lent.values(), lr=1e-3)
    for step in range(1, 4):
        # anew in each forward, as those that another network computes
        weights = {name: weight * 1.0 for name, weight in lent.items()}
        functional_call(model, weights, torch.randn(64, 32)).square().mean().backward()
        scaling_state(model).update()
        optimizer.step()
        assert ((scaling_state(model).amax_history > 0).sum(0) == step).all()
