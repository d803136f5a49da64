"""``Fp8Linear`` beside ``nn.Linear``: numbers, dtypes, what it records, and what it refuses by name."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from sqnr import sqnr
from torch import Tensor, nn

from lightning_fp8 import DelayedScaling, convert, scaling_state, unconvert
from lightning_fp8.modules import Fp8Linear


def pair(inputs: int, outputs: int, bias: bool = True) -> tuple[nn.Linear, Fp8Linear]:
    plain = nn.Linear(inputs, outputs, bias=bias)
    return plain, convert(copy.deepcopy(plain), min_features=0)  # type: ignore[return-value]


def step(layer: nn.Linear, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Output, and the gradients of input, weight and bias."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]  # type: ignore[list-item]


def assert_near(found: list[Tensor], expected: list[Tensor], decibels: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert not ours.numel() or sqnr(ours, theirs) > decibels or torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("shape", "bias"),
    [((24,), True), ((5, 24), False), ((2, 1, 3, 24), False), ((2, 2, 2, 2, 24), True), ((0, 24), True)],
)
def test_inputs_of_one_to_five_dimensions_and_empty_ones(shape: tuple[int, ...], bias: bool) -> None:
    plain, fp8 = pair(24, 10, bias)
    x, dy = torch.randn(shape), torch.randn(*shape[:-1], 10)
    found, expected = step(fp8, x, dy), step(plain, x, dy)
    assert_near(found, expected, 18)
    if bias:
        torch.testing.assert_close(found[3], expected[3])


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(), DelayedScaling(fp8_format="E4M3", amax_history_len=4), DelayedScaling(margin=3)]
)
def test_delayed_scales_keep_the_accuracy(recipe: DelayedScaling) -> None:
    plain = nn.Linear(128, 64)
    fp8 = convert(copy.deepcopy(plain), recipe)
    state = scaling_state(fp8)
    for _ in range(4):
        x, dy = torch.randn(256, 128), torch.randn(256, 64) * 1e-3
        found, expected = step(fp8, x, dy), step(plain, x, dy)
        state.update()
        assert_near(found[:1], expected[:1], 27)
        assert_near(found[1:], expected[1:], 23)
    assert (state.amax_history > 0).sum(0).tolist() == [min(4, recipe.amax_history_len)] * 2
    assert repr(fp8) == f"Fp8Linear(in_features=128, out_features=64, bias={fp8.bias is not None}, fp8={recipe})"


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_autocast_which_changes_no_gradient(x_dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    _, fp8 = pair(64, 32)
    x = torch.randn(16, 64, dtype=x_dtype)
    expected = step(fp8, x.float(), torch.ones(16, 32))
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        y, dx, dw, db = step(fp8, x, torch.ones(16, 32, dtype=autocast or x_dtype))
    assert y.dtype == (autocast or x_dtype)
    assert dx.dtype == x_dtype
    assert dw.dtype == db.dtype == torch.float32
    torch.testing.assert_close(y.float(), expected[0], rtol=2**-7, atol=1e-2)
    assert torch.equal(dw, expected[2])


def test_recording_needs_training_mode_and_gradients() -> None:
    plain, fp8 = pair(16, 8)
    fresh = convert(plain, min_features=0)
    state, x, dy = scaling_state(fp8), torch.randn(4, 16), torch.randn(4, 8)

    def recorded() -> list[float]:
        found: list[float] = state.amax[: state.delayed].tolist()
        state.update()
        return found

    step(fp8, x, dy), step(fp8, 3 * x, 0.5 * dy)
    assert state.amax[2] == fp8.weight.detach().abs().max()
    assert recorded() == [3 * x.abs().max(), dy.abs().max()]
    scale, trained = state.scale.clone(), fp8(x)
    state.discard()
    with torch.no_grad():
        assert torch.equal(fp8(x), trained)
    assert recorded() == [0, 0]
    fp8.eval()
    with torch.inference_mode():
        # by its own values, not by the history of larger ones
        assert torch.equal(fp8(x), fresh.eval()(x))
    assert recorded() == [0, 0]
    step(fp8, x, dy)  # a backward records exactly when its forward did
    assert recorded() == [0, 0]
    assert torch.equal(state.scale, scale)
    fp8.train()
    y = fp8(x)
    fp8.eval()
    y.backward(dy)
    assert recorded() == [x.abs().max(), dy.abs().max()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_input_dtypes_that_cannot_work_are_named(dtype: torch.dtype) -> None:
    model = convert(nn.Sequential(nn.Linear(16, 8)), min_features=0)
    with pytest.raises(TypeError, match=rf"Fp8Linear '0': the input must be float32.* got {dtype}"):
        model(torch.ones(2, 16).to(dtype))


INPUT = r"Fp8Linear '0': the last dimension of the input must be 16,"
WEIGHT = r"Fp8Linear '0': the weight must have two dimensions"
BIAS = r"bias of '0' must have the shape \(8,\)"


@pytest.mark.parametrize(
    ("which", "shape", "message"),
    [
        *(("input", shape, INPUT) for shape in [(2, 15), ()]),
        *(("weight", shape, WEIGHT) for shape in [(16,), (2, 8, 16), (2, 16, 16), (8, 0)]),
        # a kernel would read past their ends
        *(("bias", shape, BIAS) for shape in [(7,), (9,), (1, 8)]),
    ],
)
def test_shapes_that_cannot_work_are_named(which: str, shape: tuple[int, ...], message: str) -> None:
    model = convert(nn.Sequential(nn.Linear(16, 8)), min_features=0)
    if which != "input":
        setattr(model[0], which, nn.Parameter(torch.ones(shape)))
    with pytest.raises(ValueError, match=rf"{message}.*{re.escape(str(shape))}"):
        model(torch.ones(shape if which == "input" else (3, shape[-1] if which == "weight" else 16)))


def test_a_weight_of_another_shape_decides_as_in_a_plain_layer() -> None:
    plain, fp8 = pair(16, 8)
    fp8(torch.randn(4, 16)).sum().backward()
    for layer in (plain, fp8):
        torch.manual_seed(5)
        layer.weight, layer.bias = nn.Parameter(torch.randn(12, 24) / 4), nn.Parameter(torch.randn(12))
    x, dy = torch.randn(2, 5, 24), torch.randn(2, 5, 12)
    assert_near(step(fp8, x, dy), step(plain, x, dy), 18)
    with pytest.raises(ValueError, match=r"the input must be 24, .* got the shape \(4, 16\)"):
        fp8(torch.randn(4, 16))


def test_unconverted_between_forward_and_backward() -> None:
    model = convert(nn.Sequential(nn.Linear(16, 8)), min_features=0)
    y = model(torch.randn(4, 16))
    unconvert(model)
    y.sum().backward()
    assert model[0].weight.grad.isfinite().all()


def test_moves_and_casts_of_the_model_keep_the_state_in_fp32() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 8))
    convert(model, min_features=0).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    state = scaling_state(model)
    model(torch.randn(4, 16)).sum().backward()
    state.update()
    scale = state.scale.clone()
    model.to(torch.bfloat16)
    assert scaling_state(model) is state
    assert state.scale.dtype == torch.float32
    assert torch.equal(state.scale, scale)
    assert model(torch.randn(4, 16, dtype=torch.bfloat16)).isfinite().all()


@pytest.mark.parametrize("shape", [(4, 16), (2, 3, 16)])
def test_outputs_may_be_changed_in_place(shape: tuple[int, ...]) -> None:
    # as Falcon adds its residual
    model, x = convert(nn.Sequential(nn.Linear(16, 16))), torch.randn(shape)
    expected = model(x) + x
    y = model(x)
    y += x
    assert torch.equal(y, expected)
    gradients = [torch.autograd.grad(one.square().sum(), list(model.parameters())) for one in (y, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("frozen_weights", ["master", "fp8"])
def test_a_weight_on_another_device_than_the_scales_is_refused(frozen_weights: str) -> None:
    layers = nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 16)
    model = convert(nn.Sequential(*layers), min_features=0, frozen_weights=frozen_weights)
    scaling_state(model).to("meta")
    with pytest.raises(RuntimeError, match=r"'0': the weight is on cpu, and the scales of the model are on meta"):
        model(torch.ones(4, 16))
