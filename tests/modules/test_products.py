"""Products in bf16 and in FP8 in one layer: each equals the one of a layer with all in its precision, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairwise import pairwise
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, convert, scaling_state
from lightning_fp8.ops.formats import OPERAND_OF, PRODUCTS
from lightning_fp8.scalings.recipe import Recipe

# more than one block of inputs
ROWS, INPUTS, OUTPUTS = (3, 16), 144, 48
# all choices except the one that leaves the layer plain
CHOICES = [chosen for count in range(3) for chosen in itertools.combinations(PRODUCTS, count)]
RECIPES: dict[str, Callable[..., Recipe]] = {
    "delayed": DelayedScaling,
    "current": CurrentScaling,
    "block": BlockScaling,
    "mx": MXScaling,
}

Step = tuple[Tensor, ...]


def layer(in_bf16: tuple[str, ...], bias: bool, kind: str = "delayed") -> nn.Linear:
    torch.manual_seed(1)
    recipe = RECIPES[kind](**dict.fromkeys(in_bf16, "bf16"))
    return convert(nn.Linear(INPUTS, OUTPUTS, bias=bias), recipe)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(*ROWS, features, generator=generator) for features in (INPUTS, OUTPUTS))
    return x.requires_grad_(), dy.bfloat16()


def step(model: nn.Module, seed: int, run: Callable[[Tensor], Tensor] | None = None) -> Step:
    """Output and gradients of one training step under autocast."""
    x, dy = batch(seed)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = (model if run is None else run)(x)
    y.backward(dy)
    scaling_state(model).update()
    return (y.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters()))  # type: ignore[return-value,union-attr]


def in_plain_bf16(model: nn.Linear, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw from torch's own products."""
    x, dy = batch(seed)
    x, dy, w = x.detach().bfloat16(), dy.flatten(0, 1), model.weight.detach().bfloat16()
    y = F.linear(x, w, None if model.bias is None else model.bias.detach().bfloat16())
    return y, (dy @ w).float().view(*ROWS, INPUTS), (dy.t() @ x.flatten(0, 1)).float()


def check_layer(in_bf16: tuple[str, ...], bias: bool, kind: str, run: Any = lambda model: None) -> None:
    mixed, in_fp8 = layer(in_bf16, bias, kind), layer((), bias, kind)
    state = scaling_state(mixed)
    for seed in range(2):
        found, of_fp8 = step(mixed, seed, run(mixed)), step(in_fp8, seed)
        plain = in_plain_bf16(mixed, seed)
        for product, got, eight, sixteen in zip(PRODUCTS, found, of_fp8, plain, strict=False):
            assert torch.equal(got, sixteen if product in in_bf16 else eight), product
            assert not torch.equal(eight, sixteen)
        if bias:
            assert torch.equal(found[3], batch(seed)[1].float().sum((0, 1))) or torch.equal(found[3], of_fp8[3])
            torch.testing.assert_close(found[3], of_fp8[3], rtol=1e-6, atol=1e-5)
        # a tensor that no product takes in FP8 is not cast, and leaves no amax
        for role, row in (("input", 0), ("grad_output", 1)):
            assert bool(state.amax_history[0, row] > 0) is not OPERAND_OF[role].issubset(in_bf16)  # type: ignore[index]
        assert bool(state.amax[2] > 0) is not OPERAND_OF["weight"].issubset(in_bf16)
        # the host does not wait for histories that never come
        assert state.every_tensor_has_history is (kind == "delayed")


@pytest.mark.parametrize(("in_bf16", "kind", "bias"), pairwise(CHOICES, [*RECIPES], [False, True]))
def test_each_product_is_that_of_its_precision(in_bf16: tuple[str, ...], bias: bool, kind: str) -> None:
    check_layer(in_bf16, bias, kind)


# each recipe with some of the choices
@pytest.mark.parametrize(("in_bf16", "kind"), list(zip(CHOICES, itertools.cycle([*RECIPES][::-1]))))
def test_with_the_kernels(in_bf16: tuple[str, ...], kind: str, cuda_half: Any) -> None:
    check_layer(in_bf16, True, kind)
    assert any(("blocks" in name) == (kind == "block") for name in cuda_half)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(("in_bf16", "kind"), list(zip(CHOICES, itertools.cycle(RECIPES))))
def test_compiled(in_bf16: tuple[str, ...], kind: str) -> None:
    check_layer(in_bf16, True, kind, compiled)


@pytest.mark.parametrize(
    ("in_bf16", "kind", "reentrant"),
    list(zip(CHOICES, itertools.cycle([*RECIPES][1:]), itertools.cycle([False, True]))),
)
def test_recomputed(in_bf16: tuple[str, ...], kind: str, reentrant: bool) -> None:
    check_layer(in_bf16, True, kind, lambda model: lambda x: checkpoint(model, x, use_reentrant=reentrant))


def test_without_autocast_the_dtype_is_that_of_the_input() -> None:
    x, dy = batch(0)
    model = layer(("fprop", "wgrad"), True)
    y = model(x)
    y.backward(dy.float())
    rows, gradients = x.detach().flatten(0, 1), dy.float().flatten(0, 1)
    assert torch.equal(y, F.linear(x, model.weight, model.bias))
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, gradients.t() @ rows)
