"""Stand-ins for the GEMM kernels: they compute in fp64 and refuse arguments that the real ones could not take."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from fp8_numpy import code_values
from machines import H100, run_as
from torch import Tensor

from kernels_cuda import gemm as kernel_gemm
from kernels_cuda.gemm import Operand
from kernels_cuda.gemm_variants import Configuration
from lightning_fp8.ops.cuda import kernels


class GemmKernel(NamedTuple):
    """Stands in for a loaded kernel: records what was requested."""

    configuration: Configuration
    a_format: str
    b_format: str
    output: torch.dtype
    promote: bool


class Gemms:
    """On an H100, as far as the rule can tell.

    Attributes:
        are_missing: whether there is no kernel.
        kernels: the kernel of each launch, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.are_missing = False
        self.kernels: list[GemmKernel] = []
        run_as(H100, monkeypatch)
        monkeypatch.setattr(kernels, "gemm_kernel", self._obtain)
        monkeypatch.setattr(kernel_gemm, "gemm", self._launch)

    def _obtain(self, device: torch.device, *variant: Any) -> GemmKernel | None:
        return None if self.are_missing else GemmKernel(*variant)

    def _launch(
        self,
        kernel: GemmKernel,
        configuration: Configuration,
        a: Operand,
        b: Operand,
        out: Tensor,
        bias: Tensor | None,
    ) -> None:
        assert kernel.configuration == configuration
        self.kernels.append(kernel)
        check_rows(out)
        assert out.dtype == kernel.output
        out.copy_(_product(kernel, a, b) + _addend(bias, out.dtype))


def values(payload: Tensor, fmt: str) -> Tensor:
    """The values of a payload, in fp64."""
    return torch.from_numpy(code_values(fmt))[payload.long()].double()


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
