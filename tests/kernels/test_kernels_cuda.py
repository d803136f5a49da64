"""The kernels' own ``.cu`` sources, run as host C++, equal the reference bit for bit. No GPU is needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from casts_on_host import (
    DTYPES,
    FLOAT_MAX,
    INF,
    NAN,
    all_patterns,
    assert_codes,
    assert_same,
    assert_sums,
    cast_kernel,
    delayed,
    first_scale,
    place,
    random_bits,
    run,
)
from fp8_numpy import DEFINITIONS, code_values, power_of_two_below
from torch import Tensor

from kernels_cuda import casts
from lightning_fp8.ops.amaxes import max_abs, scale_of_current
from lightning_fp8.ops.arithmetic import saturated
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.scalings.operand import Casting, Slot, Want
from lightning_fp8.scalings.per_tensor import PerTensor


def around_boundaries() -> Tensor:
    """All E4M3 and E5M2 values, all midpoints between neighbours, the region where saturation begins, and special fp32
    values. All but the special ones come with both fp32 neighbours; each comes with both signs.
    """
    centres = [np.linspace(448, 480, 129), np.linspace(57344, 61440, 129)]
    for fmt in DEFINITIONS:
        values = code_values(fmt)[:128]
        values = values[np.isfinite(values)]
        centres += [values, (values[:-1] + values[1:]) / 2]
    middle = np.concatenate(centres).astype(np.float32)
    up, down = (np.nextafter(middle, np.float32(limit)) for limit in (np.inf, -np.inf))
    special = np.array([0, np.inf, np.nan, 1e-45, 1e-40, 2**-126, FLOAT_MAX], dtype=np.float32)
    values = np.concatenate([middle, up, down, special])
    return torch.from_numpy(np.concatenate([values, -values]))[:, None].repeat(1, 3)


PATTERNS: dict[str, Callable[[], Tensor]] = {
    "bf16": lambda: all_patterns(torch.bfloat16),
    "fp16": lambda: all_patterns(torch.float16),
    "fp32": lambda: random_bits(256, 256),
    "fp32 boundaries": around_boundaries,
}


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("patterns", PATTERNS)
def test_cast_is_exact(patterns: str, fmt: str) -> None:
    x = PATTERNS[patterns]()
    for scale in (1.0, 3.7, 2.0**-9, 1e30, FLOAT_MAX, 1e-42):
        y, y_t, _, scale_inv = run(x, fmt, delayed(scale))
        assert_codes(y, x, scale, fmt)
        assert torch.equal(y_t.t(), y)
        assert_same(scale_inv, torch.tensor(scale).reciprocal())


SIZES = (1, 15, 16, 17, 63, 64, 65, 71, 127, 128, 129, 200)
ALIGNED = ((128, 64), (256, 128), (384, 192))


@pytest.mark.parametrize("rows", [*SIZES, "aligned"])
def test_ragged_shapes(rows: int | str) -> None:
    """All pairs of sizes, each with a random choice of dtype, format, distance between rows, and addresses."""
    draw = np.random.default_rng(SIZES.index(rows) if isinstance(rows, int) else 99)
    shapes = ALIGNED if isinstance(rows, str) else tuple((rows, columns) for columns in SIZES)
    for shape in shapes:
        for wider, shift, offset in ((0, 0, 0), tuple(draw.choice([(0, 1, 8), (8, 0, 1), (7, 3, 4), (16, 8, 0)]))):
            dtype, fmt = DTYPES[draw.integers(3)], ("e4m3", "e5m2")[draw.integers(2)]
            storage = (torch.randn(shape[0] * (shape[1] + wider) + shift) * 40).to(dtype)
            x = storage.as_strided(shape, (shape[1] + wider, 1), int(shift))
            amax = torch.zeros(3)
            y, y_t, sums, _ = run(x, fmt, delayed(3.7, amax), outputs=(True, True, True), offset=int(offset))
            assert_codes(y, x, 3.7, fmt)
            assert torch.equal(y_t.t(), y), (shape, wider, shift, offset)
            assert_same(amax, torch.tensor([0.0, x.float().abs().max(), 0.0]))
            assert_sums(sums, x)


@pytest.mark.parametrize("outputs", list(itertools.product((False, True), repeat=3)))
def test_each_output_alone(outputs: tuple[bool, bool, bool]) -> None:
    for shape, record in itertools.product(((128, 64), (130, 70)), (False, True)):
        x, amax = torch.randn(shape), torch.zeros(3)
        y, y_t, sums, _ = run(x, "e4m3", delayed(100.0, amax if record else None), outputs=outputs)
        if y is not None:
            assert_codes(y, x, 100.0, "e4m3")
        if y_t is not None:
            assert_codes(y_t.t(), x, 100.0, "e4m3")
        if sums is not None:
            assert_sums(sums, x)
        assert amax[1] == (x.abs().max() if record else 0)


def test_non_finite_values_change_only_their_own_column_sum() -> None:
    x = torch.ones(140, 70)
    x[3, 1], x[4, 2], x[130, 3] = NAN, INF, -INF
    sums = run(x, "e5m2", delayed(1.0), outputs=(False, True, True)).sums
    expected = torch.tensor([128.0, 12.0])[:, None].repeat(1, 70)
    expected[0, 1], expected[0, 2], expected[1, 3] = NAN, INF, -INF
    assert_same(sums, expected)


# --- the scale of a cast, and the amax that it records ----------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_reference_agrees_on_the_first_scale(fmt: str) -> None:
    special = torch.tensor([0.0, INF, NAN, 1e-45, 1e-38, 1e-36, FLOAT_MAX])
    for amax in torch.cat([special, torch.rand(200), torch.rand(200) * 1e4]):
        assert_same(scale_of_current(amax, FORMATS[fmt]), first_scale(amax, fmt))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_without_history_is_scaled_by_its_own_amax(dtype: torch.dtype, fmt: str) -> None:
    finite = torch.randn(150, 70).to(dtype)
    for special in (0.75, 0.0, INF, -INF, NAN, -NAN, 2.0**-24):
        x = finite.clone() if special else torch.zeros_like(finite)
        x *= 2.0**-24 if special == 2.0**-24 else 1
        x[140, 66] = special
        amax, current = torch.zeros(3), torch.zeros(())
        row = place(torch.tensor([7.0, 7.0, 7.0]), torch.tensor([1.0, 0.0, 1.0]), 1, amax, current)
        y, y_t, _, scale_inv = run(x, fmt, row)
        assert_same(current, max_abs(x))
        assert_same(amax, torch.stack([torch.zeros(()), max_abs(x), torch.zeros(())]))
        scale = first_scale(x.float().abs().max(), fmt)
        assert_same(scale_inv, scale.reciprocal())
        assert_codes(y, x, scale, fmt)
        assert torch.equal(y_t.t(), y)


def amaxes_around_powers_of_two() -> Tensor:
    """All ``7 * 2^n`` that fp32 holds, and the numbers next to them."""
    exact = torch.tensor([7 * 2.0**n for n in range(-149, 126)])
    near = [torch.nextafter(exact, torch.tensor(end)) for end in (0.0, INF)]
    special = torch.tensor([0.0, INF, NAN, 1e-45, 1e-38, FLOAT_MAX])
    return torch.cat([exact, *near, special])


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_reference_rounds_a_scale_down_to_a_power_of_two(fmt: str) -> None:
    scaling = PerTensor(fmt)
    slot = Slot(torch.zeros(1, dtype=torch.int64), None, scaling, scaling, casting=Casting.OWN_POWER_OF_2)
    for amax in amaxes_around_powers_of_two():
        rows = scaling.by_reference(amax.reshape(1, 1), slot, Want()).rows
        assert 1 / rows.scale_inv.double().item() == power_of_two_below(amax.item(), fmt)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_evaluation_scales_by_own_values_rounded_down(dtype: torch.dtype, fmt: str) -> None:
    """The history has no effect."""
    finite = torch.randn(150, 70).clamp(-3, 3).to(dtype)
    for largest in (3.5, 3.484375, 3.515625, -7.0, 0.0, INF, NAN, 2.0**-24):
        x = finite.clone() if largest else torch.zeros_like(finite)
        x *= 2.0**-24 if largest == 2.0**-24 else 1
        x[140, 66] = largest
        row = place(torch.full((3,), 9.0), torch.ones(3), 1, None, torch.zeros(()))
        y, y_t, _, scale_inv = run(x, fmt, row._replace(scale_from=int(Casting.OWN_POWER_OF_2)))
        scale = torch.tensor(power_of_two_below(x.float().abs().max().item(), fmt))
        assert_same(scale_inv, scale.reciprocal())
        assert_codes(y, x, scale, fmt)
        assert torch.equal(y_t.t(), y)


def test_kernel_rounds_like_the_definition_around_powers_of_two() -> None:
    for amax in amaxes_around_powers_of_two():
        row = place(torch.ones(1), torch.ones(1), 0, None, torch.zeros(()))
        _, _, _, scale_inv = run(amax.reshape(1, 1), "e4m3", row._replace(scale_from=2), outputs=(False, False, False))
        assert 1 / scale_inv.double().item() == power_of_two_below(amax.item(), "e4m3")


def test_scaling_by_own_values_ignores_the_history() -> None:
    x, row = torch.randn(130, 70), place(torch.ones(1) * 9, torch.ones(1), 0, torch.zeros(1), torch.zeros(()))
    y, _, _, scale_inv = run(x, "e5m2", row._replace(scale_from=int(Casting.OWN)))
    assert_same(scale_inv, first_scale(x.abs().max(), "e5m2").reciprocal())
    assert_codes(y, x, first_scale(x.abs().max(), "e5m2"), "e5m2")


def test_first_scale_of_a_tiny_tensor_stays_finite() -> None:
    x = torch.full((20, 20), 1e-44)
    y, _, _, scale_inv = run(x, "e4m3", place(torch.ones(1), torch.zeros(1), 0, None, torch.zeros(())))
    assert scale_inv == 1 / FLOAT_MAX
    assert_codes(y, x, FLOAT_MAX, "e4m3")


def test_tensor_with_history_is_not_measured() -> None:
    """The first launch measures, unless a flag on the device says that this is not needed; the second one casts."""
    kernel, launches = cast_kernel(torch.float32, "e4m3"), []

    def spied(grid: int, *arguments: int | float) -> None:
        kernel(grid, *arguments)
        launches.append((current.item(), amax.item(), scale_inv.item(), y.sum().item()))

    x, y = torch.full((4, 4), 2.0), torch.zeros(4, 4, dtype=torch.uint8)
    for newest, scale, measured in ((5.0, 10.0, 0.0), (0.0, 224.0, 2.0)):
        amax, current, scale_inv = torch.zeros(1), torch.zeros(()), torch.zeros(())
        launches.clear()
        y.zero_()
        row = place(torch.tensor([10.0]), torch.tensor([newest]), 0, amax, current)._replace(scale_inv=scale_inv, y=y)
        casts.cast_transpose(spied, x, row)  # type: ignore[arg-type]
        codes = int(saturated(x, torch.tensor(scale), FORMATS["e4m3"]).sum())
        assert launches == [(measured, 0.0, 0.0, 0), (measured, 2.0, torch.tensor(scale).reciprocal().item(), codes)]
    launches.clear()
    casts.cast_transpose(spied, x, row._replace(current_amax=None))  # type: ignore[arg-type]
    assert len(launches) == 1
    assert scale_inv == torch.tensor(10.0).reciprocal()


@pytest.mark.parametrize(
    ("before", "element", "after"),
    [(5.0, 3.0, 5.0), (3.0, -5.0, 5.0), (0.0, -0.0, 0.0), (INF, 5.0, INF), (5.0, NAN, NAN), (NAN, INF, NAN)],
)
def test_amax_is_accumulated(before: float, element: float, after: float) -> None:
    x = torch.zeros(130, 66)
    x[129, 65] = element
    for index in (0, 2):
        amax, expected = torch.full((3,), 0.25), torch.full((3,), 0.25)
        amax[index], expected[index] = before, after
        row = place(torch.tensor([1.0, 2.0, 4.0]), torch.ones(3), index, amax)
        assert run(x, "e4m3", row, outputs=(True, False, False)).scale_inv == 1 / 2.0**index
        assert_same(amax, expected)
        assert not torch.signbit(amax).any()
