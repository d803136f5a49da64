"""Buffers beside parameters in bf16: which follow them, which stay in fp32, and what is computed with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import BinaryAUROC

from lightning_fp8 import Fp8Precision
from lightning_fp8.dtypes import audit
from lightning_fp8.plugins import Bf16MixedPrecision, Bf16TruePrecision
from lightning_fp8.plugins.core import PrecisionCore

IN_BF16: list[Callable[[], PrecisionCore]] = [
    Bf16TruePrecision,
    lambda: Bf16MixedPrecision(param_dtype="bfloat16"),
    lambda: Fp8Precision(param_dtype="bfloat16"),
]


class Rotary(nn.Module):
    """Rotates pairs of a sequence's features; its products of two fp32 operands, as a user would write them."""

    def __init__(self, length: int = 4096, device: str | None = None) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** -torch.arange(0, 1, 0.125, dtype=torch.float32, device=device))
        self.register_buffer("positions", torch.arange(length, dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.einsum("t,f->tf", self.positions[-x.shape[1] :], self.inv_freq)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Model(nn.Module):
    """Buffers of every kind, beside parameters and in modules without."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.rotary = Rotary(device=device)
        self.product = nn.Parameter(torch.eye(16, device=device))
        self.register_buffer("gain", torch.full((16,), 1.5, dtype=torch.float32, device=device))
        self.register_buffer("wide", torch.ones(16, dtype=torch.float64, device=device))
        self.register_buffer("mask", torch.zeros(16, dtype=torch.float32, device=device).fill_(-1e9), persistent=False)
        self.register_buffer("codes", torch.zeros(16, device=device).to(torch.float8_e4m3fn))
        self.register_buffer("index", torch.arange(16, device=device))
        self.norm = nn.BatchNorm1d(16, affine=False, device=device)
        self.loss = nn.CrossEntropyLoss(torch.linspace(0.1, 3, 16, dtype=torch.float32, device=device))
        self.metric = BinaryAUROC(thresholds=1000)

    def forward(self, x: Tensor) -> Tensor:
        y = (self.rotary(x) * self.gain * self.wide + self.mask.exp()) @ self.product
        return self.norm(y.transpose(1, 2)).transpose(1, 2)


EXPECTED = {
    "rotary.inv_freq": torch.float32,
    "rotary.positions": torch.float32,
    "gain": torch.bfloat16,
    "wide": torch.bfloat16,
    "mask": torch.bfloat16,
    "codes": torch.float8_e4m3fn,
    "index": torch.int64,
    "norm.running_mean": torch.float32,
    "norm.running_var": torch.float32,
    "norm.num_batches_tracked": torch.int64,
    "loss.weight": torch.float32,
    "metric.thresholds": torch.float32,
}


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: buffer.dtype for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("plugin", IN_BF16)
def test_each_buffer_has_its_dtype(plugin: Callable[[], PrecisionCore]) -> None:
    model = plugin().convert_module(Model())
    assert dtypes(model) == EXPECTED
    assert torch.equal(model.rotary.positions, torch.arange(4096.0))
    assert audit(model, torch.bfloat16).violations == ()
    # again, and under a precision that stores parameters in fp32
    assert dtypes(plugin().convert_module(model)) == EXPECTED
    assert dtypes(Bf16MixedPrecision(param_dtype="float32").convert_module(model)) == EXPECTED
    assert dtypes(Bf16MixedPrecision().convert_module(Model())) == dtypes(Model())


@pytest.mark.parametrize("plugin", IN_BF16)
def test_a_model_with_buffers_computes_and_is_nearer_than_lightnings(plugin: Callable[[], PrecisionCore]) -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(4, 6, 16), torch.randint(16, (4, 6))
    plain = Model()
    plain.wide = plain.wide.float()
    exact = plain(x)
    prepared = plugin()
    model = prepared.convert_module(Model())
    with prepared.forward_context():
        y = model(prepared.convert_input(x))
        loss = model.loss(y.transpose(1, 2), labels)
    loss.backward()
    assert model.product.grad.isfinite().all()
    # positions in bf16 are all 4096 here; autocast, too, casts them
    of_lightnings = (plain.bfloat16()(x.bfloat16()).float() - exact).norm() / exact.norm()
    error = (y.float() - exact).norm() / exact.norm()
    assert of_lightnings > 0.5
    assert error < (0.01 if prepared.precision == "bf16-true" else 1.01 * of_lightnings)


@pytest.mark.parametrize("created_in", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["cross entropy", "positives", "margin"])
def test_a_weighted_loss_is_that_of_fp32_on_the_same_logits(kind: str, created_in: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, labels, targets = torch.randn(64, 16).bfloat16(), torch.randint(16, (64,)), torch.rand(64, 16).bfloat16()
    weights = torch.rand(16).to(created_in)
    x, w = logits.float(), weights.float()
    loss: nn.Module
    if kind == "cross entropy":
        loss, target, expected = nn.CrossEntropyLoss(weights), labels, F.cross_entropy(x, labels, w)
    elif kind == "positives":
        loss, target = nn.BCEWithLogitsLoss(pos_weight=weights), targets
        expected = F.binary_cross_entropy_with_logits(x, targets.float(), pos_weight=w)
    else:  # torch has none for bf16 on a CPU
        loss, target = nn.MultiMarginLoss(weight=weights), labels
        expected = F.multi_margin_loss(x, labels, weight=w)
    plugin = Bf16TruePrecision()
    plugin.convert_module(nn.ModuleDict({"loss": loss, "net": nn.Linear(2, 2)}))
    with plugin.forward_context():
        assert torch.equal(loss(logits, target), expected)


def test_a_module_whose_forward_was_set_on_it_computes_in_fp32() -> None:
    """Also where its class has none."""
    rotary, frequencies = nn.Module(), 10000.0 ** -torch.arange(0, 1, 0.125)
    rotary.register_buffer("inv_freq", frequencies.clone())
    rotary.forward = lambda positions: positions[:, None] * rotary.inv_freq
    plugin = Bf16TruePrecision()
    plugin.convert_module(nn.ModuleDict({"rotary": rotary, "net": nn.Linear(8, 8)}))
    positions = torch.arange(64, dtype=torch.bfloat16)
    with plugin.forward_context():
        angles = rotary(positions)
    assert torch.equal(angles, torch.outer(positions.float(), frequencies).bfloat16())


def test_keep_fp32_on_a_module_that_has_only_buffers() -> None:
    class Scale(nn.Module):
        def __init__(self, value: Tensor) -> None:
            super().__init__()
            self.register_buffer("value", value)

        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.float32
            return x @ self.value

    x, values = torch.randn(4, 8), torch.randn(8, 8)
    for plugin in (
        Bf16TruePrecision(keep_fp32=("scale",)),
        Bf16MixedPrecision(keep_fp32=("scale",)),
        Fp8Precision(keep_fp32=("scale",)),
    ):
        for given in (values, values.double(), values.bfloat16()):
            model = plugin.convert_module(nn.ModuleDict({"scale": Scale(given), "net": nn.Linear(16, 16)}))
            assert model["scale"].value.dtype == torch.float32
            with plugin.forward_context():
                y = model["scale"](x.bfloat16())
            assert torch.equal(y, (x.bfloat16().float() @ given.float()).bfloat16())
            assert audit(model, plugin.param_dtype, keep_fp32=("scale",)).violations == ()


def test_a_shared_buffer_stays_one_tensor() -> None:
    a, b, loss = nn.Linear(4, 4), nn.Linear(4, 4), nn.NLLLoss(torch.ones(4))
    a.table = b.table = torch.ones(4)
    for layer in (a, b):
        layer.register_buffer("common", None)
        layer.register_buffer("weights", loss.weight)
    a.common = b.common = torch.zeros(4)
    model = nn.ModuleDict({"a": a, "b": b, "nested": nn.Sequential(b), "loss": loss})
    Bf16TruePrecision().convert_module(model)
    assert a.common is b.common
    assert a.common.dtype == torch.bfloat16
    # a product of the layer may take what the loss could have in fp32
    assert a.weights is b.weights is loss.weight
    assert loss.weight.dtype == torch.bfloat16


def test_a_buffer_that_is_a_parameter_too() -> None:
    layer = nn.Linear(4, 4, bias=False)
    layer.register_buffer("same", layer.weight)
    weight = layer.weight
    Bf16TruePrecision().convert_module(layer)
    assert layer.same is layer.weight is weight
    assert weight.dtype == torch.bfloat16


def test_on_the_meta_device() -> None:
    """Rotary frequencies are known by their name, with what is beside them; other values cannot be looked at."""
    model = Bf16TruePrecision().convert_module(Model(device="meta"))
    assert dtypes(model) == EXPECTED
    del model.rotary.inv_freq
    model.rotary.register_buffer("positions", torch.empty(4, device="meta"))
    assert dtypes(Bf16TruePrecision().convert_module(model))["rotary.positions"] == torch.bfloat16


def test_a_ruined_buffer_beside_parameters_is_named() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)
            self.register_buffer("inv_freq", torch.ones(4))
            self.register_buffer("positions", torch.arange(1024.0))
            self.register_buffer("small", torch.arange(256.0))
            self.register_buffer("mask", torch.full((4, 4), -1e9).triu(1))

    model = nn.ModuleDict({"attention": Attention()})
    with pytest.warns(UserWarning, match=r"digits that they need: attention\.inv_freq, attention\.positions\. bf16"):
        Bf16TruePrecision().convert_module(model)
    assert set(dtypes(model).values()) == {torch.bfloat16}
