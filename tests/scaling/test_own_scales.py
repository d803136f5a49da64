"""Every recipe without histories in a Trainer: resumed exactly, seen by callbacks, and compiled."""

from __future__ import annotations

from csv import DictReader
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lit import loader, make_trainer, same, seeded

from lightning_fp8 import (
    BlockScaling,
    CurrentScaling,
    Fp8Monitor,
    MXScaling,
    RunRecord,
    ScaleFactorLogger,
    scaling_state,
)
from lightning_fp8.scalings.recipe import Recipe

by_string = pytest.mark.parametrize(
    ("precision", "recipe"), [("fp8-current", CurrentScaling()), ("fp8-block", BlockScaling()), ("fp8-mx", MXScaling())]
)


# in a Trainer


@by_string
def test_the_string_trains_and_resumes_exactly(precision: str, recipe: Recipe, tmp_path: Path) -> None:
    whole = seeded()
    make_trainer(tmp_path, precision=precision, max_epochs=2).fit(whole, loader())
    assert scaling_state(whole).recipe == recipe
    saving = ModelCheckpoint(tmp_path, filename="half", save_on_train_epoch_end=True)
    make_trainer(tmp_path, precision=precision, enable_checkpointing=True, callbacks=[saving]).fit(seeded(), loader())
    again = seeded()
    make_trainer(tmp_path, precision=precision, max_epochs=2).fit(again, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert same(again, whole)
    delayed = seeded()
    make_trainer(tmp_path, max_epochs=2).fit(delayed, loader())
    assert not torch.equal(torch.stack(delayed.losses), torch.stack(whole.losses))
    torch.testing.assert_close(torch.stack(delayed.losses), torch.stack(whole.losses), rtol=0.1, atol=0)


@by_string
def test_callbacks_and_compiled_code_see_the_run(precision: str, recipe: Recipe, tmp_path: Path) -> None:
    """A compiled model, whose weights are cast before each step; and an eager one, whose layers can be watched."""
    runs = []
    for compiled in (False, True) if precision == "fp8-block" else (False,):
        model = seeded()
        if compiled:
            model.net.compile(backend="aot_eager")
        monitor = Fp8Monitor(every_n_steps=1)
        watching = [ScaleFactorLogger(every_n_steps=1), monitor, RunRecord()]
        csv = CSVLogger(tmp_path, version=int(compiled))
        trainer = make_trainer(
            tmp_path, precision=precision, max_epochs=2, callbacks=watching, logger=csv, log_every_n_steps=1
        )
        trainer.fit(model, loader())
        trainer.validate(model, loader(), verbose=False)
        runs.append([*model.losses, *model.parameters(), scaling_state(model).scale])
        assert monitor.verdict().status == "healthy"
        with open(Path(csv.log_dir) / "metrics.csv") as file:
            rows = [row for row in DictReader(file) if row.get("fp8/net.0.input/scale")]
        assert len(rows) == 8
        for row in rows:
            # the logged scale is the one that was used
            scale = 448 / np.float32(row["fp8/net.0.input/amax"])
            used = 2 ** np.floor(np.log2(scale)) if precision == "fp8-mx" else scale
            assert float(row["fp8/net.0.input/scale"]) == used
            assert float(row["fp8/net.0.grad_output/saturated_fraction"]) == 0
    assert all(map(torch.equal, runs[0], runs[-1]))
