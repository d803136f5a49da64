"""Stand-ins for the GEMM kernels: they compute in fp64 and refuse arguments that the real ones could not take."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from fp8_numpy import code_values
from torch import Tensor

from kernels_cuda import gemm as kernel_gemm
from kernels_cuda import gemm_variants
from kernels_cuda.casts import Row
from kernels_cuda.gemm import Split
from kernels_cuda.gemm_variants import Configuration
from lightning_fp8.ops import reference
from lightning_fp8.ops.activations import activate, activation_gradient
from lightning_fp8.ops.amaxes import max_abs
from lightning_fp8.ops.cuda import gemm_choice, kernels
from lightning_fp8.ops.cuda.gemm_choice import Choice
from lightning_fp8.ops.formats import FORMATS

HOPPER = Configuration("gemm_sm90", 128, 128, 6)


class GemmKernel(NamedTuple):
    """Stands in for a loaded kernel: records what was requested."""

    configuration: Configuration
    a_format: str
    b_format: str
    output: torch.dtype
    promote: bool
    activation: str = ""
    format: str = ""


class SumKernel(NamedTuple):
    output: torch.dtype


class Gemms:
    """Attributes:
    choice: the choice for every GEMM.
    chained: activations with which a GEMM writes the next one's operand.
    missing: families of kernels that are not available: "gemm", "chained", "sum_splits".
    asked: arguments of each request for a choice: gemm, m, n, k, promote and the output's dtype.
    launches: names of the functions that launched, in order.
    kernels: the kernel of each launch.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.choice, self.missing = Choice(HOPPER), set[str]()
        self.chained = set(gemm_variants.CHAINED_ACTIVATIONS)
        self.asked: list[tuple[Any, ...]] = []
        self.launches: list[str] = []
        self.kernels: list[GemmKernel] = []
        monkeypatch.setattr(gemm_choice, "choose", self._choose)
        monkeypatch.setattr(gemm_choice, "is_chained", lambda *asked: asked[1] in self.chained)
        monkeypatch.setattr(kernels, "gemm_kernel", self._obtain("gemm", GemmKernel))
        monkeypatch.setattr(kernels, "chained_kernel", self._obtain("chained", chained_kernel))
        monkeypatch.setattr(kernels, "sum_splits_kernel", self._obtain("sum_splits", SumKernel))
        for name in ("gemm", "split_gemm", "chained_gemm"):
            monkeypatch.setattr(kernel_gemm, name, self._counting(name))

    def _choose(self, device: torch.device, *asked: Any) -> Choice:
        self.asked.append(asked)
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


def chained_kernel(
    configuration: Configuration, a_format: str, output: torch.dtype, promote: bool, activation: str, format: str
) -> GemmKernel:
    return GemmKernel(configuration, a_format, "e4m3", output, promote, activation, format)


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


def chained_gemm(
    kernel: GemmKernel,
    configuration: Configuration,
    a: Tensor,
    b: Tensor,
    h: Tensor | None,
    y: Tensor,
    y_t: Tensor | None,
    row: Row,
    scale_inv: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None = None,
    column_sums: Tensor | None = None,
) -> None:
    (m, n), index = y.shape, int(row.index)
    assert configuration.family == "gemm_sm90"
    assert n % 8 == 0
    assert kernel.output in (torch.bfloat16, torch.float16)
    assert row.current_amax is None
    assert row.newest.flatten()[index] > 0
    assert h is None or (h.is_contiguous() and h.shape == (m, n) and h.dtype == kernel.output)
    product = _product(kernel, a, b, a_scale_inv, b_scale_inv)
    computed = (product + _addend(bias, kernel.output)).to(kernel.output)
    if kernel.promote:
        assert h is not None
        assert bias is None
        v = activation_gradient(h, computed, kernel.activation)
    else:
        assert column_sums is None
        v = activate(computed, kernel.activation)
        if h is not None:
            h.copy_(computed)
    if row.amax is not None:
        torch.maximum(row.amax[index], max_abs(v), out=row.amax[index])
    y.copy_(reference.saturating_cast(v, row.scale[index], FORMATS[kernel.format]))
    scale_inv.copy_(row.scale[index].reciprocal())
    if y_t is not None:
        y_t.copy_(y.t())
    if column_sums is not None:
        assert column_sums.shape == (kernel_gemm.column_sum_rows(m), n)
        for part, rows in enumerate(v.float().split(kernel_gemm.COLUMN_SUM_ROWS)):
            column_sums[part] = rows.sum(dim=0)


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
