"""``fp8-block`` with scales in powers of two where MX is the only product of blocks: the same scale of each element."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import strict_scaled_mm
import torch
from machines import B200, H100, RTX_4090, RTX_5090, THOR, run_as
from torch import Tensor, nn

from lightning_fp8 import BlockScaling, convert
from lightning_fp8.core.casts import cast, cast_weight
from lightning_fp8.modules.phase import Phase
from lightning_fp8.ops.amaxes import by_element
from lightning_fp8.ops.cuda import layouts, plain
from lightning_fp8.runtime.device import Gpu
from lightning_fp8.scaling.plan import plan_of
from lightning_fp8.scalings import emulation, per_block
from lightning_fp8.scalings.emulation import product_of_rounded_values
from lightning_fp8.scalings.mx import MX
from lightning_fp8.scalings.operand import Cast, Operand, Slot, Want
from lightning_fp8.scalings.per_block import PerBlock
from lightning_fp8.scalings.products import multiply
from lightning_fp8.scalings.recipe import Recipe

pytestmark = pytest.mark.filterwarnings("ignore:.*only once for all operators.*")
POWERS_OF_2 = BlockScaling(power_of_2_scales=True)
# the largest relative difference of sums in fp32, in another order, to the sum of the terms' absolute values
ORDER = 2.0**-18


@pytest.fixture
def as_mx(cuda_half: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """A GPU without another product of blocks."""
    monkeypatch.setattr(strict_scaled_mm, "CAPABILITY", (10, 0))
    for module in (layouts, per_block):
        monkeypatch.setattr(module, "multiplies_as_mx", lambda device: True)
    monkeypatch.setattr(plain, "scaled_mm_mx", plain.product_of_mx)
    return cuda_half


def spread(rows: int, columns: int, exponents: tuple[int, int] = (-6, 6)) -> Tensor:
    """Values of blocks of many magnitudes; one block of zeros."""
    generator = torch.Generator().manual_seed(rows)
    powers = torch.randint(*exponents, (-(-rows // 16), -(-columns // 128)), generator=generator)
    magnitudes = torch.exp2(powers.float()).repeat_interleave(16, 0).repeat_interleave(128, 1)[:rows, :columns]
    values = torch.randn(rows, columns, generator=generator).clamp(-3.9, 3.9) * magnitudes
    values[:128, :128] = 0
    return values


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (256, 640), (133, 171), (40, 20), (300, 1000)])
def test_each_element_has_the_same_scale(
    rows: int, columns: int, squares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(per_block, "multiplies_as_mx", lambda device: True)
    # from the least to the largest that fp32 holds
    x = spread(rows, columns, (-148, 126))
    x[-1, -1] = float("inf")
    scaling = PerBlock(squares=squares, powers_of_2=True)
    made, _ = scaling.quantized(x, Want(True, True))
    for side in made[:2]:
        as_mx = scaling.as_multiplied(Cast(side)).rows
        assert (as_mx.scaling, as_mx.codes is side.codes) == (MX(squares=squares), True)
        assert (as_mx.scale_inv.dtype, as_mx.scale_inv.dim()) == (torch.uint8, 1)
        k = min(side.codes.shape[1], 128 * side.scale_inv.shape[1])
        codes = side.codes[:, :k]
        expected = by_element(side.scale_inv, codes).expand(codes.shape)
        assert torch.equal(by_element(as_mx.scale_inv, codes).expand(codes.shape), expected)
        # also that of a block that is not finite, and the least, which has the code 0
        assert 1.0 in expected
        assert 2.0**-127 in expected or rows <= 128


def step(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(dy)
    return [y.detach(), x.grad, model.weight.grad]  # type: ignore[list-item]


@pytest.mark.parametrize(("m", "n", "k"), [(128, 256, 384), (77, 200, 330), (16, 32, 48), (1, 17, 150)])
def test_a_step_is_that_of_blocks(
    m: int,
    n: int,
    k: int,
    cuda_half: Counter[str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = convert(nn.Linear(k, n, bias=False), POWERS_OF_2)
    with torch.no_grad():
        model.weight.copy_(spread(n, k))
    twin, x, dy = copy.deepcopy(model), spread(m, k), spread(m, n)
    expected = step(model, x, dy)
    cuda_half.clear()
    request.getfixturevalue("as_mx")
    # the product of values, which takes any scales
    monkeypatch.delattr(emulation, "product_of_rounded_values")
    monkeypatch.delattr(emulation, "product_of_values")
    found = step(twin, x, dy)
    # the casts of x, of the weight, and of dy
    assert sum(cuda_half.values()) == 3
    weight = twin.weight.detach()
    sizes = [x.abs() @ weight.abs().t(), dy.abs() @ weight.abs(), dy.abs().t() @ x.abs()]
    for one, other, size in zip(found, expected, sizes, strict=True):
        # values are within 2**-4 of their codes
        assert ((one - other).abs() <= ORDER * 1.2 * size).all()


def test_both_payloads_of_a_kept_weight_are_in_mx(as_mx: Counter[str]) -> None:
    model = convert(nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 256)), POWERS_OF_2)
    for _ in range(2):
        model(torch.randn(32, 256)).sum().backward()
        model.zero_grad()
    for layer in model:
        kept = layer.fp8[""].weight_cast._cast
        slot = layer.fp8[""].slots["weight", Phase.EVALUATION]
        single = cast_weight(layer.weight.detach(), slot, Want(True, True))
        for one, other in zip(kept[:2], single[:2], strict=True):
            assert one.scaling == other.scaling == MX(squares=True)
            assert one.scale_inv.dtype == torch.uint8
            assert all(map(torch.equal, one[:2], other[:2]))


def test_a_compiled_step(as_mx: Counter[str]) -> None:
    torch.manual_seed(0)
    model = convert(nn.Linear(200, 144, bias=False), POWERS_OF_2)
    x, dy = spread(50, 200), torch.randn(50, 144)
    expected = step(model, x, dy)
    model.weight.grad = None
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, dynamic=True, backend="aot_eager")
    assert all(map(torch.equal, step(model, x, dy), expected))


@pytest.mark.parametrize(("gpu", "runs"), [(RTX_4090, 0), (H100, 0), (B200, 1), (THOR, 1), (RTX_5090, 0), (None, 0)])
def test_where_it_runs(gpu: Gpu | None, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_as(gpu, monkeypatch)
    assert layouts.multiplies_as_mx(torch.device("cpu")) == runs
    if runs:
        # scales in fp32 are refused by name
        with pytest.raises(RuntimeError, match=r"fp8-block has no kernel here.*BlockScaling\(power_of_2_scales=True\)"):
            plain.check_blocks(gpu.capability, "13.0")


@pytest.mark.usefixtures("as_mx")
@pytest.mark.parametrize("recipe", [BlockScaling(), POWERS_OF_2])
def test_scales_in_fp32_do_not_run_as_mx(recipe: Recipe) -> None:
    slot = Slot(torch.zeros(1).long(), None, *plan_of(recipe).input)
    x = cast(torch.randn(48, 256), slot, Want(True, True))
    expected = torch.uint8 if recipe == POWERS_OF_2 else torch.float32
    assert x.rows.scale_inv.dtype == x.columns.scale_inv.dtype == expected
    # with a weight that came with scales in fp32, values are multiplied
    codes = torch.randint(0, 126, (64, 256), dtype=torch.uint8)
    other = Operand(codes, torch.rand(1, 2) + 0.5, PerBlock(squares=True))
    if recipe == POWERS_OF_2:
        out = multiply(x.rows, other, None, torch.float32, False)
        torch.testing.assert_close(out, product_of_rounded_values(x.rows, other, None, torch.float32))
