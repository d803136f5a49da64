"""The cast, bit for bit against FP8 computed from its definition in numpy, and against ``ml_dtypes``."""

from __future__ import annotations

import fp8_ml_dtypes
import numpy as np
import pytest
import torch
from fp8_numpy import code_values, saturating_cast
from slots import slot_of

from lightning_fp8 import DelayedScaling
from lightning_fp8.core import casts
from lightning_fp8.ops import library
from lightning_fp8.ops.arithmetic import saturated
from lightning_fp8.ops.dequantize import DEQUANTIZED_SHIFT, dequantize, has_nan
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.scaling import ScalingState
from lightning_fp8.scalings.operand import Operand, Slot, Want

SCALES = [1.0, 0.37, 224.0, 1e-3, 3.0e38, 1.2e-38]


def with_canonical_nan(codes: np.ndarray, fmt: str) -> np.ndarray:
    return np.where(np.isnan(code_values(fmt)[codes]), 0x7F, codes)


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(256, 256)


def random_fp32() -> torch.Tensor:
    bits = torch.randint(-(1 << 31), 1 << 31, (400, 500), dtype=torch.int64).to(torch.int32)
    return bits.view(torch.float32)


CASES = {
    "bf16": lambda: all_patterns(torch.bfloat16),
    "fp16": lambda: all_patterns(torch.float16),
    "fp32": random_fp32,
    # midpoints between neighbouring codes, where rounding to even decides
    "ties": lambda: torch.from_numpy(np.sort(code_values("e4m3")[:127])).unfold(0, 2, 1).mean(1).float()[None],
}


def by_reference(x: torch.Tensor, slot: Slot) -> Operand:
    return slot.rows.by_reference(x, slot, Want()).rows  # type: ignore[return-value]


def by_kernel(x: torch.Tensor, slot: Slot) -> Operand:
    """What a GPU does, in torch's operations for an empty tensor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "cuda_on_cpu", True)
        return slot.rows.cast(x, slot, Want()).rows  # type: ignore[return-value]


HALVES = by_reference, by_kernel


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("case", CASES)
def test_bytes_equal_the_definition(case: str, fmt: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = CASES[case]()
    expected, second = (
        with_canonical_nan(oracle(x.float().numpy(), np.float32(scale), fmt), fmt)
        for oracle in (saturating_cast, fp8_ml_dtypes.saturating_cast)
    )
    np.testing.assert_array_equal(second, expected)
    for on_gpu in (False, True):
        # a GPU's does not look at the amax first
        monkeypatch.setattr(library, "cuda_on_cpu", on_gpu)
        for amax in (None, x.abs().max().float()):
            codes = saturated(x, torch.tensor(scale), FORMATS[fmt], amax)
            assert codes.dtype == torch.uint8
            np.testing.assert_array_equal(with_canonical_nan(codes.numpy(), fmt), expected)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_dequantize_gives_every_code_its_value(fmt: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    values = dequantize(codes, fmt).double() * DEQUANTIZED_SHIFT[fmt]
    np.testing.assert_array_equal(values.flatten().numpy(), code_values(fmt))
    assert has_nan(codes, fmt)
    assert not has_nan(codes[:7], fmt)


@pytest.mark.parametrize("values", [[1.0, -3.0], [float("inf"), 1.0], [float("nan"), float("inf")], [], [-0.0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("host_kernels")
def test_recorded_amax_is_non_finite_exactly_when_an_element_is(values: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=dtype).reshape(-1, 1)
    expected = np.abs(np.array([0.0, *values])).max()
    for cast in HALVES:
        state = ScalingState(["a"], DelayedScaling())
        state.amax[1] = 2.0
        cast(x, slot_of(state, record=True))
        np.testing.assert_array_equal(state.amax.numpy(), np.array([expected, 2.0, 0.0], dtype=np.float32))
        # recording takes the maximum: a smaller tensor changes nothing, not even after NaN
        cast(x * 0 + 0.5, slot_of(state, record=True))
        again = np.maximum(expected, 0.5) if np.isfinite(expected) and values else expected
        if np.isfinite(expected):
            np.testing.assert_array_equal(state.amax[0].numpy(), np.float32(again))


@pytest.mark.usefixtures("host_kernels")
def test_scale_comes_from_the_history_and_else_from_the_tensor() -> None:
    x = torch.tensor([[1.0, -4.0]])
    for cast in HALVES:
        # the second of two inputs
        state = ScalingState(["a", "b"], DelayedScaling())
        codes, scale_inv, _ = cast(x, slot_of(state, 1))
        assert scale_inv == 4 / 448
        assert codes.view(torch.float8_e4m3fn).float().tolist() == [[112, -448]]
        state.amax[1] = 2.0
        state.update()
        codes, scale_inv, _ = cast(x, slot_of(state, 1))
        assert scale_inv == 1 / 224
        assert codes.view(torch.float8_e4m3fn).float().tolist() == [[224, -448]]  # -4 saturates


@pytest.mark.usefixtures("host_kernels")
def test_scale_inv_is_a_copy() -> None:
    state = ScalingState(["a"], DelayedScaling())
    state.amax[0] = 2.0
    state.update()
    for cast in HALVES:
        _, scale_inv, _ = cast(torch.ones(1, 1), slot_of(state))
        state.scale.mul_(2)
        assert scale_inv == 1 / 224
        state.scale.div_(2)


@pytest.mark.usefixtures("host_kernels")
def test_first_use_without_a_finite_amax_keeps_the_finite_elements() -> None:
    x = torch.tensor([[float("inf"), 2.0, float("nan")]])
    for cast in HALVES:
        state = ScalingState(["a"], DelayedScaling())
        codes, scale_inv, _ = cast(x, slot_of(state))
        values = codes.view(torch.float8_e4m3fn).float()[0]
        assert scale_inv == 1
        assert values[:2].tolist() == [448, 2]
        assert values[2].isnan()


def test_non_contiguous_input_gives_a_contiguous_payload() -> None:
    x = torch.randn(40, 24)
    state = ScalingState(["a"], DelayedScaling())
    straight, strided = (casts.cast(one, slot_of(state), Want()).rows.codes for one in (x.t().contiguous(), x.t()))
    assert torch.equal(straight, strided)
    assert strided.is_contiguous()
