"""The CUDA half of the operators in place of the CPU's: the same layers, with kernels that run from their own sources.

Only the hardware is left to test on a GPU. GEMMs use a stand-in of torch's, ``tests/support/strict_scaled_mm.py``.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any

import pytest
import torch
from by_columns import unpadded
from feed_forward_blocks import BLOCKS, HIDDEN, WIDTH, converted
from outermost import NO_LAUNCH, is_outermost
from slots import slot_of
from sqnr import sqnr
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kernels_cuda import casts
from lightning_fp8 import DelayedScaling, convert, scaling_state, unconvert
from lightning_fp8.modules.all_gather import gather_in_fp8
from lightning_fp8.ops.arithmetic import saturated
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.scaling import ScalingState
from lightning_fp8.scalings.operand import Want

pytestmark = pytest.mark.filterwarnings("ignore:.*only once for all operators.*")


def encoder(activation: str = "gelu") -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, activation=activation, batch_first=True)
    return convert(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), DelayedScaling(amax_history_len=4))


def train(model: nn.Module, steps: int, batch: tuple[int, ...], autocast: bool = False) -> list[Tensor]:
    """Losses, gradients of the last step, and histories."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    results = []
    for _ in range(steps):
        for _ in range(2):  # micro-batches
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(torch.randn(batch, generator=generator)).float().square().mean()
            loss.backward()
            results.append(loss.detach())
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
    return [torch.stack(results), *gradients, scaling_state(model).amax_history.clone()]


@pytest.fixture(scope="module", params=[False, True], ids=["fp32", "autocast"])
def by_reference(request: pytest.FixtureRequest) -> tuple[bool, list[Tensor]]:
    """Whether under autocast, and the results."""
    return request.param, train(encoder(), 3, (3, 11, 32), request.param)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_training_is_that_of_the_reference(
    by_reference: tuple[bool, list[Tensor]],
    cuda_half: Counter[str],
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIGHTNING_FP8_BACKEND", backend)
    autocast, wanted = by_reference
    results = train(encoder(), 3, (3, 11, 32), autocast)
    # the same casts of the same weights; different sums in the GEMMs change a few codes downstream
    for actual, expected in zip(results, wanted, strict=True):
        assert actual.dtype == expected.dtype
        assert sqnr(actual, expected) > (15 if autocast else 25)
    torch.testing.assert_close(results[0], wanted[0], rtol=5e-3, atol=0)
    assert (sum(cuda_half.values()) > 0) == (backend == "auto")


def idle(model: nn.Module) -> nn.Module:
    model[0].some = nn.Linear(32, 32)
    return convert(model)


@pytest.mark.parametrize(
    "make",
    [
        # a bf16 product takes the gradient of the first layer, whose input needs none
        lambda model: convert(model, DelayedScaling(wgrad="bf16")),
        lambda model: convert(model[0].requires_grad_(False) and model),
        idle,
    ],
    ids=["wgrad in bf16", "frozen", "does not run"],
)
def test_what_is_never_cast_lets_no_other_cast_measure(make: Any, cuda_half: Counter[str]) -> None:
    torch.manual_seed(0)
    model = make(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)))

    def launches(x: Tensor) -> list[int]:
        cuda_half.clear()
        model(x).sum().backward()
        scaling_state(model).update()
        found = [sum(count for name, count in cuda_half.items() if f"FORMAT={fmt}" in name) for fmt in ("E4M3", "E5M2")]
        return found

    x = torch.randn(8, 32)
    first, *later = (launches(x) for _ in range(3))
    state = scaling_state(model)
    lacking = {name for name, row in zip(state.names, (state.amax_history[0] > 0).tolist()) if not row}
    # casts of two inputs; of the second layer's gradient, and, where it is cast, of the first layer's
    gradients = 1 + ("0.grad_output" not in lacking)
    assert first == [4, 2 * gradients]
    assert later == [[2, gradients]] * 2
    assert not state.every_tensor_has_history
    # now dgrad of the first layer is needed: a gradient without a history is measured, once
    assert launches(x.requires_grad_()) == [2, 3 if gradients == 1 else 2]
    assert launches(x) == [2, 2]
    assert state.every_tensor_has_history == ("0.some.input" not in lacking)


class Switched(nn.Module):
    """Runs its second layer only in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.on = [True, True, True]

    def forward(self, x: Tensor) -> Tensor:
        for layer, on in zip(self.layers, self.on, strict=True):
            x = layer(x) if on else x
        return x


def test_a_weight_whose_layer_does_not_run_is_cast_ahead_once(cuda_half: Counter[str]) -> None:
    torch.manual_seed(0)
    model = convert(Switched(), DelayedScaling(amax_history_len=4))
    state = scaling_state(model)
    launches, entries = [], []
    for on in (True, False, False, True):
        model.on[1] = on
        cuda_half.clear()
        train(model, 1, (4, 16))
        launches.append(cuda_half["cast_weights"])
        entries.append((state.amax_history[:, 1] > 0).sum().item())
    assert entries == [1, 1, 1, 2]
    # at first each of three layers alone, then all together; the layer that does not run is included in the second step
    # only. In the last step it was not expected, and has separate launches. Measuring and casting take one launch each
    assert launches == [2 * 3, 2, 2, 2 * 2]


def test_no_stale_weight_is_used(cuda_half: Counter[str]) -> None:
    model = convert(nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)))
    x = torch.randn(4, 16)
    train(model, 2, (4, 16))
    for _ in range(2):
        with torch.no_grad():
            model[1].weight.neg_()
        fresh = convert(unconvert(copy.deepcopy(model)))
        scaling_state(fresh).load_state_dict(scaling_state(model).state_dict())
        assert torch.equal(model(x), fresh(x))
    before, other = model(x), copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.zero_()
    assert other(x).count_nonzero() == 0
    assert torch.equal(model(x), before)


def test_a_captured_graph_casts_weights_itself(cuda_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    train(model, 2, (4, 16))
    model(torch.randn(4, 16))  # copies of both weights are available
    cuda_half.clear()
    monkeypatch.setattr("lightning_fp8.ops.library.is_capturing", lambda _: True)
    model(torch.randn(4, 16))
    # an input and a weight, measured and cast, for each layer, because no cached copy may become part of the graph
    assert cuda_half == {
        "cast_transpose INPUT=Fp32 FORMAT=E4M3 ACTIVATION=Identity BACKWARD=0": 2,
        "cast_weights": 2 * 2,
    }


@pytest.mark.usefixtures("cuda_half")
@pytest.mark.parametrize(
    ("weight_dtype", "x_dtype"), [*zip(casts.INPUTS, (torch.bfloat16, torch.float16, torch.float32), strict=True)]
)
def test_a_capture_after_a_warm_up_loads_no_kernel(
    host_kernels: list[str], weight_dtype: torch.dtype, x_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(weight_dtype)
    model = convert(layers)
    for _ in range(2):
        step(model, x_dtype)
    loaded = list(host_kernels)
    for module in ("ops.library", "ops.cuda.kernels"):
        monkeypatch.setattr(f"lightning_fp8.{module}.is_capturing", lambda _: True)
    step(model, x_dtype)
    assert host_kernels == loaded


def step(model: nn.Module, x_dtype: torch.dtype) -> None:
    """What a graph may contain: forward and backward, the update of the scales, and SGD."""
    x = torch.randn(8, 16, dtype=x_dtype, requires_grad=True)
    model(x).float().square().mean().backward()
    scaling_state(model).update()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.05)
            parameter.grad = None


class Computed(nn.Parameter):
    """As of a library that gathers or dequantizes a weight when it is used."""


@pytest.mark.parametrize("kind", ["views of one tensor", "a subclass"])
def test_parameters_that_are_no_tensors_of_their_own_are_cast_one_by_one(cuda_half: Counter[str], kind: str) -> None:
    model = convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    flat = torch.randn(2 * 256)
    for layer, part in zip(model, flat.chunk(2), strict=True):
        # views like those of FSDP's flat parameters
        weight = part.view(16, 16)
        layer.weight = nn.Parameter(weight) if kind == "views of one tensor" else Computed(weight.clone())
    train(model, 2, (4, 16))
    # two layers in two steps, each measured and cast
    assert cuda_half["cast_weights"] == 2 * 2 * 2


@pytest.mark.parametrize("outputs", [32, 24])
def test_a_weight_kept_by_columns(cuda_half: Counter[str], outputs: int) -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    plain = Conv1D(outputs, 16)
    model, x = convert(copy.deepcopy(plain)), torch.randn(8, 16)
    for _ in range(2):
        model.zero_grad()
        x.grad, x = None, x.detach().requires_grad_()
        y = model(x)
        y.square().sum().backward()
        scaling_state(model).update()
    inputs = x.detach().clone().requires_grad_()
    plain(inputs).square().sum().backward()
    kept = model.fp8[""].weight_cast._cast
    scale = (448 / model.weight.abs().max()).detach()
    codes = saturated(model.weight.detach().t(), scale, FORMATS["e4m3"])
    assert torch.equal(kept.rows.codes, codes)
    # padded along N, also where the kernel wrote the two payloads of the weight as it is stored
    assert torch.equal(unpadded(kept.columns.codes, outputs), codes.t())
    assert sqnr(y, plain(x)) > 25
    assert sqnr(x.grad, inputs.grad) > 20
    assert sqnr(model.weight.grad, plain.weight.grad) > 20
    # measured and cast, once for each update of the scales
    assert cuda_half["cast_weights"] == 2 * 2


def test_bias_gradient_comes_out_of_the_cast(cuda_half: Counter[str]) -> None:
    model = convert(nn.Linear(32, 24))
    for dy in (torch.randn(300, 24), torch.randn(1, 24).expand(300, 24), torch.randn(24, 300).t()):
        model.zero_grad()
        model(torch.randn(300, 32)).backward(dy)
        torch.testing.assert_close(model.bias.grad, dy.sum(dim=0), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("cuda_functions")
@pytest.mark.parametrize("want", [Want(), Want(False, True), Want(True, True)], ids=["rows", "columns", "both"])
def test_a_cast_gives_the_payloads_asked_for(host_kernels: list[str], want: Want) -> None:
    state = ScalingState(["a"], DelayedScaling())
    x, slot = torch.randn(40, 24), slot_of(state)
    # column-major ones too, with and without padding
    for tensor in (x, x.t(), x[::2], x[:, ::2], x[:32, :16].t(), torch.randn(32, 16).t()):
        made = slot.rows.by_kernel(tensor, slot, want)
        expected = slot.rows.by_reference(tensor, slot, want)
        for ours, theirs in zip(made[:2], expected[:2], strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or all(map(torch.equal, ours[:2], theirs[:2]))
    assert len(host_kernels) == 1


def test_backward_casts_only_into_what_it_multiplies(cuda_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    launch = casts.cast_transpose

    def recording(*arguments: Any) -> None:
        (made,) = (one for one in arguments if isinstance(one, casts.Result))
        asked.append(" and ".join(name for name, one in (("rows", made.y), ("columns", made.y_t)) if one is not None))
        launch(*arguments)

    monkeypatch.setattr(casts, "cast_transpose", recording)
    model = convert(nn.Linear(32, 16))
    both, rows, columns = "rows and columns", "rows", "columns"
    for x_needs, weight_needs, expected in (
        (True, True, [both, both]),
        (False, True, [both, columns]),
        (True, False, [rows, rows]),
    ):
        asked.clear()
        model.weight.requires_grad_(weight_needs)
        model(torch.randn(8, 32, requires_grad=x_needs)).sum().backward()
        # the input by rows for the output, by columns for the weight's gradient; the output's gradient as needed
        assert asked == expected


# ragged tokens are neither padded nor copied
@pytest.mark.parametrize("shape", [(256, 32), (2, 128, 32), (251, 32), (3, 1, 32)])
def test_six_launches_of_a_biased_linear(cuda_half: Counter[str], shape: tuple[int, ...]) -> None:
    # in the second of two micro-batches, with a cached weight: two casts, three GEMMs and a sum for the bias
    torch.manual_seed(0)
    model = convert(nn.Linear(32, 48), DelayedScaling(amax_history_len=4))
    x, dy = torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], 48).bfloat16()
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            model(x).backward(dy)
        if step == 0:
            scaling_state(model).update()
        x.grad = model.weight.grad = model.bias.grad = None
    cuda_half.clear()
    with torch.profiler.profile() as profiler, torch.autocast("cpu", torch.bfloat16):
        model(x).backward(dy)
    torchs = Counter(event.name.removeprefix("aten::") for event in profiler.events() if is_outermost(event))
    launches = {name: count for name, count in torchs.items() if name not in NO_LAUNCH}
    # up to 128 rows, the sums of one tile are the bias gradient
    assert launches == {"_scaled_mm": 3, **({"sum": 1} if math.prod(shape[:-1]) > 128 else {})}
    assert sum(cuda_half.values()) == 2


@pytest.mark.parametrize("block", BLOCKS)
def test_four_casts_of_a_feed_forward_block_and_no_other_pass(cuda_half: Counter[str], block: str) -> None:
    """Casts of x, the hidden tensor, and both gradients; gate and up: one with the product, one with its gradient."""
    model, rows = converted(BLOCKS[block], recipe=DelayedScaling(amax_history_len=4)), 112
    call = getattr(model, "_ff_block", model)
    for step in range(3):
        x = torch.randn(rows, WIDTH, requires_grad=True)
        cuda_half.clear()
        with torch.profiler.profile(record_shapes=True) as profiler, torch.autocast("cpu", torch.bfloat16):
            (call if step == 2 else model)(x).float().square().sum().backward()
        if step == 0:
            scaling_state(model).update()
    casts_only = Counter({name: count for name, count in cuda_half.items() if "cast_transpose" in name})
    plain = [name for name in casts_only if "ACTIVATION=Identity" in name]
    fused = [name for name in casts_only if "ACTIVATION=Identity" not in name]
    assert sorted(casts_only.values()) == [1] * 4
    assert sorted("BACKWARD=1" in name for name in fused) == [False, True]
    assert len(plain) == 2
    hidden = {rows * HIDDEN, 2 * rows * HIDDEN}
    assert not [
        event.name
        for event in profiler.events()
        if is_outermost(event) and event.name.removeprefix("aten::") not in {*NO_LAUNCH, "_scaled_mm"}
        if any(math.prod(shape) in hidden for shape in event.input_shapes if shape)
    ]


@pytest.mark.usefixtures("one_process")
def test_shards_gathered_in_fp8_are_measured_by_one_launch(cuda_half: Counter[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 48))
    largest = [layer.weight.detach().abs().max() for layer in model]
    model = fully_shard(convert(model), mesh=init_device_mesh("cpu", (1,)))
    gather_in_fp8(model)
    cuda_half.clear()
    model(torch.randn(8, 32)).sum().backward()
    state = scaling_state(model)
    for module, amax in enumerate(largest):
        row = state.row_of(module, "weight")
        assert state.amax[row] == amax
        # the largest value of e4m3
        assert state.scale[row] == torch.tensor(448.0) / amax
    assert cuda_half["cast_weights"] == 1
