"""The suites ``cast`` and ``blocks``: what is cast, what counts as the same, and as ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import cast
from benchmarks.cast import Tolerance, difference
from lightning_fp8.core import casts
from lightning_fp8.ops.formats import E4M3
from lightning_fp8.scalings import products
from lightning_fp8.scalings.operand import Operand

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ONE = "200x136 bf16->e4m3 cast_transpose"


def changed(function: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that applies ``change`` to arguments and results after each call, in place, or takes its result."""

    def wrong(*arguments: Any) -> Any:
        made = function(*arguments)
        other = change(arguments, made)
        return made if isinstance(other, Tensor) else other

    return wrong


def flipped(operand: Operand) -> Operand:
    """With another bit, in memory of its own: on the CPU both payloads have the same."""
    codes = operand.codes.clone()
    codes[0, 7] ^= 1
    return operand._replace(codes=codes)


# by what is wrong: where the function is, its name, the change, and the case
CHANGES: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "transposed payload": (products, "cast", lambda _, made: made._replace(columns=flipped(made.columns)), ONE),
    "amax": (products, "cast", lambda given, _: given[1].state.amax.mul_(1.01), ONE),
    "scale": (casts, "update_scales", lambda tensors, _: tensors[2].mul_(1 + 1e-6), "update_scales"),
    "payload of tensor 0": (
        casts,
        "cast_weights",
        lambda _, made: [made[0]._replace(rows=flipped(made[0].rows)), *made[1:]],
        "cast_weights",
    ),
    "transposed scale_inv": (products, "cast", lambda _, made: made.columns.scale_inv.mul_(1 + 1e-6), "1x128"),
}


@pytest.mark.parametrize("wrong", CHANGES)
def test_a_wrong_result_is_named(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, change, part = CHANGES[wrong]
    monkeypatch.setattr(place, name, changed(getattr(place, name), change))
    (case,) = (one for one in (*cast.cases(CPU), *cast.cases_in_blocks(CPU)) if part in one.name)
    ours, theirs, *_ = case.variants(CPU)
    assert ours.check() == f"another {wrong}"
    # in blocks each is compared with the other
    assert part == "1x128" or theirs.check() is None


def test_codes_and_sums_may_differ_as_far_as_a_tolerance_says() -> None:
    codes, near = torch.arange(100, dtype=torch.uint8), Tolerance(codes=0.02, absolute={"sums": 0.1})

    def compared(step: int, number: int, sums: float) -> str | None:
        other = codes.clone()
        other[50 : 50 + number] += step
        got = {"payload": [other.view(E4M3.dtype)], "sums": [torch.ones(3) + sums]}
        return difference(got, {"payload": [codes.view(E4M3.dtype)], "sums": [torch.ones(3)]}, near)

    assert compared(1, 2, 0.09) is None
    assert compared(1, 3, 0.0) == compared(2, 1, 0.0) == "another payload"
    assert compared(0, 0, 0.11) == "another sums"
