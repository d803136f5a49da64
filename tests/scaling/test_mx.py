"""``MXScaling``: casts against torchao, products against the definition, precision, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_columns import unpadded
from in_blocks import linear, spread
from machines import RTX_5090, run_as
from mx_numpy import in_mx
from torch import Tensor
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

from lightning_fp8 import MXScaling, convert, export, scaling_state
from lightning_fp8.core.casts import cast_weight
from lightning_fp8.ops import e8m0
from lightning_fp8.ops.amaxes import by_element
from lightning_fp8.ops.cuda.plain import check_mx, mx_payload
from lightning_fp8.scaling import ScalingState
from lightning_fp8.scalings import products
from lightning_fp8.scalings.mx import MX
from lightning_fp8.scalings.operand import Slot, Want

BOTH = pytest.mark.parametrize("recipe", [MXScaling(), MXScaling(weight_blocks=(32, 32))], ids=str)


@pytest.fixture(params=["cpu", "cuda_half", "sm_120"])
def half(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Products by torch; on sm_120 by its kernel."""
    if request.param != "cpu":
        request.getfixturevalue("cuda_half")
    if request.param == "sm_120":
        run_as(RTX_5090, monkeypatch)
    return str(request.param)


def cast(x: Tensor) -> tuple[Tensor, ...]:
    """Payload, payload by columns, and the scales of each, ``[rows of the payload, blocks]``."""
    state = ScalingState([""], MXScaling())
    slot = Slot(torch.tensor([0]), state, MX(), MX(), True)
    rows, turned, _ = products.cast(x, slot, Want(True, True))
    codes, columns, tiles = rows.codes, turned.codes, (rows.scale_inv, turned.scale_inv)
    scales = (e8m0.from_tiles(one, rows, -(-k // 32)) for one, (rows, k) in zip(tiles, (x.shape, x.t().shape)))
    return codes, columns, *scales


def of_torchao(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of a tensor whose rows are whole blocks."""
    scales, codes = to_mx(x.contiguous(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    return codes.view(torch.uint8), scales.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts_are_those_of_torchao(dtype: torch.dtype, half: str) -> None:
    """Blocks of all magnitudes that have a normal scale, each with numbers down to zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 320, generator=generator) * 2.0 ** torch.randint(-6, 7, (256, 320), generator=generator)
    x = (x * 2.0 ** torch.arange(-110, 146).clamp(max=110)[:, None]).to(dtype)
    x[3, :32], x[5, 7] = 0, float("nan")
    codes, columns, scales, _ = cast(x)
    expected, their_scales = of_torchao(x)
    assert torch.equal(scales, their_scales)
    # the sign of a NaN does not matter
    codes, expected = (torch.where(one & 0x7F == 0x7F, 0x7F, one) for one in (codes, expected))
    assert torch.equal(codes, expected)
    # each column is spread over all magnitudes
    y = torch.randn(96, 40, generator=generator).to(dtype)
    _, columns, _, scales = cast(y)
    expected, their_scales = of_torchao(y.t())
    assert torch.equal(columns, expected)
    assert torch.equal(scales, their_scales)


def test_where_torchao_differs(half: str) -> None:
    """The scale of a tiny block is 2**-127 here and there, but there its codes are not divided by it."""
    x = torch.zeros(2, 32)
    x[0, 0], x[1, 0] = 2.0**-130, float("inf")
    codes, _, scales, _ = cast(x)
    expected, their_scales = of_torchao(x)
    assert (scales.flatten().tolist(), their_scales.flatten().tolist()) == ([0, 255], [0, 254])
    # 2**-130 * 2**127 is E4M3's 2**-3; a block with an infinity is NaN as a whole
    assert codes[0, 0].view(torch.float8_e4m3fn).float() == 2.0**-3
    assert expected[0, 0] == 0
    assert bool((codes[1] & 0x7F == 0x7F).all())


def test_a_weight_in_squares_has_one_set_of_codes(half: str) -> None:
    w, state = spread(70, 100, seed=1), ScalingState([""], MXScaling(weight_blocks=(32, 32)))
    squares = MX(squares=True)
    cast = cast_weight(w, Slot(torch.tensor([2]), state, squares, squares, True), Want(True, True))
    (codes, *_), (columns, *_), scales = cast.rows, cast.columns, [cast.rows.scale_inv, cast.columns.scale_inv]
    columns = unpadded(columns, len(w))
    assert torch.equal(columns, codes.t())
    by_rows, by_columns = (
        one.view(torch.float8_e4m3fn).double() * by_element(tiles, one).double()
        for one, tiles in zip((codes, columns), scales, strict=True)
    )
    assert np.array_equal(by_rows.numpy(), in_mx(w, squares=True))
    assert torch.equal(by_columns, by_rows.t())
    assert float(state.amax[2]) == float(w.abs().max())


# multiples of nothing, one of each, no tokens
SIZES = [(37, 45, 61), (1, 33, 17), (300, 129, 31), (32, 64, 96), (0, 40, 24), (2, 1, 300)]


@pytest.mark.parametrize("sizes", SIZES)
@BOTH
def test_products_are_those_of_the_definition(recipe: MXScaling, sizes: tuple[int, int, int], half: str) -> None:
    tokens, inputs, outputs = sizes
    model, squares = linear(recipe, inputs, outputs, bias=True), recipe.weight_blocks == (32, 32)
    with torch.no_grad():
        model.weight.copy_(spread(outputs, inputs, seed=2))
    # columns of a longer tensor, and a transposed one
    x = spread(tokens, inputs + 3, seed=3)[:, 2:-1].requires_grad_()
    dy = spread(outputs, tokens, seed=4).t()
    y = model(x)
    y.backward(dy)
    by_rows, by_columns = in_mx(model.weight, squares), in_mx(model.weight.t(), squares)
    expected = {
        "y": in_mx(x) @ by_rows.T + model.bias.detach().numpy(),
        "dx": in_mx(dy) @ by_columns.T,
        "dw": in_mx(dy.t()) @ in_mx(x.t()).T,
        "db": dy.double().sum(0).numpy(),
    }
    found = {"y": y, "dx": x.grad, "dw": model.weight.grad, "db": model.bias.grad}
    for name, value in expected.items():
        assert found[name].shape == value.shape
        error = np.abs(found[name].detach().numpy() - value).max(initial=0)
        assert error <= 2e-6 * np.abs(value).max(initial=0), name


@BOTH
def test_logged_scales(recipe: MXScaling) -> None:
    model = linear(recipe, 64, 64)
    x = spread(32, 64, seed=0).requires_grad_()
    dy = spread(32, 64, seed=1)
    model(x).backward(dy)
    state = scaling_state(model)
    state.update()
    amax = [float(one.detach().abs().max()) for one in (x, dy, model.weight)]
    assert [*state.amax_history[0].tolist(), float(state.amax[2])] == amax
    # the largest power of two by which nothing is clipped
    assert state.scale.tolist() == [2.0 ** np.floor(np.log2(448 / one)) for one in amax]


def test_a_block_that_is_not_finite_is_nan_and_counted(half: str) -> None:
    model, x = linear(MXScaling(), 64, 48), torch.randn(3, 64)
    x[1, 40] = float("inf")
    y = model(x.requires_grad_())
    y.nan_to_num(0).sum().backward()
    with pytest.warns(UserWarning, match="inf or NaN in"):
        scaling_state(model).update()
    assert [bool(row.isnan().all()) for row in y] == [False, True, False]
    assert scaling_state(model).nonfinite_steps.tolist()[0] == 1


@BOTH
def test_operands_as_the_hardware_takes_them(recipe: MXScaling, half: str) -> None:
    """Scales are whole tiles, those beyond a tensor's blocks zeros, and payloads are padded to whole blocks."""
    state, x, down = ScalingState(["a"], recipe), spread(130, 70, seed=0), recipe.weight_blocks[0]
    slot = Slot(torch.tensor([2]), state, *[recipe.scaling("weight")] * 2, True)
    sides = cast_weight(x, slot, Want(True, True))[:2]
    for (payload, tiles, _), (rows, k) in zip(sides, ((130, 70), (70, 130)), strict=True):
        whole = -(-rows // 128) * 128, -(-k // 128) * 4
        assert (tiles.dtype, tiles.shape) == (torch.uint8, (whole[0] * whole[1],))
        codes, inside = e8m0.from_tiles(tiles, *whole), -(-rows // down) * down
        assert codes[:inside, : -(-k // 32)].all()
        assert not codes[inside:].any()
        assert not codes[:, -(-k // 32) :].any()
        assert mx_payload(payload, "e4m3", 16).shape == (-(-rows // 16) * 16, -(-k // 32) * 32)


def test_what_is_refused_by_name(tmp_path: Any) -> None:
    for capability in ((10, 0), (10, 3), (11, 0), (12, 1)):
        check_mx(capability)
    for capability in ((8, 9), (9, 0)):
        said = rf"fp8-mx has no product here: .* 10\.0 and newer \(.*\), got {capability[0]}\.{capability[1]}\. Use"
        with pytest.raises(RuntimeError, match=said):
            check_mx(capability)
    with pytest.raises(ValueError, match=r"MXScaling: `weight_blocks` must be \(1, 32\) or \(32, 32\), got \(128,"):
        MXScaling(weight_blocks=(128, 128))
    with pytest.raises(ValueError, match=r"layout=None has no place .* every 32 elements: weight\. Pass `layout='comp"):
        export(convert(torch.nn.Linear(64, 64), MXScaling()), tmp_path)
