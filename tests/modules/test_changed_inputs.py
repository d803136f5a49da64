"""An input that several layers take, changed in place between two of them: results are those of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import lightning_fp8
from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, convert, scaling_state

WIDTH, ROWS = 32, 24
RECIPES = [DelayedScaling(), CurrentScaling(), BlockScaling()]
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def rotate(x: Tensor) -> None:
    x[:, : WIDTH // 2].neg_()


class Block(nn.Module):
    """Two layers with one input by the source, and something between them that changes it unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.between = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        a = self.fc1(x)
        self.between(x)
        return a - self.fc2(x)


class Calling(nn.Module):
    """Calls a function with its input."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> None:
        self.change(x)


def in_place_activation(model: Block) -> None:
    pass


def helper_that_edits(model: Block) -> None:
    model.between = Calling(lambda x: x.mul_(-1))


def helper_that_edits_a_view(model: Block) -> None:
    model.between = Calling(rotate)


def hook_between(model: Block) -> None:
    model.between = nn.Identity()
    model.between.register_forward_hook(lambda _, given, y: given[0].neg_() is None or None)


def global_hook(model: Block) -> None:
    model.between = nn.Identity()


def wrapped_forward(model: Block) -> None:
    model.between = nn.Identity()
    # by the class, as it is called: conversion replaces the class
    model.fc2.forward = lambda x: type(model.fc2).forward(model.fc2, x.neg_())


CHANGES = [
    in_place_activation,
    helper_that_edits,
    helper_that_edits_a_view,
    hook_between,
    global_hook,
    wrapped_forward,
]


@pytest.fixture
def pair() -> Iterator[Callable[..., tuple[Block, Block]]]:
    handles = []

    def make(change: Callable[[Block], None], recipe: Any) -> tuple[Block, Block]:
        models = Block(), Block()
        models[1].load_state_dict(models[0].state_dict())
        convert(models[1], recipe)
        assert scaling_state(models[1]).input_leaders or change is wrapped_forward
        for model in models:
            change(model)
            if change is global_hook:
                layer = model.fc2
                handles.append(
                    register_module_forward_pre_hook(
                        lambda module, given, layer=layer: given[0].neg_() if module is layer else None
                    )
                )
        return models

    yield make
    for handle in handles:
        handle.remove()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.precision)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_input_is_cast_again(
    change: Callable[[Block], None], recipe: Any, mode: str, pair: Callable[..., tuple[Block, Block]]
) -> None:
    plain, model = pair(change, recipe)
    for _ in range(2):
        x = torch.randn(ROWS, WIDTH)
        with MODES[mode]():
            assert error(model(x), plain(x)) < 0.1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("change", "recipe"),
    [*product(CHANGES, RECIPES[:1]), *product(CHANGES[:1], RECIPES[1:])],
    ids=lambda value: getattr(value, "precision", None),
)
def test_compiled(
    change: Callable[[Block], None], recipe: Any, mode: str, pair: Callable[..., tuple[Block, Block]]
) -> None:
    plain, model = pair(change, recipe)
    torch.compiler.reset()
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(ROWS, WIDTH)
    with MODES[mode]():
        assert error(compiled(x), plain(x)) < 0.1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.precision)
def test_compiled_by_inductor(recipe: Any, mode: str, pair: Callable[..., tuple[Block, Block]]) -> None:
    plain, model = pair(helper_that_edits_a_view, recipe)
    torch.compiler.reset()
    compiled, x = torch.compile(model), torch.randn(ROWS, WIDTH)
    with MODES[mode]():
        assert error(compiled(x), plain(x)) < 0.1


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.precision)
def test_layers_called_from_outside(recipe: Any, mode: str, backend: str | None) -> None:
    torch.compiler.reset()
    plain = Block()
    model = convert(copy.deepcopy(plain), recipe)
    calls = [model.fc1, model.fc2]
    if backend is not None:
        calls = [torch.compile(layer, backend=backend) for layer in calls]
    with MODES[mode]():
        buffer = torch.randn(ROWS, WIDTH)
        # both, with a change between; then each alone, on a buffer that is used again
        for call, layer in zip(
            calls + calls[1:] * 2 + calls[:1] * 2, [plain.fc1, plain.fc2, *[plain.fc2] * 2, *[plain.fc1] * 2]
        ):
            assert error(call(buffer), layer(buffer)) < 0.1
            buffer.copy_(torch.randn(ROWS, WIDTH))


@pytest.mark.parametrize("mode", MODES)
def test_a_tensor_from_outside(mode: str, pair: Callable[..., tuple[Block, Block]]) -> None:
    # made outside of an inference mode, it counts its changes there as well
    plain, model = Block(), Block()
    model.load_state_dict(plain.state_dict())
    lightning_fp8.convert(model)
    x = torch.randn(ROWS, WIDTH)
    with MODES[mode]():
        expected = plain.fc1(x) - plain.fc2(x.neg())
        y = model.fc1(x)
        assert error(y - model.fc2(x.neg_()), expected) < 0.1
