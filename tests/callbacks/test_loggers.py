"""Logged values reach each third-party logger unchanged: they are read back from the logger's files."""

from __future__ import annotations

import csv
import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lit import Regression, loader, make_trainer, seeded
from torch import nn

from lightning_fp8 import DtypeAudit, QuantizationProbe, RunRecord, ScaleFactorLogger, scaling_state
from lightning_fp8.scaling import ScalingState

# values by key and step
Numbers = dict[str, dict[int, float]]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """W&B and MLflow without a server, a network, or files outside the test's folder."""
    import wandb

    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb_own"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    # MLflow 3 has deprecated its file store, and mlflow-skinny has no other store without a server
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    yield
    # the process that writes the run's file
    wandb.teardown()


def wandb_logger(path: Path) -> WandbLogger:
    import wandb

    quiet = wandb.Settings(
        silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True
    )
    return WandbLogger(offline=True, save_dir=path, project="fp8", settings=quiet)


def mlflow_logger(path: Path) -> MLFlowLogger:
    return MLFlowLogger(experiment_name="fp8", tracking_uri=f"file:{path}")


def from_csv(logger: CSVLogger) -> Numbers:
    numbers: Numbers = {}
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        for row in csv.DictReader(file):
            for key, value in row.items():
                if value and key not in ("step", "epoch"):
                    numbers.setdefault(key, {})[int(row["step"])] = float(value)
    return numbers


def from_tensorboard(logger: TensorBoardLogger) -> Numbers:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir).Reload()
    return {
        key: {event.step: event.value for event in events.Scalars(key)}
        for key in events.Tags()["scalars"]
        if key != "epoch"
    }


def from_mlflow(logger: MLFlowLogger) -> Numbers:
    client = logger.experiment
    keys = client.get_run(logger.run_id).data.metrics
    return {
        key: {metric.step: metric.value for metric in client.get_metric_history(logger.run_id, key)}
        for key in keys
        if key != "epoch"
    }


def records(path: Path) -> Iterator[bytes]:
    """A W&B file is a LevelDB log after a header of seven bytes: blocks of 32 KiB with records in one or more parts."""
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        # record types: whole, first, middle, last
        if kind in (1, 4):
            yield parts
            parts = b""


def from_wandb(logger: WandbLogger) -> Numbers:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    folder = Path(logger.experiment.dir).parent
    wandb.finish()
    # another process writes the file, and finishes it only when it ends
    wandb.teardown()
    (file,) = folder.glob("*.wandb")
    numbers: Numbers = {}
    for data in records(file):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") != "history":
            continue
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for key, value in row.items():
            if not key.startswith("_") and key not in ("epoch", "trainer/global_step"):
                numbers.setdefault(key, {})[row["trainer/global_step"]] = value
    return numbers


LOGGERS: dict[str, tuple[Callable[[Path], Logger], Callable[[Any], Numbers]]] = {
    "csv": (CSVLogger, from_csv),
    "tensorboard": (TensorBoardLogger, from_tensorboard),
    "wandb": (wandb_logger, from_wandb),
    "mlflow": (mlflow_logger, from_mlflow),
}


class Kept(ScaleFactorLogger):
    """Keeps the scaling state at each logged step."""

    def __init__(self) -> None:
        super().__init__(every_n_steps=2)
        self.states: dict[int, dict[str, dict[str, torch.Tensor]]] = {}

    def _log(self, trainer: Any, state: ScalingState, values: Any) -> None:
        self.states[trainer.fit_loop.epoch_loop._batches_that_stepped] = state.state_dict()
        super()._log(trainer, state, values)


def of_states(states: dict[int, dict[str, dict[str, torch.Tensor]]]) -> Numbers:
    """The quantities that follow from the scaling state alone, computed by hand."""
    numbers: Numbers = {}
    for step, tensors in states.items():
        # weights have no entry; test_callbacks covers what is logged of them
        for name, entry in tensors.items():
            scale, history = entry["scale"].item(), entry["amax_history"].tolist()
            largest = 57344 if name.endswith("grad_output") else 448
            quantities = {
                "scale": scale,
                "amax": history[0],
                "amax_history_max": max(history),
                "headroom_bits": math.log2(largest / (history[0] * scale)),
                "nonfinite_steps": entry["nonfinite_steps"].item(),
            }
            for quantity, value in quantities.items():
                numbers.setdefault(f"fp8/{name}/{quantity}", {})[step] = value
    return numbers


def test_every_logger_keeps_every_number(tmp_path: Path, offline: None) -> None:
    loggers = {name: make(tmp_path / name) for name, (make, _) in LOGGERS.items()}
    kept, probe = Kept(), QuantizationProbe(every_n_steps=4)
    model = seeded()
    trainer = make_trainer(tmp_path, logger=list(loggers.values()), callbacks=[kept, probe], max_epochs=2)
    trainer.fit(model, loader())
    # Lightning counts from 0
    assert list(kept.states) == [1, 3, 5, 7]
    state = scaling_state(model)
    assert torch.equal(kept.states[7]["net.0.input"]["scale"], state.scale[0])

    read = {name: LOGGERS[name][1](logger) for name, logger in loggers.items()}
    expected = of_states(kept.states)
    assert len(expected) == 4 * 5
    expected |= {f"fp8/{path}/sqnr_db": {7: ratio} for path, ratio in probe.sqnr_db.items()}
    assert len(expected) == 4 * 5 + 2
    for name, numbers in read.items():
        for key, by_step in expected.items():
            for step, value in by_step.items():
                # TensorBoard stores fp32
                assert numbers[key][step] == pytest.approx(value, rel=1e-6, abs=1e-6), (name, key, step)
    # nothing is lost on the way and all keys are unchanged, including fractions and summaries
    keys = set(read["csv"])
    assert {"fp8/net.0.input/saturated_fraction", "fp8/weight/scale/median"} <= keys
    for name, numbers in read.items():
        assert set(numbers) == keys, name
        for key, by_step in numbers.items():
            assert by_step == pytest.approx(read["csv"][key], rel=1e-6, abs=1e-6), (name, key)
        assert {step for by_step in numbers.values() for step in by_step} == {1, 3, 5, 7}


@pytest.mark.parametrize("kinds", [("wandb",), ("mlflow",), ("csv",), ("tensorboard",), ("wandb", "csv")])
def test_records_of_two_runs_lie_in_two_folders(kinds: tuple[str, ...], tmp_path: Path, offline: None) -> None:
    folders = []
    for precision in ("fp8-delayed", "bf16-mixed"):
        loggers = [LOGGERS[kind][0](tmp_path / kind) for kind in kinds]
        checkpoint = ModelCheckpoint(save_last=True)
        callbacks = [RunRecord(), DtypeAudit(), checkpoint]
        trainer = make_trainer(
            tmp_path, precision=precision, logger=loggers, callbacks=callbacks, enable_checkpointing=True
        )
        trainer.fit(seeded(), loader())
        # beside the checkpoints, or with the logs that a report reads
        folder = Path(checkpoint.dirpath or "").parent if len(kinds) == 1 else Path(loggers[1].log_dir or "")
        assert json.loads((folder / "fp8_run.json").read_text())["precision"] == precision
        assert json.loads((folder / "fp8_dtypes.json").read_text())["violations"] == []
        folders.append(folder)
        if "wandb" in kinds:
            import wandb

            wandb.finish()
    assert len({*folders}) == 2
    written = {path.parent for path in tmp_path.rglob("fp8_*.json")}
    assert written == {*folders}
    assert json.loads((folders[0] / "fp8_run.json").read_text())["precision"] == "fp8-delayed"


class Named(Regression):
    """A layer in a dictionary, under a name that only some loggers accept."""

    def __init__(self, name: str = "a+b") -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(32, 32)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (part,) = self.parts.values()
        return self.net(part(x))


@pytest.mark.parametrize(("name", "in_mlflow"), [("a b-c_d", "a b-c_d"), ("a+b", "ab")])
@pytest.mark.filterwarnings("ignore:.*MLFlow only allows.*")
def test_names_that_mlflow_does_not_take(name: str, in_mlflow: str, tmp_path: Path, offline: None) -> None:
    loggers = {kind: LOGGERS[kind][0](tmp_path / kind) for kind in LOGGERS}
    callbacks = [ScaleFactorLogger(every_n_steps=4)]
    make_trainer(tmp_path, logger=list(loggers.values()), callbacks=callbacks).fit(seeded(Named, name=name), loader())
    read = {kind: LOGGERS[kind][1](logger) for kind, logger in loggers.items()}
    assert f"fp8/parts.{name}.input/scale" in read["csv"]
    assert set(read["tensorboard"]) == set(read["wandb"]) == set(read["csv"])
    # Lightning removes the characters that MLflow refuses, with a warning
    assert set(read["mlflow"]) == {key.replace(name, in_mlflow) for key in read["csv"]}


def test_records_in_parts(tmp_path: Path) -> None:
    first, second, third = b"a" * 32000, b"b" * 40000, b"c" * 3

    def part(kind: int, data: bytes) -> bytes:
        return struct.pack("<IHB", 0, len(data), kind) + data

    blocks = b":W&B\0\0\0" + part(1, first)
    room = 32768 - len(blocks) - 7
    blocks += part(2, second[:room]) + part(3, second[room : room + 32761]) + part(4, second[room + 32761 :])
    blocks += part(1, third)
    # only four bytes are left in the block, too few for a header
    fourth = b"d" * (32768 - len(blocks) % 32768 - 7 - 4)
    blocks += part(1, fourth) + bytes(4) + part(1, third)
    (tmp_path / "run.wandb").write_bytes(blocks)
    assert list(records(tmp_path / "run.wandb")) == [first, second, third, fourth, third]
