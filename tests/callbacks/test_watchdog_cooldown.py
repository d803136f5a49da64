"""``ScaleWatchdog(cooldown=...)``: a moved layer comes back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lit import Regression, loader, make_trainer, same, seeded
from torch import Tensor
from watched_models import NEVER, Vanishing

from lightning_fp8 import PrecisionSchedule, ScaleWatchdog, scaling_state


class SometimesVanishing(Vanishing):
    """In trouble in its first four steps. Keeps where its first layer is moved to, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.trainer.global_step < 4 else Regression.forward(self, x)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        precision = scaling_state(self).precisions[0]
        self.places.append("fp8" if precision.in_fp8 else "bf16")
        if precision.is_current and precision.in_fp8:
            self.places[-1] = "current"


class KeepOne(pl.Callback):
    def __init__(self, file: Path, step: int) -> None:
        self.file, self.step = file, step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.file)


def fit(path: Path, *callbacks: Any, start: int = 0) -> SometimesVanishing:
    model: SometimesVanishing = seeded(SometimesVanishing)
    # a step in each epoch
    trainer = make_trainer(path, callbacks=list(callbacks), max_epochs=12)
    trainer.fit(model, loader(16), ckpt_path=str(path / f"{start}.ckpt") if start else None)
    return model


def watchdog(action: Any, cooldown: int | None = 5) -> ScaleWatchdog:
    options = {**NEVER, "underflowed_above": 0.5, "checks_in_a_row": 1, "cooldown": cooldown}
    return ScaleWatchdog(action, 2, **options)


# moved at the check of step 2, and from current scaling on at 4; back at the first check five steps after that
PLACES = {
    "fallback": ["fp8"] * 2 + ["bf16"] * 6 + ["fp8"] * 4,
    "current": ["fp8"] * 2 + ["current"] * 2 + ["bf16"] * 6 + ["fp8"] * 2,
}


@pytest.mark.parametrize("action", PLACES)
def test_a_layer_comes_back_also_in_a_resumed_run(action: str, tmp_path: Path, caplog: Any) -> None:
    start = 6
    with caplog.at_level(logging.INFO), pytest.warns(UserWarning, match="from now on: net.0"):
        whole = fit(tmp_path, watchdog(action), KeepOne(tmp_path / "6.ckpt", start))
    assert whole.places == PLACES[action]
    back = PLACES[action].index("fp8", 2)
    assert f"ScaleWatchdog, step {back}: back to the precision of the run, 5 steps after their last move: net.0" in (
        caplog.text
    )
    resumed = fit(tmp_path, watchdog(action), start=start)
    assert resumed.places == PLACES[action][start:]
    assert same(whole, resumed)
    # without the callback, it stays
    assert set(fit(tmp_path, start=start).places) == {"bf16"}


def test_without_a_cooldown_it_stays(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="from now on: net.0"):
        assert fit(tmp_path, watchdog("fallback", None)).places == ["fp8"] * 2 + ["bf16"] * 10


def test_a_moved_layer_comes_back_to_what_the_schedule_says(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="from now on: net.0"):
        model = fit(tmp_path, watchdog("fallback"), PrecisionSchedule({5: {"net.0": {"fprop": "bf16"}}}))
    assert scaling_state(model).fallbacks == ()
    assert [one.in_bf16 for one in scaling_state(model).precisions] == [("fprop",), ()]
