"""Weight averages by Lightning's callbacks: training is unaffected, and averages evaluate correctly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lit import Averaging, Regression, loader, make_trainer, needs_averaging, same, seeded
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from lightning_fp8 import convert, scaling_state
from lightning_fp8.conversion.convert import is_converted

# Lightning 2.5 lacks it
Ema: Any = getattr(callbacks, "EMAWeightAveraging", None)
needs_ema = pytest.mark.skipif(Ema is None, reason="Lightning has no such callback")
KINDS = [pytest.param("mean", marks=needs_averaging), pytest.param("ema", marks=needs_ema)]
DECAY = 0.7


def averaging(kind: str) -> pl.Callback:
    return Averaging() if kind == "mean" else Ema(decay=DECAY)


def shadow(kind: str) -> AveragedModel:
    """The same average of a plain model, for comparison."""
    return AveragedModel(seeded().net, avg_fn=None if kind == "mean" else get_ema_avg_fn(DECAY))


class Follows(pl.Callback):
    """Records weights and scales after each optimizer step, their average, and both and the loss at each validation."""

    def __init__(self, kind: str = "mean") -> None:
        self.shadow = shadow(kind)
        self.weights: list[list[Tensor]] = []
        self.scales: list[dict[str, Any]] = []
        self.validated: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step > len(self.weights):
            self.weights.append(values(module))
            self.scales.append(scaling_state(module).state_dict())
            self.shadow.update_parameters(module.net)

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validated.append(
                {
                    "loss": trainer.callback_metrics["val_loss"].clone(),
                    "average": copy.deepcopy(self.shadow.module.state_dict()),
                    "scales": scaling_state(module).state_dict(),
                    "latest": self.weights[-1] if self.weights else values(seeded()),
                }
            )


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def evaluated(weights: dict[str, Tensor], scales: dict[str, Any] | None) -> float:
    """The validation loss of these weights in a new model: with these scales in FP8 (each batch with its own, if there
    are none), or in fp32.
    """
    model = seeded().eval()
    model.net.load_state_dict(weights)
    if scales is not None:
        convert(model)
        if scales:
            scaling_state(model).load_state_dict(scales)
    losses = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=scales is not None, cache_enabled=False):
        losses = [model.step(batch) for batch in loader()]
    return float(torch.stack(losses).mean())


def named(weights: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(seeded().net.state_dict(), weights, strict=True))


def fit(path: Path, *extra: pl.Callback, model: Regression | None = None, **kwargs: Any) -> Regression:
    model = model or seeded()
    options: dict[str, Any] = {"max_epochs": 3, "val_check_interval": 1, "num_sanity_val_steps": 0, **kwargs}
    how = {name: options.pop(name) for name in ("ckpt_path", "weights_only") if name in options}
    make_trainer(path, callbacks=[*extra], **options).fit(model, loader(), loader(), **how)
    return model


# --- WeightAveraging and EMAWeightAveraging ---


@pytest.mark.parametrize(
    ("kind", "accumulate"), [pytest.param("mean", 1, marks=needs_averaging), pytest.param("ema", 2, marks=needs_ema)]
)
def test_training_goes_on_as_without(tmp_path: Path, kind: str, accumulate: int) -> None:
    """Weights are swapped for each validation, here after each batch and so also during an accumulation."""
    alone, beside = Follows(), Follows()
    plain = fit(tmp_path, alone, accumulate_grad_batches=accumulate)
    averaged = fit(tmp_path, averaging(kind), beside, accumulate_grad_batches=accumulate)
    assert len(alone.weights) == 12 // accumulate
    assert all(map(equal, alone.weights, beside.weights))
    assert torch.equal(torch.stack(plain.losses), torch.stack(averaged.losses))
    one, other = scaling_state(plain), scaling_state(averaged)
    assert torch.equal(one.scale[:4], other.scale[:4])
    assert torch.equal(one.amax_history, other.amax_history)
    assert other.amax[:4].count_nonzero() == 0
    # except for the weights left in the model, whose last cast was in validation
    assert not equal(values(plain), values(averaged))
    for model in (plain, averaged):
        largest = torch.stack([model.net[layer].weight.detach().abs().max() for layer in (0, 2)])
        assert torch.equal(scaling_state(model).scale[4:], torch.tensor(448.0) / largest)


@pytest.mark.parametrize("kind", KINDS)
def test_validation_casts_the_average_which_is_in_the_model_after_fit(tmp_path: Path, kind: str) -> None:
    follows = Follows(kind)
    model = fit(tmp_path, averaging(kind), follows)
    assert len(follows.validated) == 12
    for number, seen in enumerate(follows.validated):
        assert seen["loss"] == pytest.approx(evaluated(seen["average"], seen["scales"]), abs=1e-7)
        if number > 2:
            # far enough from the trained weights, and close to the averaged model in fp32
            assert abs(evaluated(named(seen["latest"]), seen["scales"]) - seen["loss"]) > 1e-4
            assert seen["loss"] == pytest.approx(evaluated(seen["average"], None), rel=0.03)
    average = follows.shadow.module.state_dict()
    assert equal(values(model), list(average.values()))
    found = make_trainer(tmp_path).validate(model, loader(), verbose=False)[0]["val_loss"]
    assert found == pytest.approx(evaluated(average, scaling_state(model).state_dict()), abs=1e-7)


@needs_averaging
def test_checkpoints_resume_and_load_into_a_plain_model(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_epochs=1)
    whole = Follows()
    first = fit(tmp_path, Averaging(), whole, saving, enable_checkpointing=True)
    saved = torch.load(tmp_path / "step=8.ckpt", weights_only=True)
    assert equal(list(saved["current_model_state"].values()), whole.weights[7])
    plain = Regression.load_from_checkpoint(tmp_path / "step=8.ckpt")
    assert not is_converted(plain)
    average = whole.validated[7]["average"]
    assert equal(values(plain), list(average.values()))
    found = make_trainer(tmp_path, precision="32-true").validate(plain, loader(), verbose=False)[0]["val_loss"]
    assert found == pytest.approx(evaluated(average, None), rel=1e-6)
    again = tmp_path / "again"
    second = fit(again, Averaging(), ckpt_path=tmp_path / "step=8.ckpt", weights_only=True)
    assert torch.equal(torch.stack(first.losses[8:]), torch.stack(second.losses))
    assert same(first, second)


# --- StochasticWeightAveraging ---


class FollowsEpochs(pl.Callback):
    """Records the weights that the callback averages: those at the start of each epoch from the second on."""

    def __init__(self) -> None:
        self.weights: list[list[Tensor]] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.weights.append(values(module))


def test_swa(tmp_path: Path) -> None:
    follows = FollowsEpochs()
    plain = fit(tmp_path, max_epochs=4)
    # anneals at once, to the current learning rate
    swa = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2, annealing_epochs=1, annealing_strategy="linear")
    model = fit(tmp_path, swa, follows, max_epochs=4)
    # a constant learning rate, so the training is the same
    assert torch.equal(torch.stack(plain.losses), torch.stack(model.losses))
    assert torch.equal(scaling_state(plain).amax_history, scaling_state(model).amax_history)
    assert torch.equal(scaling_state(plain).scale[:4], scaling_state(model).scale[:4])
    # `swa_epoch_start` counts from one
    for found, *epochs in zip(values(model), *follows.weights[1:], strict=True):
        torch.testing.assert_close(found, torch.stack(epochs).double().mean(0).float(), rtol=1e-5, atol=1e-7)
    found = make_trainer(tmp_path).validate(model, loader(), verbose=False)[0]["val_loss"]
    average = {name: value.clone() for name, value in model.net.state_dict().items()}
    # the histories belong to the weights of the last step, not to their average
    assert found == pytest.approx(evaluated(average, {}), abs=1e-7)
    assert found == pytest.approx(evaluated(average, None), rel=0.03)
