"""Activations in the casts in blocks, from their sources on the CPU: torch's values, cast as FP8's definition says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from block_casts_on_host import CANONICAL, DTYPES, Inputs, Kind, Made, check, run
from by_columns import padded
from host_kernels import Guarded
from torch import Tensor

from kernels_cuda import block_casts
from lightning_fp8.ops import activations

# a sum of zeros has no sign
NO_NEGATIVE_ZERO = CANONICAL.copy()
NO_NEGATIVE_ZERO[0x80] = 0
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "swiglu": lambda x, up: F.silu(x) * up,
}
assert list(ACTIVATIONS) == list(activations.ACTIVATIONS)
# each activation with two dtypes, one in each direction and family
CASES = [
    (family, activation, backward, DTYPES[(number + backward + (family == "cast_mx")) % 3])
    for family in ("cast_blocks", "cast_mx")
    for number, activation in enumerate(ACTIVATIONS)
    for backward in (False, True)
]


def random_inputs(shape: tuple[int, int], activation: str, backward: bool, dtype: torch.dtype) -> Inputs:
    """Of all magnitudes, in tensors whose rows are further apart."""
    rows, columns = shape
    wider = (0, 8, 3)[columns % 3]

    def one(like: float) -> Tensor:
        made = torch.randn(rows, columns + wider) * like * 2.0 ** torch.randint(-3, 3, (rows, 1))
        return made.to(dtype)[:, :columns]

    x, up, dy = one(3), one(1), one(1)
    return Inputs(x, up if activation == "swiglu" else None, dy if backward else None)


def by_torch(inputs: Inputs, activation: str) -> list[Tensor]:
    """In fp64: the output, or the gradients."""
    inner = [one.double().requires_grad_() for one in (inputs.x, inputs.up) if one is not None]
    y = ACTIVATIONS[activation](*inner)
    return [y.detach()] if inputs.dy is None else [*torch.autograd.grad(y, inner, inputs.dy.double())]


def own_values(kind: Kind, inputs: Inputs, activation: str) -> list[Tensor]:
    """What the kernel computes, bit for bit: column sums of one row. The last bits are not torch's."""
    one_row = Inputs(*(None if one is None else one.reshape(1, -1) for one in inputs))
    made = run(kind, one_row, activation, (True, False, True), poisons=(0x11,))
    return [one.sums.view(inputs.x.shape) for one in made]


def check_all(kind: Kind, values: Tensor, made: Made) -> None:
    check(kind, values, made, canonical=NO_NEGATIVE_ZERO)
    np.testing.assert_equal(made.amax, values.abs().max().item())


@pytest.mark.parametrize(("family", "activation", "backward", "dtype"), CASES)
def test_casts_are_those_of_the_activation(family: str, activation: str, backward: bool, dtype: torch.dtype) -> None:
    kind, info = Kind(family), torch.finfo(dtype)
    # a whole tile beside three at the edges, and a part of one
    for number, shape in enumerate([(131, 140), (33, 8)]):
        inputs = random_inputs(shape, activation, backward, dtype)
        values = own_values(kind, inputs, activation)
        factors = [one.double().abs() + 1 for one in inputs[1:] if one is not None]
        slack = 2.0**-18 * math.prod(factors, start=torch.ones(()))
        for own, exact in zip(values, by_torch(inputs, activation), strict=True):
            # a result of two operations, each rounded
            error = (own.double() - exact).abs()
            assert (error <= (1.1 + (activation == "swiglu")) * info.eps * exact.abs() + slack).all()
        kind = kind._replace(power_of_two=bool(number % 2) and not kind.in_mx)
        for own, made in zip(values, run(kind, inputs, activation), strict=True):
            check_all(kind, own, made)


@pytest.mark.parametrize("family", ["cast_blocks", "cast_mx"])
def test_special_numbers(family: str) -> None:
    """A block with inf or NaN, among them those of which the activation makes one; zeros and the smallest numbers."""
    kind = Kind(family)
    for special in (math.inf, -math.inf, math.nan, 0.0, 1e-38, -200.0, 3e38):
        x = torch.randn(40, 150)
        x[:32, :64] = 0
        x[5, 7] = x[-1, -1] = special
        (own,), (exact,) = own_values(kind, Inputs(x), "silu"), by_torch(Inputs(x), "silu")
        assert torch.equal(own.isnan(), exact.isnan())
        assert torch.equal(own.isinf(), exact.float().isinf())
        (made,) = run(kind, Inputs(x), "silu")
        check_all(kind, own, made._replace(sums=None))


def halves(whole: Tensor, which: int, dim: int) -> Tensor:
    return whole.chunk(2, dim)[which]


@pytest.mark.parametrize("family", ["cast_blocks", "cast_mx"])
@pytest.mark.parametrize("outputs", [(True, True, True), (True, False, False), (False, True, False)])
def test_both_gradients_in_one_tensor(family: str, outputs: Sequence[bool]) -> None:
    """As of a layer that makes gate and up together: the halves of a tensor are cast as two tensors."""
    rows, columns, kind = 140, 128, Kind(family)
    inputs = random_inputs((rows, columns), "swiglu", True, torch.float32)
    apart = run(kind, inputs, "swiglu")
    by_rows, by_columns = kind.scale_shapes(rows, 2 * columns)
    dtype = torch.uint8 if kind.in_mx else torch.float32
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
    block_casts.cast(kind.kernel(x.dtype, "swiglu", True), x, result, inputs.dy, gated=True)
    assert all(one.unharmed() for one in guards)
    assert amax.item() == max(one.amax for one in apart)
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
    tensors = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up, dy = (tensor.clone().requires_grad_() for tensor in tensors)
    y = F.silu(gate) * up
    expected = torch.autograd.grad(y, [gate, up], dy) if backward else [y]
    inputs = Inputs(gate.detach(), up.detach(), dy.detach() if backward else None)
    for one, other in zip(own_values(Kind("cast_blocks"), inputs, "swiglu"), expected, strict=True):
        assert (one.to(dtype) == other).float().mean() > 0.99
