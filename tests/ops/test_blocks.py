"""Casts and products in blocks: bit for bit, against FP8 from its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_columns import padded, unpadded
from fp8_numpy import cast_in_blocks, code_values
from torch import Tensor, nn

from lightning_fp8 import BlockScaling, convert
from lightning_fp8.core.casts import cast, cast_weight
from lightning_fp8.ops import arithmetic
from lightning_fp8.ops.cuda.plain import check_blocks, product_of_blocks
from lightning_fp8.scaling import ScalingState
from lightning_fp8.scaling.plan import plan_of
from lightning_fp8.scalings.emulation import product_of_blocks as product_of_the_reference
from lightning_fp8.scalings.operand import Operand, Slot, Want
from lightning_fp8.scalings.products import multiply

# rows, columns: empty, less than a block, a block, several, with partial blocks at the end
SHAPES = [(0, 40), (1, 1), (3, 128), (129, 40), (300, 257)]
KINDS = ["float32", "power of 2"]


def numbers(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of all magnitudes, with blocks of zeros, of inf, of NaN, and of the smallest numbers."""
    generator = torch.Generator().manual_seed(rows + columns)
    exponents = torch.randint(-30, 30, (rows, columns), generator=generator)
    x = (torch.randn(rows, columns, generator=generator) * 2.0**exponents).to(dtype)
    x[5:6], x[7:8, 3:4], x[9:10, :2], x[11:12] = 0, float("inf"), float("nan"), torch.finfo(dtype).smallest_normal / 8
    return x


def slots(kind: str) -> tuple[ScalingState, Slot, Slot]:
    """Of an input and of a weight."""
    state = ScalingState([""], BlockScaling(power_of_2_scales=kind != "float32"))
    plan, generation = plan_of(state.recipe), state.model.generation
    of_input = Slot(torch.tensor([0]), state, *plan.input, record=True, generation=generation)
    return state, of_input, Slot(torch.tensor([2]), state, *plan.weight, record=True, generation=generation)


def check(codes: Tensor, scale_inv: Tensor, x: Tensor, rows: int, kind: str) -> None:
    expected, scales = cast_in_blocks(x.float().numpy(), "e4m3", rows, power_of_2=kind != "float32")
    assert codes.dtype == torch.uint8
    assert np.array_equal(scale_inv.numpy(), scales)
    # the sign of a NaN does not matter
    assert np.array_equal(np.where(codes.numpy() & 0x7F == 0x7F, 0x7F, codes.numpy()), expected)


def largest(x: Tensor) -> float:
    return float(np.abs(x.float().numpy()).max()) if x.numel() else 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_both_layouts_have_their_own_blocks(
    kind: str, shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "CHUNK_ELEMENTS", 1000)
    x, (state, slot, _) = numbers(*shape, dtype), slots(kind)
    rows, columns, _ = cast(x, slot, Want(True, True))
    check(rows.codes, rows.scale_inv, x, 1, kind)
    check(unpadded(columns.codes, len(x)), columns.scale_inv, x.t(), 1, kind)
    assert np.array_equal(float(state.amax[0]), largest(x), equal_nan=True)
    for want, kept in ((Want(True, False), (rows, None)), (Want(False, True), (None, columns))):
        for one, other in zip(cast(x, slot, want), kept):
            assert (one is None) == (other is None)
            assert one is None or all(map(torch.equal, one[:2], other[:2]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_squares_of_a_weight(kind: str, shape: tuple[int, int]) -> None:
    x, (state, _, slot) = numbers(*shape), slots(kind)
    rows, columns, _ = cast_weight(x, slot, Want(True, True))
    check(rows.codes, rows.scale_inv, x, 128, kind)
    assert torch.equal(columns.codes, rows.codes.t())
    assert torch.equal(columns.scale_inv, rows.scale_inv.t())
    assert np.array_equal(float(state.amax[2]), largest(x), equal_nan=True)


def operands(a: Tensor, b: Tensor, squares: bool) -> tuple[Operand, Operand]:
    """Of an input, and of a weight or another input."""
    _, slot, weight_slot = slots("float32")
    made = cast(a, slot, Want()), cast_weight(b, weight_slot, Want()) if squares else cast(b, slot, Want())
    return made[0].rows, made[1].rows


@pytest.mark.parametrize("squares", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 5, 100), (130, 257, 300), (16, 128, 256)])
def test_products_are_those_of_the_values(m: int, n: int, k: int, squares: bool) -> None:
    generator = torch.Generator().manual_seed(m)
    a, b = (torch.randn(rows, k, generator=generator) * 10.0 ** torch.randn(rows, k) for rows in (m, n))
    both, values = operands(a, b, squares), []
    for (codes, scale_inv, _), rows in zip(both, (1, 128 if squares else 1), strict=True):
        scales = scale_inv.double().repeat_interleave(rows, 0).repeat_interleave(128, 1)[: len(codes), :k]
        values.append(torch.from_numpy(code_values("e4m3")[codes.numpy()]) * scales)
    bias = torch.randn(n)
    exact = values[0] @ values[1].T + bias
    size = values[0].abs() @ values[1].abs().T
    for found in (multiply(*both, bias, torch.float32, fast) for fast in (True, False)):
        assert bool(((found.double() - exact).abs() <= 1e-6 * size + 1e-6).all())
    # the bias is rounded to the output's dtype and added to the sums, which are then rounded once
    sums = multiply(*both, None, torch.float32, True)
    rounded = (sums + bias.bfloat16()).bfloat16()
    assert torch.equal(multiply(*both, bias, torch.bfloat16, True), rounded)


@pytest.mark.parametrize("squares", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), [(5, 130, 300), (64, 16, 512), (333, 147, 300)])
@pytest.mark.usefixtures("strict_products")
def test_products_by_torch_are_those_of_the_reference(m: int, n: int, k: int, squares: bool) -> None:
    """cuBLASLt reads the scales of 333 rows as if they were 336."""
    both = operands(torch.randn(m, k), torch.randn(n, k), squares)
    for bias in (None, torch.randn(n)):
        # as codes by columns
        longer = torch.nn.functional.pad(both[1].codes, (0, padded(k) - k))
        assert torch.equal(
            product_of_blocks(both[0], both[1]._replace(codes=longer), bias, torch.float32),
            product_of_blocks(*both, bias, torch.float32),
        )
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            expected = product_of_the_reference(*both, bias, dtype)
            found = product_of_blocks(*both, bias, dtype)
            assert found.is_contiguous()
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_fp16_under_autocast_in_bf16() -> None:
    layer = convert(nn.Linear(32, 16).half(), BlockScaling())
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 32).half()).dtype == torch.bfloat16


def test_other_gpus_are_refused_by_name() -> None:
    check_blocks((9, 0), "12.9")
    for capability, version in (((8, 9), "12.9"), ((10, 0), "13.0"), ((9, 0), "12.8"), ((9, 0), None)):
        with pytest.raises(RuntimeError, match=r"compute capability 9.0 \(H100, H200\), and torch built for CUDA 12.9"):
            check_blocks(capability, version)
