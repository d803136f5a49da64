"""The GEMMs of both generations with block scales, from their own sources on the CPU. No GPU is needed.

Codes are small integers and scales powers of two, so that every sum is exact and results are bit-identical. Stages,
barriers and columns are also covered by the tests of the plain GEMMs.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import pytest
import torch
from gemm_cases import ACCUMULATION, assert_close
from host_kernels import Guarded, HostKernel, at_the_edge, host_tensor_map
from torch import Tensor

from kernels_cuda import gemm, gemm_variants
from kernels_cuda.gemm import Split
from kernels_cuda.gemm_variants import Configuration, configurations

BLOCK, POISON = 128, 0xFF
LARGE, SMALL = (configurations((9, 0), True)[at] for at in (0, -1))
(ADA,) = configurations((8, 9), True)
# few, because each takes long to compile: the configuration, the dimension over which b shares a scale, the output
CASES = [
    (LARGE, 128, torch.bfloat16),
    (LARGE, 1, torch.float32),
    (SMALL, 1, torch.float16),
    (ADA, 128, torch.bfloat16),
    (ADA, 1, torch.float32),
]


def named(case: tuple[Configuration, int, torch.dtype]) -> str:
    return f"{case[0].family} {case[0].name} {case[1]} rows {case[2]}".replace("torch.", "")


@pytest.fixture(autouse=True)
def _maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "tensor_map", host_tensor_map)


class Operands(NamedTuple):
    """Codes ``[M, K]`` and ``[N, K]``, and scale_inv of their blocks."""

    a: Tensor
    b: Tensor
    a_scale_inv: Tensor
    b_scale_inv: Tensor

    def product(self, part: slice = slice(None)) -> Tensor:
        """The product in fp64."""
        a, b = self.values()
        return a[:, part] @ b[:, part].t()

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


def run(
    case: Operands,
    chosen: tuple[Configuration, int, torch.dtype],
    bias: Tensor | None = None,
    splits: int = 1,
    late: bool = True,
) -> Tensor:
    """One GEMM, into poisoned memory between guards."""
    configuration, b_rows, output = chosen
    (m, n), columns = (len(case.a), len(case.b)), -(-len(case.b) // 8) * 8
    made = torch.float32 if splits > 1 else output
    variant = gemm_variants.variant(configuration, "e4m3", "e4m3", made, True, b_rows)
    kernel = HostKernel(
        (configuration.family, variant),
        configuration.blocks_layout,
        configuration.threads,
        0,
        configuration.shared_bytes,
    )
    # few, so that blocks take several tiles
    kernel.multiprocessors = 2
    if configuration.family == "gemm_sm90":
        ctypes.c_int.in_dll(kernel._library, "late").value = late
    memory = Guarded((m, columns), output, POISON)
    out, operands = memory.tensor[:, :n], ((case[0], case[2]), (case[1], case[3]))
    if splits == 1:
        gemm.gemm(kernel, configuration, *operands, out, bias)
    else:
        parts = Guarded((splits, gemm.split_rows(configuration, m), columns), torch.float32, POISON)
        defines = gemm_variants.sum_splits_variant(output)
        added = HostKernel(
            ("sum_splits", defines), gemm_variants.SUM_SPLITS_LAYOUT, gemm_variants.SUM_SPLITS_THREADS, 0
        )
        split = Split(splits, parts.tensor, added)
        gemm.gemm(kernel, configuration, *operands, out, bias, split)
        assert parts.unharmed()
    assert memory.unharmed()
    return out.clone()


# a macro makes Ada's copies early or late, and thus another variant: test_gemm_sm89.py has both
@pytest.mark.parametrize(
    ("chosen", "late"),
    [(case, late) for case in CASES for late in (False, True)[: 2 - (case[0] is ADA)]],
    ids=lambda value: named(value) if isinstance(value, tuple) else "late" if value else "early",
)
def test_each_step_is_multiplied_by_its_scales(chosen: tuple[Configuration, int, torch.dtype], late: bool) -> None:
    configuration, b_rows, output = chosen
    # a tile and a remainder; a single row; more steps than stages; a last step of 16
    shapes = [(300, 200, 400), (1, 1, 16), (65, 129, 128), (130, 130, 128 * (configuration.stages + 1) + 16)]
    for m, n, k in shapes:
        case = exact(m, n, k, b_rows)
        bias = torch.randint(-9, 9, (n,)).to(output)
        assert torch.equal(run(case, chosen, bias, late=late), (case.product() + bias.double()).to(output)), (m, n, k)


@pytest.mark.parametrize("chosen", [CASES[1], CASES[4]], ids=named)
def test_parts_begin_with_the_scales_of_their_steps(chosen: tuple[Configuration, int, torch.dtype]) -> None:
    case = exact(140, 67, 6 * BLOCK - 48, chosen[1])
    for splits in (2, 5):
        assert torch.equal(run(case, chosen, torch.ones(67), splits), (case.product() + 1).float())


@pytest.mark.parametrize("chosen", CASES, ids=named)
def test_any_codes_and_scales(chosen: tuple[Configuration, int, torch.dtype]) -> None:
    """Many magnitudes, with scales laid out as a transposed weight's, within the error of the tensor cores' sums."""
    case = exact(150, 140, 400, chosen[1])
    codes = [torch.randn(one.shape).mul_(4).to(torch.float8_e4m3fn).view(torch.uint8) for one in case[:2]]
    scales = [(0.01 * torch.randn(one.shape[::-1]).exp()).t() for one in case[2:]]
    case = Operands(*codes, scales[0].contiguous(), scales[1])
    a, b = case.values()
    assert_close(run(case, chosen), case.product(), a.abs() @ b.abs().t(), ACCUMULATION[True])
