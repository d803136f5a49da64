"""The suite ``gemm``: the scaled FP8 GEMMs of training compared with cuBLASLt's, and with bf16 on the same values.

The 24 cases are fprop, dgrad and wgrad of eight layers: attention projections (hidden x hidden) and FFN projections
(hidden -> 4 hidden). Both kinds of layer cover 2048, 8192 and 32768 tokens and hidden widths of 1024, 4096 and 8192,
from the smallest to the largest output. The suite ``blocks`` has the GEMMs of some of them with a scale for each block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import Case
from benchmarks.timing import Variant, copies_for
from kernels_cuda.gemm_variants import Configuration
from kernels_cuda.launch import Kernel
from lightning_fp8.core import casts
from lightning_fp8.ops.amaxes import by_element
from lightning_fp8.ops.cuda import gemm, kernels, plain, rule
from lightning_fp8.ops.formats import FORMATS
from lightning_fp8.scalings.base import Scaling
from lightning_fp8.scalings.mx import MX
from lightning_fp8.scalings.operand import Operand
from lightning_fp8.scalings.per_block import PerBlock
from lightning_fp8.scalings.per_tensor import PerTensor

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
    return [gemm.case() for layer in layers for gemm in of_layer(*layer)]


def cases_in_blocks(device: torch.device) -> list[Case]:
    """GEMMs with a scale for each block, for the suite ``blocks``; some also in MX, where a kernel of ours has it."""
    layers = LAYERS[2:7] if device.type == "cuda" else _LAYERS_ON_CPU[:1]
    gemms = [gemm for layer in layers for gemm in of_layer(*layer)]
    if device.type == "cuda":
        gemms.insert(0, Gemm("fprop", 8192, 8192, 8192))
    cases = [replace(gemm, in_blocks=True) for gemm in gemms]
    in_mx = [replace(gemm, mx=True) for gemm in cases[:4]]
    if device.type == "cuda":
        there = torch.cuda.is_available()
        in_mx = [gemm for gemm in in_mx if there and gemm.kernel(device) is not None]
    return [gemm.case() for gemm in (*cases, *in_mx)]


def of_layer(tokens: int, in_features: int, out_features: int) -> tuple[Gemm, Gemm, Gemm]:
    """fprop, dgrad and wgrad of a linear layer."""
    return (
        Gemm("fprop", tokens, out_features, in_features),
        Gemm("dgrad", tokens, in_features, out_features),
        Gemm("wgrad", out_features, in_features, tokens),
    )


class Operands(NamedTuple):
    """Inputs of one call: payloads ``[M, K]`` and ``[N, K] uint8`` with their scales, and their values for ``bf16``."""

    a: Tensor
    b: Tensor
    a_inv: Tensor
    b_inv: Tensor
    a_values: Tensor
    b_values: Tensor


@dataclass(frozen=True)
class Gemm:
    """One of a layer's GEMMs: ``a [M, K] @ b [N, K]^T``, times both scale_inv.

    Attributes:
        kind: ``"fprop"``: E4M3 x E4M3 -> bf16, fast accumulation. ``"dgrad"``: E5M2 x E4M3 -> bf16, precise.
            ``"wgrad"``: E5M2 x E4M3 -> fp32, precise.
        m: rows of the result.
        n: columns of the result.
        k: length of the sums.
        in_blocks: all in E4M3 and precise; a has a scale for each 1 x 128, and so has b for wgrad, else for each
            128 x 128.
        mx: with ``in_blocks``, each 1 x 32 of both has a scale, in E8M0, and sums stay in the tensor cores.
    """

    kind: str
    m: int
    n: int
    k: int
    in_blocks: bool = False
    mx: bool = False

    @property
    def flops(self) -> int:
        """``2 * M * N * K``: one multiplication and one addition each."""
        return 2 * self.m * self.n * self.k

    @property
    def output(self) -> torch.dtype:
        """Dtype of the result: a weight's gradient is in fp32."""
        return torch.float32 if self.kind == "wgrad" else torch.bfloat16

    @property
    def a_format(self) -> str:
        """Format of a: the gradient, or the input for fprop."""
        return "e4m3" if self.kind == "fprop" or self.in_blocks else "e5m2"

    @property
    def scalings(self) -> tuple[Scaling, Scaling]:
        """Those of a and b."""
        if self.mx:
            return MX(), MX()
        if self.in_blocks:
            return PerBlock(), PerBlock(squares=self.kind != "wgrad")
        return PerTensor(self.a_format), PerTensor()

    @property
    def fast(self) -> bool:
        """Whether sums stay in the tensor cores (fast accumulation)."""
        return self.mx or (self.kind == "fprop" and not self.in_blocks)

    def case(self) -> Case:
        """The case of a suite."""
        scales = " in MX" if self.mx else " in blocks" if self.in_blocks else ""
        name = f"{self.kind}{scales} {self.m}x{self.n}x{self.k} (MxNxK)"
        return Case(name, self.variants, self.is_served, flops=self.flops)

    def is_served(self, device: torch.device) -> bool:
        """Whether there is a kernel for it, ours or torch's."""
        return not self.in_blocks or self.kernel(device) is not None

    def kernel(self, device: torch.device) -> tuple[Configuration, Kernel] | None:
        """Our kernel for it, which promotes but in MX; None where there is none."""
        scales: rule.Scales = "mx" if self.mx else "blocks" if self.in_blocks else "one"
        configuration = rule.configuration_for(device, self.m, self.n, scales, self.mx)
        if configuration is None:
            return None
        rows = 0 if not self.in_blocks else 1 if self.mx or self.kind == "wgrad" else 128
        kernel = kernels.gemm_kernel(device, configuration, self.a_format, "e4m3", self.output, not self.mx, rows)
        return None if kernel is None else (configuration, kernel)

    def variants(self, device: torch.device) -> list[Variant]:
        """``lightning_fp8`` as layers run it, ``kernel`` (ours), ``cublaslt`` with either accumulation, and ``bf16``.

        The operands of ``bf16`` have the memory layout of bf16 training: wgrad has both transposed, dgrad the weight.
        In blocks: ``lightning_fp8`` and ``cublaslt``.
        """
        operands = self.operands(device)
        expected = functools.cache(lambda: self.expected(operands[0]))

        of_a, of_b = self.scalings

        def fp8(inputs: Operands) -> tuple[Operand, Operand]:
            return Operand(inputs.a, inputs.a_inv, of_a), Operand(inputs.b, inputs.b_inv, of_b)

        def variant(name: str, fast: bool | None, call: Callable[[Operands], Tensor]) -> Variant:
            def check() -> str | None:
                return self.difference(call(operands[0]), *expected(), fast)

            return Variant(name, lambda at: call(operands[at]), check, len(operands))

        by_the_rule = variant(
            "lightning_fp8", self.fast, lambda inputs: casts.scaled_mm(*fp8(inputs), None, self.output, self.fast)
        )
        if self.in_blocks:
            return [by_the_rule, variant("cublaslt", self.fast, lambda inputs: self.by_torch(*fp8(inputs)))]
        found = self.kernel(device)
        ours = []
        if found is not None:
            launch = functools.partial(gemm.launch, *found, bias=None, output=self.output)
            ours = [variant("kernel", False, lambda inputs: launch(*fp8(inputs)))]

        def cublaslt(fast: bool) -> Callable[[Operands], Tensor]:
            return lambda inputs: torch._scaled_mm(
                inputs.a.view(FORMATS[self.a_format].dtype),
                inputs.b.view(FORMATS["e4m3"].dtype).t(),
                scale_a=inputs.a_inv,
                scale_b=inputs.b_inv,
                out_dtype=self.output,
                use_fast_accum=fast,
            )

        return [
            by_the_rule,
            *ours,
            variant("cublaslt", self.fast, cublaslt(self.fast)),
            variant("cublaslt precise" if self.fast else "cublaslt fast", not self.fast, cublaslt(not self.fast)),
            variant("bf16", None, lambda inputs: inputs.a_values @ inputs.b_values.t()),
        ]

    def by_torch(self, a: Operand, b: Operand) -> Tensor:
        """The product in blocks by torch, which has none on the CPU."""
        product = plain.scaled_mm_mx if self.mx else plain.scaled_mm_in_blocks
        out = product(a, b, None, self.output)
        return a.scaling.emulated_product(a, b, None, self.output) if out is None else out

    def operands(self, device: torch.device) -> list[Operands]:
        """Copies of the operands, as many as exceed the L2 cache."""
        first = self._in_blocks(device) if self.in_blocks else self._whole(device)
        size = first.a.nbytes + first.b.nbytes + self.m * self.n * self.output.itemsize
        # a clone keeps the strides of its source
        return [first, *(Operands._make(x.clone() for x in first) for _ in range(copies_for(size, device) - 1))]

    def _values(self, device: torch.device) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        a, b = (torch.randn(rows, self.k, generator=generator, device=device) for rows in (self.m, self.n))
        return a, b

    def _whole(self, device: torch.device) -> Operands:
        # E4M3's largest value is about four standard deviations, as with a typical scale
        values = [x.mul_(100).clamp_(-448, 448) for x in self._values(device)]
        a, b = values[0].to(FORMATS[self.a_format].dtype), values[1].to(FORMATS["e4m3"].dtype)
        a_values, b_values = a.bfloat16(), b.bfloat16()
        if self.kind == "wgrad":
            a_values = a_values.t().contiguous().t()
        if self.kind != "fprop":
            b_values = b_values.t().contiguous().t()
        a_inv, b_inv = (torch.tensor(scale, device=device) for scale in (_A_SCALE_INV, _B_SCALE_INV))
        return Operands(a.view(torch.uint8), b.view(torch.uint8), a_inv, b_inv, a_values, b_values)

    def _in_blocks(self, device: torch.device) -> Operands:
        (a, a_inv, _), (b, b_inv, _) = (
            scaling.quantize(x, self.k)[0] for scaling, x in zip(self.scalings, self._values(device), strict=True)
        )
        # nothing is compared with bf16
        return Operands(a, b, a_inv, b_inv, a_inv, b_inv)

    def expected(self, inputs: Operands) -> tuple[Tensor, Tensor, Tensor]:
        """Some rows of the product in fp64, the standard deviation of each sum, and the rows' indices."""
        # drawn on the CPU, so that they are the same on all devices
        rows = torch.randperm(self.m, generator=torch.Generator().manual_seed(1))[:_CHECKED_ROWS].to(inputs.a.device)
        a = _dequantized(inputs.a, inputs.a_inv, self.a_format)[rows]
        b_t = _dequantized(inputs.b, inputs.b_inv, "e4m3").t()
        return a @ b_t, (a.square() @ b_t.square_()).sqrt(), rows

    def difference(self, got: Tensor, exact: Tensor, deviation: Tensor, rows: Tensor, fast: bool | None) -> str | None:
        """What is wrong with a result; ``fast`` is None for bf16 operands, which have no scales."""
        if got.shape != (self.m, self.n):
            return f"a result of shape {tuple(got.shape)}"
        if got.dtype != (torch.bfloat16 if fast is None else self.output):
            return f"a result in {got.dtype}"
        scale = _A_SCALE_INV * _B_SCALE_INV if fast is None else 1.0
        error = (scale * got[rows].double() - exact).abs()
        rounding = 0.501 * torch.finfo(got.dtype).eps
        limit = rounding * exact.abs() + self.accumulation(fast) * deviation
        # negated, so that NaN counts as outside
        outside = int((~(error <= limit)).sum())
        return f"{outside} of {limit.numel()} numbers that are not the product's" if outside else None

    def accumulation(self, fast: bool | None) -> float:
        """Error of the sums, in their standard deviations."""
        if fast is None:
            # with split K, bf16's partial sums are rounded to bf16
            return _DEVIATIONS * torch.finfo(torch.bfloat16).eps
        added = _KEPT * _DEVIATIONS / _ADDED
        if fast or self.k <= _PROMOTED_EVERY:
            return added * self.k
        # a block's sum has the standard deviation of the whole sum divided by sqrt(number of blocks)
        return added * _PROMOTED_EVERY * (self.k / _PROMOTED_EVERY) ** 0.5


def _dequantized(payload: Tensor, scale_inv: Tensor, format: str) -> Tensor:
    values = payload.view(FORMATS[format].dtype).double()
    return values.mul_(scale_inv.double() if scale_inv.dim() == 0 else by_element(scale_inv, payload))
