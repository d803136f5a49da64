"""Frozen weights in MX without masters: what they are rounded to, their products, and the values that dgrad takes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import strict_scaled_mm
import torch
from fp8_numpy import code_values
from frozen_models import same
from machines import B200, H100, RTX_5090, run_as
from mx_numpy import cast_in_mx
from published_weights import in_numpy, published, with_codes
from torch import Tensor, nn

from lightning_fp8 import MXScaling, convert, describe, scaling_state
from lightning_fp8.core.casts import cast
from lightning_fp8.core.linear import linear_backward, run_backward
from lightning_fp8.modules.fp8_parameter import from_codes
from lightning_fp8.ops import e8m0
from lightning_fp8.ops.cuda import plain
from lightning_fp8.ops.dequantize import exact_values
from lightning_fp8.runtime.device import Gpu
from lightning_fp8.scalings import emulation
from lightning_fp8.scalings.mx import MX
from lightning_fp8.scalings.operand import Computed, Operand, Slot, Want
from lightning_fp8.scalings.products import multiply

RECIPES = {"mx": MXScaling(), "squares": MXScaling(weight_blocks=(32, 32))}
X, DY = torch.linspace(-2, 2, 10 * 200).view(10, 200), torch.linspace(-1, 3, 10 * 72).view(10, 72)


def test_values_of_all_codes_with_all_scales() -> None:
    """In bf16, those below 2**-133 round to its subnormal numbers, and those above its largest one to infinity."""
    payload = torch.arange(256, dtype=torch.uint8)
    payload = payload[(payload & 0x7F) != 0x7F].repeat_interleave(32).view(1, -1).expand(255, -1).contiguous()
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 254)
    # also with a last block that is not whole
    payload, scales = torch.cat((payload, payload[:, 32:39]), 1), torch.cat((scales, scales[:, :1]), 1)
    exact = np.ldexp(
        code_values("e4m3")[payload.numpy()], scales.numpy().astype(int).repeat(32, 1)[:, : 254 * 32 + 7] - 127
    )
    for dtype, kind in ((torch.float32, np.float32), (torch.bfloat16, ml_dtypes.bfloat16), (torch.float16, np.float16)):
        with np.errstate(over="ignore"):
            # ml_dtypes rounds fp64 to fp32 first, which holds all of these that are not infinite
            expected = exact.astype(np.float32).astype(kind).astype(np.float64)
        found = exact_values(payload, scales, "e4m3", dtype)
        assert found.dtype == dtype
        assert np.array_equal(found.double().numpy(), expected)
    in_bf16 = exact_values(payload, scales, "e4m3", torch.bfloat16).double().numpy()
    assert np.array_equal(in_bf16[3:247], exact[3:247])
    assert not np.array_equal(in_bf16[2], exact[2])
    assert np.isinf(in_bf16[247]).any()


@pytest.mark.parametrize("kind", RECIPES)
def test_masters_are_rounded_to_the_codes_of_the_recipe(kind: str, half: str) -> None:
    """Forward is bit for bit that with masters; so is backward with squares. Else it takes the values of forward."""
    found = []
    for how in ("master", "fp8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(200, 136), nn.Tanh(), nn.Linear(136, 72)).requires_grad_(False)
        with torch.no_grad():
            model[0].weight[5:9, 40:80] *= 64
            model[2].weight *= torch.logspace(-3, 1, 136)
        plain_weights = [model[at].weight.detach().clone() for at in (0, 2)]
        convert(model, RECIPES[kind], frozen_weights=how)
        x = X.clone().requires_grad_()
        y = model(x)
        y.backward(DY)
        state = scaling_state(model)
        found.append([y.detach(), state.amax[state.delayed :], state.scale[state.delayed :], x.grad])
    is_squares = kind == "squares"
    assert same(*(one[: 4 if is_squares else 3] for one in found))
    assert not describe(model)[0].reason.endswith("weight in FP8 only") or is_squares
    for at, weight in zip((0, 2), plain_weights, strict=True):
        codes, scales = cast_in_mx(weight.numpy(), is_squares)
        held = model[at].weight
        assert np.array_equal(held.payload.numpy(), codes)
        assert np.array_equal(held.scale_inv.numpy(), scales[:: 32 if is_squares else 1])
        assert np.array_equal(
            held.dequantized().numpy(), in_numpy(held.payload, torch.from_numpy(scales[: len(codes)]))
        )
    if not is_squares:
        w1, w2 = (in_numpy(model[at].weight.payload, model[at].weight.scale_inv).astype(np.float64) for at in (0, 2))
        hidden = model[:2](X).double().numpy()
        expected = ((DY.double().numpy() @ w2) * (1 - hidden**2)) @ w1
        assert np.linalg.norm(found[1][3].numpy() - expected) < 1e-6 * np.linalg.norm(expected)
        # with masters, dgrad has a rounding of its own
        assert np.linalg.norm(found[0][3].numpy() - expected) > 1e-3 * np.linalg.norm(expected)


# the second has inductor's partition into forward and backward, which may move what backward computes
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_backward_alone_makes_the_values(backend: str) -> None:
    """Neither eager nor compiled code keeps them: what is saved of a weight is its codes and scales, as views."""
    torch.manual_seed(0)
    layer = convert(with_codes(nn.Linear(256, 512, bias=False), "mx"), MXScaling(), frozen_weights="fp8")
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    for run in (layer, torch.compile(layer, backend=backend, fullgraph=True)):
        x = torch.randn(3, 256, requires_grad=True)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one), torch.autocast("cpu", torch.bfloat16):
            y = run(x)
        assert max(one.nbytes for one in kept) == 256 * 512
        assert sum(one.nbytes for one in kept) <= 256 * 512 * 33 // 32 + 64
        y.backward(torch.ones_like(y))
        values = in_numpy(layer.weight.payload, layer.weight.scale_inv).astype(np.float64)
        expected = np.ones((3, 512)) @ values
        assert np.linalg.norm(x.grad.double().numpy() - expected) < 3e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("kind", "shape"), [("mx", (256, 128)), ("mx", (200, 300)), ("squares", (200, 300)), ("squares", (24, 40))]
)
def test_products_of_a_device_read_the_scales_in_tiles(
    kind: str, shape: tuple[int, int], strict_products: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict_scaled_mm, "CAPABILITY", (10, 0))
    # in place of the kernels and cuBLASLt, whose operands are checked
    monkeypatch.setattr(plain, "scaled_mm_mx", plain.product_of_mx)
    n, k = shape
    weight: Any = from_codes(*published(kind, n, k), torch.float32, "layer")
    values = in_numpy(weight.payload, weight.scale_inv).astype(np.float64)
    of_inputs = torch.full((e8m0.size_of_tiles(16, max(n, k)),), 127, dtype=torch.uint8)
    orders = [(weight.payload, weight.scale_inv, values)]
    if kind == "squares":
        orders.append((weight.payload.t().contiguous(), weight.scale_inv.t(), values.T))
    for payload, scale_inv, expected in orders:
        width = payload.shape[1]
        codes = torch.randn(16, width).to(torch.float8_e4m3fn)
        x = Operand(codes.view(torch.uint8), of_inputs[: e8m0.size_of_tiles(16, width)], MX())
        y = multiply(x, Operand(payload, scale_inv, MX()), None, torch.float32, True)
        sums = codes.double().numpy() @ expected.T
        assert np.abs(y.double().numpy() - sums).max() < 1e-5 * np.abs(sums).max()


@pytest.mark.parametrize(("gpu", "runs"), [(H100, False), (B200, True), (RTX_5090, True), (None, True)])
def test_devices_without_products_in_mx_take_values(
    gpu: Gpu | None, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        run_as(gpu, patch)
        assert plain.has_mx(torch.device("cpu")) == runs
    taken: list[str] = []
    monkeypatch.setattr(plain, "has_mx", lambda _: runs)
    monkeypatch.setattr(plain, "scaled_mm_mx", lambda *given: taken.append("mx") or given[0].codes)
    monkeypatch.setattr(emulation, "product_of_rounded_values", lambda *_: taken.append("values"))
    weight: Any = from_codes(*published("mx", 64, 96), torch.float32, "layer")
    x = Operand(torch.zeros(16, 96, dtype=torch.uint8), torch.zeros(512, dtype=torch.uint8), MX())
    held, trained = (
        Operand(weight.payload, scale, MX()) for scale in (weight.scale_inv, e8m0.to_tiles(weight.scale_inv))
    )
    for w in (held, trained):
        MX().gpu_product(x, w, None, torch.float32, True)
    # a weight that is trained is refused by the product itself, where there is none
    assert taken == (["mx", "mx"] if runs else ["values", "mx"])


def test_an_attention_whose_weight_was_changed_in_place_is_cast_by_slices(half: str) -> None:
    """The cast of the whole has its scales in tiles, which no slice of rows can take."""
    found = []
    for how in ("master", "fp8"):
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(32, 1, batch_first=True).requires_grad_(False)
        values = attention.in_proj_weight.detach() * torch.logspace(-2, 2, 96)[:, None]
        convert(attention, MXScaling(), min_features=0, frozen_weights=how)
        attention.in_proj_weight.data.copy_(torch.ones(96, 32))
        attention.in_proj_weight.data.zero_()
        attention.in_proj_weight.data += values
        assert how == "master" or not attention.in_proj_weight.is_fp8
        attention.out_proj.weight.data.copy_(torch.eye(32))
        x, memory = torch.randn(1, 5, 32), torch.randn(1, 7, 32)
        found.append(attention(x, memory, memory.flip(1), need_weights=False)[0])
    assert same(*found)


@pytest.mark.parametrize(("activation", "with_input"), [("none", True), ("gelu", True), ("gelu", False)])
def test_the_operator_of_backward(activation: str, with_input: bool, half: str) -> None:
    """dgrad by values leaves wgrad and the sum for the bias as they are without a dgrad."""
    torch.manual_seed(0)
    slot = Slot(torch.zeros(1, dtype=torch.int64), None, MX(), MX())
    h, dy, (payload, scale_inv) = torch.randn(9, 64), torch.randn(9, 64), published("mx", 64, 96)
    kept = cast(torch.randn(9, 96), slot, Want(columns=True)).columns if with_input else None
    w = Operand(payload.t(), scale_inv.t(), MX())
    rest = slot, torch.float32, torch.float32, True
    given = dy if activation == "none" else Computed(activation, (h,), dy)
    dx, dw, db = run_backward(given, kept, w, *rest)
    _, expected_dw, expected_db = run_backward(given, kept, None, *rest)
    assert torch.equal(dw, expected_dw)
    # a kernel sums in another order
    torch.testing.assert_close(db, expected_db)
    assert dw.shape == (64, 96 if with_input else 0)
    gradient = dy.double()
    if activation == "gelu":
        h64 = h.double().requires_grad_()
        (gradient,) = torch.autograd.grad(nn.functional.gelu(h64), h64, gradient)
    expected = gradient.numpy() @ in_numpy(payload, scale_inv).astype(np.float64)
    assert np.linalg.norm(dx.double().numpy() - expected) < 1e-6 * np.linalg.norm(expected)
    torch.library.opcheck(linear_backward.op, tuple(linear_backward.signature.flattened((dy, kept, w, *rest))))
