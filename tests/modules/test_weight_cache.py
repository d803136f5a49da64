"""The FP8 copy of a weight: one cast per optimizer step, and never a stale one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fp8 import convert, scaling_state, weights_unchanged
from lightning_fp8.modules import Fp8Linear
from lightning_fp8.modules.weight_cast import assume_unchanged
from lightning_fp8.modules.weights_unchanged import casts_of


def layer() -> Fp8Linear:
    return convert(nn.Linear(16, 8, bias=False), min_features=0)  # type: ignore[return-value]


def assert_fresh(fp8: Fp8Linear, x: torch.Tensor) -> None:
    """The layer computes with the weight's current values."""
    fresh = layer().train(fp8.training)
    fresh.load_state_dict(fp8.state_dict())
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        assert torch.equal(fp8(x), fresh(x))


class DataSGD(torch.optim.Optimizer):
    """Updates weights as older optimizers do, which leaves no trace in the parameter's version counter."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {})  # type: ignore[arg-type]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.1)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
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


def assign_weights(fp8: Fp8Linear) -> None:
    fp8.load_state_dict({"weight": torch.randn(8, 16)}, assign=True)


def load_by_swapping(fp8: Fp8Linear) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        fp8.load_state_dict({"weight": torch.randn(8, 16)})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def copy_weights(fp8: Fp8Linear) -> None:
    with torch.no_grad():
        fp8.weight.copy_(torch.randn(8, 16))


def swap_weights(fp8: Fp8Linear) -> None:
    other = nn.Parameter(torch.randn(8, 16) * 3)
    other.grad, fp8.weight.grad = fp8.weight.grad, None
    torch.utils.swap_tensors(fp8.weight, other)


def step(name: str) -> Callable[[Fp8Linear], None]:
    return lambda fp8: OPTIMIZERS[name](list(fp8.parameters())).step()


CHANGES = {
    "in place": halve_in_place,
    "new .data": replace_data,
    "new parameter": replace_parameter,
    "load_state_dict": load_weights,
    "load_state_dict(assign=True)": assign_weights,
    "copy_": copy_weights,
    "swap_tensors": swap_weights,
    "load_state_dict that swaps": load_by_swapping,
    **{f"optimizer: {name}": step(name) for name in OPTIMIZERS},
}


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize(("change", "frozen"), list(zip(CHANGES, itertools.cycle([False, True]))))
def test_a_changed_weight_is_cast_again(change: str, frozen: bool) -> None:
    fp8, x = layer(), torch.randn(4, 16)
    fp8(x).sum().backward()
    # it still has a gradient, with which an optimizer may change it
    fp8.weight.requires_grad_(not frozen)
    fp8(x)
    before = fp8.weight.detach().clone()
    CHANGES[change](fp8)
    assert not torch.equal(before, fp8.weight)
    assert_fresh(fp8, x)


EVENTS: dict[str, Callable[[Fp8Linear], object]] = {
    "optimizer step": lambda fp8: torch.optim.SGD(fp8.parameters(), lr=0.0).step(),
    "update of the scales": lambda fp8: scaling_state(fp8).update(),
    "switch to evaluation and back": lambda fp8: (fp8.eval(), fp8.train()),
    "load": lambda fp8: fp8.load_state_dict({}, strict=False),
    "evaluation": lambda fp8: fp8.eval(),
    "evaluation in training mode": None,
}


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize(("event", "frozen"), list(zip(EVENTS, [False, True] * 3)))
def test_a_change_in_place_through_data_leaves_no_trace_and_is_used_from_the_next_event_on(
    event: str, frozen: bool
) -> None:
    fp8, x = layer(), torch.randn(4, 16)
    before = fp8(x)
    before.sum().backward()
    # it still has a gradient, with which an optimizer may change it
    fp8.weight.requires_grad_(not frozen)
    fp8(x)
    halve_through_data(fp8)
    assert torch.equal(fp8(x), before)
    if EVENTS[event] is not None:
        EVENTS[event](fp8)
    with torch.set_grad_enabled(not event.startswith("evaluation")):
        assert_fresh(fp8, x)
        # in training, the scale of the input has not changed; half a weight has the same codes
        assert torch.equal(fp8(x), before / 2) or not fp8.training


@pytest.mark.parametrize("event", EVENTS)
def test_steps_and_updates_are_no_events_for_a_frozen_weight_without_a_gradient(event: str) -> None:
    fp8, x, other = layer().requires_grad_(False), torch.randn(4, 16), nn.Linear(4, 4)
    before = fp8(x)
    halve_through_data(fp8)
    if event == "optimizer step":
        other(x[:, :4]).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    elif EVENTS[event] is not None:
        EVENTS[event](fp8)
    with torch.set_grad_enabled(not event.startswith("evaluation")):
        if event in ("optimizer step", "update of the scales"):
            assert torch.equal(fp8(x), before)
        else:
            assert_fresh(fp8, x)


# --- weights that are declared unchanged, and frozen ones ---


@pytest.mark.parametrize(
    ("training", "mode"), [(True, torch.no_grad), (False, torch.enable_grad), (False, torch.inference_mode)]
)
def test_a_weight_declared_unchanged_is_cast_once(
    training: bool, mode: Callable[[], Any], weight_casts: list[torch.Size]
) -> None:
    fp8, x = layer().train(training), torch.randn(4, 16)
    for times in (1, 2):
        with weights_unchanged(fp8):
            for _ in range(3):
                with mode():
                    y = fp8(x)
        assert len(weight_casts) == times
    with weights_unchanged(nn.Linear(4, 4)):
        pass
    assert_fresh(fp8, x)
    assert torch.equal(y, fp8(x))


def test_a_copy_made_without_gradients_serves_a_forward_with_them(cuda_half: object) -> None:
    """Backward needs the payloads by columns, which the first forward did not make."""
    fp8, x, plain = layer(), torch.randn(4, 16), layer()
    plain.load_state_dict(fp8.state_dict())
    gradients = []
    for one in (fp8, plain):
        given = x.clone().requires_grad_()
        with weights_unchanged(one) if one is fp8 else nullcontext():
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    one(x)
            one(given).sum().backward()
        gradients.append((given.grad, one.weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize(("change", "training"), list(zip(CHANGES, itertools.cycle([False, True]))))
def test_a_change_with_a_trace_is_seen_in_spite_of_a_declaration_and_no_copy_outlives_it(
    change: str, training: bool
) -> None:
    fp8, x = layer().train(training), torch.randn(4, 16)
    with weights_unchanged(fp8):
        fp8(x).sum().backward()
        for _ in range(2):
            before = fp8.weight.detach().clone()
            CHANGES[change](fp8)
            assert not torch.equal(before, fp8.weight)
            assert_fresh(fp8, x)
        fp8(x).sum().backward()
    CHANGES[change](fp8)
    assert_fresh(fp8, x)
    with weights_unchanged(fp8):
        assert_fresh(fp8, x)
    with assume_unchanged(casts_of(fp8.fp8.values())):
        fp8(x).sum().backward()
    CHANGES[change](fp8)
    assert_fresh(fp8, x)


def test_a_square_weight_that_is_transposed_in_its_place() -> None:
    """Only the strides of its data change, which leave a trace too."""
    fp8, fresh = (convert(nn.Linear(16, 16, bias=False)) for _ in range(2))
    x = torch.randn(4, 16)
    with weights_unchanged(fp8):
        fp8(x)
        fp8.weight.data = fp8.weight.data.t()
        fresh.load_state_dict(fp8.state_dict())
        assert torch.equal(fp8(x), fresh(x))


@pytest.mark.parametrize(
    ("vouch", "mode"),
    [
        (weights_unchanged, torch.no_grad),
        (lambda fp8: assume_unchanged(casts_of(fp8.fp8.values())), torch.inference_mode),
    ],
)
def test_a_weight_that_becomes_an_inference_tensor_is_cast_again(vouch: Any, mode: Callable[[], Any]) -> None:
    fp8, x = layer().eval(), torch.randn(4, 16)
    with torch.inference_mode():
        other = nn.Parameter(torch.randn(8, 16) * 3)
    with mode(), vouch(fp8):
        fp8(x)
        torch.utils.swap_tensors(fp8.weight, other)
        assert fp8.weight.is_inference()
        assert_fresh(fp8, x)
        # each time, as nothing records what happens to it
        with torch.inference_mode():
            fp8.weight.mul_(0.5)
        assert_fresh(fp8, x)


def test_declarations_nest_and_end_with_the_last(weight_casts: list[torch.Size]) -> None:
    model, x = nn.Sequential(layer(), nn.ReLU(), nn.Linear(8, 16), layer()).eval(), torch.randn(4, 16)
    with weights_unchanged(model):
        model(x)
        with pytest.raises(ValueError, match="last dimension"), weights_unchanged(model[3]):
            model(x[:, :4])
        model(x)
        assert len(weight_casts) == 2
    model(x)
    assert len(weight_casts) == 4


def test_a_declaration_in_one_thread_holds_in_all(weight_casts: list[torch.Size]) -> None:
    fp8, x = layer().eval(), torch.randn(4, 16)
    expected, inside, ended = fp8(x), threading.Event(), threading.Event()

    def other() -> None:
        with weights_unchanged(fp8):
            fp8(x)
            inside.set()
            ended.wait(60)
            # the first context has ended, this one has not
            fp8(x)

    thread = threading.Thread(target=other)
    with weights_unchanged(fp8):
        fp8(x)
        thread.start()
        assert inside.wait(60)
    ended.set()
    thread.join()
    assert len(weight_casts) == 1 + 1
    fp8.weight.data.neg_()
    assert torch.equal(fp8(x), -expected)


def test_the_losses_of_a_frozen_weight_are_counted_in_each_step() -> None:
    fp8, x = layer(), torch.randn(4, 16, requires_grad=True)
    fp8.weight.requires_grad_(False)
    fp8(x)
    counts, row = scaling_state(fp8).cast_counts, scaling_state(fp8).names.index("weight")
    for _ in range(2):
        counts.start(fp8)
        fp8(x)
        assert counts.values is not None
        assert counts.values[row, 0] == 16 * 8
        counts.stop(fp8)
