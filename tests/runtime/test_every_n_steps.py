"""Callbacks are due at a batch whose optimizer steps reach or pass a multiple."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from lightning_fp8 import Fp8Monitor, ScaleFactorLogger
from lightning_fp8.cli import ProgressLines
from lightning_fp8.runtime.every_n_steps import EveryNSteps


@pytest.mark.parametrize("start", [0, 5])
def test_due_are_the_batches_with_a_multiple_among_their_steps(start: int) -> None:
    for every, stride, accumulated in product((1, 3, 4), (1, 2, 3), (1, 3)):
        when = EveryNSteps("Any", every)
        when.start(start)
        count = start
        for step in range(12):
            made = range(count + 1, count + stride + 1)
            is_due = any(number % every == 0 for number in made)
            began, ended = [], []
            for batch in range(accumulated):
                began.append(when.begins())
                count += stride if batch == accumulated - 1 else 0
                ended.append(when.ends(count))
            case = f"every {every}, {stride} optimizers, {accumulated} batches, step {step}"
            assert ended == [False] * (accumulated - 1) + [is_due], case
            # the number of steps per batch is known from the first batch on
            if step or stride == 1:
                assert began == [is_due] + [False] * (accumulated - 1), case


def test_a_new_start_forgets_what_was() -> None:
    when = EveryNSteps("Any", 4)
    assert not when.ends(3)
    assert when.begins()
    when.start(3)
    assert when.begins()
    when.start(2)
    assert not when.begins()


@pytest.mark.parametrize(
    ("start", "end", "made"), [(0, 40, 40), (100, 149, 49), (0, 50, 0), (40, 60, 0), (0, 0, 0), (7, 7, 0)]
)
def test_a_run_too_short_for_the_interval(start: int, end: int, made: int) -> None:
    when = EveryNSteps("Any", 50)
    when.ends(3)
    when.start(start)
    for count in range(start, end):
        when.ends(count + 1)
    said = when.in_vain()
    assert bool(said) == bool(made)
    assert not made or (said.startswith("Any: ") and f"made {made} steps" in said and f"to {made} or less" in said)


@pytest.mark.parametrize("callback", [ScaleFactorLogger, Fp8Monitor, ProgressLines])
def test_bad_input(callback: Any) -> None:
    for steps in (0, -1, "50", 50.0, True, None):
        with pytest.raises(ValueError, match=f"{callback.__name__}: `every_n_steps` must .* got {steps!r}"):
            callback(every_n_steps=steps)
