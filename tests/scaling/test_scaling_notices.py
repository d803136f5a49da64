"""Notices of a scaling state after copies and loaded states."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from lightning_fp8 import convert, scaling_state
from lightning_fp8.scaling import ScalingState


def converted() -> nn.Linear:
    return convert(nn.Linear(8, 8), min_features=0)


def record(model: nn.Module, value: float = 1.0) -> ScalingState:
    model(torch.full((2, 8), value)).sum().backward()
    return scaling_state(model)


def test_a_backward_is_no_evaluation() -> None:
    # as through a frozen encoder, which never records
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record(converted().eval())


def test_inf_or_nan_after_a_load_is_reported() -> None:
    model = converted()
    scaling_state(model).load_state_dict(scaling_state(model).state_dict())
    record(model, float("nan"))
    with pytest.warns(UserWarning, match="inf or NaN in 'input'"):
        scaling_state(model).update()


def test_a_copy_does_not_report_what_was_before_it() -> None:
    model = converted()
    state = record(model, float("inf"))
    with pytest.warns(UserWarning, match="inf or NaN in 'input'"):
        state.update()
    other = copy.deepcopy(state)
    assert other.nonfinite_steps[0] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.update()


@pytest.mark.parametrize("how", ["copied", "loaded"])
def test_amaxes_that_came_along_become_scales(how: str) -> None:
    model = converted()
    state = record(model)
    if how == "copied":
        model = copy.deepcopy(model)
    else:
        state.load_state_dict(state.state_dict())
    scaling_state(model).update()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model.eval()(torch.ones(2, 8))


@pytest.mark.parametrize("place", ["after the step", "in a hook of the optimizer"])
def test_weights_that_a_loop_clips_after_each_step(place: str) -> None:
    """They are no longer what the optimizer made of them, unless clipping is a part of its step."""
    model = nn.Sequential(converted(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.no_grad()
    def clip(*_: object) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.05, 0.05)

    if place == "in a hook of the optimizer":
        optimizer.register_step_post_hook(clip)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            state = record(model)
            state.update()
            optimizer.step()
            optimizer.zero_grad()
            if place == "after the step":
                clip()
    said = [str(warning.message) for warning in caught]
    assert ["changes weights of a model" in message for message in said] == (
        [True] if place == "after the step" else []
    )
    assert int((state.amax_history[:, 0] > 0).sum()) == (1 if place == "after the step" else 8)
