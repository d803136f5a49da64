"""Weights changed other than by an optimizer: the next forward is as exact as that of a fresh conversion."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import small_mlp
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    convert,
    export,
    load_exported,
    scaling_state,
    unconvert,
    weights_unchanged,
)
from lightning_fp8.scaling.config import FrozenWeights
from lightning_fp8.scaling.recipe import Recipe

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


def in_place(model: nn.Linear, values: Tensor) -> None:
    with torch.no_grad():
        model.weight.copy_(values)


def through_data(model: nn.Linear, values: Tensor) -> None:
    model.weight.data.copy_(values)


def new_data(model: nn.Linear, values: Tensor) -> None:
    model.weight.data = values.clone()


def load(model: nn.Linear, values: Tensor) -> None:
    model.load_state_dict({**model.state_dict(), "weight": values})


def assign(model: nn.Linear, values: Tensor) -> None:
    model.load_state_dict({**model.state_dict(), "weight": values.clone()}, assign=True)


def swap_tensors(model: nn.Linear, values: Tensor) -> None:
    model.zero_grad()
    torch.utils.swap_tensors(model.weight, nn.Parameter(values.clone()))


CHANGES: dict[str, Callable[[nn.Linear, Tensor], None]] = {
    "in place": in_place,
    "through .data": through_data,
    "new .data": new_data,
    "load_state_dict": load,
    "assign=True": assign,
    "swap_tensors": swap_tensors,
}


@pytest.mark.parametrize("factor", [0.01, 1.5, 100.0])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_as_exact_as_in_a_fresh_conversion(change: str, factor: float, tmp_path: Path) -> None:
    model, x = trained(nn.Linear(32, 48, bias=False)), torch.randn(64, 32)
    assert isinstance(model, nn.Linear)
    CHANGES[change](model, model.weight.detach() * factor)
    plain = unconvert(copy.deepcopy(model))
    fresh = convert(copy.deepcopy(plain))
    expected = plain(x).detach()
    bound = 1.1 * error(fresh(x), expected)
    assert 0.02 < bound < 0.06
    # in evaluation, in the next training step, and exported
    with torch.no_grad():
        assert error(model.eval()(x), expected) < bound
    assert error(model.train()(x), expected) < bound
    gradient = torch.randn(64, 48)
    inputs = [x.clone().requires_grad_() for _ in range(3)]
    for run, given in zip((model, plain, fresh), inputs):
        run(given).backward(gradient)
    assert error(inputs[0].grad, inputs[1].grad) < 1.1 * error(inputs[2].grad, inputs[1].grad)
    scaling_state(model).update()
    export(model, tmp_path)
    loaded = load_exported(nn.Linear(32, 48, bias=False), tmp_path)
    with torch.no_grad():
        assert error(loaded(x), expected) < bound
        # and it continues
        assert error(model.eval()(x), expected) < bound


@pytest.fixture(params=["cpu", "cuda"])
def half(request: pytest.FixtureRequest) -> str:
    """Which half of the operators runs, on the CPU in any case."""
    if request.param == "cuda":
        request.getfixturevalue("cuda_half")
    return str(request.param)


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("first", ["evaluation", "training"])
@pytest.mark.parametrize("how", ["load_state_dict", "assign=True", "in place"])
def test_a_whole_model_that_is_changed_is_a_fresh_conversion(how: str, first: str) -> None:
    # the inputs of a layer change too, not only its weight: histories are emptied along with the weights
    model, x = trained(small_mlp()), torch.randn(64, 32)
    weights = {name: tensor * 1.5 for name, tensor in small_mlp().state_dict().items()}
    if how == "in place":
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
    else:
        model.load_state_dict(weights, assign=how == "assign=True")
    fresh = convert(small_mlp(), DelayedScaling(amax_history_len=16))
    fresh.load_state_dict(weights)
    # the same results: nothing is left of the earlier state
    for training in (first == "training", first != "training"):
        with torch.set_grad_enabled(training):
            assert torch.equal(model.train(training)(x), fresh.train(training)(x))
    state = scaling_state(model)
    assert state.amax_history.count_nonzero() == 0
    assert (state.scale[: state.delayed] == 1).all()


class Followed(nn.Module):
    """A network, and another one in the same model that follows it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.target, self.how = small_mlp(), small_mlp().requires_grad_(False).eval(), how

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.target(x)
        return self.net(x) - 0.5 * wanted

    @torch.no_grad()
    def follow(self) -> None:
        for own, of_net in zip(self.target.parameters(), self.net.parameters()):
            if self.how == "in place":
                own.lerp_(of_net, 0.5)
            elif self.how == "load_state_dict":
                self.target.load_state_dict(self.net.state_dict())
            else:
                own.data = of_net.clone()


@pytest.mark.parametrize(
    ("how", "update"),
    [("in place", "after the step"), ("load_state_dict", "before the step"), ("new .data", "before the step")],
)
def test_a_target_network_may_follow_by_any_means(how: str, update: str) -> None:
    """It never records, so no history belongs to its weights; it changes at each step."""
    model = convert(Followed(how))
    optimizer, state = torch.optim.SGD(model.net.parameters(), 1e-3), scaling_state(model)
    x = torch.randn(16, 32)
    for step in range(1, 5):
        for _ in range(2):
            model(x).square().mean().backward()
        if update == "before the step":
            state.update()
        optimizer.step()
        if update == "after the step":
            state.update()
        model.follow()
        rows = [row for row, name in enumerate(state.names[: state.delayed]) if name.startswith("net.")]
        assert (state.amax_history[:, rows] > 0).sum(0).tolist() == [step] * len(rows)
        with torch.no_grad():
            # nor does an evaluation scale by itself
            assert torch.equal(model.net(torch.cat([x, 2 * x]))[:16], model.net(x))
    # a change between two evaluations belongs to no step
    with torch.no_grad():
        model.target[0].weight.mul_(2)
        assert not torch.equal(model.net(torch.cat([x, 20 * x]))[:16], model.net(x))


def test_steps_by_hand_are_those_between_two_updates() -> None:
    """Without an optimizer of torch, a change after an update is the step that belongs to it."""
    model = convert(small_mlp())
    state, x = scaling_state(model), torch.randn(16, 32)
    for step in range(1, 4):
        for _ in range(2):
            model(x).square().mean().backward()
        state.update()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=1e-3)
                parameter.grad = None
        assert (state.amax_history > 0).sum(0).tolist() == [step] * state.delayed
        with torch.no_grad():
            assert torch.equal(model(torch.cat([x, 2 * x]))[:16], model(x))
    in_place(model[0], model[0].weight * 1.5)
    model(x)
    assert not state.amax_history.any()


@pytest.mark.parametrize("frozen_weights", ["master", "fp8"])
def test_a_frozen_weight_that_changes_after_a_step_is_no_part_of_it(frozen_weights: FrozenWeights) -> None:
    """The optimizer changes an adapter alone, so the model's weights know of no step."""
    base, adapter, x = small_mlp().requires_grad_(False), nn.Linear(32, 32), torch.randn(64, 32)
    model = convert(nn.Sequential(adapter, base), ignore_modules=["0"], frozen_weights=frozen_weights)
    optimizer, state = torch.optim.SGD(adapter.parameters(), 1e-3), scaling_state(model)
    plain = nn.Sequential(adapter, small_mlp())
    # the second time, the weight in FP8 alone has been changed before
    for _ in range(2):
        for times in range(1, 4):
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


@pytest.mark.usefixtures("half")
def test_weights_swapped_for_evaluation_leave_the_histories() -> None:
    model, x = trained(deep()), torch.randn(64, 32)
    with torch.no_grad():
        before = model.eval()(x)
    histories = scaling_state(model).amax_history.clone()
    for factor in (1.3, 30.0, 0.02):
        own = [layer.weight.data for layer in model if isinstance(layer, nn.Linear)]
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.data = layer.weight.data * factor
        with torch.no_grad():
            large = torch.cat([x, 10 * x])
            assert not torch.equal(model.eval()(large)[:64], model.eval()(x))
        for layer, weight in zip([layer for layer in model if isinstance(layer, nn.Linear)], own):
            layer.weight.data = weight
        assert torch.equal(scaling_state(model).amax_history, histories)
        with torch.no_grad(), weights_unchanged(model):
            # the second forward uses the casts of the first
            for batch in (x, large):
                assert torch.equal(model.eval()(batch)[:64], before)


@pytest.mark.parametrize("recipe", [CurrentScaling(), BlockScaling(), MXScaling()], ids=lambda one: one.precision)
def test_without_histories_no_weight_is_looked_at(recipe: Recipe, half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = convert(deep(), recipe), torch.randn(8, 32)
    monkeypatch.setattr("lightning_fp8.modules.gemm.stamps", None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(x).square().mean().backward()
        scaling_state(model).update()
        optimizer.step()
        model[0].weight.data = model[0].weight.data * 3
    monkeypatch.undo()
    fresh = convert(unconvert(copy.deepcopy(model)), recipe)
    assert torch.equal(model(x), fresh(x))


def test_nothing_is_kept_alive() -> None:
    model = trained(nn.Linear(32, 48))
    former = weakref.ref(model.weight)
    model.weight = nn.Parameter(torch.randn(48, 32))
    model(torch.randn(4, 32))
    assert former() is None


def test_compiled_layers_see_other_weights_before_them() -> None:
    torch._dynamo.reset()
    model, x = trained(deep()), torch.randn(64, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for factor, training in ((8.0, False), (1 / 64, True), (64.0, True)):
        model.train(training)
        compiled(x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        plain = unconvert(copy.deepcopy(model))
        expected, fresh = plain(x).detach(), convert(copy.deepcopy(plain)).train(training)
        with torch.set_grad_enabled(training):
            assert error(compiled(x).detach(), expected) <= 1.02 * error(fresh(x).detach(), expected) < 0.1


class Shared(nn.Module):
    """Compiled without gradients, each of the last layers casts their one input, so it is cast more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return self.q(x) + self.k(x) + self.v(x)  # type: ignore[no-any-return]


def test_a_compiled_forward_sees_other_weights_though_the_one_before_cast_an_input_more_than_once() -> None:
    torch._dynamo.reset()
    model, x = trained(Shared()).eval(), torch.randn(64, 32)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(x)
        for parameter in model.first.parameters():  # type: ignore[union-attr]
            parameter.mul_(30)
        assert error(compiled(x), unconvert(copy.deepcopy(model))(x)) < 0.1


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


def test_weights_made_in_inference_mode_keep_the_histories_that_are_loaded() -> None:
    source, x = trained(small_mlp()), torch.randn(8, 32)
    with torch.inference_mode():
        model = convert(small_mlp(), DelayedScaling(amax_history_len=16)).eval()
        model.load_state_dict(source.state_dict())
        scaling_state(model).load_state_dict(scaling_state(source).state_dict())
        assert model[0].weight.is_inference()
        for _ in range(2):
            assert torch.equal(model(torch.cat([x, 10 * x]))[:8], source.eval()(x))


def test_a_checkpoint_has_no_histories_of_other_weights() -> None:
    model, x = trained(small_mlp()), torch.randn(8, 32)
    in_place(model[0], model[0].weight * 8)
    saved, weights = scaling_state(model).state_dict(), model.state_dict()
    assert not any(len(entry["amax_history"]) for entry in saved.values())
    other = convert(small_mlp(), DelayedScaling(amax_history_len=16))
    other.load_state_dict(weights)
    scaling_state(other).load_state_dict(saved)
    with torch.no_grad():
        # as before it was saved: scaled by itself
        assert torch.equal(other.eval()(x), model.eval()(x))
    assert scaling_state(model).amax_history.any()


@pytest.mark.parametrize("training", [True, False])
def test_weights_loaded_after_a_forward_do_not_belong_to_the_scales_before_it(training: bool) -> None:
    source, model = trained(small_mlp()), trained(small_mlp())
    state = scaling_state(model)
    state.load_state_dict(scaling_state(source).state_dict())
    with torch.set_grad_enabled(training):
        model.train(training)(torch.randn(8, 32))
    model.load_state_dict(small_mlp().state_dict())
    model.train()(torch.randn(8, 32))
    assert state.amax_history.count_nonzero() == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_knows_its_weights(copied: Callable[[nn.Module], nn.Module]) -> None:
    x = torch.randn(64, 32)
    for changed in ("never", "before", "after"):
        model = trained(small_mlp())
        if changed == "before":
            in_place(model[0], model[0].weight * 8)
        other = copied(model)
        if changed == "after":
            in_place(other[0], other[0].weight * 8)
        with torch.no_grad():
            batch_decides = not torch.equal(other.eval()(torch.cat([x, 10 * x]))[:64], other(x))
        other.train()(x)
        assert batch_decides == (changed != "never") == (not scaling_state(other).amax_history.any())


# with a layer between them that is the same, too
@pytest.mark.parametrize("every", [1, 2])
def test_a_step_that_empties_the_histories_keeps_what_it_records(every: int) -> None:
    model = trained(deep())
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    assert len(layers) > 2
    for layer in layers[::every]:
        in_place(layer, layer.weight * 3)
    model(torch.randn(64, 32)).square().sum().backward()
    scaling_state(model).update()
    history = scaling_state(model).amax_history
    assert (history[0] > 0).all()
    assert (history[1:] == 0).all()
