"""An LSTM under autocast on a CPU whose oneDNN has no bf16 LSTM runs in fp32, with one warning."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_fp8.dtypes import storage as dtypes
from lightning_fp8.plugins.core import PrecisionCore
from lightning_fp8.plugins.trainer import PLUGINS
from lightning_fp8.runtime.warn_once import warn_once

AUTOCASTING = ("fp8-delayed", "bf16-mixed")

pytestmark = pytest.mark.filterwarnings("ignore:The LSTM layers", "ignore:LSTM with projections")


@pytest.fixture
def without_bf16_lstm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "_autocast_lstm_fails_on_cpu", lambda: True)
    warn_once.cache_clear()


def two_lstms() -> nn.ModuleDict:
    recurrent = nn.Sequential(nn.LSTM(16, 8, num_layers=2, bidirectional=True))
    return nn.ModuleDict({"first": nn.LSTM(16, 8), "recurrent": recurrent, "head": nn.Linear(16, 16)})


def converted(model: nn.Module, precision: Any, **settings: Any) -> tuple[Any, PrecisionCore]:
    plugin = PLUGINS[precision](**settings)
    return plugin.convert_module(model), plugin


def runs_in_fp32(layer: nn.Module) -> bool:
    return "forward" in vars(layer)


@pytest.mark.parametrize("lstm", [nn.LSTM(16, 16), nn.LSTM(16, 8, 2, bidirectional=True, batch_first=True)])
def test_the_probe_agrees_with_torch(lstm: nn.LSTM) -> None:
    """On every CPU, training a larger LSTM raises exactly where the probe says so."""
    raised = False
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            lstm(torch.randn(3, 2, 16))[0].float().sum().backward()
    except RuntimeError as error:
        raised = "LSTM" in str(error)
    dtypes._autocast_lstm_fails_on_cpu.cache_clear()
    random_state = torch.get_rng_state()
    with torch.device("meta"):
        assert dtypes._autocast_lstm_fails_on_cpu() == raised
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.usefixtures("without_bf16_lstm")
@pytest.mark.parametrize("precision", AUTOCASTING)
def test_numbers_of_fp32(precision: Any) -> None:
    """Outputs and gradients equal those of torch's LSTM without autocast bit for bit."""
    plain = two_lstms()
    model, plugin = converted(copy.deepcopy(plain), precision)
    for path in ("first", "recurrent.0"):
        layer, expected = model.get_submodule(path), plain.get_submodule(path)
        x = torch.randn(5, 3, 16)
        with plugin.forward_context():
            y, (h, c) = layer(x)
            again, _ = layer(x.bfloat16(), (h.bfloat16(), c))
        assert {t.dtype for t in (y, h, c)} == {torch.float32}
        expected_y, (expected_h, expected_c) = expected(x)
        assert all(map(torch.equal, (y, h, c), (expected_y, expected_h, expected_c)))
        # the output has the input's dtype
        in_fp32, _ = expected(x.bfloat16().float(), (expected_h.bfloat16().float(), expected_c))
        assert torch.equal(again, in_fp32.bfloat16())
        y.square().sum().backward()
        expected_y.square().sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(layer.parameters(), expected.parameters()))


@pytest.mark.usefixtures("without_bf16_lstm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_sequences(dtype: torch.dtype) -> None:
    plain = nn.LSTM(16, 8)
    model, plugin = converted(nn.ModuleDict({"lstm": copy.deepcopy(plain)}), "bf16-mixed")
    sequences = [torch.randn(n, 16).to(dtype) for n in (4, 2)]
    with plugin.forward_context():
        y, _ = model["lstm"](pack_sequence(sequences))
    assert isinstance(y, PackedSequence)
    expected, _ = plain(pack_sequence([sequence.float() for sequence in sequences]))
    assert torch.equal(y.data, expected.data.to(dtype))


@pytest.mark.usefixtures("without_bf16_lstm")
@pytest.mark.parametrize("precision", AUTOCASTING)
def test_said_once_by_name_and_only_where_it_happens(precision: Any) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, plugin = converted(two_lstms(), precision)
        assert [str(warning.message) for warning in said if "LSTM" in str(warning.message)] == []
        for _ in range(2):
            with plugin.forward_context():
                model["recurrent"](model["head"](model["first"](torch.randn(5, 3, 16))[0].repeat(1, 1, 2)))
    messages = [str(warning.message) for warning in said if "LSTM" in str(warning.message)]
    assert [text.partition(" run in float32")[0] for text in messages] == ["The LSTM layers 'first', 'recurrent.0'"]


@pytest.mark.usefixtures("without_bf16_lstm")
def test_on_another_device_the_layer_runs_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is converted on the CPU before it is moved; the device on which it runs decides."""
    seen: list[tuple[str, bool, torch.dtype]] = []
    own = nn.LSTM.forward

    def forward(layer: nn.LSTM, x: Tensor, *args: Any) -> Any:
        seen.append((x.device.type, torch.is_autocast_enabled("cpu"), x.dtype))
        return own(layer, x, *args)

    monkeypatch.setattr(nn.LSTM, "forward", forward)
    model, _ = converted(two_lstms(), "bf16-mixed")
    x = torch.randn(5, 3, 16, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model["first"](x.float())  # outside a run there is no autocast to disable
        with torch.autocast("cpu", dtype=torch.bfloat16):
            copy.deepcopy(model).to("meta")["first"](x.to("meta"))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(UserWarning, match="LSTM layers 'first'"):
        model["first"](x)
    fp32, bf16 = torch.float32, torch.bfloat16
    assert seen == [("cpu", False, fp32), ("meta", True, bf16), ("cpu", False, fp32)]


@pytest.mark.usefixtures("without_bf16_lstm")
def test_only_what_would_fail_runs_in_fp32() -> None:
    def layers() -> nn.ModuleDict:
        others = {"projected": nn.LSTM(8, 8, proj_size=4), "gru": nn.GRU(8, 8), "rnn": nn.RNN(8, 8)}
        return nn.ModuleDict({**others, "cell": nn.LSTMCell(8, 8), "lstm": nn.LSTM(8, 8), "linear": nn.Linear(16, 16)})

    def kept(precision: Any, **settings: Any) -> list[str]:
        model, _ = converted(layers(), precision, **settings)
        return [name for name, layer in model.named_children() if runs_in_fp32(layer)]

    for precision in AUTOCASTING:
        assert kept(precision) == ["lstm"]
        assert kept(precision, param_dtype="bfloat16") == []
    assert kept("bf16-true") == []
    assert kept("fp8-delayed", compute_dtype="float32") == []
    x = torch.randn(3, 2, 8)
    model, plugin = converted(layers(), "bf16-mixed")
    with plugin.forward_context():
        for name in ("projected", "gru", "rnn"):
            model[name](x)[0].float().sum().backward()
        model["cell"](x[0])[0].float().sum().backward()
    converted(model, "bf16-true")
    assert not any(runs_in_fp32(layer) for layer in model.children())
