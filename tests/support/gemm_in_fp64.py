"""Stand-ins for the GEMM kernels: they compute in fp64 and refuse arguments that the real ones could not take."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from fp8_numpy import code_values
from torch import Tensor

from kernels_cuda import gemm as kernel_gemm
from kernels_cuda.gemm import Operand, Split
from kernels_cuda.gemm_variants import Configuration
from lightning_fp8.ops.cuda import gemm as gemm_operators
from lightning_fp8.ops.cuda import gemm_choice, kernels
from lightning_fp8.ops.cuda.gemm_choice import Choice

HOPPER = Configuration("gemm_sm90", 128, 128, 6)


class GemmKernel(NamedTuple):
    """Stands in for a loaded kernel: records what was requested."""

    configuration: Configuration
    a_format: str
    b_format: str
    output: torch.dtype
    promote: bool


class SumKernel(NamedTuple):
    output: torch.dtype


class Gemms:
    """Attributes:
    choice: the choice for every GEMM.
    missing: families of kernels that are not available: "gemm", "sum_splits".
    asked: arguments of each request for a choice: gemm, m, n, k, promote and the output's dtype.
    launches: "gemm" or "split_gemm" for each launch, in order.
    kernels: the kernel of each launch.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.choice, self.missing = Choice(HOPPER), set[str]()
        self.asked: list[tuple[Any, ...]] = []
        self.launches: list[str] = []
        self.kernels: list[GemmKernel] = []
        monkeypatch.setattr(gemm_choice, "choose", self._choose)
        monkeypatch.setattr(kernels, "gemm_kernel", self._obtain("gemm", GemmKernel))
        monkeypatch.setattr(kernels, "sum_splits_kernel", self._obtain("sum_splits", SumKernel))
        monkeypatch.setattr(kernel_gemm, "gemm", self._launch)

    def _choose(self, device: torch.device, *arguments: Any) -> Choice:
        *wanted, run = arguments
        assert run is gemm_operators.run_choice
        self.asked.append((*wanted,))
        return self.choice

    def _obtain(self, family: str, make: Any) -> Any:
        return lambda device, *variant: None if family in self.missing else make(*variant)

    def _launch(
        self,
        kernel: GemmKernel,
        configuration: Configuration,
        a: Operand,
        b: Operand,
        out: Tensor,
        bias: Tensor | None,
        split: Split | None,
    ) -> None:
        assert kernel.configuration == configuration == self.choice.configuration
        self.launches.append("gemm" if split is None else "split_gemm")
        self.kernels.append(kernel)
        check_rows(out)
        if split is None:
            assert out.dtype == kernel.output
            product = _product(kernel, a, b)
        else:
            assert split.sum_kernel == SumKernel(out.dtype)
            product = _sum_of_parts(kernel, a, b, out, split)
        out.copy_(product + _addend(bias, out.dtype))


def values(payload: Tensor, fmt: str) -> Tensor:
    """The values of a payload, in fp64."""
    return torch.from_numpy(code_values(fmt))[payload.long()].double()


def _sum_of_parts(kernel: GemmKernel, a: Operand, b: Operand, out: Tensor, split: Split) -> Tensor:
    (m, n), steps = out.shape, -(-a[0].shape[1] // 128)
    assert kernel.output == split.parts.dtype == torch.float32
    assert split.parts.shape[:2] == (split.count, kernel_gemm.split_rows(kernel.configuration, m))
    assert split.parts.shape[2] >= n
    assert 2 <= split.count <= steps
    check_rows(split.parts[0])
    ends = [128 * (steps * part // split.count) for part in range(split.count + 1)]
    for part, (start, end) in enumerate(pairwise(ends)):
        columns = slice(start, end)
        its = ((payload[:, columns].contiguous(), scale_inv) for payload, scale_inv in (a, b))
        split.parts[part, :m, :n] = _product(kernel, *its)
    return split.parts[:, :m, :n].double().sum(dim=0)


def check_rows(out: Tensor) -> None:
    """Rows of the output start at multiples of 16 bytes."""
    assert out.stride(1) == 1
    assert out.data_ptr() % 16 == 0
    assert out.shape[0] == 1 or out.stride(0) * out.itemsize % 16 == 0


def _product(kernel: GemmKernel, a: Operand, b: Operand) -> Tensor:
    for payload, scale_inv in (a, b):
        assert payload.dtype == torch.uint8
        assert payload.is_contiguous()
        assert payload.data_ptr() % 16 == payload.shape[1] % 16 == 0
        assert scale_inv.dtype == torch.float32
    product = values(a[0], kernel.a_format) @ values(b[0], kernel.b_format).T
    return product * (a[1] * b[1]).double()


def _addend(bias: Tensor | None, output: torch.dtype) -> Tensor | float:
    if bias is None:
        return 0.0
    assert bias.is_contiguous()
    return bias.to(output).double()


def random_payload(rows: int, columns: int, fmt: str) -> torch.Tensor:
    payload = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    return torch.where(values(payload, fmt).isfinite(), payload, 0)
