"""The GEMM kernels compared with the reference on small random cases; :mod:`.self_test` does so for casts."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_cuda import gemm as kernels
from kernels_cuda.gemm_variants import Configuration
from kernels_cuda.launch import Kernel
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
) -> str | None:
    """More whole tiles than run at once, and partial ones; with a bias; with block scales if the kernel uses them."""
    for m, n, k in _shapes(configuration, kernel):
        a, b = _operand(m, k, a_format, 1), _operand(n, k, b_format, 2)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(3))
        out = torch.full((m, -(-n // 8) * 8), float("nan"), dtype=output, device=device)[:, :n]
        moved = a.to(device), b.to(device)
        if b_scale_rows:
            scales = _block_scales(m, n, k, b_scale_rows)
            on_device = scales[0].to(device), scales[1].to(device)
            kernels.gemm(kernel, configuration, *moved, out, *on_device, bias.to(device))
            expected, magnitude = _product_in_blocks(a, b, *scales, a_format, b_format)
        else:
            kernels.gemm(kernel, configuration, *moved, out, *_scales(device), bias.to(device))
            expected, magnitude = _product(a, b, a_format, b_format)
        expected += bias.to(output).float()
        failure = _difference(out.cpu(), expected, magnitude)
        if failure is not None:
            return f"its self-test at {m} x {n} x {k} gave {failure}"
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


def _scales(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(_A_SCALE_INV, device=device), torch.tensor(_B_SCALE_INV, device=device)


def _block_scales(m: int, n: int, k: int, b_scale_rows: int) -> tuple[Tensor, Tensor]:
    """Scales of several magnitudes, those of a laid out as casts write them, those of b as a transposed weight's."""
    generator, steps = torch.Generator().manual_seed(4), -(-k // kernels.SCALE_ROWS)
    a, b = (torch.randn(steps, rows, generator=generator).exp() for rows in (m, -(-n // b_scale_rows)))
    return a.mul_(_A_SCALE_INV).t(), b.mul_(_B_SCALE_INV).t()


def _product_in_blocks(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, a_format: str, b_format: str
) -> tuple[Tensor, Tensor]:
    """:func:`_product` for operands in blocks."""
    values = [
        payload.view(FORMATS[its_format].dtype).float() * by_element(scale_inv, payload)
        for payload, scale_inv, its_format in ((a, a_scale_inv, a_format), (b, b_scale_inv, b_format))
    ]
    return values[0] @ values[1].t(), values[0].abs() @ values[1].abs().t() * _ACCUMULATION


def _product(a: Tensor, b: Tensor, a_format: str, b_format: str) -> tuple[Tensor, Tensor]:
    """The product in fp32, and how far the tensor cores' sums may be from it."""
    a_values, b_values = a.view(FORMATS[a_format].dtype).float(), b.view(FORMATS[b_format].dtype).float()
    factor = _A_SCALE_INV * _B_SCALE_INV
    return a_values @ b_values.t() * factor, a_values.abs() @ b_values.abs().t() * (factor * _ACCUMULATION)


def _difference(actual: Tensor, expected: Tensor, margin: Tensor) -> str | None:
    error = (actual.float() - expected).abs()
    wrong = ~(error <= _ROUNDING[actual.dtype] * 1.01 * expected.abs() + margin)
    return f"{int(wrong.sum())} of {wrong.numel()} other sums" if bool(wrong.any()) else None
