"""FP8 trains as bf16 does: a GPT to the same loss with each recipe.

All runs start from the same weights and see the same batches. Measured on a CPU over 200 steps with a GPT of twice the
width, fp8-delayed with a window of 1024 less bf16-mixed: from -0.03% to +0.16% in the loss of five seeds, from -0.02%
to +0.20% in val_loss. Rounding alone, 32-true against bf16-mixed, moved the loss by 0.02% to 0.04%; two seeds are 2%
apart, which pairs leave out. A scale that is 4 times too large, so that the largest numbers are clipped, costs 79%. One
that is 1024 times too small costs nothing: FP8 is a floating point format and has that much to spare.

On a CPU without bf16 units torch's bf16 products take ten times as long as fp32 ones. The runs to compare with are in
32-true there, a stricter reference, with the same bounds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lit import make_trainer
from torch import Tensor

from lightning_fp8 import scaling_state
from lightning_fp8.examples import ByteGPT, StdlibText
from lightning_fp8.runtime.cpu import emulates_bf16
from lightning_fp8.scalings.recipe import RECIPES

STEPS = 60
# the final loss is the mean over this many steps
LAST = 30
BASELINE = "32-true" if emulates_bf16() else "bf16-mixed"
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


class Losses(pl.Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.of_step: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.of_step.append(outputs["loss"])


def train(precision: str, folder: Path) -> dict[str, float]:
    """The metrics of the only validation, at the end, and ``loss``, the mean over the last steps."""
    pl.seed_everything(0, verbose=False)
    model, losses = ByteGPT(layers=1, width=64, heads=2, context=32), Losses()
    until: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1, "val_check_interval": STEPS}
    options: dict[str, Any] = {**until, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    trainer = make_trainer(folder, precision=precision, gradient_clip_val=1.0, callbacks=[losses], **options)
    trainer.fit(model, StdlibText(context=32, batch_size=16, val_windows=256))
    if precision == "fp8-delayed":
        state = scaling_state(model)
        assert state.updates == STEPS
        assert (state.amax_history[0] > 0).all()
    found = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {**found, "loss": torch.stack(losses.of_step[-LAST:]).mean().item()}


def test_gpt_ends_at_the_same_loss(tmp_path: Path) -> None:
    # one seed: in five seeds, no difference was larger than 0.2%
    baseline = train(BASELINE, tmp_path)
    # nats per byte; an untrained model has 5.55
    assert baseline["loss"] < 3.7
    for precision in RECIPES:
        fp8 = train(precision, tmp_path)
        for name in ("loss", "val_loss"):
            assert fp8[name] == pytest.approx(baseline[name], rel=0.005), (precision, name)
