from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lit import loader, make_trainer, seeded

from lightning_fp8 import ScaleFactorLogger, scaling_state


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        return list(csv.DictReader(file))


def test_logs_scale_and_amax_of_every_tensor_to_every_logger(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, loggers = seeded(), [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "tensorboard")]
    make_trainer(tmp_path, logger=loggers, max_epochs=2, callbacks=[ScaleFactorLogger(every_n_steps=4)]).fit(
        model, loader()
    )
    state = scaling_state(model)
    logged = [row for row in rows(loggers[0]) if row.get("fp8/net.0.input/scale")]
    assert [int(row["step"]) for row in logged] == [3, 7]  # Lightning counts from 0
    events = EventAccumulator(loggers[1].log_dir).Reload()
    for position, name in enumerate(state.names):
        assert float(logged[-1][f"fp8/{name}/scale"]) == pytest.approx(state.scale[position].item(), rel=1e-6)
        assert float(logged[-1][f"fp8/{name}/amax"]) == pytest.approx(state.amax_history[0, position].item(), rel=1e-6)
        assert events.Scalars(f"fp8/{name}/scale")[-1].value == pytest.approx(state.scale[position].item(), rel=1e-6)


def test_patterns_and_accumulation(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    callback = ScaleFactorLogger(every_n_steps=1, patterns=("*.weight", "net.0.input"))
    make_trainer(tmp_path, logger=logger, accumulate_grad_batches=2, callbacks=[callback]).fit(seeded(), loader())
    logged = [row for row in rows(logger) if row.get("fp8/net.0.weight/scale")]
    keys = {key for row in logged for key in row if key.startswith("fp8/")}
    assert len(logged) == 2
    assert {key.split("/")[1] for key in keys} == {"net.0.weight", "net.2.weight", "net.0.input"}


def test_pattern_without_a_match_and_bad_interval(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pattern 'net.7.\*' matches none of the 6 tensors"):
        make_trainer(tmp_path, callbacks=[ScaleFactorLogger(patterns=("net.7.*",))]).fit(seeded(), loader())
    with pytest.raises(ValueError, match="at least 1, got 0"):
        ScaleFactorLogger(every_n_steps=0)
    with pytest.raises(TypeError, match="sequence of patterns"):
        ScaleFactorLogger(patterns="*")


def test_other_precisions_are_warned_about_once(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    with pytest.warns(UserWarning, match="no layer runs in FP8 under precision='bf16-mixed'"):
        make_trainer(tmp_path, precision="bf16-mixed", logger=logger, callbacks=[ScaleFactorLogger(1)]).fit(
            seeded(), loader()
        )


def test_one_copy_from_the_device_per_logging_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: calls.append(self.shape) or original(self))
    callback = ScaleFactorLogger(every_n_steps=2)
    make_trainer(tmp_path, logger=CSVLogger(tmp_path), callbacks=[callback]).fit(seeded(), loader())
    assert calls.count(torch.Size([2, 6])) == 2
