"""Evaluation is a function of weights and inputs: the same after any way of saving weights, and whatever the batch."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from evaluated_models import FAMILIES, WIDTH, batch, predict, steps
from fp8_numpy import power_of_two_below
from lit import Regression, loader, make_trainer, seeded
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    convert,
    scaling_state,
)
from lightning_fp8.scalings.recipe import Recipe

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "delayed, with a margin, in E4M3": DelayedScaling(margin=2, fp8_format="E4M3", amax_compute_algo="most_recent"),
    "current, with a margin": CurrentScaling(margin=1),
    "block": BlockScaling(),
    "mx": MXScaling(),
}
ONE_SCALE = [name for name in RECIPES if not RECIPES[name].scaling("input").has_blocks]


def evaluate(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Predictions, and the gradient of the batch."""
    x = batch().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
    return predict(model), gradient


class Trained(NamedTuple):
    """A model in evaluation mode, what it gives for a batch, and how a plain one is made."""

    model: nn.Module
    expected: tuple[Tensor, Tensor]
    make: Callable[[], nn.Module]
    recipe: Recipe
    frozen: bool

    def fresh(self) -> nn.Module:
        """With other weights, converted and in training mode."""
        torch.manual_seed(99)
        return convert(self.make(), self.recipe, frozen_weights="fp8" if self.frozen else None)


# each family with two recipes
KINDS = [*FAMILIES, "frozen in FP8 only"]
CASES = [*zip(KINDS, cycle(RECIPES)), *zip(KINDS, cycle([*RECIPES][::-1]))]


@pytest.fixture(params=CASES, ids=" ".join)
def trained(request: pytest.FixtureRequest) -> Trained:
    kind, recipe = request.param
    frozen = kind not in FAMILIES
    make = FAMILIES["linear" if frozen else kind]

    def plain() -> nn.Module:
        model = make()
        if frozen:
            model[2].weight.requires_grad_(False)
        return model

    torch.manual_seed(1)
    model = convert(plain(), RECIPES[recipe], frozen_weights="fp8" if frozen else None)
    steps(model, 5)
    model.eval()
    return Trained(model, evaluate(model), plain, RECIPES[recipe], frozen)


@pytest.fixture(autouse=True)
def _no_word() -> Iterator[None]:
    """None of these ways has anything to say about scales."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert not [text for text in (str(warning.message) for warning in caught) if "lightning_fp8" in text]


def state_dict_into_a_fresh_model(trained: Trained) -> nn.Module:
    model = trained.fresh()
    model.load_state_dict(trained.model.state_dict())
    return model


def into_a_model_that_trained_on_something_else(trained: Trained) -> nn.Module:
    model = trained.fresh()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(100) if parameter.requires_grad else None
    steps(model, 2)
    model.load_state_dict(trained.model.state_dict())
    return model


def with_the_scales_of_something_else(trained: Trained) -> nn.Module:
    other = trained.fresh()
    steps(other, 2)
    model = state_dict_into_a_fresh_model(trained)
    scaling_state(model).load_state_dict(scaling_state(other).state_dict())
    return model


def conversion_later(trained: Trained) -> nn.Module:
    plain = trained.make()
    plain.load_state_dict(trained.model.state_dict())
    return convert(plain, trained.recipe, frozen_weights="fp8" if trained.frozen else None)


def a_pickle(trained: Trained) -> nn.Module:
    return pickle.loads(pickle.dumps(trained.model))


def other_weights_and_back(trained: Trained) -> nn.Module:
    """As an average of weights is swapped in for a validation."""
    model, kept = trained.model, [parameter.data for parameter in trained.model.parameters()]
    if trained.frozen:
        return model
    for parameter in model.parameters():
        parameter.data = 3 * parameter.data
    assert not torch.equal(predict(model), trained.expected[0])
    for parameter, data in zip(model.parameters(), kept, strict=True):
        parameter.data = data
    return model


def further_evaluation(trained: Trained) -> nn.Module:
    for factor in (100.0, 0.01):
        with torch.no_grad():
            trained.model(batch(7, factor))
        trained.model(batch(8, factor)).sum().backward()
    return trained.model


def in_and_out_of_training(trained: Trained) -> nn.Module:
    trained.model.train()
    with torch.no_grad():
        trained.model(batch(9, 50.0))
    return trained.model


def after_a_reset(trained: Trained) -> nn.Module:
    scaling_state(trained.model).reset()
    return trained.model


WAYS: list[Callable[[Trained], nn.Module]] = [
    state_dict_into_a_fresh_model,
    into_a_model_that_trained_on_something_else,
    with_the_scales_of_something_else,
    conversion_later,
    lambda trained: copy.deepcopy(trained.model),
    a_pickle,
    other_weights_and_back,
    further_evaluation,
    in_and_out_of_training,
    after_a_reset,
]


def test_predictions_and_gradients_are_the_same(trained: Trained) -> None:
    for way in WAYS:
        assert all(map(torch.equal, evaluate(way(trained).eval()), trained.expected)), way.__name__


# --- the Trainer, compilers ---


@pytest.mark.parametrize("precision", ["fp8-delayed", "fp8-current", "fp8-block", "fp8-mx"])
def test_load_from_checkpoint(precision: str, tmp_path: Path) -> None:
    model: Any = seeded()
    trainer = make_trainer(tmp_path, precision=precision)
    trainer.fit(model, loader())
    expected = torch.cat(trainer.predict(model, loader()))
    for weights_only in (False, True):
        trainer.save_checkpoint(tmp_path / "model.ckpt", weights_only)
        loaded = Regression.load_from_checkpoint(tmp_path / "model.ckpt", map_location="cpu")
        assert type(loaded.net[0]) is nn.Linear
        later = make_trainer(tmp_path, precision=precision)
        assert torch.equal(torch.cat(later.predict(loaded, loader())), expected)
    again = make_trainer(tmp_path, precision=precision).predict(seeded(), loader(), ckpt_path=tmp_path / "model.ckpt")
    assert torch.equal(torch.cat(again), expected)


def test_each_mode_is_compiled_once() -> None:
    model = convert(FAMILIES["linear"](), RECIPES["delayed"])
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    counters.clear()
    found = []
    for _ in range(3):
        # the first step of a run has no histories, and its graph is that of all others
        steps(compiled.train(), 2)
        predict(compiled.eval())
        found.append(counters["stats"]["unique_graphs"])
    assert found == [2, 2, 2]


# --- batch mates ------------------------------------------------------------------------------------------------------


def dequantized(x: Tensor, recipe: Recipe) -> Tensor:
    """What an evaluating layer multiplies with, in place of x: its weight, 7 times the identity, is cast exactly."""
    layer = convert(nn.Linear(WIDTH, WIDTH, bias=False), recipe)
    layer.weight.data = 7 * torch.eye(WIDTH)
    return layer.eval()(x).detach() / 7


@pytest.mark.parametrize(("recipe", "factor"), list(zip(cycle(ONE_SCALE), [1.0, 1.9, 2.0, 16.0, 1 / 16])))
def test_batch_mates_change_only_subnormal_codes(recipe: str, factor: float) -> None:
    generator = torch.Generator().manual_seed(3)
    sample = torch.randn(1, WIDTH, generator=generator)
    mates = torch.randn(2, 7, WIDTH, generator=generator)
    alone, together = (torch.cat([sample, others]) for others in (mates[0], factor * mates[1]))
    before, after = (dequantized(x, RECIPES[recipe])[0] for x in (alone, together))
    amax = max(alone.abs().max().item(), together.abs().max().item())
    # below it, codes of either scale are subnormal
    smallest = 2.0**-6 / min(power_of_two_below(x.abs().max().item(), "e4m3") for x in (alone, together))
    normal = sample[0].abs() >= smallest
    assert normal.sum() > WIDTH / 2
    assert torch.equal(before[normal], after[normal])
    assert (before - after).abs().max() <= amax * 2.0**-17


@pytest.mark.parametrize("recipe", ONE_SCALE)
def test_the_scale_is_the_power_of_two_below(recipe: str) -> None:
    """Without a margin: an independent rounding, element by element."""
    for largest in (3.5, 3.5000002, 3.4999998, 1e-30, 447.0):
        # down to where codes are subnormal, which show the scale
        x = torch.randn(5, WIDTH).clamp(-0.9, 0.9) * largest * 0.5 ** torch.randint(0, 18, (5, WIDTH))
        x[2, 3] = -largest
        scale = power_of_two_below(x.abs().max().item(), "e4m3")
        expected = (x.double() * scale).to(torch.float8_e4m3fn).double() / scale
        assert torch.equal(dequantized(x, RECIPES[recipe]).double(), expected)
