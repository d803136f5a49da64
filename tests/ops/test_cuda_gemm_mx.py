"""Products with scales in E8M0 as sm_120 runs them: the launches of a layer, and what the check finds.

``tests/scaling/test_mx.py`` compares these products with the definition.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from host_kernels import HostKernel, on_host
from in_blocks import linear
from machines import RTX_5090, run_as
from sqnr import sqnr
from torch import Tensor

from kernels_cuda import gemm_variants
from lightning_fp8 import MXScaling
from lightning_fp8.ops import e8m0
from lightning_fp8.ops.cuda import kernels, plain

CPU = torch.device("cpu")
CONFIGURATION = gemm_variants.mx_configuration((12, 0))
# among the arguments: the scales of a and b, then sizes
A_SCALES, B_SCALES, M, N, K = 4, 5, 9, 10, 11


def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients of a layer."""
    layer, x = linear(MXScaling(), 300, 40, bias=True), x.clone().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    return y.detach(), x.grad, layer.weight.grad  # type: ignore[return-value]


INPUT = torch.randn(130, 300, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def expected() -> tuple[Tensor, Tensor, Tensor]:
    """By the reference."""
    return step(INPUT)


@pytest.mark.parametrize("is_missing", [False, True], ids=["ours", "without the kernel"])
def test_a_layer_launches_three_products(
    is_missing: bool, expected: tuple[Tensor, ...], cuda_half: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as(RTX_5090, monkeypatch)
    if is_missing:
        monkeypatch.setattr(kernels, "gemm_kernel", lambda *_: None)
        monkeypatch.setattr("strict_scaled_mm.CAPABILITY", (12, 0))
        plain.check_mx_product.cache_clear()
    for actual, wanted in zip(step(INPUT), expected, strict=True):
        assert sqnr(actual, wanted) > 110
    launched = Counter(name.split()[0] for name in cuda_half.elements())
    products = sum(name.endswith("PROMOTE=0 B_SCALE_ROWS=1") for name in cuda_half.elements())
    assert launched["gemm_sm89"] == products == (0 if is_missing else 3)


def check(output: torch.dtype, kind: type[HostKernel] = HostKernel) -> str | None:
    assert CONFIGURATION is not None
    variant = kernels._gemm_variant(CONFIGURATION, "e4m3", "e4m3", output, False, 1)
    return variant.check(CPU, on_host(variant, kind))


@pytest.mark.parametrize("output", gemm_variants.OUTPUTS)
def test_the_kernel_passes_its_check(output: torch.dtype) -> None:
    assert check(output) is None


def last_block(codes: Tensor) -> Tensor:
    return torch.cat([codes[:, :-1], codes[:, -2:-1]], 1)


# a change of the codes [rows, blocks], with which a kernel would read the right ones
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "the next row": lambda codes: codes.roll(1, 0),
    "the row 8 below": lambda codes: codes.roll(8, 0),
    "the row 16 below": lambda codes: codes.roll(16, 0),
    "the next quarter of a tile": lambda codes: codes.roll(32, 0),
    "the next tile of rows": lambda codes: codes.roll(128, 0),
    "the next block": lambda codes: codes.roll(1, 1),
    "the next word": lambda codes: codes.roll(4, 1),
    "the last block from the one before": last_block,
    "exponents off by one": lambda codes: codes + 1,
    "no order of tiles": lambda codes: codes.flatten().roll(0).unflatten(0, codes.shape),
}


@pytest.mark.parametrize("scales", [A_SCALES, B_SCALES], ids=["a", "b"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_finds_scales_of_others(fault: str, scales: int) -> None:
    class Faulty(HostKernel):
        def __call__(self, grid: int, *arguments: int | float | bytes) -> None:
            sizes, given = arguments[M : K + 1], list(arguments)
            rows, blocks = sizes[scales - A_SCALES], -(-sizes[2] // 32)
            read = (ctypes.c_uint8 * e8m0.to_tiles(torch.zeros(rows, blocks)).numel()).from_address(given[scales])
            tiles = torch.frombuffer(read, dtype=torch.uint8)
            if fault == "no order of tiles":
                changed = e8m0.from_tiles(tiles, -(-rows // 128) * 128, -(-blocks // 4) * 4).flatten().contiguous()
            else:
                changed = e8m0.to_tiles(FAULTS[fault](e8m0.from_tiles(tiles, rows, blocks)))
            given[scales] = changed.data_ptr()
            super().__call__(grid, *given)

    assert "other numbers in sums" in str(check(torch.float32, Faulty))
