"""The GEMM kernels compared with the reference on small random cases; :mod:`.self_test` does so for casts."""

from __future__ import annotations

import copy
import functools
from itertools import pairwise

import torch
from torch import Tensor

from kernels_cuda import gemm as kernels
from kernels_cuda.gemm_variants import Configuration
from kernels_cuda.launch import Kernel
from lightning_fp8.ops import e8m0
from lightning_fp8.ops.amaxes import by_element
from lightning_fp8.ops.formats import FORMATS

_A_SCALE_INV, _B_SCALE_INV = 0.05, 0.02
# Relative to the sum of all terms' absolute values. Hopper's tensor cores align products before they add them, and
# truncate them after 13 bits: over these cases the error is at most 2^-11.1, without promotion. A little more than
# twice that is allowed.
_ACCUMULATION = 2.0**-10
_ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def gemm(
    device: torch.device,
    configuration: Configuration,
    a_format: str,
    b_format: str,
    output: torch.dtype,
    kernel: Kernel,
    b_scale_rows: int = 0,
    mx: bool = False,
) -> str | None:
    """More whole tiles than run at once, and partial ones; with a bias; with block scales if the kernel uses them."""
    for m, n, k in _shapes(configuration, kernel):
        operands, expected, margin = _problem(m, n, k, a_format, b_format, b_scale_rows, mx)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(3))
        out = torch.full((m, -(-n // 8) * 8), float("nan"), dtype=output, device=device)[:, :n]
        a, b = ((payload.to(device), scale_inv.to(device)) for payload, scale_inv in operands)
        kernels.gemm(kernel, configuration, a, b, out, bias.to(device))
        failure = _difference(out.cpu(), expected + bias.to(output).float(), margin)
        if failure is not None:
            return f"its self-test at {m} x {n} x {k} gave {failure}"
    return None


def grouped(
    device: torch.device,
    configuration: Configuration,
    grouped: str,
    a_format: str,
    b_format: str,
    output: torch.dtype,
    kernel: Kernel,
) -> str | None:
    """Groups without a row, of one tile and of several, with more steps than stages; partial tiles of columns; tiles of
    no group, which stay as they are.
    """
    # so that each block of a persistent kernel has many tiles
    kernel = copy.copy(kernel)
    kernel.multiprocessors = 2
    by_depth, n, k = grouped == "depth", 208, 128 * (configuration.stages + 1) - 16
    tiles, count = torch.tensor([1, 0, configuration.stages + 1, 2]), 4
    edges = 128 * torch.cat([tiles.new_zeros(1), tiles.cumsum(0)])
    of_tile = torch.cat([torch.arange(count).repeat_interleave(tiles), torch.full((3,), -1)])
    rows = 128 * len(of_tile)
    scales = [torch.tensor([1.0, 3.0, 0.5, 2.0]) * factor for factor in (_A_SCALE_INV, _B_SCALE_INV)]
    shapes = ((192, rows), (304, rows)) if by_depth else ((rows, k), (count * n, k))
    payloads = [_operand(*shape, fmt, seed) for seed, (shape, fmt) in enumerate(zip(shapes, (a_format, b_format)))]
    a, b = (
        payload.view(FORMATS[fmt].dtype).float() for payload, fmt in zip(payloads, (a_format, b_format), strict=True)
    )
    if not by_depth:
        b, payloads[1] = b.view(count, n, k), payloads[1].view(count, n, k)
    left, right = ((payload.to(device), scale.to(device)) for payload, scale in zip(payloads, scales, strict=True))
    bias = torch.randn(count, n, generator=torch.Generator().manual_seed(3))
    shape = (count, len(a), len(b)) if by_depth else (rows, n)
    out = torch.full(shape, float("nan"), dtype=output, device=device)
    if by_depth:
        kernels.gemm_by_depth(kernel, configuration, left, right, edges.int().to(device), out)
    else:
        kernels.gemm_by_rows(kernel, configuration, left, right, of_tile.int().to(device), out, bias.to(device))
    result = out.cpu()
    for group, (begin, end) in enumerate(pairwise(edges.tolist())):
        part, scale = slice(begin, end), scales[0][group] * scales[1][group]
        of_a, of_b = (a[:, part], b[:, part]) if by_depth else (a[part], b[group])
        expected, margin = of_a @ of_b.t() * scale, of_a.abs() @ of_b.abs().t() * scale * _ACCUMULATION
        if not by_depth:
            expected += bias[group].to(output).float()
        failure = _difference(result[group] if by_depth else result[part], expected, margin)
        if failure is not None:
            return f"its self-test gave {failure} in group {group}"
    if not by_depth and not result[int(edges[-1]) :].isnan().all():
        return "its self-test gave rows of no group"
    return None


def sum_splits(device: torch.device, output: torch.dtype, kernel: Kernel) -> str | None:
    """Three parts, with a bias; a ragged last group of columns."""
    rows, columns, splits = 37, 71, 3
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(splits, 40, 72, generator=generator)
    bias, before = torch.randn(columns, generator=generator), torch.randn(rows, 72, generator=generator).to(output)
    out = before.to(device, copy=True)
    split = kernels.Split(splits, parts.to(device), kernel)
    kernels.sum_split_parts(split, out[:, :columns], bias.to(device))
    expected = parts[:, :rows, :columns].sum(dim=0) + bias.to(output).float()
    failure = _difference(out[:, :columns].cpu(), expected, 2.0**-10 * torch.ones_like(expected))
    if failure is None and not torch.equal(out[:, columns:].cpu(), before[:, columns:]):
        failure = "a column that is not its own"
    return None if failure is None else f"its self-test gave {failure}"


def _shapes(configuration: Configuration, kernel: Kernel) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """More tiles than run at once and more steps than stages; then partial tiles on all sides."""
    cluster, block_n = configuration.cluster, configuration.block_n
    clusters = 3 * (kernel.multiprocessors // cluster) // 2 + 1
    whole = (configuration.block_m * cluster * clusters, block_n, 128 * (configuration.stages + 1))
    return whole, (configuration.block_m * cluster + 40, block_n + 23, 400)


def _operand(rows: int, columns: int, format: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator).mul_(8.0)
    return values.to(FORMATS[format].dtype).view(torch.uint8)


def _block_scales(m: int, n: int, k: int, b_scale_rows: int) -> tuple[Tensor, Tensor]:
    """Scales of several magnitudes, those of a laid out as casts write them, those of b as a transposed weight's."""
    generator, steps = torch.Generator().manual_seed(4), -(-k // kernels.SCALE_ROWS)
    a, b = (torch.randn(steps, rows, generator=generator).exp() for rows in (m, -(-n // b_scale_rows)))
    return a.mul_(_A_SCALE_INV).t(), b.mul_(_B_SCALE_INV).t()


def _mx_scales(rows: int, k: int, smallest: int, seed: int) -> Tensor:
    """Scales of several magnitudes, in E8M0 from this code on."""
    generator, shape = torch.Generator().manual_seed(seed), (rows, -(-k // e8m0.BLOCK))
    return e8m0.to_tiles(torch.randint(smallest, smallest + 7, shape, dtype=torch.uint8, generator=generator))


# in a row, the variants of a configuration differ in the output alone; more than both shapes would be a lot of memory
@functools.lru_cache(maxsize=2)
def _problem(
    m: int, n: int, k: int, a_format: str, b_format: str, b_scale_rows: int, mx: bool
) -> tuple[tuple[kernels.Operand, kernels.Operand], Tensor, Tensor]:
    """a and b; their product in fp32; and how far the tensor cores' sums may be from it."""
    a, b = _operand(m, k, a_format, 1), _operand(n, k, b_format, 2)
    scales = torch.tensor(_A_SCALE_INV), torch.tensor(_B_SCALE_INV)
    if mx:
        # down to the smallest scale that there is; products are of the size of the bias
        scales = _mx_scales(m, k, 238, 3), _mx_scales(n, k, 0, 4)
    elif b_scale_rows:
        scales = _block_scales(m, n, k, b_scale_rows)
    a_values, b_values = (
        # values with scales in E8M0 exceed the range of fp32
        payload.view(FORMATS[its_format].dtype)
        .to(torch.float64 if mx else torch.float32)
        .mul_(by_element(scale, payload) if b_scale_rows else scale)
        for payload, its_format, scale in zip((a, b), (a_format, b_format), scales, strict=True)
    )
    return (
        ((a, scales[0]), (b, scales[1])),
        a_values @ b_values.t(),
        a_values.abs() @ b_values.abs().t() * _ACCUMULATION,
    )


def _difference(actual: Tensor, expected: Tensor, margin: Tensor) -> str | None:
    error = (actual.float() - expected).abs()
    wrong = ~(error <= _ROUNDING[actual.dtype] * 1.01 * expected.abs() + margin)
    return f"{int(wrong.sum())} of {wrong.numel()} other sums" if bool(wrong.any()) else None
