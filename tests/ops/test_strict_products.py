"""What the stand-in of torch's FP8 products refuses, and what it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import strict_scaled_mm
import torch
import torch.nn.functional as F
from gemm_in_fp64 import random_payload
from strict_scaled_mm import RefusedError
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
M, N, K = 20, 32, 272
ONE, ROWS, SQUARES = F.ScalingType.TensorWise, F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128


def fp8(rows: int, columns: int, dtype: torch.dtype = E4M3) -> Tensor:
    return random_payload(rows, columns, "e4m3" if dtype == E4M3 else "e5m2").view(dtype)


def call(**changed: Any) -> Tensor:
    """``torch._scaled_mm`` with one scale per operand, and what is changed."""
    given = {"a": fp8(M, K), "b": fp8(N, K).t(), "scale_a": torch.tensor(0.5), "scale_b": torch.tensor(0.25)}
    given |= {"bias": None, "out_dtype": torch.bfloat16} | changed
    a, b, *scales = (given.pop(name) for name in ("a", "b", "scale_a", "scale_b"))
    return torch._scaled_mm(a, b, *scales, **given)


def in_blocks(kinds: tuple[F.ScalingType, F.ScalingType] = (ROWS, SQUARES), **changed: Any) -> Tensor:
    """``torch.nn.functional.scaled_mm`` in blocks, and what is changed."""
    given = {"a": fp8(M, K), "b": fp8(N, K).t(), "output_dtype": torch.bfloat16}
    for name, kind, rows in (("scale_a", kinds[0], M), ("scale_b", kinds[1], N)):
        given[name] = torch.ones(3, rows).t() if kind == ROWS else torch.ones(1, 4).t()
    given |= changed
    a, b, scale_a, scale_b = (given.pop(name) for name in ("a", "b", "scale_a", "scale_b"))
    return F.scaled_mm(a, b, scale_a, kinds[0], scale_b, kinds[1], **given)


def wide(rows: int, columns: int, offset: int = 0) -> Tensor:
    """Rows with more in memory than they have columns."""
    return fp8(rows, columns + 24)[:, offset : columns + offset]


REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "K": (lambda: call(a=fp8(M, 264), b=fp8(N, 264).t()), "multiples of 16"),
    "N": (lambda: call(b=fp8(40, K).t()), "multiples of 16"),
    "other K": (lambda: call(a=fp8(M, 256)), r"\(20, 256\) x \(272, 32\)"),
    "a vector": (lambda: call(a=fp8(1, K)[0]), "matrices, not 1 and 2 dimensions"),
    "a by columns": (lambda: call(a=fp8(K, M).t()), "row-major and column-major"),
    "b by rows": (lambda: call(b=fp8(K, N)), "row-major and column-major"),
    "a with gaps": (lambda: call(a=fp8(M, 2 * K)[:, ::2]), "torch would copy an operand"),
    "pitch of a": (lambda: call(a=wide(M, K)), "rows of 272 bytes cannot lie 296 bytes apart"),
    "a row over another": (lambda: call(a=fp8(K, 1).t()), "rows of 272 bytes cannot lie 1 bytes apart"),
    "start of b": (lambda: call(b=fp8(N + 1, K).flatten()[8 : 8 + N * K].view(N, K).t()), "begin at multiples of 16"),
    "two E5M2": (lambda: call(a=fp8(M, K, E5M2), b=fp8(N, K, E5M2).t()), "two Float8_e5m2"),
    "bytes": (lambda: call(a=fp8(M, K).view(torch.uint8)), "Expected Float8 matrices"),
    "output in FP8": (lambda: call(out_dtype=None), "no result in None"),
    "scale in fp16": (lambda: call(scale_a=torch.tensor(0.5).half()), "scales are float32"),
    "scales by rows": (lambda: call(scale_a=torch.ones(M, 1), scale_b=torch.ones(N, 1)), "Invalid scaling"),
    "one scale by rows": (lambda: call(scale_a=torch.ones(M, 1)), "Invalid scaling"),
    "bias of fp32": (lambda: call(bias=torch.ones(N), out_dtype=torch.float32), "not supported when out_dtype is set"),
    "bias in fp32": (lambda: call(bias=torch.ones(N)), "Bias must be torch.bfloat16"),
    "bias in bf16": (lambda: call(bias=torch.ones(N).bfloat16(), out_dtype=torch.half), "Bias must be torch.float16"),
    "size of the bias": (lambda: call(bias=torch.ones(N - 1).bfloat16()), "Bias must be size 32"),
    "stride of the bias": (lambda: call(bias=torch.ones(2 * N).bfloat16()[::2]), "is misread"),
    "E5M2 in blocks": (lambda: in_blocks(a=fp8(M, K, E5M2)), "operands in blocks are float8_e4m3fn"),
    "squares x squares": (lambda: in_blocks((SQUARES, SQUARES)), "BlockWise128x128 x BlockWise128x128"),
    "one x blocks": (lambda: in_blocks((ONE, ROWS), scale_a=torch.ones(())), "no such recipe here: TensorWise"),
    "scales row-major": (lambda: in_blocks(scale_a=torch.ones(M, 3)), r"strides \(1, 20\), got \(3, 1\)"),
    "pitch of scales": (lambda: in_blocks(scale_a=torch.ones(3, 24).t()[:M]), r"strides \(1, 20\), got \(1, 24\)"),
    "scales by K": (lambda: in_blocks(scale_a=torch.ones(3, M)), r"shape \(20, 3\), got \(3, 20\)"),
    "K not in fours": (lambda: in_blocks(scale_b=torch.ones(1, 3).t()), r"shape \(4, 1\), got \(3, 1\)"),
    "start of scales": (lambda: in_blocks(scale_a=torch.ones(1 + 3 * M)[1:].view(3, M).t()), "multiples of 16 bytes"),
    "M not in fours": (lambda: in_blocks(a=fp8(18, K), scale_a=torch.ones(3, 18).t()), "reads 4 numbers past the end"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.usefixtures("strict_products")
def test_what_a_gpu_does_not_compute_is_refused(what: str) -> None:
    product, rule = REFUSED[what]
    with pytest.raises(RefusedError, match=rule):
        product()


@pytest.mark.parametrize(("capability", "one", "blocks"), [((8, 0), 1, 1), ((8, 9), 0, 1), ((10, 0), 0, 1)])
@pytest.mark.usefixtures("strict_products")
def test_gpus_differ(capability: tuple[int, int], one: bool, blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_scaled_mm, "CAPABILITY", capability)
    for product, refused in ((call, one), (in_blocks, blocks)):
        if not refused:
            product()
            continue
        with pytest.raises(RefusedError, match=r"SM90|compute capability \(8, 0\)"):
            product()


@pytest.mark.parametrize("bias", [False, True])
def test_products_with_a_scale_per_operand_are_torchs(bias: bool, request: pytest.FixtureRequest) -> None:
    given = {"a": fp8(M, K, E5M2), "b": fp8(N, K).t(), "bias": torch.randn(N).bfloat16() if bias else None}
    expected = call(**given)
    request.getfixturevalue("strict_products")
    torch.testing.assert_close(call(**given), expected, rtol=2**-7, atol=1e-3)
    # there is nothing to add a bias to
    nothing = call(a=fp8(M, K)[:, :0], b=fp8(N, K)[:, :0].t(), bias=given["bias"])
    assert torch.equal(nothing, torch.zeros(M, N, dtype=torch.bfloat16))


@pytest.mark.usefixtures("strict_products")
def test_scales_are_read_with_the_pitch_of_cublaslt() -> None:
    """Where more lies behind them, scales of 18 rows are taken for those of 20, in silence."""
    a, b, memory = fp8(18, K), fp8(N, K), torch.arange(1.0, 101.0)
    found = in_blocks(a=a, b=b.t(), scale_a=memory[:54].view(3, 18).t(), output_dtype=torch.float32)
    read = memory[:60].view(3, 20).t()[:18].repeat_interleave(128, 1)[:, :K]
    torch.testing.assert_close(found, ((a.double() * read) @ b.double().t()).float())
