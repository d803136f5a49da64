"""Weights changed other than by an optimizer: the next forward is as exact as that of a fresh conversion."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import pairwise
from small_models import small_mlp
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    convert,
    export,
    load_exported,
    scaling_state,
    unconvert,
    weights_unchanged,
)
from lightning_fp8.scaling.recipe import Recipe
from lightning_fp8.scaling.weight_changes import WeightChanges

FACTORS = (0.01, 0.5, 1.5, 2.0, 4.0, 100.0)
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


def merge(model: nn.Linear, values: Tensor) -> None:
    # as PEFT merges an adapter: a low-rank product, added through `.data`; here of full rank, to reach all values
    delta = values - model.weight.detach()
    left, singular, right = torch.linalg.svd(delta)
    model.weight.data += (left[:, : len(singular)] * singular) @ right[: len(singular)]


def swap(model: nn.Linear, values: Tensor) -> None:
    # as weight averaging does: through `.data`, swapped in (and never back)
    kept = model.weight.data.clone()
    average = nn.Parameter(values.clone())
    model.weight.data.copy_(average.data)
    average.data.copy_(kept)


def swap_tensors(model: nn.Linear, values: Tensor) -> None:
    model.zero_grad()
    torch.utils.swap_tensors(model.weight, nn.Parameter(values.clone()))


def prune_half(model: nn.Linear, values: Tensor) -> None:
    model.weight.data.copy_(values)
    prune.l1_unstructured(model, "weight", amount=0.5)
    prune.remove(model, "weight")


CHANGES: dict[str, Callable[[nn.Linear, Tensor], None]] = {
    "in place": in_place,
    "through .data": through_data,
    "new .data": new_data,
    "load_state_dict": load,
    "assign=True": assign,
    "adapter merged": merge,
    "averaged weights": swap,
    "swap_tensors": swap_tensors,
    "pruned": prune_half,
}


@pytest.mark.parametrize("factor", FACTORS)
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
    y = model.train()(x)
    assert error(y, expected) < bound
    gradient = torch.randn(64, 48)
    model.zero_grad(), plain.zero_grad(), fresh.zero_grad()
    y.backward(gradient)
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


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("how", ["load_state_dict", "assign=True", "checkpoint without scales"])
def test_a_whole_model_that_is_loaded_is_a_fresh_conversion(how: str, factor: float) -> None:
    # the inputs of a layer change too, not only its weight: histories are emptied along with the weights
    model, x = trained(small_mlp()), torch.randn(64, 32)
    weights = {name: tensor * factor for name, tensor in model.state_dict().items()}
    if how == "checkpoint without scales":
        torch.manual_seed(1)
        weights = {name: tensor * factor for name, tensor in small_mlp().state_dict().items()}
    model.load_state_dict(weights, assign=how == "assign=True")
    fresh = convert(small_mlp(), DelayedScaling(amax_history_len=16))
    fresh.load_state_dict(weights)
    state = scaling_state(model)
    assert state.amax_history.count_nonzero() == 0
    assert (state.scale[: state.delayed] == 1).all()
    with torch.no_grad():
        # the same results: nothing is left of the earlier state
        assert torch.equal(model.eval()(x), fresh.eval()(x))
    assert torch.equal(model.train()(x), fresh.train()(x))


def test_scales_that_come_with_the_weights_stay(tmp_path: Path) -> None:
    source, x = trained(small_mlp()), torch.randn(8, 32)
    weights, scales = source.state_dict(), scaling_state(source).state_dict()
    with torch.no_grad():
        expected = source.eval()(x)
    for order in ("weights first", "scales first"):
        model = trained(small_mlp())
        parts = [(model, weights), (scaling_state(model), scales)]
        for target, values in parts if order == "weights first" else parts[::-1]:
            target.load_state_dict(values)
        with torch.no_grad():
            assert torch.equal(model.eval()(x), expected)
        # other weights without scales, after a forward has run
        model.load_state_dict(small_mlp().state_dict())
        assert scaling_state(model).amax_history.count_nonzero() == 0


@pytest.mark.parametrize("training", [True, False])
def test_weights_loaded_after_a_forward_do_not_belong_to_the_scales_before_it(training: bool) -> None:
    source, model = trained(small_mlp()), trained(small_mlp())
    state = scaling_state(model)
    state.load_state_dict(scaling_state(source).state_dict())
    with torch.set_grad_enabled(training):
        model.train(training)(torch.randn(8, 32))
    model.load_state_dict(small_mlp().state_dict())
    assert state.amax_history.count_nonzero() == 0


def test_a_part_that_is_loaded_keeps_the_histories_of_the_others() -> None:
    # like a target network that follows another one in the same model
    model = trained(small_mlp())
    state = scaling_state(model)
    before = state.amax_history.clone()
    model[2].load_state_dict(small_mlp()[2].state_dict())
    emptied = [state.names.index(name) for name in ("2.input", "2.grad_output")]
    assert state.amax_history[:, emptied].count_nonzero() == 0
    kept = [state.names.index(name) for name in ("0.input", "0.grad_output")]
    assert torch.equal(state.amax_history[:, kept], before[:, kept])


def test_a_change_to_the_weights_alone_is_seen_by_compiled_layers() -> None:
    torch._dynamo.reset()
    model, x = trained(nn.Linear(32, 48)), torch.randn(64, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x)
    for factor in (100.0, 1e-4):
        model.weight.data.mul_(factor)
        model.bias.data.mul_(factor)
        expected = unconvert(copy.deepcopy(model))(x).detach()
        assert error(compiled(x), expected) < 0.05
        with torch.no_grad():
            assert error(compiled(x), expected) < 0.05


def deep() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))


def errors(model: nn.Module, x: Tensor, training: bool) -> tuple[float, float]:
    """Errors of the model and of a fresh conversion of its weights, relative to the plain model."""
    plain = unconvert(copy.deepcopy(model))
    fresh = convert(copy.deepcopy(plain))
    expected = plain(x).detach()
    with torch.set_grad_enabled(training):
        return error(model.train(training)(x).detach(), expected), error(fresh(x).detach(), expected)


# those of the ways above that keep the histories; multiplied by all other factors, too
DEEP_FACTORS = (0.01, 0.7, 1.42, 4.0, 100.0)
# on a GPU, where a write through .data leaves no trace, only those that leave one
WAYS = [
    *((way, "cpu") for way in CHANGES if way not in ("load_state_dict", "assign=True", "pruned")),
    *((way, "cuda") for way in ("in place", "new .data", "swap_tensors")),
]


# each way with each factor; the kind of the first forward is independent of both
@pytest.mark.parametrize(("where", "factor", "first"), pairwise(WAYS, DEEP_FACTORS, ["evaluation", "training"]))
def test_what_deeper_layers_get_is_as_exact_as_in_a_fresh_conversion(
    where: tuple[str, str], factor: float, first: str, request: pytest.FixtureRequest
) -> None:
    way, half = where
    if half == "cuda":
        request.getfixturevalue("cuda_half")
    model, x = trained(deep()), torch.randn(64, 32)
    for layer in model:
        if isinstance(layer, nn.Linear):
            CHANGES[way](layer, layer.weight.detach() * factor)
            layer.bias.data *= factor
    for training in (first == "training", first != "training"):
        actual, fresh = errors(model, x, training)
        assert actual <= 1.02 * fresh < 0.1


@pytest.fixture(params=["cpu", "cuda"])
def half(request: pytest.FixtureRequest) -> str:
    """Which half of the operators runs, on the CPU in any case."""
    if request.param == "cuda":
        request.getfixturevalue("cuda_half")
    return str(request.param)


@pytest.mark.usefixtures("half")
def test_weights_swapped_for_evaluation_leave_the_histories() -> None:
    model, x = trained(deep()), torch.randn(64, 32)
    with torch.no_grad():
        before = model.eval()(x)
    histories = scaling_state(model).amax_history.clone()
    for factor, batch_decides in ((1.3, False), (30.0, True), (0.02, True)):
        own = [layer.weight.data for layer in model if isinstance(layer, nn.Linear)]
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.data = layer.weight.data * factor
        with torch.no_grad():
            large = torch.cat([x, 10 * x])
            assert torch.equal(model.eval()(large)[:64], model.eval()(x)) != batch_decides
        for layer, weight in zip([layer for layer in model if isinstance(layer, nn.Linear)], own):
            layer.weight.data = weight
        assert torch.equal(scaling_state(model).amax_history, histories)
        with torch.no_grad(), weights_unchanged(model):
            # the second forward uses the casts of the first
            for batch in (x, large):
                assert torch.equal(model.eval()(batch)[:64], before)


@pytest.mark.usefixtures("half")
def test_what_an_optimizer_does_is_no_other_weight() -> None:
    # from almost nothing, growing tenfold at each step
    model = convert(deep(), DelayedScaling(amax_history_len=16))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(6):
        model(torch.rand(8, 32)).sum().backward()
        scaling_state(model).update()
        for parameter in model.parameters():
            parameter.grad = -9 * parameter.detach()
        optimizer.step()
        optimizer.zero_grad()
        assert (scaling_state(model).amax_history[: step + 1] > 0).all()


@pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling(), BlockScaling()], ids=lambda one: one.precision)
def test_without_histories_no_weight_is_compared(recipe: Recipe, half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison reads the weights, and on a GPU it waits for the device."""
    called: list[str] = []
    for name in ("see_weights", "see_optimizer_step", "see_update"):
        original = getattr(WeightChanges, name)
        call = lambda *args, name=name, original=original: (called.append(name), original(*args))[1]  # noqa: E731
        monkeypatch.setattr(WeightChanges, name, call)
    model, x = convert(deep(), recipe), torch.randn(8, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(x).square().mean().backward()
        scaling_state(model).update()
        optimizer.step()
        model[0].weight.data = model[0].weight.data * 3
    fresh = convert(unconvert(copy.deepcopy(model)), recipe)
    assert torch.equal(model(x), fresh(x))
    expected = {"see_weights", "see_update", *["see_optimizer_step"] * (half == "cpu")}
    assert {*called} == (expected if recipe.from_history else set())


def test_shards_decide_nothing() -> None:
    # another process may hold an unchanged part, and scales must be the same everywhere
    model = trained(deep())
    for module in range(3):
        scaling_state(model).weight_changes.note_sharding(module, True)
    histories = scaling_state(model).amax_history.clone()
    model[0].weight.data *= 100
    model(torch.randn(4, 32))
    assert torch.equal(scaling_state(model).amax_history, histories)


# with a layer between them that is the same, too
@pytest.mark.parametrize("every", [1, 2])
def test_a_step_that_empties_the_histories_keeps_what_it_records(every: int) -> None:
    model = trained(deep())
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    assert len(layers) > 2
    for layer in layers[::every]:
        layer.weight.data.mul_(3)
    model(torch.randn(64, 32)).square().sum().backward()
    scaling_state(model).update()
    history = scaling_state(model).amax_history
    assert (history[0] > 0).all()
    assert (history[1:] == 0).all()


def test_compiled_layers_see_other_weights_before_them() -> None:
    torch._dynamo.reset()
    model, x = trained(deep()), torch.randn(64, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for factor, training in ((8.0, False), (1 / 64, True), (64.0, True)):
        model.train(training)
        compiled(x)
        for parameter in model.parameters():
            parameter.data.mul_(factor)
        fresh = errors(copy.deepcopy(model), x, training)[1]
        with torch.set_grad_enabled(training):
            actual = compiled(x).detach()
        assert error(actual, unconvert(copy.deepcopy(model))(x).detach()) <= 1.02 * fresh < 0.1


@pytest.mark.usefixtures("cuda_half")
def test_an_update_makes_no_tensor_on_the_host() -> None:
    # a value on a GPU would make the host wait, and could not be captured
    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(func.overloadpacket._qualified_op_name)
            return func(*args, **(kwargs or {}))

    names: set[str] = set()
    model = trained(deep())
    state, held = scaling_state(model), scaling_state(model).weight_changes.reference_amax
    model(torch.randn(4, 32)).sum().backward()
    with Made():
        state.update()
    assert not names & {"aten::zeros", "aten::tensor", "aten::_to_copy", "aten::where", "aten::lift_fresh"}
    assert state.weight_changes.reference_amax is held
    assert torch.equal(held, torch.stack([layer.weight.abs().max() for layer in model if isinstance(layer, nn.Linear)]))


def test_on_another_device_no_step_is_followed_until_one_is_made() -> None:
    model = trained(deep())
    state = scaling_state(model).to("cpu")
    model(torch.randn(4, 32))
    state.weight_changes.reference_amax.fill_(7.0)
    state.update()
    assert torch.equal(state.weight_changes.reference_amax, state.amax[state.delayed :])
