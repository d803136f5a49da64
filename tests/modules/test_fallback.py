"""Layers that fall back from FP8: what they compute, what they keep, and what a checkpoint stores."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moved import to_bf16
from pairwise import pairwise
from small_models import small_mlp
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_fp8 import Fp8Precision, convert, describe, scaling_state
from lightning_fp8.conversion import fall_back
from lightning_fp8.plugins import Bf16MixedPrecision


def step(model: nn.Module, x: Tensor, run: Callable[..., Any] | None = None) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of one training step under bf16 autocast."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = (run or model)(x)
    y.float().square().mean().backward()
    return y.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def pair(factory: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    model = factory()
    return convert(copy.deepcopy(model)), model


@pytest.mark.parametrize("make", [lambda: nn.Linear(24, 40), lambda: Conv1D(40, 24)])
def test_a_layer_gives_the_numbers_of_a_plain_one(make: Callable[[], nn.Module]) -> None:
    model, plain = pair(make)
    fall_back(model, "")
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(5, 24, dtype=dtype)
        assert torch.allclose(model(x), copy.deepcopy(plain).to(dtype)(x), atol=1e-6)
    x = torch.randn(3, 5, 24)
    (y, gradients), (expected, expected_gradients) = step(model, x), step(plain, x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)
    assert all(map(torch.equal, gradients, expected_gradients))
    # nothing is recorded, and no scale changes
    state = scaling_state(model)
    assert state.amax.eq(0).all()
    state.update()
    assert state.scale.eq(1).all()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_only_the_layer_that_fell_back_leaves_fp8(backend: str | None) -> None:
    model = convert(small_mlp())
    reference = small_mlp()
    reference.load_state_dict(model.state_dict())
    convert(reference, ignore_modules=("2",))
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(16, 32)
    step(model, x, run)
    scaling_state(model).update()
    fall_back(model, "2")
    assert scaling_state(model).fallbacks == ("2",)
    # the same history for the layer that stays in FP8
    fresh, other = scaling_state(model), scaling_state(reference)
    other.load_state_dict({name: entry for name, entry in fresh.state_dict().items() if name.startswith("0.")})
    for _ in range(2):
        (y, gradients), (expected, expected_gradients) = step(model, x, run), step(reference, x)
        assert torch.equal(y, expected)
        assert all(map(torch.equal, gradients, expected_gradients))
        # input, gradient and weight of each layer
        stays, left = [0, 2, 4], [1, 3, 5]
        before = fresh.scale[left].clone()
        fresh.update(), other.update()
        assert torch.equal(fresh.scale[stays], other.scale)
        assert torch.equal(fresh.scale[left], before)


@pytest.mark.parametrize("kdim", [None, 24])
def test_an_attentions_projections_fall_back_one_by_one(kdim: int | None) -> None:
    model, plain = pair(lambda: nn.MultiheadAttention(32, 4, batch_first=True, kdim=kdim))
    state = scaling_state(model)
    x, key = torch.randn(2, 6, 32), torch.randn(2, 6, kdim or 32)

    def run(attention: nn.Module) -> Tensor:
        return attention(x, key, torch.flip(x, (0,)), need_weights=False)[0]

    def error() -> float:
        return (run(model) - run(plain)).norm().item() / run(plain).norm().item()

    everything, names = error(), list(state.module_names)
    assert names == (["in_proj", "out_proj"] if kdim is None else ["q_proj", "k_proj", "v_proj", "out_proj"])
    to_bf16(state, "out_proj")
    without_output = error()
    assert 0 < without_output < everything
    for name in names:
        to_bf16(state, name)
    assert error() < 1e-6
    assert [row.converted for row in describe(model)] == [False, False]


def test_copies_keep_it_each_for_itself() -> None:
    model = convert(small_mlp())
    fall_back(model, "0")
    copied = copy.deepcopy(model)
    fall_back(copied, "2")
    assert scaling_state(model).fallbacks == ("0",)
    assert scaling_state(copied).fallbacks == ("0", "2")
    assert not copied[2].in_fp8
    assert model[2].in_fp8


def test_describe_and_unknown_names() -> None:
    model = convert(small_mlp())
    with pytest.raises(ValueError, match=r"no converted module '1'.*'0', '2'"):
        fall_back(model, "1")
    with pytest.raises(ValueError, match=r"Did you mean 'block\.up'\?"):
        fall_back(convert(nn.ModuleDict({"block": nn.ModuleDict({"up": nn.Linear(16, 16)})})), "block.upp")
    fall_back(model, "0")
    first, second = describe(model)
    assert (first.converted, second.converted) == (False, True)
    said = ["converted, 32 -> 64", "fell back to bf16: 0", "feed-forward not fused: a layer fell back"]
    assert first.reason.split("; ") == [*said, "`convert(unconvert(model))` undoes that"]


def test_a_weight_that_fell_back_is_not_cast_with_the_others(cuda_half: Counter[str]) -> None:
    model = convert(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))))
    x = torch.randn(32, 32)
    state = scaling_state(model)
    for _ in range(3):
        step(model, x)
        state.update()
    to_bf16(state, "1")
    # inputs, then gradients, then weights of the three layers
    left, amax_of_weight = [1, 4, 7], state.amax[7].clone()
    scales = state.scale[left].clone()
    for _ in range(2):
        torch.optim.SGD(model.parameters(), lr=10.0).step()
        step(model, x)
        assert state.amax[[1, 4]].eq(0).all()
        assert state.amax[[0, 2, 3, 5, 6, 8]].gt(0).all()
        state.update()
    assert torch.equal(state.scale[left], scales)
    # the amax at its last cast
    assert state.amax[7] == amax_of_weight != model[1].weight.detach().abs().max()
    assert model[1].fp8[""].weight_cast._cast is None


def gradients_in_bf16_mixed(
    model: nn.Module, plugin: Any, training: bool, *inputs: Tensor, **options: Any
) -> list[Tensor | None]:
    """What a forward returns under a plugin, and in training all gradients."""
    model.train(training)
    torch.manual_seed(5)
    with torch.set_grad_enabled(training), plugin.forward_context():
        outputs = model(*inputs, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if training:
        outputs[0].float().square().mean().backward()
    return [*outputs, *(parameter.grad for parameter in model.parameters())]


def assert_same_bits(one: list[Tensor | None], other: list[Tensor | None]) -> None:
    assert len(one) == len(other)
    for mine, its in zip(one, other, strict=True):
        assert (mine is None) == (its is None)
        assert mine is None or its is None or (mine.dtype == its.dtype and torch.equal(mine, its))


def fallen(model: nn.Module) -> nn.Module:
    """All layers fall back."""
    for name in scaling_state(model).module_names:
        fall_back(model, name)
    return model


def assert_same_in_bf16_mixed(plain: nn.Module, *inputs: Tensor, **options: Any) -> None:
    """A copy whose layers have all fallen back gives the bits of the plain model, in training and evaluation."""
    plugins = Bf16MixedPrecision(), Fp8Precision()
    model = fallen(plugins[1].convert_module(copy.deepcopy(plain)))
    plugins[0].convert_module(plain)
    for training in (True, False):
        expected = gradients_in_bf16_mixed(plain, plugins[0], training, *inputs, **options)
        assert_same_bits(gradients_in_bf16_mixed(model, plugins[1], training, *inputs, **options), expected)


MASKS: dict[str, dict[str, Tensor]] = {
    "none": {},
    "bool": {"attn_mask": torch.ones(9, 9, dtype=torch.bool).triu(1)},
    "float": {"attn_mask": torch.linspace(-2, 2, 81).view(9, 9), "key_padding_mask": torch.arange(27.0).view(3, 9)},
    "padding": {"key_padding_mask": torch.arange(9).expand(3, 9) > 5},
}


@pytest.mark.parametrize(
    ("kind", "need_weights", "options"),
    pairwise([*MASKS], [True, False], [{}, {"batch_first": True, "dropout": 0.2}, {"batch_first": True, "kdim": 24}]),
)
def test_an_attention_gives_the_bits_of_a_plain_one(kind: str, need_weights: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(32, 4, **options)
    order = (3, 9) if plain.batch_first else (9, 3)
    query, key = torch.randn(*order, 32), torch.randn(*order, options.get("kdim", 32))
    inputs = (query, key, torch.randn(*order, 32)) if "kdim" in options else (query, query, query)
    assert_same_in_bf16_mixed(plain, *inputs, need_weights=need_weights, **MASKS[kind])


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_layer_gives_the_bits_of_a_plain_one(norm_first: bool) -> None:
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1, norm_first=norm_first)
    assert_same_in_bf16_mixed(plain, torch.randn(3, 9, 32), src_mask=torch.randn(9, 9) if norm_first else None)


@pytest.mark.parametrize(("fused", "dtype"), [(True, torch.bfloat16), (True, torch.float32), (False, torch.float32)])
def test_an_attention_takes_torchs_fast_path_where_a_plain_one_does(fused: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(32, 4, batch_first=True).to(dtype).eval()
    model = fallen(convert(copy.deepcopy(plain)))
    x, before = torch.randn(3, 9, 32, dtype=dtype), torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fused)
    try:
        with torch.no_grad():
            assert_same_bits(list(model(x, x, x)), list(plain(x, x, x)))
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def test_what_the_user_calls_in_an_attention_that_fell_back_is_called() -> None:
    model, calls = fallen(convert(nn.MultiheadAttention(32, 4, batch_first=True))), []
    before, x = model.out_proj.forward, torch.randn(2, 5, 32)
    model.out_proj.forward = lambda y: calls.append(y) or 2 * before(y)
    doubled = model(x, x, x)[0]
    del model.out_proj.forward
    torch.testing.assert_close(doubled, 2 * model(x, x, x)[0])
    assert len(calls) == 1
