"""Products of MX operands by torch: padded as torch and cuBLASLt want, and tested on a device at their first use."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import strict_scaled_mm
import torch
from machines import B200, H100, run_as
from strict_scaled_mm import RefusedError
from torch import Tensor

from lightning_fp8.core.casts import cast
from lightning_fp8.ops.cuda import check, plain
from lightning_fp8.runtime.device import Gpu
from lightning_fp8.scalings.emulation import product_of_values
from lightning_fp8.scalings.mx import MX
from lightning_fp8.scalings.operand import Operand, Slot, Want

CPU = torch.device("cpu")
SIZES = random.Random(0)
RAGGED = [tuple(SIZES.randint(1, 300) for _ in range(3)) for _ in range(5)]


@pytest.fixture
def blackwell(strict_products: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_scaled_mm, "CAPABILITY", (10, 0))


def operands(m: int, n: int, k: int) -> tuple[Operand, Operand]:
    """One by rows, one by columns, whose codes end at a multiple of 16."""
    generator = torch.Generator().manual_seed(m)
    slot = Slot(torch.zeros(1).long(), None, MX(), MX())
    a, b = (torch.randn(rows, columns, generator=generator) for rows, columns in ((m, k), (k, n)))
    return cast(a, slot, Want()).rows, cast(b, slot, Want(False, True)).columns  # type: ignore[return-value]


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (16, 16, 32), (128, 128, 128), *RAGGED])
def test_any_size_is_padded_as_torch_wants(m: int, n: int, k: int) -> None:
    a, b = operands(m, n, k)
    bias = torch.randn(n).bfloat16().float()
    for dtype in (torch.float32, torch.bfloat16):
        for added in (None, bias):
            out = plain.product_of_mx(a[:2], b[:2], added, dtype)
            assert out.shape == (m, n)
            assert out.is_contiguous()
            expected = product_of_values(a, b, added, torch.float32)
            # fp64, and rounded once or, with a bias, twice; fp32 in another order
            tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
            torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=1e-4)


@pytest.mark.usefixtures("blackwell")
def test_what_the_stand_in_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (operand[:2] for operand in operands(32, 32, 64))
    short = a[0], a[1][:256]
    with pytest.raises(RefusedError, match="scale should have 512 elements, got 256"):
        plain.product_of_mx(short, b, None, torch.float32)
    with pytest.raises(RefusedError, match=r"float8_e4m3fn, not torch\.float8_e5m2"):
        plain.product_of_mx(a, b, None, torch.float32, ("e5m2", "e4m3"))
    monkeypatch.setattr(strict_scaled_mm, "CAPABILITY", (9, 0))
    with pytest.raises(RefusedError, match=r"before compute capability 10\.0"):
        plain.product_of_mx(a, b, None, torch.float32)


def read_by_rows(operand: Tensor, scale: Tensor) -> Tensor:
    """As if scales were not in tiles."""
    blocks = -(-operand.shape[1] // 32)
    codes = scale.view(torch.uint8)[: len(operand) * blocks].view(len(operand), blocks)
    return torch.exp2(codes.double() - 127).repeat_interleave(32, 1)


def tiles_by_columns(operand: Tensor, scale: Tensor) -> Tensor:
    """As if tiles followed each other by columns."""
    down, across = -(-len(operand) // 128), -(-operand.shape[1] // 128)
    swapped = scale.view(torch.uint8).view(across, down, 512).transpose(0, 1).reshape(-1)
    return REAL(operand, swapped.view(torch.float8_e8m0fnu))


REAL = strict_scaled_mm._in_tiles
WRONG: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "not in tiles": read_by_rows,
    "tiles by columns": tiles_by_columns,
    "an exponent too large": lambda operand, scale: REAL(operand, scale) * 2,
    "one scale for a row": lambda operand, scale: REAL(operand, scale)[:, :1].expand(operand.shape),
    "shifted by a row": lambda operand, scale: REAL(operand, scale).roll(1, 0),
    "no scales": lambda operand, scale: torch.ones(operand.shape, dtype=torch.float64),
}


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("what", WRONG)
def test_the_check_finds(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, expected = check.product_of_mx(CPU)
    assert torch.equal(plain.product_of_mx(a, b, None, torch.float32), expected)
    monkeypatch.setattr(strict_scaled_mm, "_in_tiles", WRONG[what])
    assert not torch.equal(plain.product_of_mx(a, b, None, torch.float32), expected)


@pytest.mark.parametrize(
    ("gpu", "failure", "said"),
    [
        (H100, None, r"fp8-mx has no product here"),
        (B200, None, None),
        (B200, 1, r"fp8-mx cannot run on cpu: .* \(it gave other sums\)"),
        (B200, RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED"), r"it raised RuntimeError: CUBLAS.*use precision='fp8-cu"),
    ],
)
def test_the_first_product_of_a_device(
    gpu: Gpu, failure: int | Exception | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested: list[torch.dtype] = []

    def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], bias: None, dtype: torch.dtype) -> Tensor:
        tested.append(dtype)
        if isinstance(failure, Exception):
            raise failure
        return product_of_values(*(Operand(*one, MX()) for one in (a, b)), bias, dtype) + (failure or 0)

    run_as(gpu, monkeypatch)
    monkeypatch.setattr(plain, "product_of_mx", product)
    plain.check_mx_product.cache_clear()
    for _ in range(2):
        if said is None:
            plain.check_mx_product(CPU)
        else:
            with pytest.raises(RuntimeError, match=said):
                plain.check_mx_product(CPU)
    # what has passed is not tested again
    assert len(tested) == (0 if gpu == H100 else 1 if failure is None else 2)
    plain.check_mx_product.cache_clear()
    if said is None:
        monkeypatch.setattr(plain, "is_capturing", lambda _: True)
        with pytest.raises(RuntimeError, match="first time while a CUDA graph is captured"):
            plain.check_mx_product(CPU)


@pytest.mark.cuda
def test_the_check_on_the_device() -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability(gpu) < (10, 0):
        pytest.skip("its tensor cores take no scales for every 32 elements")
    plain.check_mx_product(gpu)
    a, b = operands(200, 100, 300)
    on_gpu = (Operand(one.codes.to(gpu), one.scale_inv.to(gpu), MX()) for one in (a, b))
    out = plain.scaled_mm_mx(*on_gpu, None, torch.float32)
    torch.testing.assert_close(out.cpu(), product_of_values(a, b, None, torch.float32), rtol=1e-4, atol=1e-3)
