"""Stand-ins for the GEMM kernels: they compute in fp64 and refuse arguments that the real ones could not take."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from fp8_numpy import code_values
from torch import Tensor

from kernels_cuda import gemm as kernel_gemm
from kernels_cuda.gemm import Split
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
    launches: names of the functions that launched, in order.
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
        for name in ("gemm", "split_gemm"):
            monkeypatch.setattr(kernel_gemm, name, self._counting(name))

    def _choose(self, device: torch.device, *asked: Any) -> Choice:
        *wanted, run = asked
        assert run is gemm_operators.run_choice
        self.asked.append((*wanted,))
        return self.choice

    def _obtain(self, family: str, make: Any) -> Any:
        return lambda device, *variant: None if family in self.missing else make(*variant)

    def _counting(self, name: str) -> Any:
        def launch(kernel: GemmKernel, configuration: Configuration, *args: Any, **kwargs: Any) -> None:
            assert kernel.configuration == configuration == self.choice.configuration
            self.launches.append(name)
            self.kernels.append(kernel)
            globals()[name](kernel, configuration, *args, **kwargs)

        return launch


def values(payload: Tensor, fmt: str) -> Tensor:
    """The values of a payload, in fp64."""
    return torch.from_numpy(code_values(fmt))[payload.long()].double()


def gemm(
    kernel: GemmKernel,
    configuration: Configuration,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None = None,
) -> None:
    assert out.dtype == kernel.output
    check_rows(out)
    product = _product(kernel, a, b, a_scale_inv, b_scale_inv)
    out.copy_(product + _addend(bias, out.dtype))


def split_gemm(
    kernel: GemmKernel,
    configuration: Configuration,
    split: Split,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None = None,
) -> None:
    (m, n), steps = out.shape, -(-a.shape[1] // 128)
    assert kernel.output == split.parts.dtype == torch.float32
    assert split.parts.shape[:2] == (split.count, kernel_gemm.split_rows(configuration, m))
    assert split.parts.shape[2] >= n
    assert 2 <= split.count <= steps
    assert split.sum_kernel == SumKernel(out.dtype)
    check_rows(out)
    check_rows(split.parts[0])
    ends = [128 * (steps * part // split.count) for part in range(split.count + 1)]
    for part, (start, end) in enumerate(pairwise(ends)):
        columns = slice(start, end)
        product = _product(
            kernel, a[:, columns].contiguous(), b[:, columns].contiguous(), a_scale_inv, b_scale_inv
        )  # fmt: skip
        split.parts[part, :m, :n] = product
    out.copy_(split.parts[:, :m, :n].double().sum(dim=0) + _addend(bias, out.dtype))


def check_rows(out: Tensor) -> None:
    """Rows of the output start at multiples of 16 bytes."""
    assert out.stride(1) == 1
    assert out.data_ptr() % 16 == 0
    assert out.shape[0] == 1 or out.stride(0) * out.itemsize % 16 == 0


def _product(kernel: GemmKernel, a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor) -> Tensor:
    for payload in (a, b):
        assert payload.dtype == torch.uint8
        assert payload.is_contiguous()
        assert payload.data_ptr() % 16 == payload.shape[1] % 16 == 0
    assert a_scale_inv.dtype == b_scale_inv.dtype == torch.float32
    product = values(a, kernel.a_format) @ values(b, kernel.b_format).T
    return product * (a_scale_inv * b_scale_inv).double()


def _addend(bias: Tensor | None, output: torch.dtype) -> Tensor | float:
    if bias is None:
        return 0.0
    assert bias.is_contiguous()
    return bias.to(output).double()


def random_payload(rows: int, columns: int, fmt: str) -> torch.Tensor:
    payload = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    return torch.where(values(payload, fmt).isfinite(), payload, 0)
