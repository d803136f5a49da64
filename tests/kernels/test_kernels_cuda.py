"""The kernels' own ``.cu`` sources, run as host C++, equal the reference bit for bit. No GPU is needed.

Activations are the exception: torch's and the C library's ``exp``, ``erf`` and ``tanh`` differ in the last bits.
"""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import fp8_ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_columns import padded, unpadded
from fp8_numpy import DEFINITIONS, code_values, saturating_cast
from host_kernels import FEW_VARIANTS, Guarded, HostKernel, ends_by, library
from torch import Tensor

from kernels_cuda import casts, scales, source
from kernels_cuda.casts import Row, Weight, column_sum_tiles, variant
from lightning_fp8 import DelayedScaling
from lightning_fp8.ops import reference
from lightning_fp8.ops.amaxes import max_abs, scale_of_current
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.scaling import ScalingState

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT_MAX = torch.finfo(torch.float32).max
INF, NAN = math.inf, math.nan
NO_PAYLOAD = torch.empty(0, dtype=torch.uint8)
# two buffers per output, with different initial bytes: an element that differs afterwards was not written
POISONS = (0x11, 0xEE)


def cast_kernel(*chosen: object) -> HostKernel:
    defines = variant(*chosen)  # type: ignore[arg-type]
    return HostKernel(("cast_transpose", defines), casts.layout(defines), casts.THREADS, 0)


def weights_kernel() -> HostKernel:
    return HostKernel(("cast_weights", ()), casts.CAST_WEIGHTS_LAYOUT, casts.THREADS, 0)


class Outputs(NamedTuple):
    y: Tensor | None
    y_t: Tensor | None
    sums: Tensor | None
    scale_inv: Tensor


def run(
    x: Tensor,
    fmt: str,
    row: Row,
    activation: str = "none",
    dy: Tensor | None = None,
    outputs: tuple[bool, bool, bool] = (True, True, False),
    offset: int = 0,
) -> Outputs:
    """One variant over x, run twice, with different initial bytes in all outputs and guards around them.

    Args:
        x: the tensor to cast.
        fmt: the FP8 format.
        row: as in ``cast_transpose``.
        activation: of the variant.
        dy: for a backward variant.
        outputs: whether to write by rows, by columns, and column sums.
        offset: bytes by which both payloads are off a 16-byte boundary.
    """
    gated, backward = activation == "swiglu", dy is not None
    rows, width = x.shape[0], x.shape[1] // 2 if gated and not backward else x.shape[1]
    shapes = ((rows, width), (width, padded(rows)), (column_sum_tiles(rows), width))
    kernel, results = cast_kernel(x.dtype, fmt, activation, backward), []
    for poison in POISONS:
        y, y_t = (Guarded(shape, torch.uint8, poison, offset) if on else None for shape, on in zip(shapes, outputs[:2]))
        sums = Guarded(shapes[2], torch.float32, poison) if outputs[2] else None
        scale_inv = Guarded((), torch.float32, poison)
        tensors = [None if one is None else one.tensor for one in (y, y_t, sums, scale_inv)]
        payloads = (NO_PAYLOAD if one is None else one for one in tensors[:2])
        if row.current_amax is not None:
            row.current_amax.zero_()
        casts.cast_transpose(kernel, x, casts.Result(row, tensors[3], *payloads, tensors[2]), dy, gated)
        assert all(one is None or one.unharmed() for one in (y, y_t, sums, scale_inv)), "written outside of an output"
        results.append(Outputs(*tensors))
    for name, first, second in zip(Outputs._fields, *results):
        # as bytes, where NaN equals itself
        same = first is None or first.numpy().tobytes() == second.numpy().tobytes()
        assert same, f"{name}: not all of it is written, or not the same each time"
    y, y_t, sums, scale_inv = results[0]
    return Outputs(y, None if y_t is None else unpadded(y_t, rows), sums, scale_inv)


def delayed(scale: float, amax: Tensor | None = None) -> Row:
    """The second of three tensors, which has a history; the others must not be read."""
    wrong = 1e-3
    return Row(torch.tensor([wrong, scale, wrong]), torch.tensor([0.0, 1.0, 0.0]), torch.tensor([1]), amax)


def assert_codes(payload: Tensor, x: Tensor, scale: float | Tensor, fmt: str) -> None:
    """Codes equal those of FP8's definition, by ``ml_dtypes``, and of the reference; all NaN codes count as equal."""
    canonical = torch.from_numpy(np.where(np.isnan(code_values(fmt)), 0x7F, np.arange(256)).astype(np.uint8))
    from_definition, by_ml_dtypes = (
        torch.from_numpy(oracle(x.float().numpy(), np.float32(scale), fmt))
        for oracle in (saturating_cast, fp8_ml_dtypes.saturating_cast)
    )
    of_reference = reference.saturating_cast(x, torch.as_tensor(scale, dtype=torch.float32), FORMATS[fmt])
    for expected in (from_definition, by_ml_dtypes, of_reference):
        torch.testing.assert_close(canonical[payload.int()], canonical[expected.int()], rtol=0, atol=0)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_sums(sums: Tensor, v: Tensor) -> None:
    """Each row of sums adds 128 rows of v in fp32: 127 additions, each with an error of at most half a unit."""
    for partial, block in zip(sums, v.double().split(casts.TILE_ROWS), strict=True):
        bound = block.abs().sum(0) * len(block) * 2.0**-24
        assert ((partial.double() - block.sum(0)).abs() <= bound).all()


def all_patterns(dtype: torch.dtype) -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)


def random_bits(rows: int, columns: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, (rows, columns)).to(torch.int32).view(torch.float32)


def around_boundaries() -> Tensor:
    """Every E4M3 and E5M2 value, every midpoint between two, and the region where saturation begins, each with both
    fp32 neighbours and both signs; and the special values of fp32.
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


@pytest.mark.parametrize("offset", [0, 1])
def test_any_number_of_rows_is_padded_by_columns(offset: int) -> None:
    for rows in range(1, 41):
        x = torch.randn(rows, 24).bfloat16()
        y, y_t, _, _ = run(x, "e4m3", delayed(3.7), offset=offset)
        assert torch.equal(y_t.t(), y)


@pytest.mark.parametrize("outputs", list(itertools.product((False, True), repeat=3)))
@pytest.mark.parametrize("record", [False, True])
def test_each_output_alone(outputs: tuple[bool, bool, bool], record: bool) -> None:
    for shape in ((128, 64), (130, 70)):
        x, amax = torch.randn(shape), torch.zeros(3)
        y, y_t, sums, _ = run(x, "e4m3", delayed(100.0, amax if record else None), outputs=outputs)
        if y is not None:
            assert_codes(y, x, 100.0, "e4m3")
        if y_t is not None:
            assert_codes(y_t.t(), x, 100.0, "e4m3")
        if sums is not None:
            assert_sums(sums, x)
        assert amax[1] == (x.abs().max() if record else 0)


def test_column_sums_keep_non_finite_columns_apart() -> None:
    x = torch.ones(140, 70)
    x[3, 1], x[4, 2], x[130, 3] = NAN, INF, -INF
    sums = run(x, "e5m2", delayed(1.0), outputs=(False, True, True)).sums
    expected = torch.tensor([128.0, 12.0])[:, None].repeat(1, 70)
    expected[0, 1], expected[0, 2], expected[1, 3] = NAN, INF, -INF
    assert_same(sums, expected)


# --- which scale, and what is recorded --------------------------------------------------------------------------------


def first_scale(amax: Tensor, fmt: str) -> Tensor:
    """``FP8_MAX / amax``, rounded once; 1 for inf and NaN."""
    if not amax.isfinite():
        return torch.ones(())
    with np.errstate(divide="ignore", over="ignore"):
        quotient = np.float32(DEFINITIONS[fmt][3]) / np.float32(amax.item())
    return torch.tensor(min(quotient, np.float32(FLOAT_MAX)))


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_reference_has_the_same_first_scale(fmt: str) -> None:
    special = torch.tensor([0.0, INF, NAN, 1e-45, 1e-38, 1e-36, FLOAT_MAX])
    for amax in torch.cat([special, torch.rand(200), torch.rand(200) * 1e4]):
        assert_same(scale_of_current(amax, FORMATS[fmt]), first_scale(amax, fmt))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_first_use_is_scaled_by_its_own_amax(dtype: torch.dtype, fmt: str) -> None:
    finite = torch.randn(150, 70).to(dtype)
    for special in (0.75, 0.0, INF, -INF, NAN, -NAN, 2.0**-24):
        x = finite.clone() if special else torch.zeros_like(finite)
        x *= 2.0**-24 if special == 2.0**-24 else 1
        x[140, 66] = special
        amax, current = torch.zeros(3), torch.zeros(())
        row = Row(torch.tensor([7.0, 7.0, 7.0]), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1]), amax, current)
        y, y_t, _, scale_inv = run(x, fmt, row)
        assert_same(current, max_abs(x))
        assert_same(amax, torch.stack([torch.zeros(()), max_abs(x), torch.zeros(())]))
        scale = first_scale(x.float().abs().max(), fmt)
        assert_same(scale_inv, scale.reciprocal())
        assert_codes(y, x, scale, fmt)
        assert torch.equal(y_t.t(), y)


def test_first_use_of_a_tensor_so_small_that_its_scale_would_be_infinite() -> None:
    x = torch.full((20, 20), 1e-44)
    row = Row(torch.ones(1), torch.zeros(1), torch.tensor([0]), None, torch.zeros(()))
    y, _, _, scale_inv = run(x, "e4m3", row)
    assert scale_inv == 1 / FLOAT_MAX
    assert_codes(y, x, FLOAT_MAX, "e4m3")


def test_a_history_leaves_nothing_to_measure() -> None:
    """One launch measures, unless the device's flag says that it is not needed, and one casts."""
    kernel, launches = cast_kernel(torch.float32, "e4m3"), []

    def spied(grid: int, *arguments: int | float) -> None:
        kernel(grid, *arguments)
        launches.append((current.item(), amax.item(), scale_inv.item(), y.sum().item()))

    x, y = torch.full((4, 4), 2.0), torch.zeros(4, 4, dtype=torch.uint8)
    for newest, scale, measured in ((5.0, 10.0, 0.0), (0.0, 224.0, 2.0)):
        amax, current, scale_inv = torch.zeros(1), torch.zeros(()), torch.zeros(())
        launches.clear()
        y.zero_()
        row = Row(torch.tensor([10.0]), torch.tensor([newest]), torch.tensor([0]), amax, current)
        casts.cast_transpose(spied, x, casts.Result(row, scale_inv, y, NO_PAYLOAD))  # type: ignore[arg-type]
        codes = int(reference.saturating_cast(x, torch.tensor(scale), FORMATS["e4m3"]).sum())
        assert launches == [(measured, 0.0, 0.0, 0), (measured, 2.0, torch.tensor(scale).reciprocal().item(), codes)]
    launches.clear()
    casts.cast_transpose(spied, x, casts.Result(row._replace(current_amax=None), scale_inv, y, NO_PAYLOAD))  # type: ignore[arg-type]
    assert len(launches) == 1
    assert scale_inv == torch.tensor(10.0).reciprocal()


@pytest.mark.parametrize(
    ("before", "element", "after"),
    [
        (5.0, 3.0, 5.0),
        (3.0, -5.0, 5.0),
        (0.0, -0.0, 0.0),
        (5.0, INF, INF),
        (INF, 5.0, INF),
        (5.0, -INF, INF),
        (5.0, NAN, NAN),
        (INF, NAN, NAN),
        (NAN, INF, NAN),
        (NAN, 5.0, NAN),
        (0.0, 1e-45, 1e-45),
    ],
)
@pytest.mark.parametrize("index", [0, 2])
def test_amax_is_accumulated(before: float, element: float, after: float, index: int) -> None:
    x = torch.zeros(130, 66)
    x[129, 65] = element
    amax = torch.full((3,), 0.25)
    amax[index] = before
    row = Row(torch.tensor([1.0, 2.0, 4.0]), torch.ones(3), torch.tensor([index]), amax)
    assert run(x, "e4m3", row, outputs=(True, False, False)).scale_inv == 1 / 2.0**index
    expected = torch.full((3,), 0.25)
    expected[index] = after
    assert_same(amax, expected)
    assert not torch.signbit(amax).any()


# --- activations ------------------------------------------------------------------------------------------------------


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=1)
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "swiglu": swiglu,
}
# Codes per million that may differ, as the result is close to a rounding boundary; 310, 110, 0 and 0 were observed.
DIFFERENT = {"gelu": 500, "gelu_tanh": 250, "silu": 50, "swiglu": 50}


@pytest.fixture(scope="module")
def _activations_compiled() -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda chosen: library("cast_transpose", variant(*chosen)), FEW_VARIANTS))


@pytest.fixture
def _torch_formulas() -> Iterator[None]:
    """oneDNN's ``gelu`` on the CPU is NaN for inf and differs in the tail; torch's own uses the GPU's formula."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


def by_torch(x: Tensor, activation: str, dy: Tensor | None) -> Tensor:
    if dy is None:
        return ACTIVATIONS[activation](x)
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(ACTIVATIONS[activation](leaf), leaf, dy)[0]


def tolerance(x: Tensor, activation: str, dy: Tensor | None, like: Tensor) -> Tensor:
    """The error that an fp32 result may have before rounding, if it is the small difference of larger numbers."""
    gated = x.chunk(2, dim=1)[1].float().abs() if activation == "swiglu" else None
    if dy is None:
        return 2.0**-20 * (torch.ones(like.shape) if gated is None else gated)
    of_dy = 2.0**-18 * dy.float().abs()
    return of_dy if gated is None else torch.cat([of_dy * gated, of_dy], dim=1)


def in_order(codes: Tensor) -> Tensor:
    """Codes as integers in the order of their values; -0 and 0 are equal."""
    signed = codes.to(torch.int16)
    return torch.where(signed > 127, 128 - signed, signed)


def close_codes(got: Tensor, v: Tensor, slack: Tensor, scale: float, fmt: str, exact: Tensor | None = None) -> float:
    """Asserts that each code is that of a value within one unit in the last place of v's dtype, or ``slack``, of v; NaN
    for NaN. Returns the share of codes that differ from v's, and from those of ``exact``.
    """
    low, high = (torch.nextafter(v, torch.full((), limit, dtype=v.dtype)).float() for limit in (-INF, INF))
    low, high = torch.minimum(low, v.float() - slack), torch.maximum(high, v.float() + slack)
    wanted = (low, v, high, v if exact is None else exact)
    codes = [reference.saturating_cast(one, torch.tensor(scale), FORMATS[fmt]) for one in wanted]
    at_least, expected, at_most, exact_codes = map(in_order, codes)
    values, nan, code = torch.from_numpy(code_values(fmt))[got.int()], v.isnan(), in_order(got)
    assert torch.equal(values.isnan(), nan)
    assert ((at_least <= code) & (code <= at_most) | nan).all()
    return ((code != expected) & (code != exact_codes) & ~nan).double().mean().item()


@pytest.mark.usefixtures("_activations_compiled", "_torch_formulas")
@pytest.mark.parametrize(("dtype", "fmt", "activation", "backward"), FEW_VARIANTS)
def test_activations(dtype: torch.dtype, fmt: str, activation: str, backward: bool) -> None:
    patterns = random_bits(256, 256) if dtype == torch.float32 else all_patterns(dtype)
    x = torch.cat([patterns, (3 * torch.randn(256, 256)).to(dtype)])
    if activation == "swiglu":
        x = torch.cat([x, torch.randn(x.shape).to(dtype)], dim=1)
    dy = torch.randn(512, 256).to(dtype) if backward else None
    v = by_torch(x, activation, dy)
    slack = tolerance(x, activation, dy, v)
    # in the tails torch's fp32 formulas suffer from cancellation, ours less
    exact = by_torch(x.double(), activation, None if dy is None else dy.double()).to(dtype)
    for scale in (1.0, 3.7):
        y = run(x, fmt, delayed(scale), activation, dy, (True, False, False)).y
        if activation == "relu":
            assert_codes(y, v, scale, fmt)
            continue
        different = close_codes(y, v, slack, scale, fmt, exact)
        assert different <= DIFFERENT[activation] * 1e-6, f"{different:.1e} of the codes differ"


@pytest.mark.usefixtures("_activations_compiled", "_torch_formulas")
@pytest.mark.parametrize(("dtype", "fmt", "activation", "backward"), FEW_VARIANTS)
def test_outputs_of_activations(dtype: torch.dtype, fmt: str, activation: str, backward: bool) -> None:
    """Outputs by rows and by columns agree, with the amax, column sums and first scale of the activation's result."""
    gated = activation == "swiglu"
    # in the second shape rows begin at multiples of 16 bytes, but in swiglu's second half none does
    for rows, columns, wider in ((128, 64, 0), (128, 64 + 8 // dtype.itemsize, 0), (131, 77, 3)):
        x = (3 * torch.randn(rows, columns * (1 + gated) + wider)).to(dtype)[:, : columns * (1 + gated)]
        dy = torch.randn(rows, columns + wider).to(dtype)[:, :columns] if backward else None
        v = by_torch(x, activation, dy)
        amax, current = torch.zeros(1), torch.zeros(())
        row = Row(torch.full((1,), 1e-3), torch.zeros(1), torch.tensor([0]), amax, current)
        y, y_t, sums, scale_inv = run(x, fmt, row, activation, dy, (True, True, backward))
        assert torch.equal(y_t.t(), y)
        assert torch.equal(amax[0], current)
        # the largest value is at the same position, so its error is within that of any result
        slack = tolerance(x, activation, dy, v)
        atol = 0.0 if activation == "relu" else slack.max().item()
        torch.testing.assert_close(current, max_abs(v), rtol=torch.finfo(dtype).eps, atol=atol)
        scale = first_scale(current, fmt)
        assert torch.equal(scale_inv, scale.reciprocal())
        close_codes(y, v, slack, scale.item(), fmt)
        for partial, block in zip(sums, v.double().split(casts.TILE_ROWS), strict=True) if backward else ():
            torch.testing.assert_close(partial.double(), block.sum(0), rtol=0, atol=2 * torch.finfo(dtype).eps * 128)


@pytest.mark.parametrize("outputs", list(itertools.product((False, True), repeat=3)))
def test_outputs_of_two_halves_alone(outputs: tuple[bool, bool, bool]) -> None:
    """The halves of swiglu's gradient share a block's memory: the second waits until the first has been written."""
    x, dy = torch.randn(140, 140), torch.randn(140, 70)
    every = run(x, "e5m2", delayed(9.0), "swiglu", dy, (True, True, True))
    for chosen, alone, beside in zip(outputs, run(x, "e5m2", delayed(9.0), "swiglu", dy, outputs), every):
        assert torch.equal(alone, beside) if chosen else alone is None


@pytest.mark.parametrize("firsts", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("columns", [64, 77])
def test_gate_and_up_of_two_tensors(columns: int, firsts: tuple[bool, bool]) -> None:
    """Each gradient has its own scale and place; codes, sums and amaxes equal those of the halves of one tensor."""
    rows, fmt = 140, "e5m2"
    gate, up, dy = (torch.randn(rows, columns) * factor for factor in (2, 30, 1))
    amax, kernel = torch.zeros(3), cast_kernel(torch.float32, fmt, "swiglu", True)
    newest, scale = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([5.0, 7.0, 1e-3])
    results, places = [], (1, 0)
    for place, first in zip(places, firsts):
        newest[place] = 0.0 if first else 1.0
        # if every tensor has a history, nothing is measured
        row = Row(scale, newest, torch.tensor([place]), amax, torch.zeros(()) if any(firsts) else None)
        shapes = (rows, columns), (columns, padded(rows))
        payloads = (torch.full(shape, 0xA5, dtype=torch.uint8) for shape in shapes)
        sums = torch.full((column_sum_tiles(rows), columns), float("nan"))
        results.append(casts.Result(row, torch.zeros(()), *payloads, sums))
    casts.cast_gated(kernel, gate, up, results[0], dy, results[1])
    for half, (result, place, first) in enumerate(zip(results, places, firsts)):
        exact = by_torch(torch.cat([gate, up], dim=1), "swiglu", dy).chunk(2, dim=1)[half]
        torch.testing.assert_close(amax[place], exact.abs().max(), rtol=1e-5, atol=0)
        used = first_scale(amax[place], fmt).item() if first else scale[place].item()
        assert result.scale_inv.item() == np.float32(1) / np.float32(used)
        together = run(torch.cat([gate, up], dim=1), fmt, delayed(used), "swiglu", dy, (True, True, True))
        codes, sums = together.y.chunk(2, dim=1)[half], together.sums.chunk(2, dim=1)[half]
        assert torch.equal(result.y, codes)
        assert torch.equal(unpadded(result.y_t, rows), codes.t())
        assert torch.equal(result.column_sums, sums)
    assert amax[2] == 0
    inputs = run(torch.cat([gate, up], dim=1), "e4m3", delayed(9.0), "swiglu")
    payload, scale_inv = torch.empty(rows, columns, dtype=torch.uint8), torch.zeros(())
    forward = casts.Result(delayed(9.0), scale_inv, payload, NO_PAYLOAD)
    casts.cast_gated(cast_kernel(torch.float32, "e4m3", "swiglu", False), gate, up, forward)
    assert torch.equal(payload, inputs.y)


# --- all weights at once ----------------------------------------------------------------------------------------------


def run_weights(xs: list[Tensor], indices: list[int]) -> Tensor:
    """Casts all weights, checks each against the reference, and returns the amaxes left in the arena."""
    kernel, results, untouched = weights_kernel(), [], -7.0
    arena = 3 * len(xs)
    for poison in POISONS:
        shapes = [(x.shape, (x.shape[1], padded(len(x)))) for x in xs]
        outputs = [[Guarded(shape, torch.uint8, poison) for shape in pair] for pair in shapes]
        weights = [
            Weight(x, torch.tensor([index]), y.tensor, y_t.tensor) for x, index, (y, y_t) in zip(xs, indices, outputs)
        ]
        scale, amax = (Guarded((arena,), torch.float32, poison) for _ in range(2))
        for one in (scale, amax):
            one.tensor.fill_(untouched)
        table = casts.weight_table(weights)
        casts.cast_weights(kernel, table, scale.tensor, amax.tensor)
        assert all(one.unharmed() for one in (scale, amax, *itertools.chain(*outputs)))
        left = [torch.stack(table.scale_inv), table.current_amax, scale.tensor, amax.tensor]
        results.append([*left, *(one.tensor for one in itertools.chain(*outputs))])
    for first, second in zip(*results):
        assert_same(first, second)
    scale_inv, current, scale, amax, *payloads = results[0]
    for number, (x, index) in enumerate(zip(xs, indices)):
        largest = max_abs(x)
        used = first_scale(largest, "e4m3")
        assert_same(scale_inv[number], used.reciprocal())
        assert_codes(payloads[2 * number], x, used, "e4m3")
        assert torch.equal(unpadded(payloads[2 * number + 1], len(x)).t(), payloads[2 * number])
        assert_same(current[number], largest)
        assert_same(amax[index], largest)
        assert_same(scale[index], used)
    others = torch.ones(arena, dtype=torch.bool)
    others[indices] = False
    assert (torch.stack([scale, amax])[:, others] == untouched).all()
    return amax


def weights_of_all_kinds() -> list[Tensor]:
    shapes = [(1, 1), (128, 64), (129, 65), (256, 128), (300, 200), (16, 200), (200, 16), (3, 500), (500, 3)]
    xs = [(torch.randn(shape) * 2.0 ** (n - 4)).to(DTYPES[n % 3]) for n, shape in enumerate(shapes)]
    # a slice of a wider tensor, whose row distance is not a multiple of 16 bytes; and a misaligned tensor
    xs.append(torch.randn(130, 100)[:, 1:71])
    xs.append(torch.randn(64 * 128 + 1).bfloat16()[1:].view(128, 64))
    xs.append(torch.zeros(20, 30))
    xs[3][5, 7] = -INF
    xs[4][299, 199] = NAN
    return xs


@pytest.mark.parametrize("flag", [casts._LOADS, casts._ROWS, casts._COLUMNS, 0])
def test_a_flag_of_alignment_selects_whole_words(flag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At addresses that are not aligned, reading or storing one ends the process, here as on a GPU."""
    rows, columns = 2 * casts.TILE_ROWS + 8, 2 * casts.TILE_COLUMNS + 4
    x = torch.randn(rows * columns + 1).bfloat16()[1:].view(rows, columns)
    # of a tensor that is not aligned
    y, y_t = (torch.empty(size + 1, dtype=torch.uint8)[1:] for size in (rows * columns, padded(rows) * columns))
    kernel, row = cast_kernel(x.dtype, "e4m3", "none", False), Row(*torch.ones(2, 1), torch.tensor([0]), None)
    monkeypatch.setattr(casts, "aligned_loads", lambda *_: flag & casts._LOADS)
    monkeypatch.setattr(casts, "aligned_stores", lambda *_: flag & ~casts._LOADS)
    ended = ends_by(lambda: casts.cast_transpose(kernel, x, casts.Result(row, torch.empty(()), y, y_t)))
    assert ended in ((signal.SIGILL, signal.SIGABRT) if flag else (0,))


def test_which_accesses_are_aligned() -> None:
    everything = casts._ROWS | casts._COLUMNS
    assert casts.aligned_stores(64, 128, 8) == everything
    assert casts.aligned_stores(64, 0, 8) == casts.aligned_stores(64, 136, 8) == casts._ROWS
    assert casts.aligned_stores(64, 128, 12) == casts.aligned_stores(68, 128, 8) == casts._COLUMNS
    assert casts.aligned_loads(64, 48) == casts._LOADS
    assert casts.aligned_loads(64, 40) == casts.aligned_loads(72, 48) == 0


def test_weights_of_all_kinds_at_once() -> None:
    xs = weights_of_all_kinds()
    run_weights(xs, [int(n) for n in torch.randperm(3 * len(xs))[: len(xs)]])


def test_weights_are_measured_alone() -> None:
    xs = weights_of_all_kinds()
    table = casts.weight_table([Weight(x) for x in xs])
    casts.measure_weights(weights_kernel(), table)
    assert_same(table.current_amax, torch.stack([max_abs(x) for x in xs]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (129, 65), (200, 130)])
def test_a_weight_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """It is part of the arguments, where no table is read."""
    x = (torch.randn(shape) * 8).to(dtype)
    run_weights([x], [1])
    assert casts.weight_table([Weight(x)]).weights is None


@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 1)],
        [(128, 64)],
        [(1, 65)],
        [(400, 300)],
        [(1, 1), (129, 64)],
        [(129, 64), (1, 1)],
        [(1 + n % 3, 1 + n * 7 % 150) for n in range(300)],
    ],
    ids=["one element", "one tile", "two tiles", "one weight", "small first", "small last", "many"],
)
def test_weights_find_their_tiles(shapes: list[tuple[int, int]]) -> None:
    xs = [torch.randn(shape) + 0.1 for shape in shapes]
    count = len(xs)
    amax = run_weights(xs, list(range(count))[::-1])
    assert torch.equal(amax[:count], torch.stack([x.abs().max() for x in xs[::-1]]))


# --- the end of a step ------------------------------------------------------------------------------------------------

FIELDS = ("amax", "amax_history", "scale", "nonfinite_steps")


def update_by_kernel(tensors: dict[str, Tensor], fp8_max: Tensor, most_recent: bool, margin: int) -> dict[str, Tensor]:
    """One step on copies between guards."""
    guarded = {name: Guarded(tuple(tensor.shape), tensor.dtype, 0) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        guarded[name].tensor.copy_(tensor)
    kernel = HostKernel(("update_scales", ()), scales.LAYOUT, scales.THREADS, 0)
    after = {name: one.tensor for name, one in guarded.items()}
    scales.update_scales(
        kernel,
        after["amax"],
        after["amax_history"],
        after["scale"],
        fp8_max,
        after["nonfinite_steps"],
        most_recent,
        2.0**margin,
    )
    assert all(one.unharmed() for one in guarded.values())
    return after


def compare_updates(count: int, recipe: DelayedScaling, steps: int) -> None:
    """Compares steps of a state with at least ``count`` tensors with steps of the kernel on the first ``count``;
    tensors beyond the delayed ones are weights.
    """
    state = ScalingState([str(n) for n in range(-(-count // 3))], recipe)
    special = torch.tensor([0.0, 0.0, INF, NAN, -NAN, 1e-45, 1e-30, 1e30, FLOAT_MAX, 1.0])
    filled = torch.randint(0, recipe.amax_history_len + 1, (state.delayed,))
    history = torch.rand(recipe.amax_history_len, state.delayed) * 10.0 ** torch.randint(-3, 3, (state.delayed,))
    state.amax_history.copy_(history * (torch.arange(recipe.amax_history_len)[:, None] < filled))
    for step in range(steps):
        amax = torch.rand(len(state.names)) * 10.0 ** torch.randint(-6, 6, (len(state.names),))
        chosen = torch.rand(len(amax)) < 0.4
        amax[chosen] = special[torch.randint(0, len(special), (int(chosen.sum()),))]
        if step == steps - 1:
            amax.fill_(0.5)
        state.amax.copy_(amax)
        before = {name: getattr(state, name)[..., :count].contiguous().clone() for name in FIELDS}
        most_recent = recipe.amax_compute_algo == "most_recent"
        after = update_by_kernel(before, state.fp8_max[:count].clone(), most_recent, recipe.margin)
        state.update()
        for name in FIELDS:
            assert_same(after[name], getattr(state, name)[..., :count])


@pytest.mark.parametrize("length", [1, 2, 3, 127, 128, 1024, 1025, 2500])
@pytest.mark.parametrize("count", [1, 7, 8, 9])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_update_scales(count: int, length: int, algorithm: str) -> None:
    margin = (0, 2, 127)[(count + length) % 3]
    recipe = DelayedScaling(margin=margin, amax_history_len=length, amax_compute_algo=algorithm)  # type: ignore[arg-type]
    compare_updates(count, recipe, steps=4)


@pytest.mark.parametrize("length", [3, 1025])
def test_update_scales_of_a_whole_model(length: int) -> None:
    compare_updates(300, DelayedScaling(amax_history_len=length), steps=3)


@pytest.mark.parametrize(
    ("recipe", "amaxes", "expected", "history"),
    [
        (DelayedScaling(amax_history_len=4), (2, 1, 4, 0.5), (224, 224, 112, 112), (0.5, 4, 1, 2)),
        (
            DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"),
            (2, 1, 4, 0.5),
            (224, 448, 112, 896),
            (0.5, 4, 1, 2),
        ),
        (DelayedScaling(amax_history_len=4, margin=2), (2,), (56,), (2, 0, 0, 0)),
        (DelayedScaling(amax_history_len=4), (2, 0, 0, 8), (224, 224, 224, 56), (8, 2, 0, 0)),
        (DelayedScaling(amax_history_len=2), (2, INF, NAN, 8), (224, 224, 224, 56), (8, 2)),
        (DelayedScaling(amax_history_len=2), (8, 4, 2), (56, 56, 112), (2, 4)),
    ],
    ids=["max", "most recent", "margin", "zeros", "non-finite", "oldest leaves"],
)
def test_worked_cases(
    recipe: DelayedScaling, amaxes: tuple[float, ...], expected: tuple[float, ...], history: tuple[float, ...]
) -> None:
    tensors = {
        "amax": torch.zeros(1),
        "amax_history": torch.zeros(recipe.amax_history_len, 1),
        "scale": torch.ones(1),
        "nonfinite_steps": torch.zeros(1, dtype=torch.int64),
    }
    for amax, scale in zip(amaxes, expected, strict=True):
        tensors["amax"].fill_(amax)
        most_recent = recipe.amax_compute_algo == "most_recent"
        tensors = update_by_kernel(tensors, torch.tensor([448.0]), most_recent, recipe.margin)
        assert tensors["scale"].item() == scale
        assert tensors["amax"].item() == 0
    assert tuple(tensors["amax_history"][:, 0].tolist()) == history
    assert tensors["nonfinite_steps"].item() == sum(not math.isfinite(amax) for amax in amaxes)


def test_unknown_source_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="no kernel source 'cast'; there are: cast_blocks, cast_transpose, cast_w"):
        source("cast")
