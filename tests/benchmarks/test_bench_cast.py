"""The suites ``cast`` and ``blocks``: what is cast, what counts as the same, and as ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import cast
from benchmarks.cast import Tolerance, difference
from lightning_fp8 import ops
from lightning_fp8.ops.formats import E4M3

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ONE = "200x136 bf16->e4m3 cast_transpose"


def changed(function: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that applies ``change`` to the function's arguments and results after each call."""

    def wrong(*arguments: Any) -> Any:
        made = function(*arguments)
        change(arguments, made)
        return made

    return wrong


def flip(payload: torch.Tensor) -> None:
    payload.view(torch.uint8).view(-1)[7] ^= 1


CHANGES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "transposed payload": ("cast", lambda _, made: flip(made[1]), ONE),
    "amax": ("cast", lambda given, _: given[1].state.amax.mul_(1.01), ONE),
    "scale": ("update_scales", lambda tensors, _: tensors[2].mul_(1 + 1e-6), "update_scales"),
    "payload of tensor 0": ("cast_weight", lambda _, made: flip(made[0]), "cast_weights"),
    "transposed scale_inv": ("cast_blocks", lambda _, made: made[3].mul_(1 + 1e-6), "1x128"),
}


@pytest.mark.parametrize("wrong", CHANGES)
def test_a_wrong_result_is_named(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change, part = CHANGES[wrong]
    monkeypatch.setattr(ops, name, changed(getattr(ops, name), change))
    (case,) = (one for one in (*cast.cases(CPU), *cast.cases_in_blocks(CPU)) if part in one.name)
    ours, theirs, *_ = case.variants(CPU)
    assert ours.check() == f"another {wrong}"
    assert "blocks" in name or theirs.check() is None


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


def test_bytes_of_the_cases_for_a_gpu() -> None:
    found = {case.name: case.bytes for case in (*cast.cases(GPU), *cast.cases_in_blocks(GPU))}
    # bf16 in, two payloads out
    assert found["1024x1024 bf16->e4m3 cast_transpose"] == 4 * 2**20
    # two bf16 tensors in, and 14336 column sums in fp32
    assert found["8192x14336 bf16->e5m2 gelu gradient + cast_transpose + bias gradient"] == 704643072 + 57344
    # 16 * (6144 + 2048 + 8192 + 8192) * 2048 = 805306368 elements, fp32 in twice, two payloads out
    assert found["cast_weights fp32->e4m3, 64 weights of 1B"] == 10 * 805306368
    # 1002 tensors of 4 * 4 bytes, of which 668 have 1024 entries, read and written
    assert found["update_scales 1000 tensors, history 1024"] == 668 * 1024 * 8 + 1002 * 16
    # with a scale for each 128 of both payloads, or for each square, or a byte for each 32
    assert found["cast 2048x1024 bf16->e4m3 in 1x128"] == 4 * 2**21 + 2 * 4 * 2**21 // 128
    assert found["cast 8192x8192 bf16->e4m3 in 128x128"] == 4 * 2**26 + 4 * 64 * 64
    assert found["cast 8192x8192 bf16->e4m3 in MX, a weight"] == 4 * 2**26 + 2 * 2**26 // 32
