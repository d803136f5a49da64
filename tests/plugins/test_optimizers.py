"""Optimizers of torch and of other libraries: losses, scales at every step, and resuming bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bitsandbytes
import lightning.pytorch as pl
import pytest
import schedulefree
import torch
import torchao.optim
from lit import Regression, make_trainer, same, seeded
from torch import Tensor, nn
from transformers.optimization import Adafactor

from lightning_fp8 import scaling_state
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.scaling import ScalingState

EPOCHS, STEPS = 3, 12
Parameters = Iterator[nn.Parameter]


class Fit(Regression):
    """Trains with any optimizer; ``updates`` is the number of scale updates per step."""

    updates = 1

    def __init__(self) -> None:
        super().__init__(width=64)
        # two nodes of the graph, not one block
        self.net[1] = nn.Tanh()

    def make_optimizers(self) -> Any:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return self.make_optimizers()


def with_optimizer(make: Callable[[Parameters], torch.optim.Optimizer]) -> type[Fit]:
    class Made(Fit):
        def make_optimizers(self) -> Any:
            return make(self.parameters())

    return Made


def adam_8bit(parameters: Parameters) -> torch.optim.Optimizer:
    return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-2, min_8bit_size=1024)


def adafactor(parameters: Parameters) -> torch.optim.Optimizer:
    return Adafactor(parameters, lr=1e-2, scale_parameter=False, relative_step=False)


class ScheduleFree(Fit):
    """Its optimizer holds different weights in training and in evaluation, and exchanges them in place."""

    def make_optimizers(self) -> Any:
        return schedulefree.AdamWScheduleFree(self.parameters(), lr=1e-2)

    def on_train_epoch_start(self) -> None:
        self.optimizers().optimizer.train()

    def on_validation_epoch_start(self) -> None:
        self.optimizers().optimizer.eval()


class MuonAndAdamW(Fit):
    """Two optimizers for one backward."""

    updates = 2

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def make_optimizers(self) -> Any:
        matrices = [one for one in self.parameters() if one.dim() == 2]
        others = [one for one in self.parameters() if one.dim() != 2]
        return torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()


class SAM(Fit):
    """Sharpness-aware minimization: weights are moved for a second pass, and moved back."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def make_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        parameters = [*self.parameters()]
        norm = torch.stack([one.grad.norm() for one in parameters]).norm()
        moves = [one.grad * (0.05 / norm) for one in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, moves)
        self.optimizers().zero_grad()
        self.manual_backward(self.step(batch))
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
        self.optimizers().step()
        self.optimizers().zero_grad()


class InBackward(Fit):
    """Each weight is updated by its own optimizer as soon as its gradient is ready."""

    in_backward = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def make_optimizers(self) -> None:
        self.each = {one: torch.optim.AdamW([one], lr=1e-2) for one in self.parameters()}
        if self.in_backward:
            for one in self.parameters():
                one.register_post_accumulate_grad_hook(self.change)

    def change(self, parameter: Tensor) -> None:
        self.each[parameter].step()
        self.each[parameter].zero_grad()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if not self.in_backward:
            for one in self.parameters():
                self.change(one)
        scaling_state(self).update()


class AfterBackward(InBackward):
    in_backward = False


# Lightning cannot read their states, in any precision
LOW_BIT = "torchao AdamW8bit"
MODELS: dict[str, type[Fit]] = {
    "sgd": with_optimizer(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    "adamw fused": with_optimizer(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)),
    # more iterations amplify the gradients' rounding errors, as their differences estimate the curvature
    "lbfgs": with_optimizer(lambda p: torch.optim.LBFGS(p, lr=1, max_iter=2)),
    LOW_BIT: with_optimizer(lambda p: torchao.optim.AdamW8bit(p, lr=1e-2, block_size=64)),
    "bitsandbytes AdamW8bit": with_optimizer(adam_8bit),
    "transformers Adafactor": with_optimizer(adafactor),
    "schedulefree AdamW": ScheduleFree,
    "muon and adamw": MuonAndAdamW,
    "sam": SAM,
}


class ScalesOfEveryCast(pl.Callback):
    """Compares the scale of each weight's cast with the weight, right after the forward of each step."""

    def __init__(self) -> None:
        self.seen = {"train": 0, "validation": 0}

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self.compare(pl_module, "train")

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.compare(pl_module, "validation")

    def compare(self, model: nn.Module, when: str) -> None:
        state = scaling_state(model)
        for name, layer in model.named_modules():
            if isinstance(layer, Fp8Module):
                scale = state.scale[state.names.index(f"{name}.weight")]
                expected = torch.tensor(448.0) / layer.weight.detach().abs().max()
                assert scale.item() == expected.item(), (name, when, state.updates)
        self.seen[when] += 1


def fit(model: Fit, path: Path, epochs: int, precision: str = "fp8-delayed", ckpt: Path | None = None) -> pl.Trainer:
    checks = [ScalesOfEveryCast()] if precision == "fp8-delayed" else []
    options: dict[str, Any] = {"precision": precision, "max_epochs": epochs, "num_sanity_val_steps": 0}
    trainer = make_trainer(path, callbacks=checks, **options)
    # torchao compiles its step
    with torch.compiler.set_stance("force_eager"):
        trainer.fit(model, data(), data(), ckpt_path=ckpt)
    return trainer


def data() -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 64, generator=generator)
    data = torch.utils.data.TensorDataset(x, torch.sin(x[:, :16] * 2))
    return torch.utils.data.DataLoader(data, batch_size=16)


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_with_the_scale_of_each_weight(name: str, tmp_path: Path) -> None:
    model, plain = seeded(MODELS[name]), seeded(MODELS[name])
    trainer = fit(model, tmp_path, EPOCHS)
    fit(plain, tmp_path, EPOCHS, "bf16-mixed")
    fp8, bf16 = (torch.stack(one.losses).view(EPOCHS, -1).mean(1) for one in (model, plain))
    assert fp8[-1] < 0.8 * fp8[0]
    assert (fp8 - bf16).abs().max() < 0.04 * bf16[0], (fp8, bf16)

    (check,) = (one for one in trainer.callbacks if isinstance(one, ScalesOfEveryCast))
    assert check.seen["train"] >= STEPS == check.seen["validation"]
    state = scaling_state(model)
    assert state.updates == STEPS * model.updates
    entries = (state.amax_history > 0).sum(0)
    # for what changes weights outside of `step`, histories begin anew
    assert entries.min() > 0 if name in ("sam", "schedulefree AdamW") else (entries == STEPS).all()

    half, resumed = seeded(MODELS[name]), seeded(MODELS[name])
    fit(half, tmp_path, 1).save_checkpoint(tmp_path / "half.ckpt")
    if name == LOW_BIT:
        for precision in ("32-true", "fp8-delayed"):
            with pytest.raises(RuntimeError, match="Callable map_location not supported"):
                fit(resumed, tmp_path, EPOCHS, precision, tmp_path / "half.ckpt")
        return
    fit(resumed, tmp_path, EPOCHS, ckpt=tmp_path / "half.ckpt")
    assert same(model, resumed)


def test_in_backward_is_the_same_as_after_it(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    inside, after = seeded(InBackward), seeded(AfterBackward)
    for model in (inside, after):
        fit(model, tmp_path, EPOCHS)
    assert torch.equal(torch.stack(inside.losses), torch.stack(after.losses))
    assert same(inside, after)
    state: ScalingState = scaling_state(inside)
    assert state.updates == STEPS
    assert ((state.amax_history > 0).sum(0) == STEPS).all()
    assert not [one for one in recwarn if "nothing has updated its scales" in str(one.message)]
