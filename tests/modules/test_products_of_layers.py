"""``wgrad`` in bf16 in all kinds of layers, what it keeps for backward, and inputs that layers share."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, convert, scaling_state
from lightning_fp8.core.linear import linear
from lightning_fp8.scalings.recipe import Recipe

RECIPES: list[Callable[..., Recipe]] = [DelayedScaling, CurrentScaling, BlockScaling, MXScaling]


class Calls:
    """Input, weight and output gradient of every call of the operator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[Tensor, Tensor, list[Tensor]]] = []
        run = linear.run

        def noting(x: Tensor, parameter: Tensor, *rest: Any) -> Tensor:
            y: Tensor = run(x, parameter, *rest)
            gradients: list[Tensor] = []
            y.register_hook(gradients.append)
            self.made.append((x.detach(), parameter, gradients))
            return y

        monkeypatch.setattr(linear, "run", noting)

    def weight_gradient(self, leaf: Tensor) -> Tensor:
        """The weight gradient of a parameter, from plain products in bf16."""
        total = torch.zeros_like(leaf)
        for x, parameter, (dy,) in self.made:
            dw = (dy.flatten(0, -2).t() @ x.bfloat16().flatten(0, -2)).to(parameter.dtype)
            (part,) = (
                torch.autograd.grad(parameter, leaf, dw, retain_graph=True, allow_unused=True)
                if (parameter is not leaf)
                else (dw,)
            )
            total += 0 if part is None else part
        return total


def attention(**kwargs: Any) -> nn.Module:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True, **kwargs)

        def forward(self, x: Tensor) -> Tensor:
            other = x[..., : kwargs.get("kdim", 32)]
            y: Tensor = self.attention(x, other, other, need_weights=False)[0]
            return y

    return Attention()


class Shared(nn.Module):
    """Three layers with one input, which conversion detects."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return q * k + v


def conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return nn.Sequential(Conv1D(48, 32), nn.Tanh(), Conv1D(32, 48))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "packed": attention,
    "separate": lambda: attention(kdim=16, vdim=16),
    "shared": Shared,
    "conv1d": conv1d,
    "fused": lambda: nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)),
}


@pytest.mark.parametrize(("name", "recipe"), [*zip(KINDS, itertools.cycle(RECIPES)), *zip(KINDS, RECIPES[::-1])])
def test_layers_of_all_kinds(name: str, recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    models = [KINDS[name]()]
    models.append(KINDS[name]())
    models[1].load_state_dict(models[0].state_dict())
    found = []
    for wgrad, model in zip(("fp8", "bf16"), models, strict=True):
        convert(model, recipe(wgrad=wgrad))
        calls = Calls(monkeypatch)
        x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
        found.append((y, x.grad))
        monkeypatch.undo()
    # the forward and dgrad are in FP8 as before; fused layers differ in roundings between operators
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)  # type: ignore[arg-type]
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    assert len(weights) >= 2
    for weight in weights:
        assert weight.grad is not None
        assert torch.equal(weight.grad, calls.weight_gradient(weight))


@pytest.mark.parametrize(
    ("names", "recipe"), list(zip(itertools.permutations("qkv"), itertools.cycle(RECIPES), strict=False))
)
@pytest.mark.usefixtures("half")
def test_layers_of_one_input_may_differ_in_their_products(
    names: tuple[str, str, str], recipe: Callable[..., Recipe]
) -> None:
    """Another layer takes a cast only in the layouts in which it has been made."""
    choices = [{"fprop": "bf16"}, {"wgrad": "bf16"}, {"fprop": "bf16", "wgrad": "bf16"}]
    overrides = dict(zip(names, choices, strict=True))
    torch.manual_seed(0)
    shared = convert(Shared(), recipe(), overrides=overrides)  # type: ignore[arg-type]
    assert shared.q.fp8[""].shared_input is not None
    separate = [
        convert(copy.deepcopy(unconverted(shared, name)), recipe(), overrides={"": overrides[name]}) for name in "qkv"
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        x = torch.randn(8, 32, generator=generator, requires_grad=True)
        q, k, v = (one(x) for one in separate)
        (q * k + v).sum().backward()
        gradient, x.grad = x.grad, None
        y = shared(x)
        y.sum().backward()
        assert torch.equal(y, q * k + v)
        torch.testing.assert_close(x.grad, gradient, rtol=1e-6, atol=1e-6)
        for layer, alone in zip((shared.q, shared.k, shared.v), separate, strict=True):
            assert torch.equal(layer.weight.grad, alone.weight.grad)
            scaling_state(alone).update()
        scaling_state(shared).update()
        shared.zero_grad()
        for alone in separate:
            alone.zero_grad()
    made = shared.q.fp8[""].shared_input._made
    assert made is None or made.x() is x


def test_an_input_that_a_hook_changes_is_rounded_again() -> None:
    model = convert(Shared(), DelayedScaling(fprop="bf16", wgrad="bf16"))
    model.k.register_forward_pre_hook(lambda module, args: args[0].mul_(2))
    x = torch.randn(8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x.clone())
        q, k, v = (F.linear(x * by, one.weight, one.bias) for by, one in ((1, model.q), (2, model.k), (2, model.v)))
    assert torch.equal(y, q * k + v)


def unconverted(model: nn.Module, name: str) -> nn.Module:
    layer = nn.Linear(32, 32)
    layer.load_state_dict(model.get_submodule(name).state_dict())
    return layer
