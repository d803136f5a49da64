"""Experts in one launch a product, as on a GPU: Hopper's kernels on the CPU, and their reference."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import Any

import experts as made
import pytest
import torch
from experts import EXPERTS, FORMS, experts, routing
from no_gradient import NoGradient
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, convert, scaling_state, weights_unchanged
from lightning_fp8.modules import experts as modules
from lightning_fp8.modules.experts import Fp8Experts
from lightning_fp8.scalings import base
from lightning_fp8.scalings.recipe import Recipe

SIZE, TOKENS = 64, 40


@pytest.fixture(autouse=True)
def _whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that products of groups take."""
    for name, size in (("WIDTH", SIZE), ("HIDDEN", SIZE), ("TOKENS", TOKENS)):
        monkeypatch.setattr(made, name, size)


def step(model: Any, x: Tensor, index: Tensor, weights: Tensor, in_bf16: bool = False) -> list[Tensor]:
    """Output, gradients and recorded amaxes."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
        y = model(x, index, weights)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    gradients = [x.grad, weights.grad, *(parameter.grad for parameter in model.parameters())]
    return [y.detach(), *gradients, scaling_state(model).amax.clone()]  # type: ignore[list-item]


def relative(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def one_by_one(model: Any, monkeypatch: pytest.MonkeyPatch, *given: Any) -> list[Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(base, "has_kernels", lambda *_: False)
        return step(model, *given)


@pytest.mark.parametrize(
    ("form", "recipe"), list(zip([*FORMS, "gate"], itertools.cycle([DelayedScaling(), CurrentScaling(margin=1)])))
)
def test_the_reference_is_each_expert_by_itself(form: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, but for gradients of weights that lie in memory in another order."""
    monkeypatch.setattr(base, "has_kernels", lambda *_: True)
    monkeypatch.setattr(modules, "on_gpu", lambda x: True)
    both = [convert(experts(form), recipe) for _ in range(2)]
    both[1].load_state_dict(both[0].state_dict())
    # in the second step, expert 1 has no token
    for number, without in enumerate([(), (1,), ()]):
        given = torch.randn(TOKENS, SIZE) * 2.0**number, *routing(*without, seed=number), bool(number % 2)
        found, expected = step(both[0], *given), one_by_one(both[1], monkeypatch, *given)
        exact = (0, 1, 2, -1)
        assert all(torch.equal(found[at], expected[at]) for at in exact)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * other.abs().max().item())
        states = [scaling_state(model) for model in both]
        for state in states:
            state.update()
        assert torch.equal(states[0].amax_history, states[1].amax_history)
        assert torch.equal(states[0].scale, states[1].scale)


@pytest.mark.parametrize(
    ("form", "recipe", "in_bf16"),
    [
        ("gate", DelayedScaling(), True),
        ("no gate", CurrentScaling(), False),
        ("transposed, biases, interleaved gate", DelayedScaling(), False),
    ],
)
def test_kernels_against_experts_one_by_one(
    form: str, recipe: Recipe, in_bf16: bool, grouped_half: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = convert(experts(form), recipe)
    other = copy.deepcopy(model)
    # the last expert has its first token, and so no history, when all others have one: scale 1 would clip it
    for number, without in enumerate([(EXPERTS - 1,), (), (2,)]):
        given = (
            torch.randn(TOKENS, SIZE) * (1000 if in_bf16 else 1) * 2.0**number,
            *routing(*without, seed=number),
            in_bf16,
        )
        grouped_half.clear()
        found = step(model, *given)
        assert any("GROUPED" in name for name in grouped_half)
        for one, its in zip(found, one_by_one(other, monkeypatch, *given), strict=True):
            # a sum that is rounded the other way, in FP8 or bf16, here and there
            assert relative(one, its) < 5e-2
        for each in (model, other):
            scaling_state(each).update()
    grouped_half.clear()
    model.eval(), other.eval()
    assert relative(step(model, *given)[0], one_by_one(other, monkeypatch, *given)[0]) < 5e-2
    assert any("GROUPED" in name for name in grouped_half)


def test_launches_do_not_depend_on_the_number_of_experts(
    grouped_half: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for number in (2, 8):
        monkeypatch.setattr(made, "EXPERTS", number)
        model = convert(experts(), DelayedScaling())
        for seed in range(2):
            scaling_state(model).update()
            grouped_half.clear()
            step(model, torch.randn(TOKENS, SIZE), *routing(seed=seed))
        # gradients are added up in fp32
        assert all(("PROMOTE=1" in name) == ("e5m2" in name) for name in grouped_half if "gemm" in name)
        counts.append(Counter(name.split()[0] for name in grouped_half.elements()))
    # a layer of two products: input and gradient of each are cast once, and each has three GEMMs. All weights of a
    # model are measured and cast in two launches. Without a history, the first step measured what it cast
    assert counts[0] == counts[1] == {"cast_weights": 2, "cast_transpose": 4, "gemm_sm90": 6}


@pytest.mark.parametrize(("form", "in_bf16"), [("gate", True), ("transposed", False)])
def test_kernels_are_asked_for_before_a_product(
    form: str, in_bf16: bool, host_kernels: list[str], grouped_half: Counter[str]
) -> None:
    """In a backward, or in the capture of a graph, one that is missing would be an error."""
    model = convert(experts(form))
    given = torch.randn(TOKENS, SIZE), *routing()
    with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
        assert model._runs_in_groups(given[0])
    asked_for = {*host_kernels}
    step(model, *given, in_bf16)
    assert {name for name in grouped_half if "GROUPED" in name} <= asked_for
    assert {name for name in grouped_half if name.startswith("cast_transpose")} <= asked_for


def test_generation_casts_all_experts_once_and_copies_none(
    grouped_half: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, stack = convert(experts(), DelayedScaling()).eval(), torch.stack
    given, copied = (torch.randn(TOKENS, SIZE), *routing()), set[int]()
    monkeypatch.setattr(torch, "stack", lambda parts: copied.add(parts[0].numel()) or stack(parts))
    with torch.inference_mode(), weights_unchanged(model):
        expected, launches = model(*given), grouped_half["cast_weights"]
        assert torch.equal(model(*given), expected)
        assert grouped_half["cast_weights"] == launches == 4
        # nothing is copied
        assert not copied
        kept = [gemm.weight_cast.get(weight) for gemm, weight in model.gemms()]
        # for backward alone
        assert not any(one is None or one.columns is not None for one in kept)
    assert torch.equal(model(*given), expected)


@pytest.mark.usefixtures("grouped_half")
def test_experts_on_another_device_than_the_scales_are_refused() -> None:
    model = convert(experts(), DelayedScaling())
    scaling_state(model).to("meta")
    with pytest.raises(RuntimeError, match=r"gate_up_proj\.0': the weight is on cpu, and the scales .* are on meta"):
        model(torch.randn(TOKENS, SIZE), *routing())


def test_a_captured_graph_reads_nothing_of_the_host(
    grouped_half: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = convert(experts(), DelayedScaling())
    given = torch.randn(TOKENS, SIZE), *routing()
    expected = step(model, *given)
    monkeypatch.setattr("lightning_fp8.ops.cuda.kernels.is_capturing", lambda _: True)
    monkeypatch.setattr("lightning_fp8.ops.library.is_capturing", lambda _: True)
    monkeypatch.setattr("lightning_fp8.scalings.launches.is_capturing", lambda _: True)
    # a table of several weights is copied from there
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    assert all(map(torch.equal, step(model, *given), expected))


def test_compiled_as_one_graph(grouped_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    eager = convert(experts("transposed, biases, interleaved gate"), DelayedScaling())
    model = copy.deepcopy(eager)
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    # of one and of several tiles for an expert, and fewer rows than a tile has
    for seed, tokens in enumerate((TOKENS, 300, 17)):
        monkeypatch.setattr(made, "TOKENS", tokens)
        given = torch.randn(tokens, SIZE), *routing(seed=seed)
        expected = step(eager, *given)
        x, weights = given[0].clone().requires_grad_(), given[2].clone().requires_grad_()
        y = compiled(x, given[1], weights)
        model.zero_grad()
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        gradients = [x.grad, weights.grad, *(parameter.grad for parameter in model.parameters())]
        for one, other in zip([y, *gradients, scaling_state(model).amax], expected, strict=True):
            assert torch.equal(one, other)
        for each in (eager, model):
            scaling_state(each).update()
    assert counters["stats"]["unique_graphs"] == 1


def test_frozen_experts_pass_gradients_on(grouped_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = convert(experts().requires_grad_(False))
    x, (index, weights) = torch.randn(TOKENS, SIZE), routing()
    found = []
    for has_kernels in (None, lambda *_: False):
        if has_kernels is not None:
            monkeypatch.setattr(base, "has_kernels", has_kernels)
        grouped_half.clear()
        x = x.detach().requires_grad_()
        model(x, index, weights).square().sum().backward()
        found.append(x.grad)
        assert any("GROUPED=1" in name for name in grouped_half) == (has_kernels is None)
        assert not any("GROUPED=2" in name for name in grouped_half)
    assert relative(*found) < 5e-2


def test_one_expert(grouped_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "EXPERTS", 1)
    model = convert(experts())
    given = torch.randn(TOKENS, SIZE), torch.zeros(TOKENS, 1, dtype=torch.int64), torch.rand(TOKENS, 1)
    found = step(model, *given)
    assert any("GROUPED=1" in name for name in grouped_half)
    for one, other in zip(found, one_by_one(model, monkeypatch, *given), strict=True):
        assert relative(one, other) < 5e-2


@pytest.mark.usefixtures("grouped_half")
@pytest.mark.parametrize("form", ["gate", "no gate"])
def test_without_a_gradient_of_the_output_there_are_none(form: str) -> None:
    plain = experts(form)
    for model in (plain, convert(copy.deepcopy(plain))):
        x = torch.randn(TOKENS, SIZE, requires_grad=True)
        NoGradient.apply(model(x, *routing())).sum().backward()
        assert x.grad is None
        assert all(parameter.grad is None for parameter in model.parameters())


def test_fully_sharded(grouped_half: Counter[str], one_process: None) -> None:
    """The whole weights of a forward are cast in it, all together, and their gradients are sharded."""
    plain = convert(experts())
    sharded = fully_shard(copy.deepcopy(plain), mesh=init_device_mesh("cpu", (1,)))
    for seed in range(2):
        given = torch.randn(TOKENS, SIZE), *routing(seed=seed)
        expected = step(plain, *given)
        grouped_half.clear()
        found = [one.full_tensor() if isinstance(one, DTensor) else one for one in step(sharded, *given)]
        assert any("GROUPED=2" in name for name in grouped_half)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        for model in (plain, sharded):
            scaling_state(model).update()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_changes_no_bit(reentrant: bool, grouped_half: Counter[str]) -> None:
    model = convert(experts(), DelayedScaling())
    other = copy.deepcopy(model)
    given = torch.randn(TOKENS, SIZE), *routing()
    expected = step(other, *given)
    x, weights = given[0].clone().requires_grad_(), given[2].clone().requires_grad_()
    y = checkpoint(model, x, given[1], weights, use_reentrant=reentrant)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    gradients = [x.grad, weights.grad, *(parameter.grad for parameter in model.parameters())]
    for one, its in zip([y, *gradients, scaling_state(model).amax], expected, strict=True):
        assert torch.equal(one, its)


def test_an_index_of_no_expert_stops_the_program(grouped_half: Counter[str]) -> None:
    index, weights = routing()
    index[3, 0] = EXPERTS
    with pytest.raises(RuntimeError, match="names an expert that does not exist: there are 4"):
        convert(experts())(torch.randn(TOKENS, SIZE), index, weights)


def test_biases(grouped_half: Counter[str]) -> None:
    """Of another shape, which a kernel would read past its end; in another order; of a dtype that no kernel reads."""
    model = convert(experts("transposed, biases, interleaved gate"))
    given = torch.randn(TOKENS, SIZE), *routing()
    expected = step(model, *given)
    bias = model.gate_up_proj_bias.detach()
    model.gate_up_proj_bias = torch.nn.Parameter(bias.t().contiguous().t())
    assert all(map(torch.equal, step(model, *given), expected))
    model.gate_up_proj_bias = torch.nn.Parameter(bias.double())
    for one, other in zip(step(model, *given), expected, strict=True):
        torch.testing.assert_close(one.to(other.dtype), other)
    model.gate_up_proj_bias = torch.nn.Parameter(model.gate_up_proj_bias[:, 1:].detach().clone())
    with pytest.raises(ValueError, match=r"biases of 'gate_up_proj' must have the shape \(4, 128\).* got \(4, 127\)"):
        model(*given)


def test_what_runs_one_by_one(grouped_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes in blocks, products in bf16, layers that fell back, counted losses, no tokens, sizes that are odd."""
    x, (index, weights) = torch.randn(TOKENS, SIZE), routing()

    def in_groups(model: Fp8Experts, rows: int = TOKENS) -> bool:
        grouped_half.clear()
        step(model, x[:rows, : model.fp8["gate_up_proj.0"].weight.shape[-1]], index[:rows], weights[:rows])  # type: ignore[union-attr]
        return any("GROUPED" in name for name in grouped_half)

    assert in_groups(convert(experts()))
    assert not in_groups(convert(experts()), 0)
    assert not in_groups(convert(experts(), BlockScaling()))
    assert not in_groups(convert(experts(), DelayedScaling(wgrad="bf16")))
    model = convert(experts())
    scaling_state(model).model.counts.start("test")
    assert not in_groups(model)
    for size in (SIZE - 8, SIZE - 16):
        # no multiple of 16; no multiple of 64, of which Hopper stores rows
        monkeypatch.setattr(made, "WIDTH", size)
        assert not in_groups(convert(experts()))
