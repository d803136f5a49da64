"""Layers that were moved, to bf16 or to the scales of their own values, stay there in every copy of a model."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from experts import experts, routing
from lit import TRUSTED, loader, make_trainer, seeded
from moved import to_current
from pairwise import pairwise
from small_models import small_mlp
from torch import Tensor, nn

from lightning_fp8 import CurrentScaling, PrecisionSchedule, convert, scaling_state
from lightning_fp8.conversion import fall_back


def saved_whole(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Whole(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_whole,
    "a part of a whole": lambda model: convert(Whole(copy.deepcopy(model))).part,
    "an average": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "linear": (small_mlp, lambda: (torch.randn(8, 32),)),
    "attention": (lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.0), lambda: (torch.randn(8, 2, 32),)),
    "experts": (experts, lambda: (torch.randn(12, 32), *routing())),
}


def names(model: nn.Module) -> list[str]:
    return list(scaling_state(model).module_names)


def one_falls_back(model: nn.Module) -> None:
    fall_back(model, names(model)[1])


def one_is_current(model: nn.Module) -> None:
    to_current(scaling_state(model), 0)


def both(model: nn.Module) -> None:
    one_is_current(model), one_falls_back(model)


def by_schedule(model: nn.Module) -> None:
    PrecisionSchedule({0: {"*": "bf16"}}).before_step(model, 0)


def in_part_by_schedule(model: nn.Module) -> None:
    PrecisionSchedule({0: {"fprop": "bf16"}}).before_step(model, 0)


def to_current_by_schedule(model: nn.Module) -> None:
    PrecisionSchedule({0: "fp8-current"}).before_step(model, 0)


MOVES = (one_falls_back, one_is_current, both, by_schedule, in_part_by_schedule, to_current_by_schedule)


def places(model: nn.Module) -> list[Any]:
    return [(one.in_bf16, one.is_current) for one in scaling_state(model).precisions]


def step(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The output and the gradients of a step in training, and the output of an evaluation after it."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(*inputs)
        y.float().square().mean().backward()
        with torch.no_grad():
            evaluated = model.eval()(*inputs)
    model.train()
    scaling_state(model).update()
    return [y.detach(), evaluated, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def assert_the_same(one: nn.Module, other: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    assert places(one) == places(other)
    for _ in range(2):
        assert all(map(torch.equal, step(one, inputs), step(other, inputs)))
    assert places(one) == places(other)


def moved(kind: str, move: Callable[[nn.Module], None]) -> tuple[nn.Module, nn.Module, tuple[Tensor, ...]]:
    """A model whose layers were moved between two steps, a new one of its kind, and inputs for both."""
    torch.manual_seed(0)
    make, draw = MODELS[kind]
    model, inputs = convert(make()), draw()
    step(model, inputs)
    move(model)
    step(model, inputs)
    return model, convert(make()), inputs


@pytest.mark.parametrize(("kind", "move", "how"), pairwise([*MODELS], MOVES, [*COPIES]))
def test_in_copies(kind: str, move: Callable[[nn.Module], None], how: str) -> None:
    model, fresh, inputs = moved(kind, move)
    assert places(model) != places(fresh)
    assert_the_same(COPIES[how](model), model, inputs)


@pytest.mark.parametrize(("kind", "move", "weights_first"), pairwise([*MODELS], MOVES[:3], [True, False]))
def test_in_a_loop_of_ones_own(weights_first: bool, kind: str, move: Callable[[nn.Module], None]) -> None:
    model, fresh, inputs = moved(kind, move)
    loads = [
        lambda: fresh.load_state_dict(model.state_dict()),
        lambda: scaling_state(fresh).load_state_dict(scaling_state(model).state_dict()),
    ]
    for load in loads if weights_first else loads[::-1]:
        load()
    assert_the_same(fresh, model, inputs)


def test_a_recipe_without_histories() -> None:
    model, inputs = convert(small_mlp(), CurrentScaling()), (torch.randn(8, 32),)
    one_falls_back(model)
    fresh = convert(small_mlp(), CurrentScaling())
    fresh.load_state_dict(model.state_dict())
    scaling_state(fresh).load_state_dict(scaling_state(model).state_dict())
    for copied in (fresh, *(how(model) for how in COPIES.values())):
        assert_the_same(copied, copy.deepcopy(model), inputs)


def test_in_a_trainer_that_resumes(tmp_path: Path) -> None:
    model, file = convert(seeded()), str(tmp_path / "one.ckpt")
    both(model)
    trainer = make_trainer(tmp_path)
    trainer.fit(model, loader())
    trainer.save_checkpoint(file)
    # what a checkpoint says, a copy says
    copied = copy.deepcopy(model)
    resumed = seeded()
    make_trainer(tmp_path, max_epochs=2).fit(resumed, loader(), ckpt_path=file, **TRUSTED)
    assert places(resumed) == places(model) == places(copied)
    whole = convert(seeded())
    both(whole)
    make_trainer(tmp_path, max_epochs=2).fit(whole, loader())
    assert all(map(torch.equal, resumed.parameters(), whole.parameters()))
