"""The suite ``blocks``: casts with one scale per block, and such GEMMs for layers of the suite ``gemm``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import copy
from benchmarks.case import Case, Results, difference
from benchmarks.gemm import LAYERS, Product
from lightning_fp8 import ops
from lightning_fp8.ops import blocks
from lightning_fp8.ops.amaxes import by_element
from lightning_fp8.ops.cuda import gemm_choice, kernels, plain
from lightning_fp8.ops.cuda.gemm import kernels_of
from lightning_fp8.ops.operand import Fp8Tensor, OwnScaling, WeightSlot, with_scale
from lightning_fp8.tools.timing import Variant, copies_for

_OWN = OwnScaling(blocks="float32")
# number of rows compared with fp64
_CHECKED_ROWS = 64
# error relative to the sum of the terms' absolute values: tensor cores keep 13 bits below the largest of 32 terms
_ACCUMULATION = 2.0**-10


def cases(device: torch.device) -> list[Case]:
    """All cases of the suite; on the CPU tiny ones in place of training sizes."""
    if device.type != "cuda":
        return [Cast(200, 136), Cast(200, 136, weight=True), *_of_layer(64, 32, 48)]
    casts = [Cast(8192, 8192), Cast(8192, 4096), Cast(2048, 1024), Cast(8192, 8192, weight=True)]
    return [*casts, Gemm("fprop", 8192, 8192, 8192), *(one for layer in LAYERS[2:7] for one in _of_layer(*layer))]


def _of_layer(tokens: int, in_features: int, out_features: int) -> tuple[Gemm, Gemm, Gemm]:
    return (
        Gemm("fprop", tokens, out_features, in_features),
        Gemm("dgrad", tokens, in_features, out_features),
        Gemm("wgrad", out_features, in_features, tokens),
    )


@dataclass(frozen=True)
class Cast:
    """Casts a bf16 tensor to E4M3 by rows and by columns: in blocks of 1 x 128, or a weight in squares of 128 x 128."""

    rows: int
    columns: int
    weight: bool = False

    flops = None

    @property
    def name(self) -> str:
        """Shape and blocks."""
        return f"cast {self.rows}x{self.columns} bf16->e4m3 in {'128x128' if self.weight else '1x128'}"

    @property
    def bytes(self) -> int:
        """Reads bf16, writes both payloads and their scales."""
        scales = 4 * (1 if self.weight else 2 * 128) * -(-self.rows // 128) * -(-self.columns // 128)
        return 4 * self.rows * self.columns + scales

    def is_served(self, device: torch.device) -> bool:
        """Whether there is a kernel, or none is expected."""
        if self.weight:
            return device.type != "cuda" or kernels.weights_kernel(device, True) is not None
        return device.type != "cuda" or kernels.block_cast_kernel(device, torch.bfloat16) is not None

    def variants(self, device: torch.device) -> list[Variant]:
        """``lightning_fp8``, ``torch`` (the same cast in torch's operations), and a copy."""
        copies = copies_for(self.bytes, device)
        generator = torch.Generator(device).manual_seed(1)
        x = [
            torch.randn(self.rows, self.columns, generator=generator, device=device).to(torch.bfloat16)
            for _ in range(copies)
        ]

        slot = _slot(self.weight)

        def variant(name: str, cast: Callable[..., Any], other: Callable[..., Any]) -> Variant:
            def check() -> str | None:
                return difference(_named(cast(x[0], slot, "both")), _named(other(x[0], slot, "both")))

            return Variant(name, lambda at: cast(x[at], slot, "both"), check, copies)

        ours = ops.cast_weight_blocks if self.weight else ops.cast_blocks
        theirs = blocks.cast_weight if self.weight else blocks.cast
        made = [variant("lightning_fp8", ours, theirs), variant("torch", theirs, ours)]
        return [*made, copy(self.bytes, device)]


@dataclass(frozen=True)
class Gemm(Product):
    """A GEMM of a layer in E4M3: a in blocks of 1 x 128, and b too for wgrad, else in squares of 128 x 128."""

    @property
    def name(self) -> str:
        """Kind and sizes."""
        return f"{self.kind} in blocks {self.m}x{self.n}x{self.k} (MxNxK)"

    def is_served(self, device: torch.device) -> bool:
        """Whether there is a kernel for it, or none is expected."""
        if device.type != "cuda":
            return True
        choice = gemm_choice.choose_in_blocks(device, "rawkernel", self.m, self.n, self.k)
        rows = 1 if self.kind == "wgrad" else 128
        return kernels_of(choice, device, "e4m3", "e4m3", self.output, True, rows) is not None

    def variants(self, device: torch.device) -> list[Variant]:
        """``lightning_fp8``, ``torch`` (cuBLASLt in blocks), and cuBLASLt with one scale per tensor."""
        copies = copies_for((self.m + self.n) * self.k + self.m * self.n * self.output.itemsize, device)
        given = [self._operands(device, seed) for seed in range(copies)]
        one = torch.ones((), device=device)

        def variant(name: str, call: Callable[..., Tensor], whole: bool = False) -> Variant:
            def on(operands: tuple[Tensor, ...]) -> Tensor:
                a, b, *scales = operands
                a_inv, b_inv = (one, one) if whole else scales
                return call(Fp8Tensor(a, a_inv, "e4m3"), Fp8Tensor(b, b_inv, "e4m3"), None, self.output)

            def check() -> str | None:
                return self._wrong(on(given[0]), *given[0][:2], *((None, None) if whole else given[0][2:]))

            return Variant(name, lambda at: on(given[at]), check, copies)

        return [
            variant("lightning_fp8", lambda *arguments: ops.scaled_mm(*arguments, False, "rawkernel")),
            variant("torch", plain.scaled_mm_in_blocks),
            variant("cublaslt, a scale a tensor", partial(plain.scaled_mm, fast_accumulation=False), whole=True),
        ]

    def _operands(self, device: torch.device, seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        a, b = (torch.randn(rows, self.k, generator=generator, device=device) for rows in (self.m, self.n))
        a_fp8, _, a_inv, _ = ops.cast_blocks(a, _slot(False), "rows")
        if self.kind == "wgrad":
            b_fp8, _, b_inv, _ = ops.cast_blocks(b, _slot(False), "rows")
        else:
            b_fp8, _, b_inv = ops.cast_weight_blocks(b, _slot(True), "rows")
        return a_fp8, b_fp8, a_inv, b_inv

    def _wrong(self, got: Tensor, a: Tensor, b: Tensor, a_inv: Tensor | None, b_inv: Tensor | None) -> str | None:
        rows = torch.randperm(self.m, generator=torch.Generator().manual_seed(1))[:_CHECKED_ROWS].to(a.device)
        a_values = _values(a, a_inv)[rows]
        b_values = _values(b, b_inv)
        exact, size = a_values @ b_values.t(), a_values.abs() @ b_values.abs_().t()
        error = (got[rows].double() - exact).abs()
        wrong = int((~(error <= 0.51 * torch.finfo(got.dtype).eps * exact.abs() + _ACCUMULATION * size)).sum())
        return f"{wrong} of {error.numel()} numbers that are not the product's" if wrong else None


def _slot(weight: bool) -> Any:
    if weight:
        return WeightSlot(torch.zeros(1, dtype=torch.int64), "e4m3", None, False, _OWN)
    return with_scale(torch.ones(()), "e4m3")._replace(own=_OWN)


def _values(payload: Tensor, scale_inv: Tensor | None) -> Tensor:
    values = payload.view(torch.float8_e4m3fn).double()
    return values if scale_inv is None else values.mul_(by_element(scale_inv, payload))


def _named(parts: tuple[Tensor, ...]) -> Results:
    names = ("payload", "payload by columns", "scale_inv", "scale_inv by columns")
    return {name: [part] for name, part in zip(names, parts, strict=False)}
