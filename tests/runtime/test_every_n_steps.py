"""Callbacks are due at a batch whose optimizer steps reach or pass a multiple."""

from __future__ import annotations

from itertools import product

import pytest

from lightning_fp8.runtime.every_n_steps import EveryNSteps


@pytest.mark.parametrize("start", [0, 5])
def test_due_are_the_batches_with_a_multiple_among_their_steps(start: int) -> None:
    for every, stride, accumulated in product((1, 2, 3, 4, 7), (1, 2, 3), (1, 3)):
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


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"LayerTimer: `every_n_steps` must be at least 1, got 0\."):
        EveryNSteps("LayerTimer", 0)
