"""The GEMMs of both generations with block scales, from their own sources on the CPU. No GPU is needed.

Codes are small integers and scales powers of two, so that every sum is exact and results are bit-identical. Stages,
barriers and columns are also covered by the tests of the plain GEMMs.
"""

from __future__ import annotations

from typing import NamedTuple

import gemm_on_host
import pytest
import torch
from gemm_cases import ACCUMULATION, assert_close
from gemm_on_host import Chosen
from host_kernels import at_the_edge, host_tensor_map
from torch import Tensor

from kernels_cuda import gemm
from kernels_cuda.gemm_variants import configurations

BLOCK, POISON = 128, 0xFF
LARGE, SMALL = configurations((9, 0), in_blocks=True)
(ADA,) = configurations((8, 9), in_blocks=True)
# few, because each takes long to compile: the configuration, the dimension over which b shares a scale, the output
CASES = [
    Chosen(configuration, output, promote=True, b_scale_rows=rows)
    for configuration, rows, output in (
        (LARGE, 128, torch.bfloat16),
        (LARGE, 1, torch.float32),
        (SMALL, 1, torch.float16),
        (ADA, 128, torch.bfloat16),
        (ADA, 1, torch.float32),
    )
]


def named(case: Chosen) -> str:
    one = case.configuration
    return f"{one.family} {one.name} {case.b_scale_rows} rows {case.output}".replace("torch.", "")


@pytest.fixture(autouse=True)
def _maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "tensor_map", host_tensor_map)


class Operands(NamedTuple):
    """Codes ``[M, K]`` and ``[N, K]``, and scale_inv of their blocks."""

    a: Tensor
    b: Tensor
    a_scale_inv: Tensor
    b_scale_inv: Tensor

    def product(self) -> Tensor:
        """The product in fp64."""
        a, b = self.values()
        return a @ b.t()

    def values(self) -> tuple[Tensor, Tensor]:
        """The operands in fp64, multiplied by the scales of their blocks."""
        return of_elements(self.a, self.a_scale_inv), of_elements(self.b, self.b_scale_inv)


def of_elements(codes: Tensor, scale_inv: Tensor) -> Tensor:
    (rows, k), (blocks, _) = codes.shape, scale_inv.shape
    scale_inv = scale_inv.double().repeat_interleave(1 if blocks == rows else BLOCK, 0)[:rows]
    return codes.view(torch.float8_e4m3fn).double() * scale_inv.repeat_interleave(BLOCK, 1)[:, :k]


def exact(m: int, n: int, k: int, b_rows: int) -> Operands:
    """Sums of integers of at most 4, times powers of two from 1 to 64. Scales end right before a page."""
    draw = torch.Generator().manual_seed(m + 3 * n + 5 * k)
    codes = (
        torch.randint(-2, 3, (rows, k), generator=draw).to(torch.float8_e4m3fn).view(torch.uint8) for rows in (m, n)
    )
    steps = -(-k // BLOCK)
    scales = [2.0 ** torch.randint(0, 4, shape, generator=draw) for shape in ((steps, m), (steps, -(-n // b_rows)))]
    # as casts lay them out: rows are contiguous, except for a weight, where steps are
    a_scale_inv = at_the_edge(scales[0]).t()
    return Operands(*codes, a_scale_inv, at_the_edge(scales[1]).t() if b_rows == 1 else at_the_edge(scales[1].t()))


def run(case: Operands, chosen: Chosen, bias: Tensor | None = None, late: bool = True) -> Tensor:
    # few multiprocessors, so that blocks take several tiles
    return gemm_on_host.run(((case.a, case.a_scale_inv), (case.b, case.b_scale_inv)), chosen, bias, late, 2)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("chosen", CASES, ids=named)
def test_each_step_is_multiplied_by_its_scales(chosen: Chosen, late: bool) -> None:
    # a tile and a remainder; a single row; more steps than stages; a last step of 16
    shapes = [(300, 200, 400), (1, 1, 16), (65, 129, 128), (130, 130, 128 * (chosen.configuration.stages + 1) + 16)]
    for m, n, k in shapes:
        case = exact(m, n, k, chosen.b_scale_rows)
        bias = torch.randint(-9, 9, (n,)).to(chosen.output)
        expected = (case.product() + bias.double()).to(chosen.output)
        assert torch.equal(run(case, chosen, bias, late=late), expected), (m, n, k)


@pytest.mark.parametrize("chosen", CASES, ids=named)
def test_any_codes_and_scales(chosen: Chosen) -> None:
    """Many magnitudes, with scales laid out as a transposed weight's, within the error of the tensor cores' sums."""
    case = exact(150, 140, 400, chosen.b_scale_rows)
    codes = [torch.randn(one.shape).mul_(4).to(torch.float8_e4m3fn).view(torch.uint8) for one in case[:2]]
    scales = [(0.01 * torch.randn(one.shape[::-1]).exp()).t() for one in case[2:]]
    case = Operands(*codes, scales[0].contiguous(), scales[1])
    a, b = case.values()
    assert_close(run(case, chosen), case.product(), a.abs() @ b.abs().t(), ACCUMULATION[True])
