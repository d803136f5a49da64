"""The casts of all weights at once and the update of the scales, from their sources on the CPU, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from by_columns import padded, unpadded
from casts_on_host import (
    DTYPES,
    FLOAT_MAX,
    INF,
    NAN,
    POISONS,
    assert_codes,
    assert_same,
    first_scale,
)
from host_kernels import Guarded, HostKernel
from pairwise import pairwise
from torch import Tensor

from kernels_cuda import casts, scales
from kernels_cuda.casts import Weight
from lightning_fp8 import DelayedScaling
from lightning_fp8.ops.amaxes import max_abs
from lightning_fp8.scaling import ScalingState


def weights_kernel() -> HostKernel:
    return HostKernel(("cast_weights", ()), casts.CAST_WEIGHTS_LAYOUT, casts.THREADS, 0)


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


def test_which_accesses_are_aligned() -> None:
    everything = casts._ROWS | casts._COLUMNS
    assert casts.aligned(72, 48, 64, 128, 8) == everything
    assert casts.aligned(72, 48, 64, 0, 8) == casts.aligned(72, 48, 64, 136, 8) == casts._ROWS
    assert casts.aligned(72, 48, 64, 128, 12) == casts.aligned(72, 48, 68, 128, 8) == casts._COLUMNS
    assert casts.aligned(64, 48, 0, 0, 8) == casts._LOADS
    assert casts.aligned(64, 40, 0, 0, 8) == casts.aligned(72, 48, 0, 0, 8) == 0


def test_weights_of_all_kinds_at_once() -> None:
    xs = weights_of_all_kinds()
    run_weights(xs, [int(n) for n in torch.randperm(3 * len(xs))[: len(xs)]])


@pytest.mark.parametrize(("shape", "dtype"), [*zip([(1, 1), (129, 65), (200, 130)], DTYPES, strict=True)])
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
    # some have their largest among the oldest, which leave the window
    state.amax_history[-2:, ::2] = 1e9
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


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "count"), pairwise([1, 2, 3, 127, 128, 1024, 1025, 2500], [1, 7, 8, 9])[::2])
def test_update_scales(length: int, count: int, algorithm: str) -> None:
    margin = (0, 2, 127)[(count + length) % 3]
    recipe = DelayedScaling(margin=margin, amax_history_len=length, amax_compute_algo=algorithm)  # type: ignore[arg-type]
    compare_updates(count, recipe, steps=4)
