"""GEMMs and casts over groups of rows, each with a scale, from their own sources on the CPU. No GPU is needed.

Codes are small integers and scales powers of two, so that every sum is exact and results are bit-identical. Formats,
stages and barriers are covered by the tests of the plain GEMMs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import gemm_on_host
import pytest
import torch
from casts_on_host import NO_PAYLOAD, POISONS, assert_codes, assert_sums, cast_kernel, first_scale
from fp8_numpy import power_of_two_below
from gemm_cases import DTYPES
from gemm_on_host import POISON, Chosen
from host_kernels import Guarded, HostKernel, at_the_edge, host_tensor_map
from torch import Tensor

from kernels_cuda import casts, gemm
from kernels_cuda.gemm_variants import grouped_configuration
from lightning_fp8.scalings.operand import Casting

TILE, NAN_CODE = 128, 0x7F
HOPPER, ADA = (9, 0), (8, 9)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Routing(NamedTuple):
    """The rows of each group, and the tiles behind the last of them."""

    sizes: Sequence[int]
    unused: int

    @property
    def edges(self) -> list[int]:
        return [0, *itertools.accumulate(-(-size // TILE) * TILE for size in self.sizes)]

    @property
    def rows(self) -> int:
        """Of the whole matrix."""
        return self.edges[-1] + self.unused * TILE

    @property
    def group_of_tile(self) -> list[int]:
        counts = [-(-size // TILE) for size in self.sizes]
        return [group for group, count in enumerate(counts) for _ in range(count)] + [-1] * self.unused

    def place(self, rows: Tensor) -> Tensor:
        """Of numbers for all rows, those of the groups; zeros in the rest of their tiles."""
        placed, behind = torch.zeros_like(rows), self.edges[-1]
        for first, size in zip(self.edges, self.sizes, strict=False):
            placed[first : first + size] = rows[first : first + size]
        placed[behind:] = rows[behind:]
        return placed


ROUTINGS = [
    # an empty group, whole tiles, one row; then nothing is unused, and last, no group has rows
    Routing([200, 0, 256, 1], 2),
    Routing([0, 0, 500, 0], 1),
    Routing([1, 129], 0),
    Routing([0, 0], 1),
]


def int32(values: Sequence[int]) -> Tensor:
    return at_the_edge(torch.tensor(values, dtype=torch.int32))


class Numbers:
    """Draws integers, as codes, and powers of two."""

    def __init__(self, *seed: int) -> None:
        self._draw = torch.Generator().manual_seed(sum(3**at * one for at, one in enumerate(seed)))

    def codes(self, *shape: int, fmt: str = "e4m3") -> Tensor:
        """At most 2; in memory that ends at a page."""
        drawn = torch.randint(-2, 3, shape, generator=self._draw)
        return at_the_edge(drawn.to(DTYPES[fmt]).view(torch.uint8))

    def scales(self, count: int) -> Tensor:
        """No two the same."""
        return at_the_edge(2.0 ** (torch.randperm(count, generator=self._draw) - 2.0))

    def bias(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return at_the_edge(torch.randint(-9, 10, shape, generator=self._draw).to(dtype))


def values(codes: Tensor, fmt: str = "e4m3") -> Tensor:
    return codes.view(DTYPES[fmt]).double()


def chosen(
    capability: tuple[int, int], grouped: str, output: torch.dtype, promote: bool, a_format: str = "e4m3"
) -> Chosen:
    configuration = grouped_configuration(capability, promote)
    assert configuration is not None
    return Chosen(configuration, output, (a_format, "e4m3"), promote, grouped=grouped)


def named(value: object) -> str | None:
    if isinstance(value, Routing):
        return "-".join(map(str, value.sizes))
    if isinstance(value, Chosen):
        return f"{value.configuration.family} {value.output} {'promoted' if value.promote else 'fast'}".replace(
            "torch.", ""
        )
    return None


def loaded(one: Chosen, late: bool = True) -> HostKernel:
    kernel = gemm_on_host.load(one, late)
    # so that blocks of a persistent kernel take several tiles
    kernel.multiprocessors = 2
    return kernel


@pytest.fixture(autouse=True)
def _maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "tensor_map", host_tensor_map)


def test_a_configuration_has_tiles_of_one_group() -> None:
    for promote in (False, True):
        for capability in (HOPPER, ADA, (12, 0)):
            one = grouped_configuration(capability, promote)
            assert one is not None
            assert (one.block_m, one.cluster) == (TILE, 1)
        assert grouped_configuration((10, 0), promote) is None


# --- by rows ----------------------------------------------------------------------------------------------------------

BY_ROWS = [
    chosen(capability, "rows", output, promote, a_format)
    for capability in (HOPPER, ADA)
    for output, promote, a_format in ((BF16, False, "e4m3"), (FP16, True, "e4m3"), (FP32, True, "e5m2"))
]


def check_by_rows(
    one: Chosen, routing: Routing, n: int, k: int, bias_dtype: torch.dtype | None = None, late: bool = True
) -> None:
    count, numbers, fmt = len(routing.sizes), Numbers(n, k, *routing.sizes), one.formats[0]
    a = at_the_edge(routing.place(numbers.codes(routing.rows, k, fmt=fmt)))
    # whatever lies there, nothing comes of it
    a[routing.edges[-1] :] = NAN_CODE
    # nor is the scale of group -1 read
    b, scales = numbers.codes(count, n, k), (numbers.scales(count), at_the_edge(numbers.scales(count), begins=True))
    bias = None if bias_dtype is None else numbers.bias(count, n, dtype=bias_dtype)
    # rows further apart than their elements need
    guarded = Guarded((routing.rows, n + 16), one.output, POISON)
    out = guarded.tensor[:, :n]
    gemm.gemm_by_rows(
        loaded(one, late),
        one.configuration,
        (a, scales[0]),
        (b, scales[1]),
        int32(routing.group_of_tile),
        out,
        bias,
    )
    assert guarded.unharmed()
    untouched = guarded.tensor[:, n:], guarded.tensor[routing.edges[-1] :]
    assert all((part.contiguous().view(torch.uint8) == POISON).all() for part in untouched)
    for group, (first, end) in enumerate(itertools.pairwise(routing.edges)):
        expected = values(a[first:end], fmt) @ values(b[group]).t() * scales[0][group] * scales[1][group]
        if bias is not None:
            expected += bias[group].double()
        assert torch.equal(out[first:end], expected.to(one.output)), group


@pytest.mark.parametrize("one", BY_ROWS, ids=named)
def test_rows_are_multiplied_with_the_matrix_of_their_group(one: Chosen) -> None:
    widths, depths = (128, 144, 16, 272), (128, 400, 16, 144)
    for at, routing in enumerate(ROUTINGS):
        for further in (0, 1):
            check_by_rows(one, routing, widths[(at + further) % 4], depths[at - further])


@pytest.mark.parametrize("one", BY_ROWS, ids=named)
def test_each_group_has_its_bias(one: Chosen) -> None:
    for routing, bias_dtype in zip((*ROUTINGS[:2], ROUTINGS[0]), (BF16, FP16, FP32), strict=True):
        check_by_rows(one, routing, 144, 48, bias_dtype)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("one", [BY_ROWS[0], BY_ROWS[2], BY_ROWS[3], BY_ROWS[5]], ids=named)
def test_more_steps_than_stages_by_rows(one: Chosen, late: bool) -> None:
    check_by_rows(one, ROUTINGS[0], 48, 128 * (one.configuration.stages + 1) + 16, BF16, late)


# --- by depth ---------------------------------------------------------------------------------------------------------

BY_DEPTH = [
    chosen(capability, "depth", output, True, a_format)
    for capability in (HOPPER, ADA)
    for output, a_format in ((BF16, "e4m3"), (FP16, "e4m3"), (FP32, "e5m2"))
]


def check_by_depth(one: Chosen, routing: Routing, m: int, n: int, late: bool = True) -> None:
    count, numbers, fmt = len(routing.sizes), Numbers(m, n, *routing.sizes), one.formats[0]
    a, b = (
        at_the_edge(routing.place(numbers.codes(routing.rows, size, fmt=each)).t().contiguous())
        for size, each in zip((m, n), one.formats, strict=True)
    )
    for payload in (a, b):
        payload[:, routing.edges[-1] :] = NAN_CODE
    scales = numbers.scales(count), numbers.scales(count)
    guarded = Guarded((count, m, n), one.output, POISON)
    gemm.gemm_by_depth(
        loaded(one, late), one.configuration, (a, scales[0]), (b, scales[1]), int32(routing.edges), guarded.tensor
    )
    assert guarded.unharmed()
    for group, (first, end) in enumerate(itertools.pairwise(routing.edges)):
        product = values(a[:, first:end], fmt) @ values(b[:, first:end]).t()
        expected = (product * scales[0][group] * scales[1][group]).to(one.output)
        assert torch.equal(guarded.tensor[group], expected), group
        assert (first < end) == bool(expected.any())


@pytest.mark.parametrize("one", BY_DEPTH, ids=named)
def test_each_group_has_the_sum_over_its_rows(one: Chosen) -> None:
    sizes = (64, 144), (192, 16), (128, 128), (320, 272)
    for at, routing in enumerate(ROUTINGS):
        for further in (0, 1):
            check_by_depth(one, routing, *sizes[at - further])
    # on Ada any number of rows
    for m in (16, 80, 144) if one in BY_DEPTH[3:] else ():
        check_by_depth(one, ROUTINGS[0], m, 48)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("one", [BY_DEPTH[2], BY_DEPTH[5]], ids=named)
def test_more_steps_than_stages_by_depth(one: Chosen, late: bool) -> None:
    # sums of different lengths, one after the other, and empty ones between them
    sizes = [128 * (one.configuration.stages + 1), 0, 0, 100, 300, 0]
    check_by_depth(one, Routing(sizes, 1), 192, 144, late)


# --- casts ------------------------------------------------------------------------------------------------------------


class Cast(NamedTuple):
    """The outputs, and what is left in the scaling state."""

    y: Tensor
    y_t: Tensor
    sums: Tensor
    scale_inv: Tensor
    amax: Tensor


# of the scaling state, in which groups have any places
PLACES = 11


def places(count: int) -> Tensor:
    return at_the_edge((torch.arange(count) * 4 + 3) % PLACES)


def cast(
    x: Tensor,
    routing: Routing,
    fmt: str,
    newest: Tensor,
    current: Tensor | None,
    poison: int,
    casting: Casting = Casting.HISTORY,
) -> Cast:
    count, columns = len(routing.sizes), x.shape[1]
    y, y_t = (Guarded(shape, torch.uint8, poison) for shape in ((routing.rows, columns), (columns, routing.rows)))
    sums = Guarded((routing.rows // TILE, columns), FP32, poison)
    scale_inv, amax = Guarded((count,), FP32, poison), torch.zeros(PLACES)
    guarded = y, y_t, sums, scale_inv
    written = [one.tensor for one in guarded]
    result = casts.Result(SCALES, newest, places(count), amax, written[3], *written[:3], current_amax=current)
    result = result._replace(group_of_tile=int32(routing.group_of_tile), scale_from=int(casting))
    casts.cast_transpose(cast_kernel(x.dtype, fmt), x, result)
    assert all(one.unharmed() for one in guarded)
    return Cast(*written, amax)


# whatever a place has, as no two have the same
SCALES = 1.5 ** torch.arange(PLACES, dtype=FP32)
WITH_HISTORY = torch.ones(PLACES)


@pytest.mark.parametrize("history", ["with", "without", "some with", "in evaluation"])
@pytest.mark.parametrize("routing", ROUTINGS, ids=named)
def test_a_cast_has_a_scale_for_each_group(routing: Routing, history: str) -> None:
    count, behind, dtype, fmt = len(routing.sizes), routing.edges[-1], BF16, "e5m2" if history == "with" else "e4m3"
    evaluates = history == "in evaluation"
    newest = {"without": torch.zeros(PLACES), "some with": torch.arange(PLACES) % 2.0}.get(history, WITH_HISTORY)
    x = routing.place(torch.randn(routing.rows, 72, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    x[behind:] = torch.nan
    for number, first in enumerate(routing.edges[:-1]):
        # groups of different sizes
        x[first : first + routing.sizes[number]] *= 2.0**number
    for poison in POISONS:
        current = None if history == "with" else torch.zeros(count)
        casting = Casting.OWN_POWER_OF_2 if evaluates else Casting.HISTORY
        made = cast(at_the_edge(x), routing, fmt, newest, current, poison, casting)
        amax, tiles = torch.zeros(PLACES), behind // TILE
        untouched = [made.y[behind:], made.y_t[:, behind:], made.sums[tiles:]]
        for group, (first, end) in enumerate(itertools.pairwise(routing.edges)):
            if first == end:
                untouched.append(made.scale_inv[group])
                continue
            place, part = places(count)[group], x[first:end]
            amax[place] = part.abs().max()
            has_history = newest[place] > 0 and not evaluates
            scale = SCALES[place] if has_history else first_scale(amax[place], fmt)
            if evaluates:
                scale = torch.tensor(power_of_two_below(amax[place].item(), fmt))
            if current is not None:
                # what has a history is not measured
                assert current[group] == (0 if has_history else amax[place])
            assert_codes(made.y[first:end], part, scale, fmt)
            assert torch.equal(made.y_t[:, first:end], made.y[first:end].t())
            assert_sums(made.sums[first // TILE : end // TILE], part)
            assert made.scale_inv[group] == 1 / scale
        assert torch.equal(made.amax, amax)
        assert all((one.contiguous().view(-1).view(torch.uint8) == poison).all() for one in untouched)


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_casts_of_groups_in_other_dtypes(dtype: torch.dtype) -> None:
    # a ragged tile at the right, and elements that are read one by one
    routing = ROUTINGS[0]
    x = routing.place(torch.randn(routing.rows, 77)).to(dtype)
    made = cast(x, routing, "e4m3", WITH_HISTORY, None, POISON)
    for group, (first, end) in enumerate(itertools.pairwise(routing.edges)):
        assert_codes(made.y[first:end], x[first:end], SCALES[places(4)[group]], "e4m3")


def test_a_gradient_of_an_activation_has_a_scale_for_each_group() -> None:
    routing, draw = ROUTINGS[2], torch.Generator().manual_seed(0)
    h, dy = (torch.randn(routing.rows, 64, generator=draw).to(BF16) for _ in range(2))
    made = torch.empty(routing.rows, 64, dtype=torch.uint8)
    scale_inv, amax, tiles = torch.empty(2), torch.zeros(PLACES), int32(routing.group_of_tile)
    result = casts.Result(SCALES, WITH_HISTORY, places(2), amax, scale_inv, made, NO_PAYLOAD, None, None, None, tiles)
    casts.cast_transpose(cast_kernel(BF16, "e5m2", "relu", True), h, result, dy)
    for (first, end), place in zip(itertools.pairwise(routing.edges), places(2), strict=True):
        gradient = torch.where(h[first:end] > 0, dy[first:end], 0)
        assert_codes(made[first:end], gradient, SCALES[place], "e5m2")
        assert amax[place] == gradient.abs().max()
    assert torch.equal(scale_inv, 1 / SCALES[places(2)])
