"""``python -m benchmarks.recipes``: its measurements, its tables and the rule that chooses the default."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
import torch
from fp8_numpy import DEFINITIONS, code_values, saturating_cast
from scales_in_numpy import largest, scale_of

from benchmarks import recipe_cases
from benchmarks.recipe_cases import TRAININGS, train, watch
from lightning_fp8 import DelayedScaling

pytestmark = pytest.mark.usefixtures("one_thread")


def lost(values: np.ndarray, scale: np.float32, fmt: str) -> tuple[float, float]:
    """Shares of clipped numbers and of numbers that become zero, from the format's definition."""
    beyond = np.abs(values.astype(np.float64) * np.float64(scale)) > DEFINITIONS[fmt][3]
    zero = code_values(fmt)[saturating_cast(values, scale, fmt)] == 0
    return beyond.mean().item(), zero.mean().item()


@pytest.mark.parametrize(("window", "margin"), [(1, 1), (4, 0)])
def test_events_in_a_layer(window: int, margin: int) -> None:
    """Compared with histories, scales and casts in NumPy."""
    for event, size in recipe_cases.EVENTS.items():
        torch.manual_seed(3)
        torch.nn.Linear(recipe_cases.FEATURES, recipe_cases.FEATURES, bias=False)
        histories: dict[str, list[float]] = {"e4m3": [], "e5m2": []}
        shares: list[tuple[float, float]] = []
        for step in range(-recipe_cases.BEFORE, window + 8):
            shape = (recipe_cases.ROWS, recipe_cases.FEATURES)
            of_step = []
            for fmt, history in histories.items():
                values = (torch.randn(shape) * size(step)).numpy()
                amax = max(history[-window:]) if history else largest(values)
                of_step.append(lost(values, scale_of(amax, fmt, margin), fmt))
                history.append(largest(values))
            shares.append((of_step[1][0], of_step[0][1]))
        after = np.array(shares[recipe_cases.BEFORE :])
        found = watch(event, DelayedScaling(margin, amax_history_len=window), 3)
        assert found["clipped_steps"] == (after[:, 0] > 0.01).sum()
        assert found["zero_steps"] == (after[:, 1] > 0.01).sum()
        assert found["clipped_fraction"] == pytest.approx(after[:, 0].max(), abs=1e-6)
        assert found["zero_fraction"] == pytest.approx(after[:, 1].max(), abs=1e-6)
        steady = mean(share for share, _ in shares[1 : recipe_cases.BEFORE])
        assert found["steady_clipped_fraction"] == pytest.approx(steady, abs=1e-6)
        around = [share for share, _ in shares[recipe_cases.BEFORE - 8 : recipe_cases.BEFORE + 8]]
        assert found["clipped_fractions"] == pytest.approx(around, abs=1e-6)


def test_a_training_with_an_outlier() -> None:
    """The outlier changes the losses of FP8 only; the same seed gives the same numbers."""
    short = replace(TRAININGS["spikes"], steps=8, last=4, outlier=lambda step: 1e5 if step == 5 else 1.0)
    without = replace(short, outlier=lambda step: 1.0)
    assert train(short, None, 1) == train(without, None, 1)
    recipe = DelayedScaling(amax_history_len=4)
    found, plain = train(short, recipe, 1), train(without, recipe, 1)
    assert found == train(short, recipe, 1)
    assert found["loss"] != plain["loss"]
    # the loss of an untrained model over 256 byte values
    assert all(abs(row[key] - np.log(256)) < 0.8 for row in (found, plain) for key in ("loss", "val_loss"))
    assert found["val_accuracy"] is None
    # two of eight steps were counted: 0 and 7, the latter after the spike
    assert found["underflowed_fraction"] > 10 * plain["underflowed_fraction"]
