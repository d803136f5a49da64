"""A fused linear - activation - linear, called directly or by the public function, gives the results of its parts."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from feed_forward_blocks import HIDDEN, WIDTH
from feed_forward_step import training_step
from torch import Tensor, nn
from transformers.activations import ACT2FN

from lightning_fp8 import convert, feed_forward, scaling_state


def two_linears() -> nn.Sequential:
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 10)), min_features=0)


@pytest.mark.parametrize("behind_data", [False, True])
@pytest.mark.parametrize(
    "frozen", [(), ("0.weight",), ("1.weight",), ("0.weight", "0.bias"), ("0.weight", "0.bias", "1.weight")]
)
def test_nothing_is_computed_for_frozen_parameters(frozen: tuple[str, ...], behind_data: bool) -> None:
    parts, whole = two_linears(), two_linears()
    for model in (parts, whole):
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
    x = torch.randn(5, 16, requires_grad=not behind_data)
    parts[1](F.gelu(parts[0](x))).sum().backward()
    expected, x.grad = x.grad, None
    feed_forward(whole[0], F.gelu, whole[1], x).sum().backward()
    assert behind_data or torch.equal(x.grad, expected)
    one, two = scaling_state(parts).amax, scaling_state(whole).amax
    assert torch.equal(one, two)
    # the gradient of h has no amax, unless it is needed further back, or summed for the gradient of a bias
    assert (two[2] > 0) == ("0.bias" not in frozen or not behind_data)
    for one, two in zip(parts.parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None) == (not two.requires_grad)
        assert one.grad is None or torch.equal(one.grad, two.grad)


def test_bad_input_is_named() -> None:
    model = two_linears()
    with pytest.raises(ValueError, match=r"Fp8Linear '0'.* must be 16, .* got the shape \(3, 5\)"):
        feed_forward(model[0], F.gelu, model[1], torch.randn(3, 5))
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        feed_forward(model[0], F.gelu, model[1], torch.zeros(3, 16, dtype=torch.int64))
    model[1].bias = nn.Parameter(torch.zeros(23))
    with pytest.raises(ValueError, match=r"bias of '1' must have the shape \(10,\)"):
        feed_forward(model[0], F.gelu, model[1], torch.randn(3, 16))


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


FUSED = {
    "relu": [F.relu, torch.relu, nn.ReLU(), ACT2FN["relu"]],
    "gelu": [F.gelu, nn.GELU(), ACT2FN["gelu"]],
    "gelu_tanh": [
        *(functools.partial(F.gelu, approximate="tanh"), nn.GELU("tanh")),
        *(ACT2FN["gelu_new"], ACT2FN["gelu_pytorch_tanh"]),
    ],
    "silu": [F.silu, nn.SiLU(), ACT2FN["silu"], ACT2FN["swish"]],
}
OTHERS = ("gelu_python", "gelu_python_tanh", "gelu_10", "gelu_fast", "quick_gelu", "relu6", "tanh", "mish")


def test_which_activations_run_fused(fused: list[str]) -> None:
    model, x = two_linears(), torch.randn(3, 16)
    for name, activations in FUSED.items():
        for activation in activations:
            feed_forward(model[0], activation, model[1], x)
        assert fused == [name] * len(activations)
        fused.clear()
    for activation in (nn.Tanh(), functools.partial(F.gelu), lambda x: x, *(ACT2FN[name] for name in OTHERS)):
        feed_forward(model[0], activation, model[1], x)
    assert fused == []


class Own(nn.Module):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down, self.activation = nn.Linear(HIDDEN, WIDTH), activation

    def forward(self, x: Tensor) -> Tensor:
        return feed_forward(self.up, self.activation, self.down, x)

    def parts(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class OwnGated(Own):
    def forward(self, x: Tensor) -> Tensor:
        return feed_forward((self.gate, self.up), self.activation, self.down, x)

    def parts(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


@pytest.mark.parametrize(("kind", "name", "activation"), [(Own, "silu", nn.SiLU()), (OwnGated, "gated", F.silu)])
def test_the_public_function(kind: type[Own], name: str, activation: Any, fused: list[str]) -> None:
    model, x = kind(activation), torch.randn(4, 5, WIDTH)
    # plain layers, and bf16
    assert torch.equal(model(x), model.parts(x))
    half = copy.deepcopy(model).bfloat16()
    assert torch.equal(half(x.bfloat16()), half.parts(x.bfloat16()))
    assert fused == []
    convert(model)
    reference = copy.deepcopy(model)
    for _ in range(2):
        one, two = training_step(reference, reference.parts, x), training_step(model, model, x)
        assert all(map(torch.equal, one, two))
    assert fused == [name] * 2
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), reference.parts(x))
    assert fused == [name] * 3


def test_the_public_function_refuses_other_tuples_and_runs_layers_of_two_models_apart(fused: list[str]) -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"pair \(gate, up\), got a tuple of 3"):
        feed_forward((layer, layer, layer), F.silu, layer, torch.zeros(1, 4))  # type: ignore[arg-type]
    first, second = convert(nn.Linear(WIDTH, HIDDEN)), convert(nn.Linear(HIDDEN, WIDTH))
    x = torch.randn(3, WIDTH)
    assert torch.equal(feed_forward(first, F.relu, second, x), second(first(x).relu()))
    assert fused == []
