"""Converted models count the same FLOPs as torch's own formulas count for the plain models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.throughput import measure_flops
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import ModelSummary as Summary
from lightning.pytorch.utilities.model_summary import summarize
from lit import Regression, loader, make_trainer, seeded
from pairwise import pairwise
from slots import slot_of
from small_models import small_mlp
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from lightning_fp8 import convert
from lightning_fp8.core.casts import scaled_mm
from lightning_fp8.core.feed_forward import mlp_backward
from lightning_fp8.examples.transformer_block import Block
from lightning_fp8.modules.feed_forward import fp8_feed_forward
from lightning_fp8.scalings.operand import Operand
from lightning_fp8.scalings.per_tensor import PerTensor

Forward = Callable[..., Any]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "swiglu": lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
}
X, MEMORY, IMAGE = (4, 6, 32), (4, 9, 32), (4, 9, 20)


class Called(nn.Module):
    """A module with the arguments for its call."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.module, self.kwargs = module, kwargs

    def forward(self, *args: Tensor) -> Tensor:
        y = self.module(*args, **self.kwargs)
        return y[0] if isinstance(y, tuple) else y


def encoder(**kwargs: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, **kwargs)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def attention(**kwargs: Any) -> nn.Module:
    return nn.MultiheadAttention(32, 2, batch_first=True, **kwargs)


# by name: the model, and the shapes of its inputs
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "mlp": (small_mlp, (X,)),
    "no bias, no multiples of 16": (lambda: nn.Sequential(nn.Linear(32, 13, False), nn.Linear(13, 7)), ((5, 32),)),
    "no rows": (small_mlp, ((0, 32),)),
    "block": (lambda: Block(32, 2), (X,)),
    "encoder": (lambda: encoder(activation=F.gelu, norm_first=True), (X,)),
    "decoder": (lambda: nn.TransformerDecoderLayer(32, 2, 64, dropout=0.0, batch_first=True), (X, MEMORY)),
    "self-attention": (lambda: Called(attention()), (X, X, X)),
    "cross-attention": (lambda: Called(attention()), (X, MEMORY, MEMORY)),
    "attention to other features": (lambda: Called(attention(kdim=20, vdim=20)), (X, IMAGE, IMAGE)),
}


@pytest.fixture(autouse=True)
def _attention_that_is_counted() -> Iterator[None]:
    # torch has no formula for the CPU's fused attention
    with sdpa_kernel(SDPBackend.MATH):
        yield


def flops(run: Callable[[], Any]) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    return counter.get_total_flops()


def step(forward: Forward, inputs: tuple[Tensor, ...], backward: bool = True) -> Callable[[], Any]:
    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            y = forward(*inputs)
        if backward:
            y.float().sum().backward()

    return run


def pair(name: str) -> tuple[nn.Module, nn.Module, tuple[Tensor, ...]]:
    """A plain model, the same one converted, and inputs."""
    make, shapes = MODELS[name]
    plain = make()
    one = [torch.randn(*shape) for shape in shapes]
    # self-attention takes one tensor
    inputs = tuple(one[shapes.index(shape)] for shape in shapes)
    return plain, convert(copy.deepcopy(plain), min_features=0), inputs


def test_an_mlp_counts_by_the_definition() -> None:
    model, x = convert(small_mlp()), torch.randn(8, 32)
    assert flops(lambda: model(x)) == 2 * 8 * (32 * 64 + 64 * 16)
    # three products for the second layer, two for the first, whose input needs no gradient
    assert flops(lambda: model(x).sum().backward()) == 2 * 8 * (2 * 32 * 64 + 3 * 64 * 16)


@pytest.mark.parametrize("inputs_need_gradients", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_training_step_and_evaluation(name: str, inputs_need_gradients: bool) -> None:
    plain, converted, inputs = pair(name)
    for x in inputs:
        x.requires_grad_(inputs_need_gradients)
    expected = flops(step(plain, inputs))
    assert (expected > 0) == (name != "no rows")
    assert flops(step(converted, inputs)) == expected
    # training mode without gradients, so that torch's encoder does not take its fused path, which counts as zero
    with torch.no_grad():
        expected = flops(step(plain, inputs, backward=False))
        assert flops(step(converted, inputs, backward=False)) == expected
        assert flops(step(converted.eval(), inputs, backward=False)) == expected


@pytest.mark.parametrize(
    ("frozen", "name"),
    [
        ("weight", "encoder"),
        ("bias", "mlp"),
        ("first", "cross-attention"),
        ("last", "attention to other features"),
        ("all but one bias", "encoder"),
    ],
)
def test_frozen_parameters(frozen: str, name: str) -> None:
    plain, converted, inputs = pair(name)
    for model in (plain, converted):
        parameters = list(model.named_parameters())
        for position, (path, parameter) in enumerate(parameters):
            first = position < len(parameters) / 2
            freeze = {"first": first, "last": not first, "all but one bias": "bias" not in path or position > 3}
            parameter.requires_grad_(not freeze.get(frozen, path.endswith(frozen)))
    assert flops(step(converted, inputs)) == flops(step(plain, inputs)) > flops(lambda: converted(*inputs))


@pytest.mark.parametrize(("name", "reentrant"), [("mlp", True), ("encoder", False), ("block", True)])
def test_checkpointing_counts_forward_twice(name: str, reentrant: bool) -> None:
    plain, converted, inputs = pair(name)
    inputs[0].requires_grad_()
    once, forward = (flops(step(plain, inputs, backward)) for backward in (True, False))
    for model in (plain, converted):
        with set_checkpoint_early_stop(False):
            again = step(lambda *args, model=model: checkpoint(model, *args, use_reentrant=reentrant), inputs)
            assert flops(again) == once + forward


# --- the fused feed-forward block: counters hook all modules, so that it runs unfused ---


@pytest.mark.parametrize(
    ("frozen", "activation", "x_needs_gradient"),
    pairwise([(), ("0.weight", "0.bias"), ("1.weight", "1.bias"), ("1.weight",)], [*ACTIVATIONS], [False, True]),
)
def test_feed_forward_as_one(frozen: tuple[str, ...], activation: str, x_needs_gradient: bool) -> None:
    plain = nn.Sequential(nn.Linear(16, 48 if activation == "swiglu" else 24), nn.Linear(24, 10))
    for name in frozen:
        plain.get_parameter(name).requires_grad_(False)
    whole = convert(copy.deepcopy(plain), min_features=0)
    x = torch.randn(3, 7, 16, requires_grad=x_needs_gradient)

    def parts(x: Tensor) -> Tensor:
        return plain[1](ACTIVATIONS[activation](plain[0](x)))

    def one(x: Tensor) -> Tensor:
        return fp8_feed_forward(whole[0], activation, whole[1], x)

    assert flops(step(one, (x,))) == flops(step(parts, (x,)))
    with torch.no_grad():
        assert flops(step(one, (x,), backward=False)) == flops(step(parts, (x,), backward=False)) > 0


def test_products_called_directly() -> None:
    a, b = (Operand(torch.zeros(rows, 24, dtype=torch.uint8), torch.tensor(1.0), PerTensor()) for rows in (5, 7))
    expected = flops(lambda: torch.randn(5, 24) @ torch.randn(24, 7))
    # the padding of a payload by columns is not counted
    padded = b._replace(codes=F.pad(b.codes, (0, 8)))
    assert flops(lambda: scaled_mm(a, padded, None, torch.bfloat16, True)) == expected
    assert flops(lambda: scaled_mm(a, b, None, torch.bfloat16, True)) == expected


def test_a_backward_through_an_activation_counts_by_the_width_before_it() -> None:
    m, n, k, last = 5, 14, 24, 10
    state = convert(nn.Linear(k, n), min_features=0).scaling_state

    def columns(rows: int, size: int) -> Operand:
        return Operand(torch.zeros(rows, size, dtype=torch.uint8), torch.ones(()), PerTensor())

    x, w_1, a, w_2 = columns(k, m), columns(k, n), columns(n // 2, m), columns(n // 2, last)
    dy, h, slots = torch.randn(m, last), torch.randn(m, n), [slot_of(state, 1, "e5m2")] * 2

    def backward() -> None:
        dtypes = torch.float32, torch.float32
        mlp_backward(dy, h, "swiglu", x, w_1, a, w_2, *slots, *dtypes, [False, False])

    assert flops(backward) == 2 * 2 * m * n * k + 2 * 2 * m * n // 2 * last


# --- torch.compile, Lightning ---


def test_compiled(request: pytest.FixtureRequest) -> None:
    """Under a counter, dynamo neither compiles nor runs compiled code; a backward compiled earlier is counted."""
    # torch no longer compiles code that has run under a counter, for any model, until a reset
    request.addfinalizer(torch.compiler.reset)
    plain, converted, inputs = pair("encoder")
    expected, forward = (flops(step(plain, inputs, backward)) for backward in (True, False))
    for model in (plain, converted):
        torch.compiler.reset()
        compiled = torch.compile(model, backend="aot_eager")
        losses = []
        step(lambda *args, compiled=compiled, losses=losses: losses.append(compiled(*args)), inputs, False)()
        assert flops(lambda losses=losses: losses[0].float().sum().backward()) == expected - forward
        with warnings.catch_warnings():
            # a warning about the hooks that a counter has on all modules
            warnings.simplefilter("ignore")
            assert flops(step(compiled, inputs)) == expected


@pytest.mark.parametrize("name", ["encoder", "decoder", "attention to other features"])
def test_measure_flops_on_the_meta_device(name: str) -> None:
    def measured(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[int]:
        return [measure_flops(model, lambda: model(*inputs), loss) for loss in (None, Tensor.sum)]

    plain, converted, inputs = pair(name)
    expected = measured(plain, inputs)
    assert min(expected) > 0
    assert measured(converted, inputs) == expected
    meta = tuple(x.to("meta") for x in inputs)
    with torch.device("meta"):
        born = MODELS[name][0]()
    assert measured(born, meta) == expected
    assert measured(convert(born), meta) == expected


class WithExample(Regression):
    example_input_array = torch.randn(16, 32)


@pytest.mark.skipif(not hasattr(Summary, "flop_counts"), reason="Lightning's summary has no FLOPs")
def test_model_summary(tmp_path: Path) -> None:
    summaries = []

    class Kept(ModelSummary):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            summaries.append(summarize(pl_module, max_depth=-1))

    model = seeded(WithExample)
    make_trainer(tmp_path, precision="fp8-delayed", callbacks=[Kept()], max_steps=1).fit(model, loader())
    (summary,) = summaries
    layers = {name: sum(of.values()) for name, of in summary.flop_counts.items()}
    assert layers == {"net": 98304, "net.0": 65536, "net.1": 0, "net.2": 32768}
    assert summary.total_flops == 2 * 16 * (32 * 64 + 64 * 16) == 98304
