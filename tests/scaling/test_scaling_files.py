"""The files of a scaling state: the same names and shapes after any number of steps, and what is loaded of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lit import warned
from scales_in_numpy import scale_of
from torch import Tensor, nn

from lightning_fp8 import CurrentScaling, DelayedScaling, MXScaling, convert, scaling_state
from lightning_fp8.conversion import fall_back
from lightning_fp8.scaling import ScalingState
from lightning_fp8.scalings.recipe import Recipe

WIDTH = 32
RECIPES: list[Recipe] = [DelayedScaling(amax_history_len=6), CurrentScaling(), MXScaling()]
Entries = dict[str, dict[str, Tensor]]


def chain(recipe: Recipe, *names: str) -> nn.Module:
    model = nn.Sequential()
    for name in names or ("a", "b"):
        model.add_module(name, nn.Linear(WIDTH, WIDTH))
    return convert(model, recipe)


def trained(steps: int, recipe: Recipe, *names: str) -> nn.Module:
    torch.manual_seed(steps)
    model = chain(recipe, *names)
    for _ in range(steps):
        step(model)
    return model


def step(model: nn.Module) -> None:
    model(torch.randn(8, WIDTH)).sum().backward()
    scaling_state(model).update()


def shapes(entries: Entries) -> dict[str, dict[str, tuple[int, ...]]]:
    return {name: {field: tuple(value.shape) for field, value in entry.items()} for name, entry in entries.items()}


def same(first: ScalingState, second: ScalingState) -> bool:
    """Whether both have the same histories, scales and counters."""
    delayed = slice(first.delayed)
    pairs = (
        (first.amax_history, second.amax_history),
        (first.scale[delayed], second.scale[delayed]),
        (first.nonfinite_steps[delayed], second.nonfinite_steps[delayed]),
    )
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.precision)
def test_names_and_shapes_are_the_same_after_any_number_of_steps(recipe: Recipe) -> None:
    files = [scaling_state(trained(steps, recipe)).state_dict() for steps in (0, 1, 5, 9)]
    assert all(shapes(file) == shapes(files[0]) for file in files)
    fields = {"nonfinite_steps": (), "in_fp8": ()}
    if recipe.from_history:
        fields |= {"amax_history": (6,), "is_current": ()}
    assert shapes(files[0]) == {f"{name}.{role}": fields for role in ("input", "grad_output") for name in "ab"}


@pytest.mark.parametrize(
    ("saved", "into", "recipe"),
    [(5, 0, RECIPES[0]), (9, 5, RECIPES[1]), (5, 0, RECIPES[2]), (20, 3, RECIPES[0]), (0, 4, RECIPES[0])],
)
def test_distributed_checkpoints_load_into_a_model_of_any_step(
    saved: int, into: int, recipe: Recipe, tmp_path: Path
) -> None:
    source, model = trained(saved, recipe), trained(into, recipe)
    fall_back(source, "b")
    dcp.save({"model": source.state_dict(), "scaling": scaling_state(source).state_dict()}, checkpoint_id=tmp_path)
    loaded: dict[str, Any] = {"model": model.state_dict(), "scaling": scaling_state(model).state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path)
    model.load_state_dict(loaded["model"])
    scaling_state(model).load_state_dict(loaded["scaling"])
    assert scaling_state(model).fallbacks == ("b",)
    if recipe.from_history:
        assert same(scaling_state(model), scaling_state(source))
    for _ in range(2):
        for one in (source, model):
            torch.manual_seed(7)
            step(one)
    assert same(scaling_state(model), scaling_state(source))


def test_a_state_is_stateful_itself(tmp_path: Path) -> None:
    source, model = trained(5, RECIPES[0]), trained(0, RECIPES[0])
    dcp.save({"scaling": scaling_state(source)}, checkpoint_id=tmp_path)
    dcp.load({"scaling": scaling_state(model)}, checkpoint_id=tmp_path)
    assert same(scaling_state(model), scaling_state(source))


@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(amax_history_len=2),
        DelayedScaling(amax_history_len=9, margin=3),
        DelayedScaling(amax_history_len=6, amax_compute_algo="most_recent"),
        DelayedScaling(amax_history_len=1, fp8_format="E4M3"),
    ],
    ids=str,
)
def test_another_recipe_with_histories(recipe: DelayedScaling) -> None:
    """Histories are cut or padded, and scales computed anew, here by numpy."""
    file = scaling_state(trained(4, RECIPES[0])).state_dict()
    model = chain(recipe)
    state = scaling_state(model)
    state.load_state_dict(file)
    for row, name in enumerate(state.names[: state.delayed]):
        kept = file[name]["amax_history"][: recipe.amax_history_len]
        kept = kept[kept > 0]
        history = state.amax_history[:, row]
        assert torch.equal(history[: len(kept)], kept)
        assert not history[len(kept) :].any()
        amax = kept[0] if recipe.newest_only else kept.max()
        assert state.scale[row] == scale_of(amax.numpy(), recipe.format_of(name.split(".")[1]).name, recipe.margin)


def test_to_and_from_a_recipe_without_histories() -> None:
    delayed, current = trained(3, RECIPES[0]), trained(3, RECIPES[1])
    fall_back(delayed, "b")
    state = scaling_state(current)
    state.load_state_dict(scaling_state(delayed).state_dict())
    assert state.fallbacks == ("b",)
    fresh = scaling_state(trained(2, RECIPES[0]))
    fresh.load_state_dict(state.state_dict())
    assert fresh.fallbacks == ("b",)
    assert not fresh.amax_history.any()


def test_what_only_one_side_has() -> None:
    source, model = trained(3, RECIPES[0], "a", "b", "late"), trained(2, RECIPES[0], "new", "b")
    file, state = scaling_state(source).state_dict(), scaling_state(model)
    (said,) = warned("lightning_fp8", lambda: state.load_state_dict(file))
    assert "Only in the file: 'a.input', 'late.input', 'a.grad_output', 'late.grad_output'." in said
    assert "Only in the model: 'new.input', 'new.grad_output'." in said
    filled = {name: int((state.amax_history[:, row] > 0).sum()) for row, name in enumerate(state.names[:4])}
    assert filled == {"new.input": 0, "b.input": 3, "new.grad_output": 0, "b.grad_output": 3}
    model.add_module("late", nn.Linear(WIDTH, WIDTH))
    convert(model)
    row = state.names.index("late.input")
    assert torch.equal(state.amax_history[:, row], file["late.input"]["amax_history"])
    assert state.scale[row] == scaling_state(source).scale[2]


ANOTHER_FORM: dict[str, tuple[Callable[[Entries], Any], str]] = {
    "another model": (
        lambda file: {f"x.{name}": entry for name, entry in file.items()},
        r"no layer is in both\. Only in the file: 'x\.a\.input'.* Only in the model: 'a\.input'",
    ),
    "nothing": (lambda file: {}, "no layer is in both. Only in the model"),
    "other fields": (
        lambda file: {name: {**entry, "scale": torch.ones(())} for name, entry in file.items()},
        r"'a\.input' is of another form: it has the fields 'amax_history', 'in_fp8'.*this version reads",
    ),
    "the weights": (lambda file: {"a.weight": torch.zeros(3)}, "must map names of tensors to their entries"),
    "a list": (lambda file: [1], "must map names of tensors to their entries"),
    "an entry that is no mapping": (
        lambda file: {**file, "b.input": None},
        "must map names of tensors to their entries",
    ),
}


@pytest.mark.parametrize("what", ANOTHER_FORM)
def test_what_is_no_file_of_this_model_changes_nothing(what: str) -> None:
    model = trained(3, RECIPES[0])
    state, (make, message) = scaling_state(model), ANOTHER_FORM[what]
    fall_back(model, "b")
    before = state.state_dict()
    with pytest.raises(ValueError, match=message):
        state.load_state_dict(make(scaling_state(trained(2, RECIPES[0])).state_dict()))
    after = state.state_dict()
    assert all(torch.equal(before[name][field], after[name][field]) for name in before for field in before[name])
