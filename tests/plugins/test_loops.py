"""Weights are cast once per loop of a Trainer, and a loop never uses the casts of another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from counted_casts import count_weight_casts
from lit import Regression, loader, make_trainer, seeded

from lightning_fp8 import convert, scaling_state
from lightning_fp8.modules.weights_unchanged import casts_of


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    return count_weight_casts(monkeypatch)


def trained(path: Path) -> Regression:
    model = seeded()
    make_trainer(path).fit(model, loader())
    return model  # type: ignore[no-any-return]


def predicted(model: Regression) -> list[torch.Tensor]:
    """Predictions of the model's current weights, from a model without any casts so far."""
    fresh = seeded()
    fresh.load_state_dict(model.state_dict())
    convert(fresh)
    scaling_state(fresh).load_state_dict(scaling_state(model).state_dict())
    fresh.train(isinstance(model, KeepsMode) and model.training)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return [fresh(x) for x, _ in loader()]


def assert_equal(found: Any, expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class KeepsMode(Regression):
    """No switch between training and evaluation shows that a loop has begun."""

    def on_validation_model_eval(self) -> None:
        pass

    def on_predict_model_eval(self) -> None:
        pass


@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
@pytest.mark.parametrize("inference_mode", [True, False])
def test_one_cast_per_loop(tmp_path: Path, loop: str, inference_mode: bool, casts: Counter[int]) -> None:
    model, options = trained(tmp_path), {} if loop == "predict" else {"verbose": False}
    trainer = make_trainer(tmp_path, inference_mode=inference_mode)
    for _ in range(2):
        casts.clear()
        found = getattr(trainer, loop)(model, loader(), **options)
        assert sorted(casts.values()) == [1, 1]
        if loop == "predict":
            assert_equal(found, predicted(model))
    # the copies have been dropped
    assert all(one._cast is None for layer in (model.net[0], model.net[2]) for one in casts_of(layer.fp8.values()))


def load(model: Regression) -> None:
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


def write_through_data(model: Regression) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


@pytest.mark.parametrize("keeps_eval_mode", [False, True])
@pytest.mark.parametrize("change", [load, write_through_data])
def test_a_change_between_loops_is_seen(
    tmp_path: Path, change: Callable[[Regression], None], keeps_eval_mode: bool
) -> None:
    model = seeded(KeepsMode) if keeps_eval_mode else seeded()
    trainer = make_trainer(tmp_path)
    trainer.fit(model, loader())
    model.train(not keeps_eval_mode)
    before = trainer.predict(model, loader())
    change(model)
    expected = predicted(model)
    found = trainer.predict(model, loader())
    assert not torch.equal(before[0], found[0])
    assert_equal(found, expected)


@pytest.mark.parametrize("remedy", [True, False])
def test_a_swap_through_data_within_a_step_needs_a_switch_of_modes(tmp_path: Path, remedy: bool) -> None:
    class Swaps(Regression):
        """As with `ema_scope` of latent diffusion."""

        def swap(self) -> None:
            self.net[2].weight.data.neg_()
            self.net[2].bias.data.neg_()
            if remedy:
                self.train()
                self.eval()

        def predict_step(self, batch: Any, batch_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
            own = self(batch[0])
            self.swap()
            swapped = self(batch[0])
            self.swap()
            return own, swapped

    for own, swapped in make_trainer(tmp_path).predict(seeded(Swaps), loader()):
        # as the documentation says: without it, the casts of the former weight are used, and a bias in 16 bits
        assert torch.equal(swapped, -own if remedy else own)


@pytest.mark.parametrize("kind", [Regression, KeepsMode])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_validations_inside_a_fit(tmp_path: Path, kind: type[Regression], is_frozen: bool) -> None:
    class Sees(pl.Callback):
        """Changes the weights through .data around each validation, as swapped averages do."""

        def __init__(self) -> None:
            self.losses: list[tuple[float, float]] = []

        def on_validation_epoch_start(self, trainer: pl.Trainer, module: Regression) -> None:  # type: ignore[override]
            self.kept = [parameter.detach().clone() for parameter in module.parameters()]
            for parameter in module.parameters():
                parameter.data.mul_(0.9)
            expected = [(y - z).square().mean() for (_, z), y in zip(loader(), predicted(module), strict=True)]
            self.losses.append((0.0, float(torch.stack(expected).mean())))

        def on_validation_epoch_end(self, trainer: pl.Trainer, module: Regression) -> None:  # type: ignore[override]
            self.losses[-1] = (float(trainer.callback_metrics["val_loss"]), self.losses[-1][1])
            for parameter, kept in zip(module.parameters(), self.kept, strict=True):
                parameter.data.copy_(kept)

    alone, model, sees = seeded(kind), seeded(kind), Sees()
    for one in (alone, model):
        one.net[0].requires_grad_(not is_frozen)
    make_trainer(tmp_path).fit(alone, loader())
    make_trainer(tmp_path, val_check_interval=1, callbacks=[sees], num_sanity_val_steps=0).fit(
        model, loader(), loader()
    )
    assert len(sees.losses) == 4
    assert all(found == pytest.approx(expected, abs=1e-6) for found, expected in sees.losses)
    assert torch.equal(torch.stack(alone.losses), torch.stack(model.losses))
