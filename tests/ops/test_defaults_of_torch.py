"""Nothing depends on torch's default device and default dtype, which a script or a context may set to any."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import pairwise
from torch import Tensor, nn

from lightning_fp8 import Fp8Monitor, convert, export, load_exported, scaling_state
from lightning_fp8.runtime.switch import default_dtype
from lightning_fp8.scalings.recipe import RECIPES

# a tensor on "meta" takes part in no operation with others, as one on a GPU
DEFAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "another device": lambda: torch.device("meta"),
    "another dtype": lambda: default_dtype(torch.float64),
}


def train(model: nn.Module, *given: Tensor) -> list[Tensor]:
    """The outputs of two steps, the last gradients, and a checkpoint's numbers, which are loaded in between."""
    state, seen = scaling_state(model), []
    monitor = Fp8Monitor(every_n_steps=1)
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(step)):
            y = model(*given)
        y.float().square().mean().backward()
        state.update()
        seen.append(y.detach())
        saved = state.state_dict()
        seen += [number for entry in saved.values() for number in entry.values()]
        state.load_state_dict(saved)
        monitor.check(model)
    return [*seen, *(one.grad for one in model.parameters() if one.grad is not None)]


def assert_same(default: str, model: nn.Module, *given: Tensor, **settings: Any) -> None:
    expected = train(convert(copy.deepcopy(model), **settings), *given)
    with DEFAULTS[default]():
        found = train(convert(model, **settings), *given)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("recipe", "half", "default"), pairwise([*RECIPES], ["cuda", "cpu"], [*DEFAULTS]))
def test_training(recipe: str, half: str, default: str, request: pytest.FixtureRequest) -> None:
    if half == "cuda":
        request.getfixturevalue("cuda_half")
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    model[2].requires_grad_(False)
    assert_same(default, model, torch.randn(33, 32), recipe=RECIPES[recipe](), frozen_weights="fp8")


@pytest.mark.usefixtures("grouped_half")
@pytest.mark.parametrize("default", DEFAULTS)
def test_experts(default: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import experts

    monkeypatch.setattr(experts, "WIDTH", 64)
    monkeypatch.setattr(experts, "HIDDEN", 64)
    assert_same(default, experts.experts(), torch.randn(experts.TOKENS, 64), *experts.routing())


@pytest.mark.parametrize("default", DEFAULTS)
def test_export_and_load(default: str, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(4, 32)
    loaded = copy.deepcopy(model)
    train(convert(model), x)
    with DEFAULTS[default]():
        loaded = load_exported(loaded, export(model, tmp_path / "exported"))
    assert torch.equal(loaded.eval()(x), model.eval()(x))
