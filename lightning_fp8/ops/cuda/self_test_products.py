"""A product by torch compared with the reference on small cases; the other self-tests do so for our own kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.ops import e8m0, reference
from lightning_fp8.ops.formats import E4M3
from lightning_fp8.ops.operand import ALIGNMENT, Fp8Tensor

# several tiles of scales along each side; and sizes that are multiples of nothing
_SHAPES = ((272, 144, 288), (133, 71, 171))


def mx(device: torch.device, product: Callable[..., Tensor]) -> str | None:
    """What is wrong with the product of operands with scales in E8M0; None if all results are the exact ones."""
    for m, n, k in _SHAPES:
        # one of them as by columns: with zeros at the end of its rows
        a, b = _operand(m, k, k, 1), _operand(n, k, k + -k % ALIGNMENT, 2)
        bias = torch.arange(n).remainder(7).float()
        for output in (torch.bfloat16, torch.float32):
            for added in (None, bias):
                expected = reference.scaled_mm_dequantized(a, b, added, output)
                on_device = [
                    mat._replace(payload=mat.payload.to(device), scale_inv=mat.scale_inv.to(device)) for mat in (a, b)
                ]
                out = product(*on_device, None if added is None else added.to(device), output).cpu()
                if not torch.equal(out, expected):
                    wrong = int((out != expected).sum())
                    return f"its self-test at {m} x {n} x {k} in {output} gave {wrong} of {out.numel()} other sums"
    return None


def _operand(rows: int, k: int, width: int, seed: int) -> Fp8Tensor:
    """Small integers, and scales from 1/2 to 2, so that all sums are exact in fp32 in any order; a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-4, 5, (rows, k), generator=generator).float()
    codes = torch.randint(126, 129, (rows, -(-k // e8m0.BLOCK)), generator=generator, dtype=torch.uint8)
    values[3, : e8m0.BLOCK], codes[3, 0] = 0, 0
    payload = F.pad(values, (0, width - k)).to(E4M3.dtype).view(torch.uint8)
    return Fp8Tensor(payload, e8m0.to_tiles(codes), E4M3.name)
