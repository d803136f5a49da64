"""Evaluation equals training with dropout off, for every transformer module of torch, in every mode and precision."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from lit import Regression, loader, make_trainer
from pairwise import pairwise
from torch import Tensor, nn

from lightning_fp8.modules import attention, feed_forward, linear
from lightning_fp8.plugins import Bf16MixedPrecision
from lightning_fp8.plugins.core import PrecisionCore
from lightning_fp8.plugins.trainer import PLUGINS

WIDTH, HEADS, BATCH, LENGTH, SOURCE = 16, 2, 2, 5, 4
GRAD_MODES: tuple[Callable[[], Any], ...] = (torch.enable_grad, torch.no_grad, torch.inference_mode)
pytestmark = [
    # thousands of operations on tensors of a few bytes
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*(mismatched|enable_nested_tensor|nested tensors).*"),
]


def squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x) ** 2


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the FP8 layers that ran, in order."""
    calls: list[str] = []
    original = linear.fp8_linear

    def counting(rows: Any, *args: Any) -> Tensor:
        calls.append(rows.name)
        return original(rows, *args)

    monkeypatch.setattr(linear, "fp8_linear", counting)
    monkeypatch.setattr(attention, "fp8_linear", counting)
    fused = feed_forward.fp8_feed_forward

    def counting_both(first: Any, activation: str, second: Any, x: Tensor) -> Tensor:
        calls.extend(layer.fp8[""].name for layer in (first, second))
        return fused(first, activation, second, x)

    monkeypatch.setattr(feed_forward, "fp8_feed_forward", counting_both)
    return calls


def prepared(plugin: PrecisionCore, make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    with plugin.module_init_context():
        return plugin.convert_module(make())


def causal(kind: str, length: int = LENGTH) -> Tensor | None:
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    return {"none": None, "bool": mask, "float": torch.zeros(length, length).masked_fill(mask, float("-inf"))}[kind]


def padding(kind: str, length: int = LENGTH) -> Tensor | None:
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, length - 2 :] = True
    return {"none": None, "bool": mask, "float": torch.zeros(BATCH, length).masked_fill(mask, float("-inf"))}[kind]


def agree(
    plugin: PrecisionCore, model: nn.Module, call: Callable[[], Any], gemms: list[str], expected_gemms: int
) -> None:
    """All six ways to call the model give the same results, in one dtype, by the same FP8 GEMMs; in FP8 evaluation has
    scales of its own, so it differs from training as casts do."""
    outputs: list[Tensor] = []
    for training, mode in itertools.product((True, False), GRAD_MODES):
        model.train(training)
        gemms.clear()
        with plugin.forward_context(), mode():
            output = call()
            # attention also returns its weights
            outputs.extend(part for part in (output if isinstance(output, tuple) else [output]) if part is not None)
        assert len(gemms) == expected_gemms
    assert torch.backends.mha.get_fastpath_enabled()
    kinds = len(outputs) // 6
    for kind in range(kinds):
        first = outputs[kind].detach()
        assert first.isfinite().all()
        for number, output in enumerate(outputs[kind::kinds]):
            assert output.dtype == first.dtype
            if expected_gemms and number == len(GRAD_MODES):
                assert (output - first).float().norm() < 0.08 * first.float().norm()
                first = output.detach()
            # the same path for all; the fused attention kernels for training and inference may round differently
            torch.testing.assert_close(output.clone(), first, rtol=2**-7, atol=2**-7)


def inputs(batch_first: bool, length: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(BATCH, length, WIDTH, generator=torch.Generator().manual_seed(length)).to(dtype)
    return x if batch_first else x.transpose(0, 1)


DTYPES = (torch.float32, torch.bfloat16)
BOTH = (True, False)
MASKS = ("none", "bool", "float")
# with the caller's `is_causal` argument
HINTED_MASKS = (("none", None), *itertools.product(("bool", "float"), (None, False, True)))
KINDS = ("relu", "gelu", squared_relu)
# FP8 recipes share the classes of layers
WITHOUT_RECIPES = ("fp8-delayed", "bf16-mixed", "bf16-true")


@pytest.mark.parametrize("precision", WITHOUT_RECIPES)
def test_encoder(precision: Any, gemms: list[str]) -> None:
    count = 4 if precision.startswith("fp8-") else 0
    # each pair of the options of a layer and of its call
    combinations = pairwise(KINDS, BOTH, BOTH, BOTH, BOTH, DTYPES, HINTED_MASKS, MASKS)
    for activation, norm_first, batch_first, bias, nested, dtype, (mask, hint), pad in combinations:
        plugin = PLUGINS[precision]()
        sizes = (WIDTH, HEADS, 24, 0.0, activation)
        options = {"batch_first": batch_first, "norm_first": norm_first, "bias": bias}
        layer = partial(nn.TransformerEncoderLayer, *sizes, **options)
        encoder = prepared(plugin, lambda: nn.TransformerEncoder(layer(), 1, enable_nested_tensor=nested))  # noqa: B023
        x, src_mask, kpm = inputs(batch_first, LENGTH, dtype), causal(mask), padding(pad)
        agree(plugin, encoder, partial(encoder, x, src_mask, kpm, is_causal=hint), gemms, count)
        if nested:
            one = encoder.layers[0]
            agree(plugin, one, partial(one, x, src_mask, kpm, is_causal=bool(hint)), gemms, count)


@pytest.mark.parametrize("precision", WITHOUT_RECIPES)
def test_decoder(precision: Any, gemms: list[str]) -> None:
    # self-attention: in and out; cross-attention: query, key with value, out; then two linear layers
    count = 7 if precision.startswith("fp8-") else 0
    combinations = pairwise(KINDS, BOTH, BOTH, BOTH, DTYPES, HINTED_MASKS, MASKS)
    for activation, norm_first, batch_first, bias, dtype, (mask, hint), pad in combinations:
        plugin = PLUGINS[precision]()
        sizes = (WIDTH, HEADS, 24, 0.0, activation)
        options = {"batch_first": batch_first, "norm_first": norm_first, "bias": bias}
        layer = partial(nn.TransformerDecoderLayer, *sizes, **options)
        decoder = prepared(plugin, lambda: nn.TransformerDecoder(layer(), 1))  # noqa: B023
        x, memory = inputs(batch_first, LENGTH, dtype), inputs(batch_first, SOURCE, dtype)
        masks = (causal(mask), None, padding(pad), padding(pad, SOURCE))
        agree(plugin, decoder, partial(decoder, x, memory, *masks, tgt_is_causal=hint), gemms, count)
        if batch_first:
            one = decoder.layers[0]
            agree(plugin, one, partial(one, x, memory, *masks, tgt_is_causal=bool(hint)), gemms, count)


@pytest.mark.parametrize("precision", WITHOUT_RECIPES)
def test_attention(precision: Any, gemms: list[str]) -> None:
    combinations = pairwise(BOTH, BOTH, BOTH, BOTH, DTYPES, HINTED_MASKS, MASKS)
    for need_weights, batch_first, bias, extra, dtype, (mask, hint), pad in combinations:
        plugin = PLUGINS[precision]()
        options = {"add_bias_kv": extra, "add_zero_attn": extra, "batch_first": batch_first}
        model = prepared(plugin, partial(nn.MultiheadAttention, WIDTH, HEADS, 0.0, bias, **options))
        x = inputs(batch_first, LENGTH, dtype)
        call = partial(model, x, x, x, padding(pad), need_weights, causal(mask), is_causal=bool(hint))
        agree(plugin, model, call, gemms, 2 if precision.startswith("fp8-") else 0)


def encoder_inputs() -> tuple[nn.Module, Tensor, Tensor | None]:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1).eval(), inputs(True, LENGTH, torch.float32), padding("bool")


@pytest.fixture(params=[True, False])
def fast_path(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(request.param)
    yield request.param
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("precision", WITHOUT_RECIPES)
def test_switches_come_back_after_an_exception_and_out_of_nesting(precision: Any, fast_path: bool) -> None:
    def state() -> tuple[Any, ...]:
        key = torch._C.DispatchKey.AutocastIPU
        return (
            torch.backends.mha.get_fastpath_enabled(),
            torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"),
            torch._C._dispatch_tls_is_dispatch_key_included(key),
            torch._C._dispatch_tls_is_dispatch_key_excluded(key),
        )

    def enter_and_fail() -> None:
        with PLUGINS[precision]().forward_context():
            inside = state()
            with Bf16MixedPrecision().forward_context():
                assert not torch.backends.mha.get_fastpath_enabled()
            assert state() == inside
            raise KeyError

    before = state()
    with pytest.raises(KeyError):
        enter_and_fail()
    assert state() == before


class Evaluating(Regression):
    def on_train_epoch_end(self) -> None:
        encoder, x, mask = encoder_inputs()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            encoder(x, src_key_padding_mask=mask)
        assert self.current_epoch == 0


@pytest.mark.parametrize("precision", WITHOUT_RECIPES)
def test_hooks_evaluate_encoders_under_an_autocast_of_their_own(precision: Any, tmp_path: Any, fast_path: bool) -> None:
    make_trainer(tmp_path, precision=precision).fit(Evaluating(), loader())
    assert torch.backends.mha.get_fastpath_enabled() == fast_path
    with pytest.raises(AssertionError):
        make_trainer(tmp_path, precision=precision, max_epochs=2).fit(Evaluating(), loader())
    assert torch.backends.mha.get_fastpath_enabled() == fast_path


@pytest.mark.parametrize("precision", WITHOUT_RECIPES)
def test_outside_the_context_a_prepared_model_is_torchs_own(precision: Any) -> None:
    encoder, x, mask = encoder_inputs()
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    encoder.to(dtype)
    with torch.no_grad():
        expected = encoder(x.to(dtype), src_key_padding_mask=mask)
        prepared = PLUGINS[precision]().convert_module(encoder)
        actual = prepared(x.to(dtype), src_key_padding_mask=mask)
    if precision.startswith("fp8-"):
        # at padded positions, torch's fast path gives zeros, and the layers' own forward the computed values
        assert expected[0, -1].abs().max() == 0
        assert actual[0, -1].abs().max() > 0
    else:
        assert torch.equal(actual, expected)
