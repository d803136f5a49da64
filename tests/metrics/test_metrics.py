"""The metrics compared with FP8's definition in numpy, and torchmetrics' general requirements."""

from __future__ import annotations

import math
import pickle
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from fp8_numpy import DEFINITIONS, saturating_cast
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.metric import Metric
from torchmetrics.utilities import dim_zero_sum

from lightning_fp8.metrics import SQNR, SaturationFraction, UnderflowFraction
from lightning_fp8.ops.formats import FORMATS

mpl.use("Agg")

SMALLEST = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}
LARGEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}
SCALES = [1.0, 1.5, 2.0**-6, 3e-7, 12345.678, 2.0**40, 1e38, 1e-40]
FRACTIONS = [SaturationFraction, UnderflowFraction]


def every_pattern(dtype: torch.dtype) -> Tensor:
    """Every number of 16 bits, including zeros, subnormals, inf and NaN of both signs."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)


def boundaries(fmt: str) -> Tensor:
    """The thresholds of a format, i.e. the tie and the largest value, with their fp32 neighbours."""
    edges = np.float32([SMALLEST[fmt] / 2, SMALLEST[fmt], DEFINITIONS[fmt][3]])
    near = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf))])
    return torch.from_numpy(np.concatenate([near, -near, np.float32([0.0, -0.0])]))


def random_fp32(fmt: str, scale: float) -> Tensor:
    """Values of all magnitudes of the format, divided by the scale, including its boundaries."""
    low, high = math.log2(SMALLEST[fmt]) - 4, math.log2(DEFINITIONS[fmt][3]) + 4
    exponents = torch.empty(20000, dtype=torch.float64).uniform_(low, high)
    values = torch.exp2(exponents) * torch.randn(20000).sign() / scale
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45])
    return torch.cat([values.float(), boundaries(fmt) / scale, special])


def expected_counts(x: Tensor, scale: float, fmt: str) -> dict[type[Metric], tuple[int, int]]:
    """Hits and elements, from the codes that a cast by definition gives."""
    values = x.float().numpy()
    codes = saturating_cast(values, np.float32(scale), fmt) & 0x7F
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.abs(values * np.float32(scale)).astype(np.float64)
    # clipped: the largest code represents a value above it
    clipped = (codes == LARGEST_CODE[fmt]) & ~np.isnan(values) & (scaled > DEFINITIONS[fmt][3])
    nonzero = ~np.isnan(values) & (values != 0)
    return {
        SaturationFraction: (int(clipped.sum()), int((~np.isnan(values)).sum())),
        UnderflowFraction: (int((nonzero & (codes == 0)).sum()), int(nonzero.sum())),
    }


def counts(metric: Metric) -> tuple[int, ...]:
    return tuple(int(value) for value in metric.metric_state.values())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scale", SCALES)
def test_fractions_are_those_of_the_cast_by_definition(fmt: str, scale: float) -> None:
    for x in (every_pattern(torch.bfloat16), every_pattern(torch.float16), random_fp32(fmt, scale)):
        for kind, (hits, elements) in expected_counts(x, scale, fmt).items():
            for given in (scale, torch.tensor(scale)):
                metric = kind(fmt)
                metric.update(x, given)
                assert counts(metric) == (hits, elements)
            assert metric.compute().item() == hits / elements


def test_the_product_is_rounded_to_fp32() -> None:
    # 448 * (1 + 2**-36) exactly, as the product of two fp32 numbers; 448 in fp32
    x, scale = torch.tensor([448 * (1 + 2.0**-12)]), 1 - 2.0**-12 + 2.0**-24
    assert x.double().item() * torch.tensor(scale).double().item() > 448
    assert SaturationFraction()(x, scale) == SaturationFraction()(x, torch.tensor(scale)) == 0
    assert SaturationFraction()(x, torch.tensor(scale, dtype=torch.float64)) == 0
    # a product below fp32's smallest subnormal is zero
    assert UnderflowFraction("e5m2")(torch.tensor([1e-30]), 1e-30) == 1
    # a scale in double precision is rounded to fp32 as in the cast: 1 + 2**-30 is 1
    for x in (torch.tensor([448.0]), torch.tensor(448.0)):
        assert SaturationFraction()(x, torch.tensor(1 + 2.0**-30, dtype=torch.float64)) == 0
    assert SaturationFraction()(torch.tensor([448.0]), 1 + 2.0**-23) == 1


def test_fractions_of_nothing_are_zero() -> None:
    for kind in FRACTIONS:
        assert kind()(torch.empty(0)) == 0
        assert kind()(torch.tensor([math.nan])) == 0
    assert UnderflowFraction()(torch.zeros(8)) == 0
    assert SaturationFraction()(torch.tensor([math.nan, math.inf, 1.0])) == 0.5
    assert UnderflowFraction()(torch.tensor([math.nan, 0.0, 1e-9, 1.0])) == 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_sqnr_is_the_ratio_in_float64(dtype: torch.dtype) -> None:
    target, preds = torch.randn(3, 1, 50), (torch.randn(3, 1, 50) * 3).to(dtype)
    exact, approximate = target.double().numpy().ravel().tolist(), preds.double().numpy().ravel().tolist()
    signal = math.fsum(value**2 for value in exact)
    noise = math.fsum((other - value) ** 2 for value, other in zip(exact, approximate))
    result = SQNR()(preds, target)
    assert result.dtype == torch.float64
    assert result.item() == pytest.approx(10 * math.log10(signal / noise), rel=1e-13)


def test_sqnr_at_its_ends() -> None:
    x = torch.tensor([1.0, 2.0])
    assert SQNR()(x, x) == math.inf
    assert SQNR()(x, torch.zeros(2)) == -math.inf
    for preds, target in ((torch.zeros(2), torch.zeros(2)), (torch.empty(0), torch.empty(0)), (x * math.nan, x)):
        assert SQNR()(preds, target).isnan()
    with pytest.warns(UserWarning, match="was called before the ``update`` method"):
        assert SQNR().compute().isnan()


def every_metric() -> list[tuple[Metric, list[tuple[Tensor, Any]]]]:
    """Each metric, in one format or the other, with batches for three updates, of different sizes and values."""
    spread = [torch.randn(size) * 10.0**power for size, power in ((7, 2), (100, 6), (31, -6))]
    pairs = [(x.to(torch.bfloat16), x) for x in spread]
    scaled = list(zip(spread, (1.0, 0.5, torch.tensor(1.5))))
    return [(SQNR(), pairs), *((kind(fmt), scaled) for kind, fmt in zip(FRACTIONS, FORMATS))]


@pytest.mark.parametrize("which", range(3))
def test_what_torchmetrics_promises(which: int) -> None:
    metric, batches = every_metric()[which]
    fresh, at_once, forward = metric.clone(), metric.clone(), metric.clone()
    at_once.persistent(True)
    for batch in batches:
        metric.update(*batch)
        alone = metric.clone()
        alone.reset()
        alone.update(*batch)
        assert torch.equal(forward(*batch), alone.compute())
    value = metric.compute()
    assert value.isfinite()
    assert value != alone.compute()
    assert torch.equal(forward.compute(), value)

    assert metric.state_dict() == {}
    metric.persistent(True)
    at_once.load_state_dict(metric.state_dict())
    assert set(metric.state_dict()) == set(metric.metric_state)
    at_once._update_count = 1
    assert torch.equal(at_once.compute(), value)
    assert torch.equal(pickle.loads(pickle.dumps(metric)).compute(), value)
    metric.reset()
    assert not any(state.any() for state in metric.metric_state.values())
    fresh.update(*batches[0])
    metric.update(*batches[0])
    assert torch.equal(metric.compute(), fresh.compute())
    # processes are summed by torchmetrics
    assert {*metric._reductions.values()} == {dim_zero_sum}
    assert (metric.is_differentiable, metric.full_state_update) == (False, False)
    assert metric.higher_is_better is isinstance(metric, SQNR)


@pytest.mark.parametrize("which", range(3))
def test_sums_keep_their_dtype_where_the_owner_is_cast(which: int) -> None:
    metric, batches = every_metric()[which]
    dtypes = [state.dtype for state in metric.metric_state.values()]
    assert set(dtypes) == {torch.float64 if isinstance(metric, SQNR) else torch.int64}
    expected = metric.clone()
    for batch in batches:
        expected.update(*batch)
    owner = torch.nn.Sequential(torch.nn.Linear(2, 2), metric)
    metric.update(*batches[0])
    owner.to(torch.bfloat16).half().to(dtype=torch.bfloat16)
    metric.set_dtype(torch.float16)
    for batch in batches[1:]:
        metric.update(*batch)
    assert [state.dtype for state in metric.metric_state.values()] == dtypes
    assert torch.equal(metric.compute(), expected.compute())
    metric.reset()
    assert [state.dtype for state in metric.metric_state.values()] == dtypes
    metric.to("meta", torch.bfloat16)
    assert [state.dtype for state in metric.metric_state.values()] == dtypes
    assert all(state.is_meta for state in metric.metric_state.values())


def test_a_collection_keeps_the_formats_apart() -> None:
    """If their states are equal after the first update, torchmetrics would let metrics share one state from then on."""
    fractions = MetricCollection({f"{kind.__name__}/{fmt}": kind(fmt) for kind in FRACTIONS for fmt in FORMATS})
    alone = {name: metric.clone() for name, metric in fractions.items()}
    # at first neither format clips or loses anything; then one of them does, and then both
    for x in (torch.ones(4), torch.tensor([500.0, 600.0, 700.0, 1e-4, 1.0]), torch.tensor([1e6, 1e-9, 1e-9])):
        fractions.update(x, scale=1.0)
        for metric in alone.values():
            metric.update(x, scale=1.0)
    values = fractions.compute()
    assert values == {name: metric.compute() for name, metric in alone.items()}
    assert len({value.item() for value in values.values()}) == 4
    together = MetricCollection([SQNR(), SaturationFraction()])
    x = torch.tensor([100.0, 500.0])
    values = together(preds=x + 1, target=x, x=x, scale=1.0)
    assert values["SaturationFraction"] == 0.5
    assert values["SQNR"].item() == pytest.approx(10 * math.log10(260000 / 2))


ONES = torch.ones(2)
WRONG = {
    "scale": [
        *(((ONES, scale), ValueError) for scale in (0, -1.0, math.nan, math.inf, 1e39, 1e-60, np.float32(-2))),
        *(((ONES, scale), TypeError) for scale in ("1", None, True, 1j, torch.tensor(2))),
        ((ONES, torch.ones(1)), ValueError),
    ],
    "x": [((x, 1.0), TypeError) for x in (ONES.long(), [1.0], ONES.double())],
}


@pytest.mark.parametrize("kind", FRACTIONS)
def test_errors_of_fractions(kind: type[Metric]) -> None:
    for format in ("E4M3", None, ["e4m3"], torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=f"{kind.__name__}: `format` must be one of") as error:
            kind(format)
        assert repr(format) in str(error.value)
    metric = kind()
    for name, cases in WRONG.items():
        for given, wrong in cases:
            with pytest.raises(wrong, match=f"{kind.__name__}: .*`{name}`"):
                metric.update(*given)
    assert counts(metric) == (0, 0)
    for scale in (2, np.float32(2), np.float64(2), torch.tensor(2.0, dtype=torch.bfloat16)):
        assert kind()(torch.tensor([2.0**-11, 2.0**-9, 1, 300]), scale) == 0.25


@pytest.mark.parametrize(
    ("preds", "target", "wrong", "name"),
    [
        (ONES, ONES[0], ValueError, "shape"),
        (ONES.int(), ONES, TypeError, "`preds`"),
        (ONES, ONES.to(torch.complex64), TypeError, "`target`"),
        (ONES, 1.0, TypeError, "`target`"),
    ],
)
def test_errors_of_sqnr(preds: Any, target: Any, wrong: type[Exception], name: str) -> None:
    with pytest.raises(wrong, match=name):
        SQNR().update(preds, target)
