"""The suite ``gemm``: the scaled FP8 GEMMs of training compared with cuBLASLt's, and with bf16 on the same values.

The 24 cases are fprop, dgrad and wgrad of eight layers: attention projections (hidden x hidden) and FFN projections
(hidden -> 4 hidden). Both kinds of layer cover 2048, 8192 and 32768 tokens and hidden widths of 1024, 4096 and 8192,
from the smallest to the largest output.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.case import Case
from lightning_fp8 import ops
from lightning_fp8.ops.cuda import gemm_choice
from lightning_fp8.ops.cuda.gemm import kernels_of
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.ops.operand import Fp8Tensor
from lightning_fp8.tools.timing import Variant, copies_for

# tokens, in_features, out_features
LAYERS = (
    (2048, 1024, 1024),
    (2048, 8192, 8192),
    (8192, 4096, 4096),
    (32768, 8192, 8192),
    (2048, 4096, 16384),
    (8192, 4096, 16384),
    (8192, 8192, 32768),
    (32768, 1024, 4096),
)
_LAYERS_ON_CPU = ((64, 32, 48), (48, 64, 32))
_CHECKED_ROWS = 64
# neither is a power of two, so a scale that is left out or rounded to bf16 gives a wrong result
_A_SCALE_INV, _B_SCALE_INV = 0.3717, 1.6183
# Tensor cores add 32 products at a time to a sum, all of which lose what is 13 bits below the largest; precise GEMMs
# start a new sum every 128 along K. A sum stays within five standard deviations.
_KEPT, _ADDED, _PROMOTED_EVERY, _DEVIATIONS = 2.0**-13, 32, 128, 5.0


def cases(device: torch.device) -> list[Case]:
    """All cases of the suite; on the CPU tiny ones in place of training sizes."""
    layers = LAYERS if device.type == "cuda" else _LAYERS_ON_CPU
    return [gemm for layer in layers for gemm in of_layer(*layer)]


def of_layer(tokens: int, in_features: int, out_features: int) -> tuple[Gemm, Gemm, Gemm]:
    """fprop, dgrad and wgrad of a linear layer."""
    return (
        Gemm("fprop", tokens, out_features, in_features),
        Gemm("dgrad", tokens, in_features, out_features),
        Gemm("wgrad", out_features, in_features, tokens),
    )


class Operands(NamedTuple):
    """Inputs of one call: payloads ``[M, K]`` and ``[N, K] uint8``, and their values in bf16, for ``matmul``."""

    a: Tensor
    b: Tensor
    a_values: Tensor
    b_values: Tensor


@dataclass(frozen=True)
class Product:
    """One of a layer's GEMMs: a ``[M, K]``, b ``[N, K]``, the result ``[M, N]``.

    Attributes:
        kind: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        m: rows of the result.
        n: columns of the result.
        k: length of the sums.
    """

    kind: str
    m: int
    n: int
    k: int

    bytes = None

    @property
    def flops(self) -> int:
        """``2 * M * N * K``: one multiplication and one addition each."""
        return 2 * self.m * self.n * self.k

    @property
    def output(self) -> torch.dtype:
        """Dtype of the result: a weight's gradient is in fp32."""
        return torch.float32 if self.kind == "wgrad" else torch.bfloat16


@dataclass(frozen=True)
class Gemm(Product):
    """One of a layer's GEMMs: ``a [M, K] @ b [N, K]^T``, times both scale_inv.

    Attributes:
        kind: ``"fprop"``: E4M3 x E4M3 -> bf16, fast accumulation. ``"dgrad"``: E5M2 x E4M3 -> bf16, precise.
            ``"wgrad"``: E5M2 x E4M3 -> fp32, precise.
    """

    @property
    def name(self) -> str:
        """Kind and sizes."""
        return f"{self.kind} {self.m}x{self.n}x{self.k} (MxNxK)"

    @property
    def a_format(self) -> str:
        """Format of a: the gradient, or the input for fprop."""
        return "e4m3" if self.kind == "fprop" else "e5m2"

    @property
    def fast(self) -> bool:
        """Whether sums stay in the tensor cores (fast accumulation)."""
        return self.kind == "fprop"

    def is_served(self, device: torch.device) -> bool:
        """Whether there is a kernel for it, or none is expected."""
        if device.type != "cuda":
            return True
        choice = gemm_choice.choose(device, "rawkernel", self.m, self.n, self.k, not self.fast, self.output)
        return kernels_of(choice, device, self.a_format, "e4m3", self.output, not self.fast) is not None

    def variants(self, device: torch.device) -> list[Variant]:
        """``lightning_fp8`` (our kernels), ``auto``, ``cublaslt`` with either accumulation, and ``bf16``.

        The operands of ``bf16`` have the memory layout of bf16 training: wgrad has both transposed, dgrad the weight.
        """
        operands = self._operands(device)
        scales = [torch.tensor(scale, device=device) for scale in (_A_SCALE_INV, _B_SCALE_INV)]
        expected = functools.cache(lambda: self._expected(operands[0]))

        def variant(name: str, fast: bool | None, call: Callable[[Operands], Tensor]) -> Variant:
            def check() -> str | None:
                return self._difference(call(operands[0]), *expected(), fast)

            return Variant(name, lambda at: call(operands[at]), check, len(operands))

        def ours(gemm: str) -> Callable[[Operands], Tensor]:
            return lambda given: ops.scaled_mm(
                Fp8Tensor(given.a, scales[0], self.a_format),
                Fp8Tensor(given.b, scales[1], "e4m3"),
                None,
                self.output,
                self.fast,
                gemm,
            )

        def cublaslt(fast: bool) -> Callable[[Operands], Tensor]:
            return lambda given: torch._scaled_mm(
                given.a.view(FORMATS[self.a_format].dtype),
                given.b.view(FORMATS["e4m3"].dtype).t(),
                scale_a=scales[0],
                scale_b=scales[1],
                out_dtype=self.output,
                use_fast_accum=fast,
            )

        other = "cublaslt precise" if self.fast else "cublaslt fast"
        return [
            variant("lightning_fp8", self.fast, ours("rawkernel")),
            variant("auto", self.fast, ours("auto")),
            variant("cublaslt", self.fast, cublaslt(self.fast)),
            variant(other, not self.fast, cublaslt(not self.fast)),
            variant("bf16", None, lambda given: given.a_values @ given.b_values.t()),
        ]

    def _operands(self, device: torch.device) -> list[Operands]:
        generator = torch.Generator(device).manual_seed(0)

        def payload(rows: int, format: str) -> Tensor:
            # E4M3's largest value is about four standard deviations, as with a typical scale
            values = torch.randn(rows, self.k, generator=generator, device=device)
            return values.mul_(100).clamp_(-448, 448).to(FORMATS[format].dtype)

        a, b = payload(self.m, self.a_format), payload(self.n, "e4m3")
        a_values, b_values = a.bfloat16(), b.bfloat16()
        if self.kind == "wgrad":
            a_values = a_values.t().contiguous().t()
        if self.kind != "fprop":
            b_values = b_values.t().contiguous().t()
        first = Operands(a.view(torch.uint8), b.view(torch.uint8), a_values, b_values)
        size = a.nbytes + b.nbytes + self.m * self.n * self.output.itemsize
        # a clone keeps the strides of its source
        return [first, *(Operands(*(x.clone() for x in first)) for _ in range(copies_for(size, device) - 1))]

    def _expected(self, given: Operands) -> tuple[Tensor, Tensor, Tensor]:
        """Some rows of the unscaled product in fp64, the standard deviation of each sum, and the rows' indices."""
        # drawn on the CPU, so that they are the same on all devices
        rows = torch.randperm(self.m, generator=torch.Generator().manual_seed(1))[:_CHECKED_ROWS].to(given.a.device)
        a = given.a[rows].view(FORMATS[self.a_format].dtype).double()
        b_t = given.b.view(FORMATS["e4m3"].dtype).double().t()
        return a @ b_t, (a.square() @ b_t.square_()).sqrt(), rows

    def _difference(self, got: Tensor, exact: Tensor, deviation: Tensor, rows: Tensor, fast: bool | None) -> str | None:
        """What is wrong with a result; ``fast`` is None for bf16 operands, which have no scales."""
        if got.shape != (self.m, self.n):
            return f"a result of shape {tuple(got.shape)}"
        if got.dtype != (torch.bfloat16 if fast is None else self.output):
            return f"a result in {got.dtype}"
        scale = 1.0 if fast is None else _A_SCALE_INV * _B_SCALE_INV
        error = (got[rows].double() - scale * exact).abs()
        rounding = 0.501 * torch.finfo(got.dtype).eps
        limit = scale * (rounding * exact.abs() + self._accumulation(fast) * deviation)
        # negated, so that NaN counts as outside
        outside = int((~(error <= limit)).sum())
        return f"{outside} of {limit.numel()} numbers that are not the product's" if outside else None

    def _accumulation(self, fast: bool | None) -> float:
        """Error of the sums, in their standard deviations."""
        if fast is None:
            # with split K, bf16's partial sums are rounded to bf16
            return _DEVIATIONS * torch.finfo(torch.bfloat16).eps
        added = _KEPT * _DEVIATIONS / _ADDED
        if fast or self.k <= _PROMOTED_EVERY:
            return added * self.k
        # a block's sum has the standard deviation of the whole sum divided by sqrt(number of blocks)
        return added * _PROMOTED_EVERY * (self.k / _PROMOTED_EVERY) ** 0.5


def summary(rows: list[dict[str, Any]]) -> str | None:
    """Our kernels compared with cuBLASLt, and ``auto`` with the faster of the two, by p50 over all cases with both."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        times.setdefault(row["case"], {})[row["variant"]] = row["p50_us"]
    whole = {case: found for case, found in times.items() if {"lightning_fp8", "auto", "cublaslt"} <= set(found)}
    if not whole:
        return None
    ours = {case: found["cublaslt"] / found["lightning_fp8"] for case, found in whole.items()}
    auto = {case: min(found["cublaslt"], found["lightning_fp8"]) / found["auto"] for case, found in whole.items()}
    return f"lightning_fp8: {_speed(ours)} of cublaslt; auto: {_speed(auto)} of the better of the two."


def _speed(ratios: dict[str, float]) -> str:
    lowest = min(ratios, key=lambda case: ratios[case])
    mean = statistics.geometric_mean(ratios.values())
    return f"{mean:.3f} (geometric mean of {len(ratios)}; lowest {ratios[lowest]:.3f}, {lowest}) times the speed"
