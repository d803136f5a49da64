"""Weights and biases whose class has operators of its own stay out of FP8; those of a class that only marks do not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fp8 import convert, describe, scaling_state, unconvert


class Doubled(nn.Parameter):
    """Products with it are twice as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return 2 * result if func is F.linear else result


class Dequantized(Tensor):
    """Its values are those of a tensor without memory, of int8 and a scale."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor) -> Dequantized:
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.codes = codes
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        plain = [arg.codes.float() / 64 if isinstance(arg, cls) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


class Marked(nn.Parameter):
    """A parameter that an optimizer treats in its own way."""


class MarkedTensor(Tensor):
    pass


def doubled(values: Tensor) -> nn.Parameter:
    return Doubled(values.detach())


def dequantized(values: Tensor) -> nn.Parameter:
    return nn.Parameter(Dequantized((values * 64).to(torch.int8)), requires_grad=False)


def model_of(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.GELU(), nn.Linear(32, 32))


@pytest.mark.parametrize("parameter", ["weight", "bias"])
@pytest.mark.parametrize("of", [doubled, dequantized])
def test_a_layer_with_operators_of_its_own_stays_plain(of: Any, parameter: str) -> None:
    model, x = model_of(nn.Linear(32, 32)), torch.randn(8, 32)
    setattr(model[0], parameter, of(getattr(model[0], parameter).detach()))  # type: ignore[index]
    expected = model(x)
    (before, _) = describe(model)
    convert(model)
    (row, other) = describe(model)
    kind = "Doubled" if of is doubled else "Dequantized"
    assert str(row) == str(before)
    assert f"its {parameter} is of the class {kind}, which has operators of its own" in str(row)
    assert str(other).startswith("fp8")
    assert scaling_state(model).module_names == ("2",)
    # one layer in FP8: 0.04; without the class 0.5
    assert (model(x) - expected).norm() < 0.06 * expected.norm()


def test_weights_that_torchao_has_quantized() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    training = pytest.importorskip("torchao.prototype.quantized_training")
    x = torch.randn(8, 64)
    for settings in (quantization.Int8WeightOnlyConfig(), training.bitnet_training()):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        quantization.quantize_(model, settings, filter_fn=lambda _, path: path == "0")
        expected = model(x)
        convert(model)
        assert "which has operators of its own" in str(describe(model)[0])
        assert (model(x) - expected).norm() < 0.06 * expected.norm()


@pytest.mark.parametrize("marked", [Marked, lambda values: nn.Parameter(values.as_subclass(MarkedTensor))])
def test_a_class_that_only_marks_its_tensors_is_converted(marked: Any) -> None:
    plain, x = model_of(nn.Linear(32, 32)), torch.randn(8, 32)
    model = copy.deepcopy(plain)
    for layer in (model[0], model[2]):  # type: ignore[index]
        layer.weight, layer.bias = marked(layer.weight.detach()), marked(layer.bias.detach())
    kinds = {type(parameter) for parameter in model.parameters()}
    convert(plain)
    assert scaling_state(convert(model)).module_names == ("0", "2")
    results = []
    for one in (model, plain, torch.compile(model, backend="eager")):
        one.zero_grad()
        y = one(x)
        y.square().sum().backward()
        results.append([y, *(parameter.grad for parameter in one.parameters())])
    for made, expected, compiled in zip(*results, strict=True):
        assert torch.equal(made.as_subclass(Tensor), expected)
        torch.testing.assert_close(compiled.as_subclass(Tensor), expected, rtol=0.01, atol=0.01)
    assert torch.equal(model.eval()(x).as_subclass(Tensor), plain.eval()(x))
    assert kinds == {type(parameter) for parameter in model.parameters()}


def test_a_layer_with_a_sparse_weight_stays_plain() -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(4, 32)
    model[0].weight = nn.Parameter(model[0].weight.detach().to_sparse_csr())
    hidden = model[0](x)
    convert(model)
    assert "its weight is sparse (torch.sparse_csr)" in {row.path: row.reason for row in describe(model)}["0"]
    assert torch.equal(model[0](x), hidden)
    assert torch.equal(model(x), model[1](hidden))


def test_an_attention_whose_weights_have_operators_of_their_own() -> None:
    model = nn.Sequential(nn.MultiheadAttention(32, 2))
    attention: Any = model[0]
    attention.out_proj.weight = doubled(attention.out_proj.weight)
    assert scaling_state(convert(model)).module_names == ("0.in_proj",)
    assert "its weight is of the class Doubled" in str(describe(model)[1])
    unconvert(model)
    attention.in_proj_weight = doubled(attention.in_proj_weight)
    with pytest.raises(ValueError, match=r"(?s)nothing to convert.*its in_proj_weight is of the class Doubled"):
        convert(model)


def test_a_layer_that_is_quantized_after_its_conversion_becomes_plain_again() -> None:
    model: Any = convert(model_of(nn.Linear(32, 32)))
    model[0].weight = doubled(model[0].weight)
    convert(model)
    assert type(model[0]) is nn.Linear
    assert scaling_state(model).module_names == ("2",)
    x = torch.randn(8, 32)
    y = model(x)
    expected = unconvert(model)(x)
    assert (y - expected).norm() < 0.06 * expected.norm()
