from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from sqnr import sqnr
from torch import nn

from lightning_fp8 import DelayedScaling, convert, scaling_state, unconvert
from lightning_fp8.modules import Fp8Linear


def pair(inputs: int, outputs: int, bias: bool = True) -> tuple[nn.Linear, Fp8Linear]:
    plain = nn.Linear(inputs, outputs, bias=bias)
    return plain, convert(copy.deepcopy(plain), min_features=0)  # type: ignore[return-value]


@pytest.mark.parametrize("shape", [(24,), (5, 24), (2, 3, 24), (2, 1, 3, 24), (2, 2, 2, 2, 24), (0, 24), (3, 0, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_inputs_of_one_to_five_dimensions_and_empty_ones(shape: tuple[int, ...], bias: bool) -> None:
    plain, fp8 = pair(24, 10, bias)
    x = torch.randn(shape)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected, actual = plain(inputs[0]), fp8(inputs[1])
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    dy = torch.randn_like(expected)
    expected.backward(dy)
    actual.backward(dy)
    gradients = [(inputs[0].grad, inputs[1].grad), (plain.weight.grad, fp8.weight.grad)]
    gradients += [(plain.bias.grad, fp8.bias.grad)] if bias else []
    for theirs, ours in gradients:
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
    if x.numel():
        assert sqnr(actual, expected) > 20
        assert min(sqnr(ours, theirs) for theirs, ours in gradients) > 18
        if bias:
            torch.testing.assert_close(fp8.bias.grad, plain.bias.grad)


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(), DelayedScaling(fp8_format="E4M3", amax_history_len=4), DelayedScaling(margin=3)]
)
def test_delayed_scales_keep_the_accuracy(recipe: DelayedScaling) -> None:
    plain = nn.Linear(128, 64)
    fp8 = convert(copy.deepcopy(plain), recipe)
    state = scaling_state(fp8)
    for _ in range(4):
        plain.zero_grad()
        fp8.zero_grad()
        x = torch.randn(256, 128)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        dy = torch.randn(256, 64) * 1e-3
        expected, actual = plain(inputs[0]), fp8(inputs[1])
        expected.backward(dy)
        actual.backward(dy)
        state.update()
        assert sqnr(actual, expected) > 27
        assert sqnr(inputs[1].grad, inputs[0].grad) > 23
        assert sqnr(fp8.weight.grad, plain.weight.grad) > 23
    assert (state.amax_history > 0).sum(0).tolist() == [min(4, recipe.amax_history_len)] * 2


@pytest.mark.parametrize("sizes", [(1, 1), (3, 5), (17, 33), (130, 31)])
def test_sizes_that_are_no_multiples_of_16(sizes: tuple[int, int]) -> None:
    plain, fp8 = pair(*sizes)
    x = torch.randn(19, sizes[0])
    assert sqnr(fp8(x), plain(x)) > 20


def test_non_contiguous_input() -> None:
    _, fp8 = pair(12, 8)
    x = torch.randn(12, 7, 5).permute(2, 1, 0)
    assert not x.is_contiguous()
    assert torch.equal(fp8(x), fp8(x.contiguous()))


@pytest.mark.parametrize(
    ("x_dtype", "autocast", "out"),
    [
        (torch.float32, None, torch.float32),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float16, None, torch.float16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_output_and_gradient_dtypes(x_dtype: torch.dtype, autocast: torch.dtype | None, out: torch.dtype) -> None:
    _, fp8 = pair(16, 8)
    x = torch.randn(4, 16, dtype=x_dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        y = fp8(x)
    assert y.dtype == out
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == x_dtype
    assert fp8.weight.grad.dtype == fp8.bias.grad.dtype == torch.float32


def test_autocast_changes_the_output_dtype_and_nothing_else() -> None:
    _, fp8 = pair(64, 32)
    x = torch.randn(16, 64)
    fp32 = fp8(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bf16 = fp8(x)
        bf16.sum().backward()
    torch.testing.assert_close(bf16, fp32.bfloat16(), rtol=2**-7, atol=1e-3)
    under_autocast = fp8.weight.grad.clone()
    fp8.weight.grad = None
    fp8(x).sum().backward()
    assert torch.equal(under_autocast, fp8.weight.grad)


def test_backward_keeps_one_byte_per_input_element() -> None:
    _, fp8 = pair(256, 64)
    saved: list[torch.Tensor] = []
    x = torch.randn(512, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fp8(x)
    large = [t for t in saved if t.numel() > 1]
    assert sorted(t.numel() for t in large) == [256 * 64, 512 * 256]
    assert {t.dtype for t in large} == {torch.uint8}


@pytest.mark.parametrize("frozen", ["weight", "input", "both"])
def test_frozen_weight_or_input(frozen: str) -> None:
    _, fp8 = pair(16, 8)
    fp8.weight.requires_grad_(frozen == "input")
    x = torch.randn(4, 16, requires_grad=frozen == "weight")
    fp8(x).sum().backward()
    assert (x.grad is None) == (frozen != "weight")
    assert (fp8.weight.grad is None) == (frozen != "input")
    torch.testing.assert_close(fp8.bias.grad, torch.full((8,), 4.0))
    assert (scaling_state(fp8).amax > 0).all()


def test_recording_needs_training_mode_and_gradients() -> None:
    _, fp8 = pair(16, 8)
    state, x = scaling_state(fp8), torch.randn(4, 16, requires_grad=True)

    def recorded() -> list[bool]:
        found = (state.amax[: state.delayed] > 0).tolist()
        state.update()
        return found

    fp8(x).sum().backward()
    assert recorded() == [True, True]
    scale = state.scale.clone()
    with torch.no_grad():
        fp8(x)
    assert recorded() == [False, False]
    fp8.eval()
    fp8(x).sum().backward()  # a backward records exactly when its forward did
    assert recorded() == [False, False]
    with torch.inference_mode():
        fp8(x)
    assert recorded() == [False, False]
    assert torch.equal(state.scale, scale)
    fp8.train()
    y = fp8(x)
    fp8.eval()
    y.sum().backward()
    assert recorded() == [True, True]


def test_recorded_amaxes_are_those_of_the_tensors() -> None:
    _, fp8 = pair(16, 8)
    x, dy = torch.randn(4, 16), torch.randn(4, 8)
    fp8(x).backward(dy)
    fp8(3 * x).backward(0.5 * dy)
    expected = torch.stack([3 * x.abs().max(), dy.abs().max(), fp8.weight.detach().abs().max()])
    assert torch.equal(scaling_state(fp8).amax, expected)


def test_evaluation_in_eval_mode_uses_the_training_scales() -> None:
    _, fp8 = pair(16, 8)
    x = torch.randn(4, 16)
    fp8(x).sum().backward()
    scaling_state(fp8).update()
    trained = fp8(x)
    fp8.eval()
    with torch.no_grad():
        assert torch.equal(fp8(x), trained)


def test_an_inf_batch_leaves_scales_alone_and_training_goes_on() -> None:
    _, fp8 = pair(16, 8)
    state, x = scaling_state(fp8), torch.randn(4, 16)
    fp8(x).sum().backward()
    state.update()
    scale = state.scale.clone()
    broken = x.clone()
    broken[0, 0] = float("nan")
    fp8(broken).sum().backward()
    state.update()
    assert state.scale[0] == scale[0]
    assert state.nonfinite_steps.tolist() == [1, 0, 0]
    fp8(x).sum().backward()
    state.update()
    assert state.scale.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64])
def test_input_dtypes_that_cannot_work_are_named(dtype: torch.dtype) -> None:
    model = convert(nn.Sequential(nn.Linear(16, 8)), min_features=0)
    with pytest.raises(TypeError, match=rf"Fp8Linear '0': the input must be float32.* got {dtype}"):
        model(torch.ones(2, 16).to(dtype))


@pytest.mark.parametrize("shape", [(2, 15), (32, 1), ()])
def test_input_shapes_that_cannot_work_are_named(shape: tuple[int, ...]) -> None:
    model = convert(nn.Sequential(nn.Linear(16, 8)), min_features=0)
    with pytest.raises(ValueError, match=r"Fp8Linear '0': the last dimension of the input must be 16,") as error:
        model(torch.ones(shape))
    assert str(shape) in str(error.value)


def replace_weight(layer: nn.Linear, *shape: int) -> None:
    torch.manual_seed(5)
    layer.weight = nn.Parameter(torch.randn(shape) / 4)
    layer.bias = nn.Parameter(torch.randn(shape[0]))


def test_a_weight_of_another_shape_decides_as_in_a_plain_layer() -> None:
    plain, fp8 = pair(16, 8)
    fp8(torch.randn(4, 16)).sum().backward()
    for layer in (plain, fp8):
        replace_weight(layer, 12, 24)
    x = torch.randn(2, 5, 24)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected, actual = plain(inputs[0]), fp8(inputs[1])
    assert actual.shape == (2, 5, 12)
    dy = torch.randn_like(expected)
    expected.backward(dy)
    actual.backward(dy)
    assert sqnr(actual, expected) > 20
    assert sqnr(inputs[1].grad, inputs[0].grad) > 18
    assert sqnr(fp8.weight.grad, plain.weight.grad) > 18
    torch.testing.assert_close(fp8.bias.grad, plain.bias.grad)
    with pytest.raises(ValueError, match=r"the input must be 24, .* got the shape \(4, 16\)"):
        fp8(torch.randn(4, 16))


@pytest.mark.parametrize("shape", [(16,), (2, 8, 16), (8, 0)])
def test_weights_that_cannot_work_are_named(shape: tuple[int, ...]) -> None:
    model = convert(nn.Sequential(nn.Linear(16, 8, bias=False)), min_features=0)
    model[0].weight = nn.Parameter(torch.ones(shape))
    with pytest.raises(ValueError, match=rf"Fp8Linear '0': the weight must have two .* {re.escape(str(shape))}"):
        model(torch.ones(3, shape[-1]))


@pytest.mark.parametrize("shape", [(7,), (9,), (1,), (), (1, 8)])
def test_a_bias_that_a_kernel_would_read_past_is_named(shape: tuple[int, ...]) -> None:
    model = convert(nn.Sequential(nn.Linear(16, 8)), min_features=0)
    model[0].bias = nn.Parameter(torch.ones(shape))
    with pytest.raises(ValueError, match=rf"bias of '0' must have the shape \(8,\).* got {re.escape(str(shape))}"):
        model(torch.ones(3, 16))


def test_unconverted_between_forward_and_backward() -> None:
    model = convert(nn.Sequential(nn.Linear(16, 8)), min_features=0)
    y = model(torch.randn(4, 16))
    unconvert(model)
    y.sum().backward()
    assert model[0].weight.grad.isfinite().all()


def test_double_backward_is_refused() -> None:
    _, fp8 = pair(16, 8)
    x = torch.randn(4, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(fp8(x).sum(), x, create_graph=True)


def test_copies_and_pickles_have_a_state_of_their_own() -> None:
    model = convert(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)), min_features=0)
    x = torch.randn(4, 16)
    model(x).sum().backward()
    scaling_state(model).update()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        mine, theirs = scaling_state(model), scaling_state(other)
        assert theirs is not mine
        assert torch.equal(theirs.scale, mine.scale)
        assert torch.equal(other(x), model(x))
        theirs.amax.fill_(100.0)
        theirs.update()
        assert not torch.equal(theirs.scale, mine.scale)


def test_moves_and_casts_of_the_model_keep_the_state_in_fp32() -> None:
    model = convert(nn.Sequential(nn.Linear(16, 8)), min_features=0)
    state = scaling_state(model)
    model(torch.randn(4, 16)).sum().backward()
    state.update()
    scale = state.scale.clone()
    model.to(torch.bfloat16)
    assert scaling_state(model) is state
    assert state.scale.dtype == torch.float32
    assert torch.equal(state.scale, scale)
    assert model(torch.randn(4, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_meta_device_and_materialisation() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 8))
    convert(model, min_features=0).to_empty(device="cpu")
    nn.init.normal_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    assert model(torch.randn(4, 16)).isfinite().all()


def test_repr_shows_the_recipe() -> None:
    assert "fp8=DelayedScaling(margin=2" in repr(convert(nn.Linear(16, 16), DelayedScaling(margin=2)))
