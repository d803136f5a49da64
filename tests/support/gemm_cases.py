"""FP8 operands, their product in fp64, and the tolerance for a kernel's result."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels_cuda.gemm import Operand
from kernels_cuda.gemm_variants import OUTPUTS, Configuration

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FORMAT_PAIRS = (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"))
# half the distance of neighbouring numbers, relative, and half the smallest number
_ROUNDING = {torch.float32: (2.0**-24, 0.0), torch.bfloat16: (2.0**-8, 0.0), torch.float16: (2.0**-11, 2.0**-25)}
# The largest error of sums of Hopper's tensor cores over `random_problems`, relative to the sum of absolute terms, with
# and without promotion, in the model of tensor_cores.py; see `test_the_worst_sums`. Ada's is about the same.
LARGEST = {True: 2.0**-12.00, False: 2.0**-10.65}
# twice that is allowed: for other operands, and for tensor cores that add in a different order
ACCUMULATION = {promote: 2 * error for promote, error in LARGEST.items()}


class Operands(NamedTuple):
    """a [M, K] and b [N, K] as codes, with their factors."""

    a: Tensor
    b: Tensor
    a_scale_inv: Tensor
    b_scale_inv: Tensor
    a_format: str
    b_format: str

    @property
    def scaled(self) -> tuple[Operand, Operand]:
        """Both operands as kernels take them."""
        return (self.a, self.a_scale_inv), (self.b, self.b_scale_inv)

    def values(self) -> tuple[Tensor, Tensor]:
        """Both operands as fp64, without the factors."""
        return self.a.view(DTYPES[self.a_format]).double(), self.b.view(DTYPES[self.b_format]).double()

    @property
    def factor(self) -> float:
        return self.a_scale_inv.item() * self.b_scale_inv.item()

    def product(self) -> Tensor:
        """The product in fp64."""
        a, b = self.values()
        return a @ b.t() * self.factor

    def magnitude(self) -> Tensor:
        """The sum of all terms' absolute values, which bounds the error of summation."""
        a, b = self.values()
        return a.abs() @ b.abs().t() * self.factor


def operands(m: int, n: int, k: int, a_format: str = "e4m3", b_format: str = "e4m3", seed: int = 0) -> Operands:
    generator = torch.Generator().manual_seed(seed)
    codes = [
        torch.randn(rows, k, generator=generator).mul_(4).to(DTYPES[fmt]).view(torch.uint8)
        for rows, fmt in ((m, a_format), (n, b_format))
    ]
    return Operands(*codes, torch.tensor(0.37), torch.tensor(0.0131), a_format, b_format)


class Problem(NamedTuple):
    """A GEMM of random sizes, and the kernel for it; not promoted, one for groups of rows."""

    number: int
    configuration: Configuration
    promote: bool
    m: int
    n: int
    k: int
    pair: tuple[str, str]
    output: torch.dtype

    @property
    def case(self) -> Operands:
        return operands(self.m, self.n, self.k, *self.pair, seed=self.number)


def random_problems(fast: Sequence[Configuration], promoted: Sequence[Configuration]) -> Iterator[Problem]:
    """200 problems, four of ten promoted, with these configurations in turn; empty without configurations."""
    if not fast:
        return
    chosen = random.Random(0)
    for number in range(200):
        m, n = (chosen.choice([chosen.randint(1, 300), 64 * chosen.randint(1, 40)]) for _ in range(2))
        k = 16 * chosen.randint(1, 200)
        pair, output = chosen.choice(FORMAT_PAIRS), chosen.choice(list(OUTPUTS))
        promote = number % 10 >= 6
        ours = promoted if promote else fast
        yield Problem(number, ours[number // 10 % len(ours)], promote, m, n, k, pair, output)


def assert_close(actual: Tensor, expected: Tensor, magnitude: Tensor, accumulation: float) -> None:
    """Within the rounding of the output and the error of the sums; no NaN.

    Args:
        actual: a kernel's result.
        expected: in fp64.
        magnitude: in fp64, sums of absolute values.
        accumulation: error of a sum, relative to its magnitude.
    """
    relative, absolute = _ROUNDING[actual.dtype]
    error = (actual.double() - expected).abs()
    bound = relative * 1.01 * expected.abs() + absolute + accumulation * magnitude
    wrong = ~(error <= bound)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} wrong, the first at {wrong.nonzero()[0].tolist()}, off by up to"
        f" {(error / magnitude).max().item():.2e} of the terms' sizes"
    )
