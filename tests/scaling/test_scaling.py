"""A scaling state by itself: what an update computes, and what is saved and loaded."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_blocks import linear
from moved import to_bf16, to_current
from torch import nn

from lightning_fp8 import DelayedScaling, scaling_state
from lightning_fp8.scaling import ScalingState
from lightning_fp8.scaling.statistics import scales_in_words

INF, NAN = math.inf, math.nan
INPUT, GRAD = 0, 1
LARGEST = torch.finfo(torch.float32).max


def run(recipe: DelayedScaling, amaxes: list[float], row: int = INPUT) -> tuple[ScalingState, list[float]]:
    state, scales = ScalingState(["layer"], recipe), []
    for amax in amaxes:
        state.amax[row] = amax
        state.update()
        scales.append(state.scale[row].item())
    return state, scales


@pytest.mark.parametrize(
    ("recipe", "amaxes", "scales"),
    [
        (DelayedScaling(amax_history_len=4), [2, 1, 4, 0.5], [224, 224, 112, 112]),
        (DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"), [2, 1, 4, 0.5], [224, 448, 112, 896]),
        (DelayedScaling(amax_history_len=4, margin=2), [2], [56]),
        (DelayedScaling(amax_history_len=4), [2, 0, 0, 8], [224, 224, 224, 56]),
        # the largest entry leaves the window after four more steps
        (DelayedScaling(amax_history_len=4), [8, 1, 1, 1, 1], [56, 56, 56, 56, 448]),
        # a window of 1 equals `most_recent` in any window
        (DelayedScaling(amax_history_len=1), [2, 1, 4, 0.5], [224, 448, 112, 896]),
        # the default: 16 steps
        (DelayedScaling(), [8, *[1] * 16], [56] * 16 + [448]),
        (DelayedScaling(amax_history_len=4), [2, INF, NAN, 4], [224, 224, 224, 112]),
        # 448 / 1e-44 is infinite
        (DelayedScaling(), [1e-44], [LARGEST]),
    ],
)
def test_worked_cases(recipe: DelayedScaling, amaxes: list[float], scales: list[float]) -> None:
    assert run(recipe, amaxes)[1] == scales


def test_histories() -> None:
    state, _ = run(DelayedScaling(amax_history_len=4), [2, 0, INF, 0, NAN, 8])
    # newest first, without steps that have no amax, or none that is finite
    assert state.amax_history[:, INPUT].tolist() == [8, 2, 0, 0]
    assert state.nonfinite_steps.tolist() == [2, 0, 0]
    assert state.amax_history[:, GRAD].tolist() == [0, 0, 0, 0]
    assert state.scale[GRAD].item() == 1
    # 1e30 * 2**127 is infinite
    assert run(DelayedScaling(margin=127), [1e30])[1][0] > 0


@pytest.mark.parametrize(("fp8_format", "scale"), [("HYBRID", 57344 / 2), ("E4M3", 224)])
def test_gradients_use_the_format_of_the_recipe(fp8_format: Any, scale: float) -> None:
    assert run(DelayedScaling(fp8_format=fp8_format), [2], row=GRAD)[1] == [scale]


def test_an_update_leaves_weights_alone() -> None:
    state = ScalingState(["a", ""], DelayedScaling(amax_history_len=16))
    assert state.names == ("a.input", "input", "a.grad_output", "grad_output", "a.weight", "weight")
    state.amax.fill_(3.0)
    state.scale[4:] = torch.tensor([5.0, 7.0])
    state.amax[5] = NAN
    state.update()
    assert state.amax[:5].tolist() == [0, 0, 0, 0, 3]
    assert state.scale[4:].tolist() == [5, 7]
    assert state.amax_history.shape == (16, 4)
    # but it counts that one of them is not finite
    assert state.nonfinite_steps.tolist() == [0] * 5 + [1]
    assert state.updates == 1


def test_made_in_inference_mode_it_can_be_updated_outside() -> None:
    with torch.inference_mode():
        state = ScalingState(["a"], DelayedScaling())
    state.amax[0] = 2.0
    state.update()
    assert state.scale[0] == 224


def test_scales_in_words() -> None:
    model = linear(DelayedScaling(), 16, 16)
    state = scaling_state(model)
    assert scales_in_words(state) == []
    nn.init.constant_(model.weight, 0.25)
    (model(torch.full((4, 16), 2.0)) * 0.5).sum().backward()
    state.update()
    numbers = [
        ("input", "2", "224", "448"),
        ("grad_output", "0.5", "1.15e+05", "57344"),
        ("weight", "0.25", "1.79e+03"),
    ]
    for line, (name, *found) in zip(scales_in_words(state), numbers, strict=True):
        assert line.startswith(f"{name}: ")
        assert all(f" {number}" in line for number in found)


# saved and loaded


def filled(names: tuple[str, ...] = ("a", "b")) -> ScalingState:
    state = ScalingState(names, DelayedScaling(amax_history_len=4))
    for step in range(3):
        state.amax[: state.delayed] = torch.arange(state.delayed) + 0.25 * step
        state.update()
    state.amax[1], state.nonfinite_steps[2] = 7.0, 5
    return state


def same(one: ScalingState, other: ScalingState) -> bool:
    """Whether all fields of the tensors that have a history are equal, by name."""
    rows = [other.names.index(name) for name in one.names[: one.delayed]]
    fields = ("amax_history", "scale", "nonfinite_steps")
    return all(torch.equal(getattr(one, f)[..., : one.delayed], getattr(other, f)[..., rows]) for f in fields)


def test_state_dict_round_trip_through_a_weights_only_file() -> None:
    state, file = filled(), io.BytesIO()
    to_current(state, 1)
    to_bf16(state, "a")
    torch.save(state.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert set(saved) == {"a.input", "a.grad_output", "b.input", "b.grad_output"}
    assert saved["b.input"]["amax_history"].tolist() == [1.5, 1.25, 1.0, 0.0]
    # keyed by name, not by position
    for names in (("a", "b"), ("b", "a")):
        other = ScalingState(names, DelayedScaling(amax_history_len=4))
        other.load_state_dict(saved)
        assert same(other, state)
        assert (other.current_modules, other.fallbacks) == (("b",), ("a",))
    # which empties histories, too
    other.load_state_dict(ScalingState(["a", "b"], DelayedScaling()).state_dict())
    assert other.amax_history.count_nonzero() == 0
    assert other.fallbacks == ()


# a history of one step needs no other order of memory
@pytest.mark.parametrize("window", [1, 4])
def test_a_state_dict_stays_as_it_is_when_the_state_goes_on(window: int) -> None:
    state = ScalingState(["a"], DelayedScaling(amax_history_len=window))
    state.amax.fill_(2.0)
    state.update()
    saved = state.state_dict()
    for amax in (3.0, float("inf")):
        state.amax.fill_(amax)
        state.update()
    for entry in saved.values():
        assert entry["amax_history"].tolist() == [2.0, 0.0, 0.0, 0.0][:window]
        assert entry["nonfinite_steps"] == 0


MALFORMED: dict[str, tuple[str, Any]] = {
    "a negative amax": ("amax_history", torch.tensor([-1.0])),
    "an infinite amax": ("amax_history", torch.tensor([INF])),
    "an amax too large for float32": ("amax_history", torch.tensor([1e39], dtype=torch.float64)),
    "a gap": ("amax_history", torch.tensor([0.0, 1.0])),
    "a history of two dimensions": ("amax_history", torch.ones(1, 2)),
    "a history without a dimension": ("amax_history", torch.tensor(1.0)),
    "a list": ("amax_history", [1.0, 2.0]),
    "a counter that is NaN": ("nonfinite_steps", torch.tensor(NAN)),
    "a counter below 0": ("nonfinite_steps", torch.tensor(-1)),
    "half a step": ("nonfinite_steps", torch.tensor(1.5)),
    "a counter without end": ("nonfinite_steps", torch.tensor(INF)),
    "a complex counter": ("nonfinite_steps", torch.tensor(1j)),
    "no tensor": ("nonfinite_steps", 0),
    "two flags": ("in_fp8", torch.ones(2)),
    "a word": ("in_fp8", "no"),
    "nothing": ("is_current", None),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_values_that_the_state_cannot_hold_are_refused(what: str) -> None:
    state, entries = filled(), filled().state_dict()
    before, (field, value) = copy.deepcopy(state), MALFORMED[what]
    entries["b.input"][field] = value
    with pytest.raises(ValueError, match=r"The scaling state of 'b\.input' must"):
        state.load_state_dict(entries)
    assert same(state, before)


@pytest.mark.parametrize("drop", [ScalingState.discard, lambda state: state.load_state_dict(filled().state_dict())])
def test_an_amax_that_waits_is_dropped_with_its_step_and_by_a_load(drop: Callable[[ScalingState], None]) -> None:
    # as gradients that wait are
    state = filled()
    state.amax.fill_(INF)
    drop(state)
    assert not state.amax[: state.delayed].any()
    state.update()
    assert same(state, filled())
