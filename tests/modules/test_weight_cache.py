"""The FP8 copy of a weight: one cast per optimizer step, and never a stale one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_fp8 import Fp8Linear, convert, scaling_state
from lightning_fp8.ops import basic


def layer() -> Fp8Linear:
    return convert(nn.Linear(16, 8, bias=False))  # type: ignore[return-value]


@pytest.fixture
def weight_casts(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    shapes: list[torch.Size] = []
    original = basic.cast_weight

    def counting(weight: torch.Tensor, *args: object) -> object:
        shapes.append(weight.shape)
        return original(weight, *args)

    monkeypatch.setattr(basic, "cast_weight", counting)
    return shapes


def test_one_cast_per_optimizer_step_whatever_the_number_of_micro_batches(weight_casts: list[torch.Size]) -> None:
    fp8 = layer()
    optimizer = torch.optim.SGD(fp8.parameters(), lr=0.1)
    for step in range(1, 4):
        for _ in range(4):
            fp8(torch.randn(4, 16)).sum().backward()
        scaling_state(fp8).update()
        optimizer.step()
        assert len(weight_casts) == step


def test_the_state_shows_what_the_last_cast_used() -> None:
    fp8 = layer()
    for factor in (1.0, 4.0, 0.01):
        with torch.no_grad():
            fp8.weight.mul_(factor)
        fp8(torch.randn(4, 16)).sum().backward()
        scaling_state(fp8).update()
        state, largest = scaling_state(fp8), fp8.weight.detach().abs().max()
        assert state.amax[state.names.index("weight")] == largest
        assert state.scale[state.names.index("weight")] == torch.tensor(448.0) / largest


class DataSGD(torch.optim.Optimizer):
    """As older optimizers do it: no trace in the parameter's version counter."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {})  # type: ignore[arg-type]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.1)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "through .data": DataSGD,
}


def halve_through_data(fp8: Fp8Linear) -> None:
    fp8.weight.data.mul_(0.5)


def halve_in_place(fp8: Fp8Linear) -> None:
    with torch.no_grad():
        fp8.weight.mul_(0.5)


def replace_data(fp8: Fp8Linear) -> None:
    fp8.weight.data = torch.randn(8, 16)
    fp8.weight.data = torch.randn(8, 16)


def replace_parameter(fp8: Fp8Linear) -> None:
    fp8.weight = nn.Parameter(torch.randn(8, 16))


def load_weights(fp8: Fp8Linear) -> None:
    fp8.load_state_dict({"weight": torch.randn(8, 16)})


def swap_rows_through_data(fp8: Fp8Linear) -> None:
    fp8.weight.data[[0, 1]] = fp8.weight.data[[1, 0]]


def negate_through_data(fp8: Fp8Linear) -> None:
    fp8.weight.data.neg_()


def permute_within_rows_and_columns(fp8: Fp8Linear) -> None:
    # four corners of a rectangle, so that sums over rows and over columns stay what they are
    fp8.weight.data[:2, :2] += torch.tensor([[1.0, -1.0], [-1.0, 1.0]]) * 2**-10


def swap_columns_of_signs(fp8: Fp8Linear) -> None:
    fp8.weight.data[:2, :2] = fp8.weight.data[:2, :2].flip(0, 1)


def change_two_signs_in_a_row(fp8: Fp8Linear) -> None:
    fp8.weight.data[0, :2] *= -1


def step(name: str) -> Callable[[Fp8Linear], None]:
    return lambda fp8: OPTIMIZERS[name](list(fp8.parameters())).step()


CHANGES = {
    "through .data": halve_through_data,
    "in place": halve_in_place,
    "new .data": replace_data,
    "new parameter": replace_parameter,
    "load_state_dict": load_weights,
    "rows swapped through .data": swap_rows_through_data,
    "negated through .data": negate_through_data,
    "row and column sums kept": permute_within_rows_and_columns,
    "corners swapped": swap_columns_of_signs,
    "two signs": change_two_signs_in_a_row,
    **{f"optimizer: {name}": step(name) for name in OPTIMIZERS},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_cast_again(change: str) -> None:
    fp8, x = layer(), torch.randn(4, 16)
    fp8(x).sum().backward()  # fills the cache
    before = fp8.weight.detach().clone()
    CHANGES[change](fp8)
    assert not torch.equal(before, fp8.weight)
    fresh = layer()
    fresh.load_state_dict(fp8.state_dict())
    assert torch.equal(fp8(x), fresh(x))


def test_weights_swapped_for_validation_and_back() -> None:
    # as weight averaging does it, through `.data`, in the middle of an accumulation window
    fp8, x = layer(), torch.randn(4, 16)
    trained = fp8(x)
    trained.sum().backward()
    kept, averaged = fp8.weight.data.clone(), torch.randn(8, 16)
    fp8.weight.data.copy_(averaged)
    fp8.eval()
    with torch.no_grad():
        in_evaluation = fp8(x)
    fresh = layer().eval()
    fresh.load_state_dict({"weight": averaged})
    assert torch.equal(in_evaluation, fresh(x))
    fp8.weight.data.copy_(kept)
    fp8.train()
    assert torch.equal(fp8(x), trained)


def test_new_scales_are_no_reason_to_cast_again(weight_casts: list[torch.Size]) -> None:
    fp8, x = layer(), torch.randn(4, 16)
    fp8(x).sum().backward()
    scaling_state(fp8).update()
    fp8(x)
    assert len(weight_casts) == 1


def test_parametrized_weight_is_cast_at_each_forward() -> None:
    fp8, x = layer(), torch.randn(4, 16)
    fp8(x).sum().backward()
    torch.nn.utils.parametrize.register_parametrization(fp8, "weight", nn.Tanh())
    expected = fp8.weight.detach().clone()
    fresh = layer()
    fresh.load_state_dict({"weight": expected})
    assert torch.equal(fp8(x), fresh(x))
    with torch.no_grad():
        fp8.parametrizations.weight.original.mul_(2)
    fresh.load_state_dict({"weight": fp8.weight.detach()})
    assert torch.equal(fp8(x), fresh(x))


def corners(first: float, second: float) -> torch.Tensor:
    """A weight whose bits have the same sums over rows and columns for both orders of the arguments."""
    weight = torch.full((8, 16), 0.5)
    weight[:2, :2] = torch.tensor([[first, second], [second, first]])
    return weight


def test_a_permutation_that_keeps_all_sums_is_noticed() -> None:
    fp8, x = layer(), torch.randn(4, 16)
    fp8.weight.data.copy_(corners(0.75, -0.25))
    fp8(x).sum().backward()
    fp8.weight.data.copy_(corners(-0.25, 0.75))
    fresh = layer()
    fresh.load_state_dict(fp8.state_dict())
    assert torch.equal(fp8(x), fresh(x))


def test_parameters_may_be_swapped() -> None:
    fp8, x = layer(), torch.randn(4, 16)
    fp8(x).sum().backward()
    scaling_state(fp8).update()
    fp8.weight.grad = None
    other = nn.Parameter(torch.randn(8, 16) * 3)
    expected = other.detach().clone()
    torch.utils.swap_tensors(fp8.weight, other)
    assert torch.equal(fp8.weight, expected)
    fresh = layer()
    fresh.load_state_dict({"weight": expected})
    scaling_state(fresh).load_state_dict(scaling_state(fp8).state_dict())
    assert torch.equal(fp8(x), fresh(x))


@pytest.mark.parametrize("what", ["to", "load_state_dict"])
def test_conversions_that_swap_parameters(what: str) -> None:
    fp8, x = layer(), torch.randn(4, 16)
    fp8(x).sum().backward()
    scaling_state(fp8).update()
    fp8.zero_grad()
    loaded = torch.randn(8, 16)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        fp8.to(torch.bfloat16) if what == "to" else fp8.load_state_dict({"weight": loaded})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    expected = layer().to(fp8.weight.dtype)
    expected.load_state_dict(fp8.state_dict())
    if what == "to":
        assert fp8.weight.dtype == torch.bfloat16
        scaling_state(expected).load_state_dict(scaling_state(fp8).state_dict())
    else:
        assert torch.equal(fp8.weight, loaded)
    assert torch.equal(fp8(x), expected(x))
