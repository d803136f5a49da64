"""Sums as tensor cores add them, to compare with bit for bit, and for what a tolerance must allow."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TensorCores(NamedTuple):
    """How FP8 products are added, by MMA-Sim (github.com/microsoft/MMA-Sim), which was compared with the hardware.

    A sum and the products that are added to it at once are aligned to the largest of their exponents (of a product: the
    sum of its factors'), cut off behind a number of bits, and added exactly; the result is cut off again.

    Attributes:
        together: products that are added at once.
        bits: kept of each term behind the largest exponent.
        kept: of a sum, behind its leading bit.
    """

    together: int
    bits: int
    kept: int

    def sums(
        self,
        a: Tensor,
        b: Tensor,
        formats: tuple[str, str],
        promote: bool,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """``a [M, K] @ b [N, K]^T`` of values in these formats, fp64.

        With ``promote``, sums start anew every 128, and these partial sums are added in fp32. ``scales`` are exponents,
        of the powers of two by which products are multiplied, ``[M, ceil(K/32)]`` and ``[N, ceil(K/32)]``.
        """
        a_exponents, b_exponents = (exponents(values, fmt) for values, fmt in zip((a, b), formats))
        total, sums = torch.zeros(len(a), len(b)), torch.zeros(len(a), len(b), dtype=torch.float64)
        for k in range(0, a.shape[1], self.together):
            if promote and k % 128 == 0:
                total, sums = total + sums.float(), torch.zeros_like(sums)
            its = slice(k, k + self.together)
            shift = torch.zeros(()) if scales is None else scales[0][:, None, k // 32] + scales[1][:, k // 32]
            products = torch.ldexp(a[:, None, its] * b[:, its], shift[..., None])
            terms = torch.cat([products, sums[..., None]], dim=2)
            aligned_by = a_exponents[:, None, its] + b_exponents[:, its] + shift[..., None]
            unit = torch.maximum(aligned_by.amax(dim=2), exponents(sums)).sub(self.bits).exp2()
            fraction, exponent = torch.frexp((terms / unit[..., None]).trunc().sum(dim=2) * unit)
            sums = torch.ldexp((fraction * 2.0 ** (self.kept + 1)).trunc(), exponent - self.kept - 1)
        return (total + sums.float()).double() if promote else sums


def exponents(values: Tensor, fmt: str = "") -> Tensor:
    """The exponent of the leading bit, for subnormals the format's smallest one; for zero less than any other."""
    smallest = {"e4m3": -6.0, "e5m2": -14.0, "": -126.0}[fmt]
    result = (torch.frexp(values).exponent - 1).double().clamp(min=smallest)
    return torch.where(values == 0, -500.0, result)


HOPPER, ADA, SM120 = TensorCores(32, 13, 13), TensorCores(16, 13, 13), TensorCores(32, 25, 23)
