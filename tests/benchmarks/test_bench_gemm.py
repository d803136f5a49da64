"""The GEMMs of the suites ``gemm`` and ``blocks``: their operands, what is expected of a result, and what is ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fp8_numpy import code_values
from tensor_cores import HOPPER
from torch import Tensor

from benchmarks import gemm
from benchmarks.gemm import Gemm
from lightning_fp8.core import casts
from lightning_fp8.ops.amaxes import BLOCK
from lightning_fp8.ops.arithmetic import of_rows

CPU = torch.device("cpu")
FPROP, DGRAD, WGRAD = gemm.of_layer(64, 32, 48)
SCALE = 0.3717 * 1.6183


def spoiled(number: float, at: tuple[int, int] = (5, 7)) -> Callable[[Tensor], Tensor]:
    def spoil(result: Tensor) -> Tensor:
        result[at] = result[at] * number
        return result

    return spoil


SPOILED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "one number": (spoiled(1.02), "1 of {} numbers that are not the product's"),
    "a NaN": (spoiled(float("nan")), "1 of {} numbers that are not the product's"),
    "no scales": (lambda y: y / SCALE, "numbers that are not the product's"),
    "its dtype": (lambda y: y.half(), "a result in torch.float16"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_wrong_result_is_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, words = SPOILED[what]
    scaled_mm, cublaslt = casts.scaled_mm, torch._scaled_mm
    monkeypatch.setattr(casts, "scaled_mm", lambda *given: spoil(scaled_mm(*given)))
    monkeypatch.setattr(torch, "_scaled_mm", lambda *given, **options: spoil(cublaslt(*given, **options)))
    found = {variant.name: variant.check() for variant in FPROP.variants(CPU)}
    assert found.pop("bf16") is None
    assert list(found) == ["lightning_fp8", "cublaslt", "cublaslt precise"]
    for said in found.values():
        assert words.format(64 * 48) in str(said)


# with the longest sums of the suite only more than a step is noticed
@pytest.mark.parametrize(
    ("kind", "fast", "k", "missing"),
    [("fprop", True, 8192, 128), ("wgrad", False, 8192, 128), ("dgrad", True, 32768, 4096)],
)
def test_the_bound_takes_tensor_cores_sums_and_no_missing_step(kind: str, fast: bool, k: int, missing: int) -> None:
    case = Gemm(kind, 40, 8, k)
    given = case.operands(CPU)[0]
    formats = case.a_format, "e4m3"
    a, b = (torch.from_numpy(code_values(fmt)[one.numpy()]) for fmt, one in zip(formats, given))
    expected = case.expected(given)

    def difference(k: int) -> str | None:
        sums = HOPPER.sums(a[:, :k], b[:, :k], formats, promote=not fast)
        return case.difference((SCALE * sums).to(case.output), *expected, fast)

    assert difference(k) is None
    assert difference(k - missing) is not None


def test_a_wrong_product_in_blocks_is_seen() -> None:
    """Of tensor cores' sums, a single wrong number is found, a missing step, and wrong scales of one step."""
    case = Gemm("wgrad", 24, 16, 4096, in_blocks=True)
    given = case.operands(CPU)[0]
    expected = case.expected(given)
    values = [one.view(torch.float8_e4m3fn).double() for one in given[:2]]
    scales = [of_rows(inverse, BLOCK, len(one)) for one, inverse in zip(given[:2], given[2:4])]
    sums = torch.zeros(24, 16)
    for step in range(32):
        assert case.difference(sums.to(case.output), *expected, False) is not None
        its = [one[:, 128 * step :][:, :128] for one in values]
        partial = HOPPER.sums(its[0], its[1], ("e4m3", "e4m3"), promote=True).float()
        sums += partial * (scales[0][:, step, None] * scales[1][:, step])
    out = sums.to(case.output)
    assert case.difference(out, *expected, False) is None
    assert case.difference(spoiled(1.5)(out.clone()), *expected, False) == "1 of 384 numbers that are not the product's"
    given.b_inv[:, 1] *= 1.1
    assert case.difference(out, *case.expected(given), False) is not None
