"""Activations in the casts in blocks, from their sources on the CPU: torch's values, cast as FP8's definition says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_columns import padded, unpadded
from fp8_numpy import cast_in_blocks, code_values
from host_kernels import Guarded, HostKernel
from mx_numpy import cast_in_mx, in_tiles
from torch import Tensor

from kernels_cuda import block_casts
from kernels_cuda.casts import SCALE_TILE, column_sum_tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# two buffers per output, with different initial bytes: an element that differs afterwards was not written
POISONS = (0x11, 0xEE)
# zeros count as equal, as a sum of one of them has no sign
CANONICAL = np.where(np.isnan(code_values("e4m3")), 0x7F, np.arange(256)).astype(np.uint8)
CANONICAL[0x80] = 0
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "swiglu": lambda x, up: F.silu(x) * up,
}
# each activation with two dtypes, one in each direction and family
CASES = [
    (family, activation, backward, DTYPES[(number + backward + (family == "cast_mx")) % 3])
    for family in ("cast_blocks", "cast_mx")
    for number, activation in enumerate(ACTIVATIONS)
    for backward in (False, True)
]


class Inputs(NamedTuple):
    """What a variant takes."""

    x: Tensor
    up: Tensor | None
    dy: Tensor | None

    @classmethod
    def random(cls, shape: tuple[int, int], activation: str, backward: bool, dtype: torch.dtype) -> Inputs:
        """Of all magnitudes, in tensors whose rows are further apart."""
        rows, columns = shape
        wider = (0, 8, 3)[columns % 3]

        def one(like: float) -> Tensor:
            made = torch.randn(rows, columns + wider) * like * 2.0 ** torch.randint(-3, 3, (rows, 1))
            return made.to(dtype)[:, :columns]

        x, up, dy = one(3), one(1), one(1)
        return cls(x, up if activation == "swiglu" else None, dy if backward else None)

    def values(self, activation: str) -> list[Tensor]:
        """By torch in fp64: the output, or the gradients."""
        inner = [one.double().requires_grad_() for one in (self.x, self.up) if one is not None]
        y = ACTIVATIONS[activation](*inner)
        return [y.detach()] if self.dy is None else [*torch.autograd.grad(y, inner, self.dy.double())]


def kernel(family: str, activation: str, backward: bool, dtype: torch.dtype) -> HostKernel:
    defines = block_casts.variant(dtype, activation, backward)
    return HostKernel((family, defines), block_casts.layout(defines), block_casts.THREADS, 0)


class Made(NamedTuple):
    """One tensor's outputs."""

    y: Tensor
    scales: Tensor
    y_t: Tensor
    scales_t: Tensor
    sums: Tensor
    amax: float


def scale_shapes(family: str, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """Of scales by rows and by columns, the long dimension last."""
    down, across = -(-rows // 128), -(-columns // 128)
    return ((down * across * SCALE_TILE,),) * 2 if family == "cast_mx" else ((across, rows), (down, columns))


def run(launch: HostKernel, inputs: Inputs, power_of_two: bool = False) -> list[Made]:
    """One launch, run twice, with different initial bytes in all outputs and guards around them."""
    (rows, columns), (family, _) = inputs.x.shape, launch._function
    results = []
    dtype = torch.uint8 if family == "cast_mx" else torch.float32
    for poison in POISONS:
        guards, made = [], []
        for _ in range(1 if inputs.up is None or inputs.dy is None else 2):
            by_rows, by_columns = scale_shapes(family, rows, columns)
            outputs = [
                Guarded((rows, columns), torch.uint8, poison),
                Guarded(by_rows, dtype, poison),
                Guarded((columns, padded(rows)), torch.uint8, poison),
                Guarded(by_columns, dtype, poison),
                Guarded((column_sum_tiles(rows), columns), torch.float32, poison),
            ]
            y, scales, y_t, scales_t, sums = (one.tensor for one in outputs)
            amax = torch.tensor([0.25, 0.0, 0.25])
            stored = [one if one.dim() == 1 else one.t() for one in (scales, scales_t)]
            recorded = torch.tensor([1]), amax
            guards += outputs
            made.append((block_casts.Result(recorded, (y, stored[0]), (y_t, stored[1]), sums), amax))
        x, up, dy = inputs
        if up is None:
            block_casts.cast(launch, x, made[0][0], dy, power_of_two=power_of_two)
        else:
            of_up = None if dy is None else made[1][0]
            block_casts.cast_gated(launch, x, up, made[0][0], dy, of_up, power_of_two)
        assert all(one.unharmed() for one in guards), "written outside of an output"
        assert all(amax[::2].tolist() == [0.25, 0.25] for _, amax in made)
        results.append([Made(*one.by_rows, *one.by_columns, one.column_sums, amax[1].item()) for one, amax in made])
    for first, second in zip(*results, strict=True):
        for name, one, other in zip(Made._fields[:-1], first[:-1], second[:-1], strict=True):
            assert one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes(), name
    return results[0]


def own_values(launch: HostKernel, inputs: Inputs) -> list[Tensor]:
    """What the kernel computes, bit for bit: column sums of one row. The last bits are not torch's."""
    one_row = Inputs(*(None if one is None else one.reshape(1, -1) for one in inputs))
    return [made.sums.view(inputs.x.shape) for made in run(launch, one_row)]


def check(family: str, values: Tensor, made: Made, power_of_two: bool = False) -> None:
    """Codes and scales of both layouts are those of the values, and so are amax and sums."""
    v = values.float().numpy()
    for part, payload, scales in ((v, made.y, made.scales), (v.T, unpadded(made.y_t, len(v)), made.scales_t)):
        if family == "cast_mx":
            codes, inverse = cast_in_mx(part)
            inverse = in_tiles(inverse)
        else:
            codes, inverse = cast_in_blocks(part, "e4m3", 1, power_of_2=power_of_two)
        np.testing.assert_array_equal(scales.numpy(), inverse)
        np.testing.assert_array_equal(CANONICAL[payload.numpy()], CANONICAL[codes])
    np.testing.assert_equal(made.amax, float(np.abs(v).max()))
    for partial, tile in zip(made.sums, values.double().split(128), strict=True) if len(made.sums) else ():
        bound = tile.abs().sum(0) * len(tile) * 2.0**-24
        assert ((partial.double() - tile.sum(0)).abs() <= bound).all()


@pytest.mark.parametrize(("family", "activation", "backward", "dtype"), CASES)
def test_casts_are_those_of_the_activation(family: str, activation: str, backward: bool, dtype: torch.dtype) -> None:
    launch = kernel(family, activation, backward, dtype)
    info = torch.finfo(dtype)
    for number, shape in enumerate([(128, 128), (131, 270), (1, 1), (33, 8)]):
        inputs = Inputs.random(shape, activation, backward, dtype)
        values = own_values(launch, inputs)
        factors = [one.double().abs() + 1 for one in inputs[1:] if one is not None]
        slack = 2.0**-18 * math.prod(factors, start=torch.ones(()))
        for own, exact in zip(values, inputs.values(activation), strict=True):
            # a result of two operations, each rounded
            error = (own.double() - exact).abs()
            assert (error <= (1.1 + (activation == "swiglu")) * info.eps * exact.abs() + slack).all()
        power_of_two = bool(number % 2)
        for own, made in zip(values, run(launch, inputs, power_of_two), strict=True):
            check(family, own, made, power_of_two)


@pytest.mark.parametrize("family", ["cast_blocks", "cast_mx"])
def test_special_numbers(family: str) -> None:
    """A block with inf or NaN, among them those of which the activation makes one; zeros and the smallest numbers."""
    launch = kernel(family, "silu", False, torch.float32)
    for special in (math.inf, -math.inf, math.nan, 0.0, 1e-38, -200.0, 3e38):
        x = torch.randn(70, 150)
        x[:64, :64] = 0
        x[5, 7] = x[-1, -1] = special
        inputs = Inputs(x, None, None)
        (own,), (exact,) = own_values(launch, inputs), inputs.values("silu")
        assert torch.equal(own.isnan(), exact.isnan())
        assert torch.equal(own.isinf(), exact.float().isinf())
        (made,) = run(launch, inputs)
        check(family, own, made._replace(sums=made.sums[:0]))


def halves(whole: Tensor, which: int, dim: int) -> Tensor:
    return whole.chunk(2, dim)[which]


@pytest.mark.parametrize("family", ["cast_blocks", "cast_mx"])
@pytest.mark.parametrize("outputs", [(True, True, True), (True, False, False), (False, True, False)])
def test_both_gradients_in_one_tensor(family: str, outputs: Sequence[bool]) -> None:
    """As of a layer that makes gate and up together: the halves of a tensor are cast as two tensors."""
    rows, columns = 140, 128
    inputs = Inputs.random((rows, columns), "swiglu", True, torch.float32)
    launch = kernel(family, "swiglu", True, torch.float32)
    apart = run(launch, inputs)
    by_rows, by_columns = scale_shapes(family, rows, 2 * columns)
    dtype = torch.uint8 if family == "cast_mx" else torch.float32
    shapes = (rows, 2 * columns), by_rows, (2 * columns, padded(rows)), by_columns, (2, 2 * columns)
    types = torch.uint8, dtype, torch.uint8, dtype, torch.float32
    guards = [Guarded(shape, kind, 0x11) for shape, kind in zip(shapes, types, strict=True)]
    y, scales, y_t, scales_t, sums = (one.tensor for one in guards)
    stored = [one if one.dim() == 1 else one.t() for one in (scales, scales_t)]
    amax = torch.zeros(1)
    result = block_casts.Result(
        (torch.tensor([0]), amax),
        (y, stored[0]) if outputs[0] else None,
        (y_t, stored[1]) if outputs[1] else None,
        sums if outputs[2] else None,
    )
    x = torch.cat([inputs.x, inputs.up], 1)
    block_casts.cast(launch, x, result, inputs.dy, gated=True)
    assert all(one.unharmed() for one in guards)
    assert amax.item() == max(one.amax for one in apart)
    values = torch.cat(own_values(launch, inputs), 1)
    if all(outputs):
        check(family, values, Made(y, stored[0], y_t, stored[1], sums, amax.item()))
    for which, one in enumerate(apart):
        assert not outputs[0] or torch.equal(halves(y, which, 1), one.y)
        assert not outputs[1] or torch.equal(halves(y_t, which, 0), one.y_t)
        assert not outputs[2] or torch.equal(halves(sums, which, 1), one.sums)
        if outputs[1]:
            first = halves(stored[1], which, 0)
            assert torch.equal(first, one.scales_t)


@pytest.mark.parametrize("misaligned", [None, "gate", "up", "dy"])
def test_words_of_16_bytes_are_read_where_all_tensors_begin_at_one(misaligned: str | None) -> None:
    """A GPU raises an error for other addresses, and a CPU does not."""

    def made(name: str) -> Tensor:
        return torch.empty(128 * 128 + 8)[name == misaligned :][: 128 * 128].view(128, 128)

    flags = []
    payload = torch.empty(128, 128, dtype=torch.uint8), torch.empty(1, 128).t()
    results = [block_casts.Result(None, payload) for _ in range(2)]

    def record(grid: int, *arguments: int) -> None:
        flags.append(arguments[9])

    gate, up, dy = map(made, ("gate", "up", "dy"))
    block_casts.cast_gated(record, gate, up, results[0], dy, results[1])  # type: ignore[arg-type]
    assert [bool(one & 1) for one in flags] == [misaligned is None]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_round_where_torchs_operators_do(dtype: torch.dtype, backward: bool) -> None:
    """All but a few values are those of eager torch, whose products each end in the dtype."""
    tensors = torch.randn(3, 128, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up, dy = (tensor.clone().requires_grad_() for tensor in tensors)
    y = F.silu(gate) * up
    expected = torch.autograd.grad(y, [gate, up], dy) if backward else [y]
    inputs = Inputs(gate.detach(), up.detach(), dy.detach() if backward else None)
    for one, other in zip(own_values(kernel("cast_blocks", "swiglu", backward, dtype), inputs), expected, strict=True):
        assert (one.to(dtype) == other).float().mean() > 0.99
