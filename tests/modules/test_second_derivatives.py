"""Losses on gradients of inputs: forces, penalties. Beside fp64 with the same casts, and beside layers one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lit import make_trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    convert,
    feed_forward,
    scaling_state,
)
from lightning_fp8.scalings.recipe import Recipe

RECIPES = [DelayedScaling(), CurrentScaling(), BlockScaling(), MXScaling(), CurrentScaling(wgrad="bf16")]
X = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))


def seeded(make: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    torch.manual_seed(1)
    return make(*arguments)


def on_forces(model: Callable[[Tensor], Tensor], x: Tensor = X) -> dict[str, Tensor]:
    """The gradients of a loss on the gradient of the input, and that gradient itself."""
    x = x.clone().requires_grad_()
    (forces,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (forces - torch.cos(x.detach())).square().mean().backward()
    parameters = model.named_parameters() if isinstance(model, nn.Module) else ()
    gradients = {name: weight.grad for name, weight in parameters if weight.grad is not None}
    return {"forces": forces.detach(), "x": x.grad, **gradients}  # type: ignore[dict-item]


# --- one layer, in fp64 with the same casts, which derivatives pass through ---


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x by the scale of its own values, to FP8 and back, as fp64; its derivative is one."""
    largest = torch.finfo(dtype).max
    scale = (torch.tensor(largest) / x.detach().float().abs().max()).double()
    values = (x.detach() * scale).float().clamp(-largest, largest).to(dtype).double()
    return x + (values * scale.float().reciprocal().double() - x).detach()


class Dgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dy: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(dy, w)
        return rounded(dy, torch.float8_e5m2) @ rounded(w, torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        dy, w = ctx.saved_tensors
        return g @ w.t(), dy.t() @ g


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return rounded(x, torch.float8_e4m3fn) @ rounded(w, torch.float8_e4m3fn).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        dw = rounded(dy.detach(), torch.float8_e5m2).t() @ rounded(x.detach(), torch.float8_e4m3fn)
        return Dgrad.apply(dy, w), dw


def test_two_layers_are_those_of_fp64_with_the_same_casts() -> None:
    torch.manual_seed(2)
    layers = nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False)
    weights = [layer.weight.detach().double().requires_grad_() for layer in layers]
    x = X.double().requires_grad_()
    y = Linear.apply(Linear.apply(x, weights[0]).sin(), weights[1]).pow(3)
    (forces,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (forces - torch.cos(X.double())).square().mean().backward()
    expected = {"forces": forces.detach(), "x": x.grad, "0": weights[0].grad, "1": weights[1].grad}

    model = nn.ModuleList(convert(layer, CurrentScaling()) for layer in layers)
    found = on_forces(lambda x: model[1](model[0](x).sin()).pow(3))
    found |= {str(at): layer.weight.grad for at, layer in enumerate(layers)}  # type: ignore[misc]
    for name, value in expected.items():
        # fp32's rounding, and the few codes that it changes
        assert (found[name].double() - value).norm() < 2e-3 * value.norm(), name  # type: ignore[union-attr, operator]


# --- whole networks ---


class OneByOne(nn.Module):
    """The same parts, which a fused block cannot see."""

    def __init__(self, parts: nn.Sequential) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def network(activation: Callable[[], nn.Module] = nn.SiLU) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(32, 64), activation(), nn.Linear(64, 64), activation(), nn.Linear(64, 32), nn.Linear(32, 1)
    )


class Gated(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.fused = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32), fused

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return feed_forward((self.gate, self.up), F.silu, self.down, x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return [*one] == [name.removeprefix("parts.") for name in other] and all(
        map(torch.equal, one.values(), other.values())
    )


@pytest.mark.parametrize(
    ("recipe", "activation"), zip(RECIPES, cycle([nn.SiLU, nn.GELU, partial(nn.GELU, "tanh"), nn.ReLU])), ids=repr
)
def test_fused_blocks_are_their_layers(activation: Callable[[], nn.Module], recipe: Recipe) -> None:
    fused = convert(seeded(network, activation), recipe)
    separate = convert(OneByOne(seeded(network, activation)), recipe)  # type: ignore[arg-type]
    for _ in range(2):
        assert same(on_forces(fused), on_forces(separate))
        for model in (fused, separate):
            scaling_state(model).update()
            model.zero_grad()
    assert torch.equal(scaling_state(fused).amax_history, scaling_state(separate).amax_history)


@pytest.mark.parametrize("recipe", RECIPES[1:4], ids=repr)
def test_gated_blocks_are_their_layers(recipe: Recipe) -> None:
    fused, separate = (convert(seeded(Gated, whole), recipe) for whole in (True, False))
    one, other = on_forces(fused), on_forces(separate)
    # the gradients of gate and up are added in another order
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_near_those_in_fp32(recipe: Recipe) -> None:
    exact, found = on_forces(seeded(network)), on_forces(convert(seeded(network), recipe))
    for name, value in exact.items():
        assert (found[name] - value).norm() <= 0.12 * value.norm(), name


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed(reentrant: bool) -> None:
    model = convert(seeded(network), CurrentScaling())
    expected = on_forces(model)
    model.zero_grad()
    if reentrant:
        # torch's own rule
        with pytest.raises(RuntimeError, match="use_reentrant"):
            on_forces(lambda x: checkpoint(model, x, use_reentrant=True))
        return
    x = X.clone().requires_grad_()
    (forces,) = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).sum(), x, create_graph=True)
    (forces - torch.cos(X)).square().mean().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is None or torch.equal(weight.grad, expected[name])


def test_attention_and_conv1d() -> None:
    from transformers.pytorch_utils import Conv1D

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.conv = nn.MultiheadAttention(32, 4, batch_first=True), Conv1D(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = x.view(4, 6, 32)
            # written out, as torch has no second derivative of its fused attention
            return self.conv(self.attention(x, x, x, need_weights=True)[0].contiguous()).tanh()

    exact, found = (on_forces(model) for model in (seeded(Block), convert(seeded(Block), CurrentScaling())))
    assert [*found] == [*exact]
    for name, value in exact.items():
        if value.norm() > 1e-6:
            assert (found[name] - value).norm() <= 0.2 * value.norm(), name


def test_a_frozen_weight_in_fp8_only() -> None:
    model = seeded(network).requires_grad_(False)
    results = []
    for how in ("master", "fp8"):
        x = X.clone().requires_grad_()
        net = convert(seeded(network).requires_grad_(False), CurrentScaling(), frozen_weights=how)  # type: ignore[arg-type]
        (forces,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(forces.square().sum(), x)[0])
    x = X.clone().requires_grad_()
    (forces,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (exact,) = torch.autograd.grad(forces.square().sum(), x)
    for found in results:
        assert (found - exact).norm() <= 0.15 * exact.norm()


def test_third_derivatives() -> None:
    model = convert(seeded(network, nn.Tanh), CurrentScaling())
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    second.square().sum().backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)


# --- training ---


class OnForces(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = network(), list[float]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_()
        (forces,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        loss = (forces - torch.cos(x.detach())).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 3e-3)


def test_a_loss_on_forces_falls_as_in_bf16(tmp_path: Path) -> None:
    ends = []
    data = TensorDataset(torch.randn(256, 32, generator=torch.Generator().manual_seed(4)))
    for precision in ("bf16-mixed", "fp8-delayed"):
        model = seeded(OnForces)
        trainer = make_trainer(tmp_path, precision=precision, max_steps=240, max_epochs=-1)
        trainer.fit(model, DataLoader(data, 32))
        ends.append(sum(model.losses[-8:]) / 8)  # type: ignore[arg-type, index]
        assert ends[-1] < 0.7 * model.losses[0]  # type: ignore[index, operator]
    assert abs(ends[1] - ends[0]) < 0.02 * ends[0]


def test_a_penalty_on_gradients_trains_its_critic() -> None:
    critic = convert(seeded(network, nn.ReLU))
    optimizer, penalties = torch.optim.Adam(critic.parameters(), 1e-2), []
    for _ in range(60):
        x = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        penalty.backward()
        scaling_state(critic).update()
        optimizer.step()
        penalties.append(penalty.item())
    assert penalties[-1] < 0.1 * penalties[0]


# --- what is not defined ---


def test_through_the_gradient_of_a_weight_is_refused_where_it_is_used() -> None:
    model = convert(seeded(network))
    loss = model(X).square().mean()
    (gradient,) = torch.autograd.grad(loss, model[0].weight, create_graph=True)
    with pytest.raises(RuntimeError, match="through the gradient of an FP8 layer's weight"):
        gradient.square().sum().backward()


def test_compiled_code_has_none() -> None:
    torch._dynamo.reset()
    model = torch.compile(convert(seeded(network)), backend="aot_eager")
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"double backward|create_graph"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].sum().backward()
    torch._dynamo.reset()
