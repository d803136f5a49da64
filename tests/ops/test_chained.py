"""Linear - activation - linear with GEMMs that write the next operand: the results of separate GEMMs and casts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from feed_forward_step import training_step
from gemm_in_fp64 import HOPPER, Gemms
from host_kernels import host_tensor_map
from slots import slot_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels_cuda import gemm as kernel_gemm
from kernels_cuda.gemm_variants import CHAINED_ACTIVATIONS, Configuration
from lightning_fp8 import DelayedScaling, ScalingState, convert, scaling_state
from lightning_fp8.modules.feed_forward import fp8_feed_forward
from lightning_fp8.ops.cuda import chained, gemm_choice, kernels
from lightning_fp8.ops.cuda import dispatch as cuda
from lightning_fp8.ops.cuda.gemm_choice import Choice
from lightning_fp8.ops.operand import Fp8Operand

pytestmark = pytest.mark.filterwarnings("ignore:.*only once for all operators.*")
ROWS = 150


@pytest.fixture
def gemms(cuda_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Gemms:
    """GEMMs in fp64, everything else in torch's own operators, so that equal roundings give equal results."""
    for name in ("cast_kernel", "weights_kernel", "update_kernel"):
        monkeypatch.setattr(cuda, name, lambda *_: None)
    return Gemms(monkeypatch)


def block(bias: bool = True, hidden: int = 48, features: int = 32, outputs: int = 16, steps: int = 1) -> nn.Sequential:
    """Two converted layers whose tensors have a history after one step."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(features, hidden, bias=bias), nn.Linear(hidden, outputs, bias=bias))
    model = convert(layers, DelayedScaling(amax_history_len=4))
    for _ in range(steps):
        step(model, "relu")
    return model


def step(model: nn.Sequential, activation: str, dtype: torch.dtype = torch.bfloat16, rows: int = ROWS) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(rows, model[0].in_features)
    with torch.autocast("cpu", dtype):
        return training_step(model, lambda x: fp8_feed_forward(model[0], activation, model[1], x), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", CHAINED_ACTIVATIONS)
def test_numbers_are_those_of_gemm_and_cast(gemms: Gemms, activation: str, bias: bool, dtype: torch.dtype) -> None:
    whole, parts = block(bias), block(bias)
    for _ in range(2):
        gemms.launches.clear()
        gemms.missing = {"chained"}
        expected = step(parts, activation, dtype)
        assert gemms.launches == ["gemm"] * 6
        gemms.launches.clear(), gemms.kernels.clear()
        gemms.missing = set()
        actual = step(whole, activation, dtype)
        # fprop chained to the cast, then plain; backward: wgrad of the second, chained dgrad, then the first layer
        assert gemms.launches == ["chained_gemm", "gemm", "gemm", "chained_gemm", "gemm", "gemm"]
        forward, backward = gemms.kernels[0], gemms.kernels[3]
        assert forward == (HOPPER, "e4m3", "e4m3", dtype, False, activation, "e4m3")
        assert backward == (HOPPER, "e5m2", "e4m3", dtype, True, activation, "e5m2")
        for one, other in zip(actual, expected, strict=True):
            assert one.dtype == other.dtype
        # the bias gradient is summed in different groups
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        assert all(map(torch.equal, actual[:2], expected[:2]))
        assert all(map(torch.equal, actual[-2:], expected[-2:]))


@pytest.mark.parametrize("rows", [1, 64, 65])
def test_any_number_of_rows(gemms: Gemms, rows: int) -> None:
    whole, parts = block(), block()
    actual = step(whole, "gelu", rows=rows)
    gemms.missing = {"chained"}
    torch.testing.assert_close(actual, step(parts, "gelu", rows=rows), rtol=1e-6, atol=1e-6)


def test_sizes_that_need_padding_elsewhere(gemms: Gemms) -> None:
    # the first layer's own dgrad and wgrad accept any size
    whole, parts = block(hidden=24, features=16, outputs=16), block(hidden=24, features=16, outputs=16)
    gemms.launches.clear()
    actual = step(whole, "silu", rows=13)
    assert gemms.launches.count("chained_gemm") == 2
    gemms.missing = {"chained"}
    torch.testing.assert_close(actual, step(parts, "silu", rows=13), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("frozen", ["0.weight", "1.weight", "0.bias", "1.bias"])
def test_frozen_parameters_get_no_gradient(gemms: Gemms, frozen: str) -> None:
    whole, parts = block(), block()
    for model in (whole, parts):
        model.get_parameter(frozen).requires_grad_(False)
    gemms.launches.clear()
    actual = step(whole, "gelu")
    assert gemms.launches.count("chained_gemm") == 2
    assert len(gemms.launches) == (5 if frozen.endswith("weight") else 6)
    assert whole.get_parameter(frozen).grad is None
    gemms.missing = {"chained"}
    expected = step(parts, "gelu")
    assert len(actual) == 2 + 3 + 2
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_an_input_without_gradient_has_no_dgrad(gemms: Gemms) -> None:
    model = block()
    gemms.launches.clear()
    with torch.autocast("cpu", torch.bfloat16):
        fp8_feed_forward(model[0], "gelu", model[1], torch.randn(8, 32)).float().sum().backward()
    assert gemms.launches == ["chained_gemm", "gemm", "gemm", "chained_gemm", "gemm"]


def test_the_hidden_tensor_is_there_only_for_a_backward(gemms: Gemms, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, made = block(), torch.randn(8, 32), []
    hidden = chained.hidden

    def watching(*args: Any) -> tuple[Tensor, Fp8Operand]:
        h, a = hidden(*args)
        made.append([tensor.numel() for tensor in (h, a.rows, a.columns, a.scale_inv)])
        return h, a

    monkeypatch.setattr(chained, "hidden", watching)
    with torch.autocast("cpu", torch.bfloat16):
        with_gradients = fp8_feed_forward(model[0], "gelu", model[1], x)
        with torch.no_grad():
            without = fp8_feed_forward(model[0], "gelu", model[1], x)
    assert torch.equal(with_gradients, without)
    # h, its activation by rows and by columns, the scale
    assert made == [[8 * 48, 8 * 48, 8 * 48, 1], [0, 8 * 48, 0, 1]]


def test_backward_casts_only_into_what_it_multiplies(gemms: Gemms, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts: list[str] = []
    transposed: list[bool] = []
    cast, launch = chained.cast_gradient, kernel_gemm.chained_gemm

    def casting(*args: Any) -> Any:
        layouts.append(args[4])
        return cast(*args)

    def launching(*args: Any, **kwargs: Any) -> None:
        transposed.append(args[6] is not None)
        launch(*args, **kwargs)

    model = block()
    monkeypatch.setattr(chained, "cast_gradient", casting)
    monkeypatch.setattr(kernel_gemm, "chained_gemm", launching)
    for first, second in ((True, True), (False, True), (True, False)):
        model[0].weight.requires_grad_(first), model[1].weight.requires_grad_(second)
        step(model, "gelu")
    assert layouts == ["both", "both", "rows"]
    # forward for the second weight's gradient, backward for the first's
    assert transposed == [True, True, True, False, False, True]


def test_tensors_may_lie_anywhere(gemms: Gemms) -> None:
    whole, parts = block(), block()
    for model in (whole, parts):
        apart = torch.stack([model[0].bias.detach(), torch.zeros(48)], dim=1)[:, 0]
        model[0].bias = nn.Parameter(apart)
    by_columns = torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t.t().contiguous().t() if t.dtype == torch.bfloat16 else t
    )
    with by_columns:
        actual = step(whole, "gelu")
    gemms.missing = {"chained"}
    torch.testing.assert_close(actual, step(parts, "gelu"), rtol=1e-6, atol=1e-6)


def test_amaxes_are_recorded_exactly_in_training(gemms: Gemms) -> None:
    model = block().eval()
    state = scaling_state(model)
    gemms.launches.clear()
    with torch.autocast("cpu", torch.bfloat16):
        fp8_feed_forward(model[0], "gelu", model[1], torch.randn(8, 32)).float().sum().backward()
        # that of the forward: a gradient that is not recorded is measured before its cast
        assert gemms.launches.count("chained_gemm") == 1
        assert state.amax[: state.delayed].count_nonzero() == 0
        fp8_feed_forward(model.train()[0], "gelu", model[1], torch.randn(8, 32)).float().sum().backward()
    assert state.amax[: state.delayed].count_nonzero() == 4


STEPS_ASIDE: dict[str, Callable[[Gemms, ScalingState], Any]] = {
    "no kernel": lambda gemms, state: gemms.missing.add("chained"),
    "K is split": lambda gemms, state: setattr(gemms, "choice", Choice(HOPPER, 2)),
    "torch's GEMM was faster": lambda gemms, state: setattr(gemms, "choice", Choice(None)),
    "another family": lambda gemms, state: setattr(gemms, "choice", Choice(Configuration("gemm_sm89", 128, 128, 4))),
    "somebody counts": lambda gemms, state: state.cast_counts.start(gemms),
    "a tensor without history": lambda gemms, state: (state.amax_history[:, 1].zero_(), state._forget_histories()),
}


@pytest.mark.parametrize("why", STEPS_ASIDE)
def test_steps_aside(gemms: Gemms, why: str) -> None:
    model, parts = block(), block()
    for one in (model, parts):
        STEPS_ASIDE[why](gemms, scaling_state(one))
    gemms.launches.clear()
    actual = step(model, "gelu")
    assert "chained_gemm" not in gemms.launches
    gemms.missing.add("chained")
    torch.testing.assert_close(actual, step(parts, "gelu"), rtol=0, atol=0)


def test_an_activation_that_is_faster_apart_is_cast_on_its_own(gemms: Gemms) -> None:
    model = block()
    gemms.chained = {"relu"}
    for activation, chains in (("gelu", 0), ("relu", 2)):
        gemms.launches.clear()
        step(model, activation)
        assert gemms.launches.count("chained_gemm") == chains
    gemms.launches.clear()
    with chained.taken():
        step(model, "gelu")
    assert gemms.launches.count("chained_gemm") == 2


def test_left_out_for_a_measurement(gemms: Gemms) -> None:
    def fail() -> None:
        with chained.left_out():
            raise KeyError

    model, parts = block(), block()
    gemms.launches.clear()
    # on a GPU, backward runs in a separate thread
    with chained.left_out():
        actual = step(model, "gelu")
    assert "chained_gemm" not in gemms.launches
    with pytest.raises(KeyError):
        fail()
    chained_step = step(parts, "gelu")
    assert gemms.launches.count("chained_gemm") == 2
    torch.testing.assert_close(actual, chained_step, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "activation", "dtype", "forward", "backward"),
    [
        ({}, "gelu", torch.bfloat16, True, True),
        ({"features": 24}, "gelu", torch.bfloat16, False, True),
        ({"outputs": 24}, "gelu", torch.bfloat16, True, False),
        ({"hidden": 44}, "gelu", torch.bfloat16, False, False),
        ({}, "gelu", torch.float32, False, False),
    ],
)
def test_sizes_and_dtypes(
    gemms: Gemms, sizes: dict[str, int], activation: str, dtype: torch.dtype, forward: bool, backward: bool
) -> None:
    model = block(**sizes)
    gemms.launches.clear()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = fp8_feed_forward(model[0], activation, model[1], torch.randn(8, model[0].in_features))
        assert ("chained_gemm" in gemms.launches) == forward
        gemms.launches.clear()
        y.float().sum().backward()
    assert ("chained_gemm" in gemms.launches) == backward


def test_swiglu_and_a_state_that_is_gone(gemms: Gemms) -> None:
    a, b, model = torch.zeros(8, 32, dtype=torch.uint8), torch.zeros(48, 32, dtype=torch.uint8), block()
    slot = slot_of(scaling_state(model), 3, record=True)
    gone = slot._replace(state=None)
    found = [
        chained.find(a, b, "e4m3", torch.bfloat16, False, activation, place)
        for activation, place in (("gelu", slot), ("swiglu", slot), ("none", slot), ("gelu", gone))
    ]
    assert [chain is not None for chain in found] == [True, False, False, False]


def test_the_models_setting_decides(gemms: Gemms) -> None:
    model = block()
    convert(model, gemm="rawkernel")
    gemms.asked.clear()
    step(model, "gelu")
    # M, N and K of fprop, then of dgrad and wgrad; the chained dgrad is chosen before the wgrad that runs before it
    assert gemms.asked == [
        ("rawkernel", ROWS, 48, 32, False, torch.bfloat16),
        ("rawkernel", ROWS, 16, 48, False, torch.bfloat16),
        ("rawkernel", ROWS, 48, 16, True, torch.bfloat16),
        ("rawkernel", 16, 48, ROWS, True, torch.float32),
        ("rawkernel", ROWS, 32, 48, True, torch.float32),
        ("rawkernel", 48, 32, ROWS, True, torch.float32),
    ]


def test_compiled_without_a_graph_break(gemms: Gemms) -> None:
    eager, compiled = block(), block()
    run = torch.compile(
        lambda x: fp8_feed_forward(compiled[0], "gelu", compiled[1], x), backend="aot_eager", fullgraph=True
    )
    for _ in range(2):
        x = torch.randn(ROWS, 32)
        with torch.autocast("cpu", torch.bfloat16):
            one = training_step(eager, lambda x: fp8_feed_forward(eager[0], "gelu", eager[1], x), x)
            gemms.launches.clear()
            two = training_step(compiled, run, x)
        assert gemms.launches.count("chained_gemm") == 2
        assert all(map(torch.equal, one, two))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_changes_nothing(gemms: Gemms, reentrant: bool) -> None:
    plain, recomputed = block(), block()

    def run(x: Tensor) -> Tensor:
        return fp8_feed_forward(recomputed[0], "gelu", recomputed[1], x)

    x = torch.randn(ROWS, 32)
    with torch.autocast("cpu", torch.bfloat16):
        one = training_step(plain, lambda x: fp8_feed_forward(plain[0], "gelu", plain[1], x), x)
        two = training_step(recomputed, lambda x: checkpoint(run, x, use_reentrant=reentrant), x)
    assert all(map(torch.equal, one, two))


@pytest.fixture
def from_sources(cuda_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches, with all kernels compiled from their sources, including GEMMs."""
    monkeypatch.setattr(kernel_gemm, "tensor_map", host_tensor_map)
    monkeypatch.setattr(gemm_choice, "choose", lambda *_: Choice(HOPPER))
    monkeypatch.setattr(gemm_choice, "is_chained", lambda *_: True)
    return cuda_half


def test_a_training_step_from_the_sources(from_sources: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = block(), block()
    from_sources.clear()
    actual = step(whole, "relu")
    launches = Counter(name.split()[0] for name in from_sources.elements())
    # casts: x and the gradient of y, and all weights together, measured first; GEMMs: three passes of two layers, of
    # which two are chained to a cast
    assert launches == {"cast_transpose": 2, "cast_weights": 2, "gemm_sm90": 6, "update_scales": 1}
    assert sum("CHAIN=" in name for name in from_sources) == 2
    monkeypatch.setattr(kernels, "chained_kernel", lambda *_: None)
    from_sources.clear()
    expected = step(parts, "relu")
    launches = Counter(name.split()[0] for name in from_sources.elements())
    assert launches == {"cast_transpose": 4, "cast_weights": 2, "gemm_sm90": 6, "update_scales": 1}
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
