"""A fused linear - activation - linear gives the results of its parts, and is not used where it would not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from feed_forward_step import ACTIVATIONS, training_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import convert, scaling_state, unconvert
from lightning_fp8.modules import feed_forward
from lightning_fp8.modules.feed_forward import (
    activation_name,
    fp8_feed_forward,
)
from lightning_fp8.modules.fused_blocks import Fp8FeedForward


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The activations of the blocks that ran fused."""
    calls: list[str] = []

    def counting(first: Any, activation: str, second: Any, x: Tensor) -> Tensor:
        calls.append(activation)
        return fp8_feed_forward(first, activation, second, x)

    monkeypatch.setattr(feed_forward, "fp8_feed_forward", counting)
    return calls


def two_linears(activation: str, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    width = 48 if activation == "swiglu" else 24
    return convert(nn.Sequential(nn.Linear(16, width, bias=bias), nn.Linear(24, 10, bias=bias)), min_features=0)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_numbers_are_those_of_the_parts(name: str, bias: bool, autocast: bool) -> None:
    parts, whole = two_linears(name, bias), two_linears(name, bias)
    for _ in range(3):  # the first use of every tensor, then delayed scales
        x = torch.randn(3, 7, 16)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            one = training_step(parts, lambda x: parts[1](ACTIVATIONS[name](parts[0](x))), x)
            two = training_step(whole, lambda x: fp8_feed_forward(whole[0], name, whole[1], x), x)
        for expected, actual in zip(one, two, strict=True):
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("frozen", [("0.weight",), ("1.weight",), ("0.weight", "0.bias"), ("0.bias", "1.bias")])
def test_frozen_parameters_get_no_gradient_and_the_others_theirs(frozen: tuple[str, ...]) -> None:
    parts, whole = two_linears("gelu"), two_linears("gelu")
    for model in (parts, whole):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
    x = torch.randn(5, 16)
    one = training_step(parts, lambda x: parts[1](F.gelu(parts[0](x))), x)
    two = training_step(whole, lambda x: fp8_feed_forward(whole[0], "gelu", whole[1], x), x)
    assert len(one) == len(two) == 2 + 4 - len(frozen) + 2
    assert all(map(torch.equal, one, two))
    assert all(whole.get_parameter(name).grad is None for name in frozen)


@pytest.mark.parametrize("frozen", [("0.weight", "0.bias"), ("0.weight", "0.bias", "1.weight"), ("0.weight",)])
def test_nothing_is_computed_for_a_frozen_first_layer_behind_data(frozen: tuple[str, ...]) -> None:
    parts, whole = two_linears("gelu"), two_linears("gelu")
    x = torch.randn(5, 16)
    for model in (parts, whole):
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
    parts[1](F.gelu(parts[0](x))).sum().backward()
    fp8_feed_forward(whole[0], "gelu", whole[1], x).sum().backward()
    # the gradient of h has no amax, unless it is summed for the gradient of a bias
    one, two = scaling_state(parts).amax, scaling_state(whole).amax
    assert torch.equal(one, two)
    assert (two[2] > 0) == ("0.bias" not in frozen)
    for one, two in zip(parts.parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        assert one.grad is None or torch.equal(one.grad, two.grad)


def layer(
    activation: Any = F.gelu, dropout: float = 0.0, kind: type[nn.Module] = nn.TransformerEncoderLayer
) -> nn.Module:
    torch.manual_seed(0)
    return convert(kind(16, 2, 24, dropout=dropout, activation=activation, batch_first=True))


def test_transformer_layers_use_it(fused: list[str]) -> None:
    for activation in (F.relu, F.gelu, nn.GELU("tanh"), nn.SiLU(), "relu", "gelu"):
        layer(activation)(torch.randn(2, 5, 16)).sum().backward()
    x = torch.randn(2, 5, 16)
    layer(F.silu, kind=nn.TransformerDecoderLayer)(x, x).sum().backward()
    assert fused == ["relu", "gelu", "gelu_tanh", "silu", "relu", "gelu", "silu"]


def hooked(part: str) -> Callable[[nn.Module], Any]:
    return lambda model: model.get_submodule(part).register_forward_hook(lambda *_: None)


STEPS_ASIDE: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "dropout": (lambda: layer(dropout=0.1), lambda model: None),
    "another activation": (lambda: layer(F.elu), lambda model: None),
    "a hook on linear1": (layer, hooked("linear1")),
    "a hook on linear2": (layer, lambda model: model.linear2.register_full_backward_hook(lambda *_: None)),
    "a hook on the activation": (lambda: layer(nn.ReLU()), hooked("activation")),
    "a hook on the dropout": (layer, hooked("dropout")),
    "a forward of its own": (layer, lambda model: setattr(model.linear1, "forward", model.linear1.forward)),
    "another mode": (layer, lambda model: model.linear1.eval()),
}


@pytest.mark.parametrize("case", STEPS_ASIDE)
def test_it_steps_aside(case: str, fused: list[str]) -> None:
    make, change = STEPS_ASIDE[case]
    model = make()
    change(model)
    model(torch.randn(2, 5, 16)).sum().backward()
    assert fused == []


def test_it_steps_aside_for_a_hook_on_all_modules(fused: list[str]) -> None:
    model, seen = layer(), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        model(torch.randn(2, 5, 16))
    finally:
        handle.remove()
    assert fused == []
    assert model.linear1 in seen
    assert model.linear2 in seen


def test_dropout_in_evaluation_is_none(fused: list[str]) -> None:
    model = layer(dropout=0.1).eval()
    x = torch.randn(2, 5, 16)
    y = model(x)
    assert fused == ["gelu"]
    assert torch.equal(y, model(x))


def test_hooks_see_the_numbers_that_came_without_them(fused: list[str]) -> None:
    model, x, seen = layer(), torch.randn(2, 5, 16), []
    y = model(x)
    model.linear1.register_forward_hook(lambda _, inputs, output: seen.append(output))
    assert torch.equal(model(x), y)
    assert len(fused) == len(seen) == 1


def test_a_partly_ignored_layer_stays_plain_and_conversion_comes_and_goes(fused: list[str]) -> None:
    model = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0)
    convert(model, ignore_modules=("linear2",))
    assert type(model) is nn.TransformerEncoderLayer
    convert(model)
    assert isinstance(model, Fp8FeedForward)
    assert type(model).__name__ == "Fp8TransformerEncoderLayer"
    assert isinstance(model, nn.TransformerEncoderLayer)
    convert(model, ignore_modules=("linear1",))
    assert type(model) is nn.TransformerEncoderLayer
    unconvert(convert(model))
    assert type(model) is nn.TransformerEncoderLayer
    assert fused == []


def test_a_subclass_of_a_transformer_layer_keeps_its_own_block(fused: list[str]) -> None:
    class Mine(nn.TransformerEncoderLayer):
        def _ff_block(self, x: Tensor) -> Tensor:
            return super()._ff_block(x) * 2

    model = convert(Mine(16, 2, 24, dropout=0.0))
    model(torch.randn(5, 16))
    assert type(model) is Mine
    assert fused == []


def test_copies_and_pickles(fused: list[str]) -> None:
    model, x = layer(), torch.randn(2, 5, 16)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
    assert len(fused) == 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_changes_nothing(reentrant: bool) -> None:
    x = torch.randn(4, 5, 16)
    plain, recomputed = layer(), layer()
    for _ in range(2):
        one = training_step(plain, plain, x)
        two = training_step(recomputed, lambda x: checkpoint(recomputed, x, use_reentrant=reentrant), x)
        assert all(map(torch.equal, one, two))


def test_compiled_without_a_graph_break(fused: list[str]) -> None:
    eager, compiled = layer(), layer()
    block = torch.compile(lambda x: compiled._ff_block(x), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x = torch.randn(2, 5, 16)
        one, two = training_step(eager, eager._ff_block, x), training_step(compiled, block, x)
        assert all(map(torch.equal, one, two))
    assert set(fused) == {"gelu"}


def test_backward_keeps_fp8_inputs_and_one_16_bit_tensor() -> None:
    model = two_linears("gelu")
    x, kept = torch.randn(32, 16), []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t.dtype, tuple(t.shape))) or t, lambda t: t),
    ):
        fp8_feed_forward(model[0], "gelu", model[1], x)
    large = [(dtype, shape) for dtype, shape in kept if 32 in shape]
    assert sorted(large, key=str) == [
        (torch.bfloat16, (32, 24)),
        (torch.uint8, (16, 32)),
        (torch.uint8, (24, 32)),
    ]


def test_names_of_activations() -> None:
    assert activation_name(nn.GELU()) == "gelu"
    assert activation_name(nn.GELU("tanh")) == "gelu_tanh"
    assert activation_name(torch.relu) == "relu"
    assert activation_name(nn.Tanh()) is None
    assert activation_name(lambda x: x) is None


def test_bad_input_is_named() -> None:
    model = two_linears("gelu")
    with pytest.raises(ValueError, match=r"Fp8Linear '0'.* must be 16, .* got the shape \(3, 5\)"):
        fp8_feed_forward(model[0], "gelu", model[1], torch.randn(3, 5))
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        fp8_feed_forward(model[0], "gelu", model[1], torch.zeros(3, 16, dtype=torch.int64))
    model[1].bias = nn.Parameter(torch.zeros(23))
    with pytest.raises(ValueError, match=r"bias of '1' must have the shape \(10,\)"):
        fp8_feed_forward(model[0], "gelu", model[1], torch.randn(3, 16))


def test_weights_of_another_width(fused: list[str]) -> None:
    """A fused block has the results of its parts; if the parts do not fit together, the error is that of the part."""
    layer = convert(nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True))
    layer.linear1.weight, layer.linear1.bias = nn.Parameter(torch.randn(80, 32) / 4), nn.Parameter(torch.randn(80))
    layer.linear2.weight, layer.linear2.bias = nn.Parameter(torch.randn(24, 80) / 4), nn.Parameter(torch.randn(24))
    x = torch.randn(2, 5, 32)
    expected = layer.linear2(layer.linear1(x).relu())
    assert torch.equal(layer._ff_block(x), expected)
    assert fused == ["relu"]
    layer.linear2.weight = nn.Parameter(torch.randn(32, 40))
    with pytest.raises(ValueError, match=r"'linear2': .* the input must be 40, .* got the shape \(2, 5, 80\)"):
        layer(x)
