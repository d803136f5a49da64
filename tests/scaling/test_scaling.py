from __future__ import annotations

import copy
import io
import math

import pytest
import torch

from lightning_fp8 import DelayedScaling
from lightning_fp8.scaling import ScalingState

INF, NAN = math.inf, math.nan
INPUT, GRAD, WEIGHT = 0, 1, 2


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
        (DelayedScaling(amax_history_len=1), [8, 1], [56, 448]),
        # a window of 1 equals `most_recent` in any window
        (DelayedScaling(amax_history_len=1), [2, 1, 4, 0.5], [224, 448, 112, 896]),
        # the default: 16 steps
        (DelayedScaling(), [8, *[1] * 16], [56] * 16 + [448]),
    ],
)
def test_worked_cases(recipe: DelayedScaling, amaxes: list[float], scales: list[float]) -> None:
    assert run(recipe, amaxes)[1] == scales


def test_history_is_newest_first_and_skips_steps_without_amax() -> None:
    state, _ = run(DelayedScaling(amax_history_len=4), [2, 0, 0, 8])
    assert state.amax_history[:, INPUT].tolist() == [8, 2, 0, 0]
    assert state.amax_history[:, GRAD].tolist() == [0, 0, 0, 0]
    assert state.scale[GRAD].item() == 1


@pytest.mark.parametrize(("fp8_format", "scale"), [("HYBRID", 57344 / 2), ("E4M3", 224)])
def test_gradients_use_the_format_of_the_recipe(fp8_format: str, scale: float) -> None:
    assert run(DelayedScaling(fp8_format=fp8_format), [2], row=GRAD)[1] == [scale]  # type: ignore[arg-type]


def test_non_finite_amax_never_enters_the_history() -> None:
    state, scales = run(DelayedScaling(amax_history_len=4), [2, INF, NAN, 4])
    assert scales == [224, 224, 224, 112]
    assert state.amax_history[:, INPUT].tolist() == [4, 2, 0, 0]
    assert state.nonfinite_steps.tolist() == [2, 0, 0]


def test_extreme_amaxes_give_finite_positive_scales() -> None:
    largest = torch.finfo(torch.float32).max
    assert run(DelayedScaling(), [1e-44])[1] == [largest]  # 448 / 1e-44 is infinite
    assert run(DelayedScaling(margin=127), [1e30])[1][0] > 0  # 1e30 * 2**127 is infinite


def test_an_update_leaves_weights_alone() -> None:
    state = ScalingState(["a", "b"], DelayedScaling(amax_history_len=16))
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


def test_names() -> None:
    assert ScalingState(["blocks.0.qkv", ""], DelayedScaling()).names == (
        "blocks.0.qkv.input",
        "input",
        "blocks.0.qkv.grad_output",
        "grad_output",
        "blocks.0.qkv.weight",
        "weight",
    )


def filled(history: int = 4, names: tuple[str, ...] = ("a", "b")) -> ScalingState:
    state = ScalingState(names, DelayedScaling(amax_history_len=history))
    for step in range(3):
        state.amax[: state.delayed] = torch.arange(state.delayed) + 0.25 * step
        state.update()
    state.amax[1], state.nonfinite_steps[2] = 7.0, 5
    return state


def fields(state: ScalingState) -> list[torch.Tensor]:
    """The state's fields for the tensors that have a history."""
    return [getattr(state, name)[..., : state.delayed] for name in ("amax", "amax_history", "scale", "nonfinite_steps")]


def test_state_dict_round_trip_through_a_weights_only_file() -> None:
    state, other = filled(), filled(names=("a", "b"))
    other.load_state_dict(ScalingState(["a", "b"], DelayedScaling(amax_history_len=4)).state_dict())
    assert other.amax_history.count_nonzero() == 0
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert set(saved) == {"a.input", "a.grad_output", "b.input", "b.grad_output"}
    # only the filled part of the window
    assert saved["b.input"]["amax_history"].tolist() == [1.5, 1.25, 1.0]
    other.load_state_dict(saved)
    assert all(map(torch.equal, fields(state), fields(other)))


def test_state_dict_is_keyed_by_name_not_by_position() -> None:
    state, other = filled(), ScalingState(["b", "a"], DelayedScaling(amax_history_len=4))
    other.load_state_dict(state.state_dict())
    for mine, name in enumerate(other.names[:4]):
        theirs = state.names.index(name)
        assert mine != theirs
        assert other.scale[mine] == state.scale[theirs]
        assert torch.equal(other.amax_history[:, mine], state.amax_history[:, theirs])


@pytest.mark.parametrize(("length", "history"), [(2, [0.5, 0.25]), (6, [0.5, 0.25, 0, 0, 0, 0])])
def test_another_window_length_keeps_the_newest_entries(length: int, history: list[float]) -> None:
    other = ScalingState(["a", "b"], DelayedScaling(amax_history_len=length))
    other.load_state_dict(filled().state_dict())
    assert other.amax_history[:, 0].tolist() == history


def test_load_names_missing_and_unexpected_tensors_and_changes_nothing() -> None:
    state = filled()
    before = copy.deepcopy(state)
    with pytest.raises(ValueError, match="does not fit this model") as error:
        state.load_state_dict(filled(names=("a", "c")).state_dict())
    assert "In the model but not in the checkpoint: 'b.input', 'b.grad_output'." in str(error.value)
    assert "In the checkpoint but not in the model: 'c.input', 'c.grad_output'." in str(error.value)
    with pytest.raises(ValueError, match=r"does not fit this model\. In the model but") as error:
        state.load_state_dict(filled(names=("a",)).state_dict())
    assert "In the checkpoint" not in str(error.value)
    broken = filled().state_dict()
    del broken["b.grad_output"]["scale"]
    with pytest.raises(ValueError, match=r"'b.grad_output' lacks the tensors scale"):
        state.load_state_dict(broken)
    assert all(map(torch.equal, fields(state), fields(before)))


def test_made_in_inference_mode_it_can_be_updated_outside() -> None:
    with torch.inference_mode():
        state = ScalingState(["a"], DelayedScaling())
    state.amax[0] = 2.0
    state.update()
    assert state.scale[0] == 224


SINGLE = torch.tensor
MALFORMED = {
    "a scale that float32 has not": {"scale": SINGLE(1e39, dtype=torch.float64)},
    "a scale that is 0 in float32": {"scale": SINGLE(1e-50, dtype=torch.float64)},
    "a negative amax": {"amax": SINGLE(-1.0)},
    "minus infinity": {"amax": SINGLE(-INF)},
    "an amax too large for float32": {"amax_history": SINGLE([1e39], dtype=torch.float64)},
    "a gap": {"amax_history": SINGLE([0.0, 1.0])},
    "a counter that is NaN": {"nonfinite_steps": SINGLE(NAN)},
    "a counter below 0": {"nonfinite_steps": SINGLE(-1)},
    "half a step": {"nonfinite_steps": SINGLE(1.5)},
    "a counter without end": {"nonfinite_steps": SINGLE(INF)},
}


@pytest.mark.parametrize("what", MALFORMED)
def test_values_that_the_state_cannot_hold_are_refused(what: str) -> None:
    state = filled()
    before, entries = copy.deepcopy(state), filled().state_dict()
    entries["b.input"].update(MALFORMED[what])
    with pytest.raises(ValueError, match=r"The scaling state of 'b\.input' must"):
        state.load_state_dict(entries)
    assert all(map(torch.equal, fields(state), fields(before)))


def test_an_amax_that_waits_may_be_infinite() -> None:
    # recorded in the middle of an accumulation, and skipped by the next update
    state, entries = filled(), filled().state_dict()
    entries["b.input"]["amax"] = SINGLE(INF)
    state.load_state_dict(entries)
    state.update()
    assert state.nonfinite_steps[state.names.index("b.input")] == 1


def test_entries_of_weights_are_left_out_of_account() -> None:
    # versions up to 0.5.0 wrote them
    state, entries = filled(), filled().state_dict()
    entries["a.weight"] = {"amax": SINGLE(-1.0)}
    state.load_state_dict(entries)
    assert all(map(torch.equal, fields(state), fields(filled())))


def test_a_step_given_up_leaves_nothing() -> None:
    state, other = filled(), filled()
    state.amax[: state.delayed] = INF
    state.discard()
    other.amax[: other.delayed] = 0
    state.update(), other.update()
    assert all(map(torch.equal, fields(state), fields(other)))
