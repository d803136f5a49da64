"""Gradients that nobody records (saliency, attacks, forces, guidance, frozen encoders): never clipped by a history."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from experts import WIDTH, experts, routing
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, convert, feed_forward, scaling_state

ROWS = 24
# much larger than the loss of the training, as a sum over a batch is than a mean
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "saliency": lambda y: 100 * y.sum(),
    "forces": lambda y: 1000 * y.square().sum(),
    "guidance": lambda y: 100 * F.log_softmax(y, -1)[..., 0].sum(),
}


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return feed_forward((self.gate, self.up), F.silu, self.down, x)


class FeedForward(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return feed_forward(self.up, F.gelu, self.down, x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x[None], x[None], x[None])[0][0]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = experts()

    def forward(self, x: Tensor) -> Tensor:
        index, weights = routing()
        return self.experts(x[: len(index)], index, weights)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)),
    "feed_forward": FeedForward,
    "gated": Gated,
    "attention": Attention,
    "experts": Experts,
}


def trained(kind: str, recipe: Any) -> tuple[nn.Module, nn.Module]:
    """A converted model after a few steps with small gradients, and the plain one with the same weights."""
    torch.manual_seed(0)
    plain = KINDS[kind]()
    model = convert(copy.deepcopy(plain), recipe)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(3):
        model(torch.randn(ROWS, WIDTH)).square().mean().mul(1e-3).backward()
        scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
    plain.load_state_dict(model.state_dict())
    return model.eval(), plain.eval()


def input_gradient(call: Callable[[Tensor], Tensor], loss: Callable[[Tensor], Tensor]) -> Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(call(x)), x)
    return gradient


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_evaluation(kind: str, loss: str) -> None:
    errors = {}
    for recipe in (DelayedScaling(), CurrentScaling()):
        model, plain = trained(kind, recipe)
        before = {name: value.clone() for name, value in vars(scaling_state(model)).items() if type(value) is Tensor}
        errors[recipe.precision] = error(input_gradient(model, LOSSES[loss]), input_gradient(plain, LOSSES[loss]))
        state = scaling_state(model)
        assert all(torch.equal(getattr(state, name), before[name]) for name in ("amax_history", "nonfinite_steps"))
        assert not state.amax[: state.delayed].any()
    assert errors["fp8-current"] < 0.12
    assert errors["fp8-delayed"] < 1.3 * errors["fp8-current"] + 0.01


@pytest.mark.parametrize("kind", ["linear", "gated", "attention"])
def test_compiled(kind: str) -> None:
    torch.compiler.reset()
    model, plain = trained(kind, DelayedScaling())
    compiled = torch.compile(model, backend="aot_eager")
    expected = input_gradient(plain, LOSSES["saliency"])
    assert error(input_gradient(compiled, LOSSES["saliency"]), expected) < 0.12


@pytest.mark.parametrize("kind", KINDS)
def test_cuda_half(kind: str, cuda_half: Counter[str]) -> None:
    gradients, launches = {}, {}
    for recipe in (DelayedScaling(), CurrentScaling()):
        model, plain = trained(kind, recipe)
        y = model(x := torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_())
        cuda_half.clear()
        (gradients[recipe.precision],) = torch.autograd.grad(LOSSES["saliency"](y), x)
        launches[recipe.precision] = Counter(cuda_half)
        assert error(gradients[recipe.precision], input_gradient(plain, LOSSES["saliency"])) < 0.12
    # each gradient is measured in one launch before its cast
    assert launches["fp8-delayed"] == launches["fp8-current"]


@pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling(), BlockScaling()], ids=lambda one: one.precision)
def test_a_frozen_encoder_in_evaluation(recipe: Any) -> None:
    """A prompt is trained through an encoder that never records, beside a head that does."""
    plain = nn.ModuleDict({"encoder": KINDS["linear"](), "head": nn.Linear(WIDTH, 16)})
    model = convert(copy.deepcopy(plain), recipe)
    state = scaling_state(model)
    for factor in (1.0, 1.0, 3000.0):
        gradients = []
        for one in (plain, model):
            one.train()
            one["encoder"].eval().requires_grad_(False)
            prompt = torch.ones(ROWS, WIDTH).tril().requires_grad_()
            hidden = one["encoder"](prompt)
            (factor * hidden.square().sum() + one["head"](hidden).square().mean()).backward()
            gradients.append(prompt.grad)
        assert error(gradients[1], gradients[0]) < 0.12
        state.update()
    if recipe.from_history:
        recorded = {name for name, filled in zip(state.names, state.amax_history[0] > 0) if filled}
        assert recorded == {"head.input", "head.grad_output"}


class Attacked(pl.LightningModule):
    """Makes adversarial inputs in validation, and with ``model.eval()`` inside a training step."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.plain = KINDS["linear"](), KINDS["linear"]()
        self.plain.requires_grad_(False)
        self.errors: dict[str, list[float]] = {"train": [], "validate": []}

    def _attack(self, x: Tensor, stage: str) -> None:
        self.plain.load_state_dict(self.net.state_dict())
        with torch.enable_grad():
            found, expected = (
                torch.autograd.grad(LOSSES["saliency"](net(leaf := x.clone().requires_grad_())), leaf)[0]
                for net in (self.net, self.plain)
            )
        self.errors[stage].append(error(found, expected))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.net.eval()
        self._attack(batch[0], "train")
        self.net.train()
        return self.net(batch[0]).square().mean() * 1e-3

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self._attack(batch[0], "validate")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), 1e-2)


def test_attacks_in_a_trainer(tmp_path: Any) -> None:
    model = Attacked()
    data = DataLoader(TensorDataset(torch.randn(4 * ROWS, WIDTH)), ROWS)
    trainer = pl.Trainer(
        max_epochs=2,
        precision="fp8-delayed",
        plugins=None,
        inference_mode=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, data, data)
    assert {stage: len(found) for stage, found in model.errors.items()} == {"train": 8, "validate": 8}
    assert max(map(max, model.errors.values())) < 0.12
