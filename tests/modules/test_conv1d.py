"""``Fp8Conv1D``: the transposed linear layer of Hugging Face's GPT-2."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sqnr import sqnr
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_fp8 import DelayedScaling, convert, scaling_state, unconvert
from lightning_fp8.modules import Fp8Linear
from lightning_fp8.modules.conv1d import Fp8Conv1D


@pytest.mark.parametrize("autocast", [False, True])
def test_conv1d_equals_linear_of_the_transposed_weight(autocast: bool) -> None:
    layers: list[Any] = [Conv1D(40, 24), nn.Linear(24, 40)]
    with torch.no_grad():
        layers[0].weight.mul_(10)
        layers[0].bias.normal_()
        layers[1].weight.copy_(layers[0].weight.t())
        layers[1].bias.copy_(layers[0].bias)
    for layer in layers:
        convert(layer, DelayedScaling(amax_history_len=4))
    assert [type(layer) for layer in layers] == [Fp8Conv1D, Fp8Linear]
    states = [scaling_state(layer) for layer in layers]
    x, dy = torch.randn(2, 5, 24), torch.randn(2, 5, 40) * 1e-2
    for _ in range(2):
        inputs = [x.clone().requires_grad_() for _ in layers]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
        assert outputs[0].dtype == (torch.bfloat16 if autocast else torch.float32)
        for layer, y, state in zip(layers, outputs, states, strict=True):
            layer.zero_grad()
            y.backward(dy.to(y.dtype))
            state.update()
        assert torch.equal(*outputs)
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        assert torch.equal(layers[0].weight.grad.t(), layers[1].weight.grad)
        assert torch.equal(layers[0].bias.grad, layers[1].bias.grad)
        assert torch.equal(states[0].scale, states[1].scale)
    assert (states[0].amax_history > 0).sum(0).tolist() == [2, 2]
    assert (states[0].scale != 1).all()
    assert type(unconvert(layers[0])) is Conv1D


def test_a_weight_of_another_shape_decides() -> None:
    layer = Conv1D(40, 24)
    plain = copy.deepcopy(layer)
    convert(layer)
    weight, bias, x = torch.randn(16, 8), torch.randn(8), torch.randn(5, 16)
    for each in (layer, plain):
        each.nf, each.weight, each.bias = 8, nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    assert sqnr(layer(x), plain(x)) > 20
    with pytest.raises(ValueError, match=r"the input must be 16, .* got the shape \(5, 24\)"):
        layer(torch.randn(5, 24))
