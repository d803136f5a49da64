"""Files of published versions are read, and give the numbers that were recorded with them.

Checkpoints of each recipe, a bare scaling state, and exports in each layout; see ``support/golden.py``. What files hold
is compared exactly. Predictions and losses are within the rounding of bf16, as processors sum in different orders; FP8
rounds to 3 bits, so a wrong scale or a layer outside of FP8 is far outside of that.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from golden import (
    EXPORTS,
    GOLDEN,
    RECIPES,
    STEPS,
    Numbers,
    exported_model,
    exported_predictions,
    predictions,
    run,
    state_numbers,
    tiny,
)
from torch import Tensor

from lightning_fp8 import convert, load_exported, scaling_state, unconvert

VERSIONS = sorted(path.name for path in GOLDEN.iterdir())
pytestmark = pytest.mark.parametrize("version", VERSIONS)


def recorded(version: str) -> Numbers:
    return json.loads((GOLDEN / version / "numbers.json").read_text(encoding="utf-8"))


def distance(found: Tensor, expected: list[list[float]]) -> float:
    """Root mean square of the difference over that of the expected values."""
    return ((found - torch.tensor(expected)).norm() / torch.tensor(expected).norm()).item()


def test_there_is_one_of_each(version: str) -> None:
    numbers = recorded(version)
    assert numbers["checkpoints"].keys() == {*RECIPES}
    assert {path.stem for path in (GOLDEN / version).glob("*.ckpt")} == {*RECIPES}
    assert numbers["exports"].keys() == {*EXPORTS}
    assert numbers["version"].rpartition(".")[0] == version


@pytest.mark.parametrize("precision", RECIPES)
def test_a_checkpoint_is_resumed(version: str, precision: str, tmp_path: Path) -> None:
    expected, file = recorded(version)["checkpoints"][precision], GOLDEN / version / f"{precision}.ckpt"
    recipe = torch.load(file, weights_only=True)["hyper_parameters"]["recipe"]
    assert recipe == RECIPES[precision]
    assert repr(recipe) == expected["recipe"]
    model = tiny(recipe)
    # no step is left: the run only loads
    run(model, tmp_path, STEPS, file)
    assert state_numbers(model) == expected["state"]
    assert distance(predictions(model), expected["predictions"]) < 0.01
    assert distance(predictions(unconvert(model)), expected["predictions"]) > 0.015
    model = tiny(recipe)
    run(model, tmp_path, STEPS + 1, file)
    assert model.losses == pytest.approx([expected["next_loss"]], rel=1e-3)


def test_a_scaling_state_is_read(version: str) -> None:
    model = convert(tiny(RECIPES["fp8-delayed"]), RECIPES["fp8-delayed"])
    scaling_state(model).load_state_dict(torch.load(GOLDEN / version / "scaling_state.pt", weights_only=True))
    assert state_numbers(model) == recorded(version)["checkpoints"]["fp8-delayed"]["state"]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_is_read(version: str, name: str, frozen: bool) -> None:
    pytest.importorskip("safetensors")
    model = load_exported(exported_model(name), GOLDEN / version / name, frozen=frozen)
    found = exported_predictions(model)
    assert distance(found, recorded(version)["exports"][name]["predictions"]) < 0.005
    other = exported_model(name)
    with torch.no_grad():
        other[2].load_state_dict(model[2].state_dict())
        other[0].weight.zero_()
    assert distance(exported_predictions(other), recorded(version)["exports"][name]["predictions"]) > 0.1
