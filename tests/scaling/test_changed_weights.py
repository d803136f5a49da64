"""Weights changed other than by an optimizer. tests/modules/test_weight_cache.py has each kind of change, and the state
machine their sequences."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import small_mlp
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fp8 import (
    DelayedScaling,
    convert,
    scaling_state,
    unconvert,
)
from lightning_fp8.scaling.config import FrozenWeights

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


@pytest.fixture(params=["cpu", "cuda"])
def half(request: pytest.FixtureRequest) -> str:
    """Which half of the operators runs, on the CPU in any case."""
    if request.param == "cuda":
        request.getfixturevalue("cuda_half")
    return str(request.param)


class Followed(nn.Module):
    """A network, and another one in the same model that follows it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.target, self.how = small_mlp(), small_mlp().requires_grad_(False), how
        self.target.train(how == "an average without no_grad")

    def forward(self, x: Tensor) -> Tensor:
        # some detach what the target gives, and do not switch gradients off
        with torch.set_grad_enabled(self.how == "an average without no_grad"):
            wanted = self.target(x).detach()
        return self.net(x) - 0.5 * wanted

    @torch.no_grad()
    def follow(self) -> None:
        for own, of_net in zip(self.target.parameters(), self.net.parameters()):
            if self.how == "in place":
                own.lerp_(of_net, 0.5)
            elif self.how == "load_state_dict":
                self.target.load_state_dict(self.net.state_dict())
            else:
                own.data = 0.5 * own + 0.5 * of_net


@pytest.mark.parametrize("how", ["in place", "load_state_dict", "new .data", "an average without no_grad"])
def test_a_target_network_may_follow_by_any_means(how: str) -> None:
    model = convert(Followed(how))
    optimizer, state = torch.optim.SGD(model.net.parameters(), 1e-3), scaling_state(model)
    for step in range(1, 5):
        model(torch.randn(16, 32)).square().mean().backward()
        state.update()
        optimizer.step()
        model.follow()
        rows = [row for row, name in enumerate(state.names[: state.delayed]) if name.startswith("net.")]
        assert (state.amax_history[:, rows] > 0).sum(0).tolist() == [step] * len(rows)


def load(model: nn.Module, weights: dict[str, Tensor], assign: bool = False) -> None:
    model.load_state_dict(weights, strict=False, assign=assign)


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_empties_the_histories_of_what_it_loads(assign: bool) -> None:
    """At once, and whatever the values."""
    model, x = trained(deep()), torch.randn(64, 32)
    state, same = scaling_state(model), copy.deepcopy(model.state_dict())

    def filled() -> dict[str, bool]:
        return {name: bool((state.amax_history[:, row] > 0).any()) for row, name in enumerate(state.names[:6])}

    load(model, {name: tensor for name, tensor in same.items() if name.startswith("2.")}, assign)
    assert filled() == {name: not name.startswith("2.") for name in state.names[:6]}
    assert (state.scale[: state.delayed] == 1).tolist() == [not is_filled for is_filled in filled().values()]
    load(model, {}, assign)
    assert sum(filled().values()) == 4
    load(model, same, assign)
    assert not any(filled().values())
    # nothing is left of the earlier state
    fresh = convert(deep(), DelayedScaling(amax_history_len=16))
    load(fresh, same)
    for training in (True, False):
        with torch.set_grad_enabled(training):
            assert torch.equal(model.train(training)(x), fresh.train(training)(x))


def test_a_bias_alone_belongs_to_its_layer() -> None:
    model = trained(small_mlp())
    load(model, {"2.bias": torch.randn(16)})
    history = scaling_state(model).amax_history
    assert (history > 0).any(0).tolist() == [True, False] * 2


@pytest.mark.parametrize("frozen_weights", ["master", "fp8"])
def test_a_frozen_weight_that_changes_is_evaluated_as_it_is(frozen_weights: FrozenWeights) -> None:
    base, adapter, x = small_mlp().requires_grad_(False), nn.Linear(32, 32), torch.randn(64, 32)
    model = convert(nn.Sequential(adapter, base), ignore_modules=["0"], frozen_weights=frozen_weights)
    optimizer, state = torch.optim.SGD(adapter.parameters(), 1e-3), scaling_state(model)
    plain = nn.Sequential(adapter, small_mlp())
    # the second time, the weight in FP8 alone has been changed before
    for times in (3, 6):
        for _ in range(3):
            model.train()(x).square().mean().backward()
            state.update()
            optimizer.step()
        assert ((state.amax_history > 0).sum(0) == times).all()
        with torch.no_grad():
            base[0].weight.mul_(30)
            plain[1].load_state_dict(base.state_dict())
            assert error(model.eval()(x), plain(x)) < 0.1


@pytest.mark.parametrize("move", [lambda model: model.double().float(), lambda model: model.to(torch.bfloat16)])
def test_a_move_is_no_change(move: Callable[[nn.Module], nn.Module]) -> None:
    model = trained(small_mlp())
    histories = scaling_state(model).amax_history.clone()
    move(model)(torch.randn(8, 32))
    assert torch.equal(scaling_state(model).amax_history, histories)


def deep() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))


def test_nothing_is_kept_alive() -> None:
    model = trained(nn.Linear(32, 48))
    former = weakref.ref(model.weight)
    model.weight = nn.Parameter(torch.randn(48, 32))
    model(torch.randn(4, 32))
    assert former() is None


def test_compiled_layers_see_other_weights_before_them() -> None:
    torch._dynamo.reset()
    model, x = trained(deep()).eval(), torch.randn(64, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for factor in (8.0, 1 / 64, 64.0):
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


@pytest.mark.usefixtures("cuda_half")
def test_an_update_makes_no_tensor_on_the_host() -> None:
    # a value on a GPU would make the host wait, and could not be captured
    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(func.overloadpacket._qualified_op_name)
            return func(*args, **(kwargs or {}))

    names: set[str] = set()
    model = trained(deep())
    model(torch.randn(4, 32)).sum().backward()
    with Made():
        scaling_state(model).update()
    assert not names & {"aten::zeros", "aten::tensor", "aten::_to_copy", "aten::where", "aten::lift_fresh"}
