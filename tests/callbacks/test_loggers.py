"""Logged values reach each third-party logger unchanged: they are read back from the logger's files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lit import Regression, loader, make_trainer, seeded

from lightning_fp8 import DtypeAudit, RunRecord


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


LOGGERS: dict[str, Callable[[Path], Logger]] = {
    "csv": CSVLogger,
    "wandb": wandb_logger,
    "mlflow": mlflow_logger,
}


class Traced(Regression):
    """Has an example input, and the layers of an encoder before a feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.randn(4, 32)
        layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.net = torch.nn.Sequential(torch.nn.Unflatten(1, (1, 32)), layer, torch.nn.Flatten(), self.net)


@pytest.mark.filterwarnings("ignore:.*might cause the trace to be incorrect")
@pytest.mark.parametrize("precision", ["fp8-delayed", "bf16-mixed"])
def test_the_graph_of_a_model(precision: str, tmp_path: Path) -> None:
    """A run that logs its graph is the run that does not, and the graph has the layers' operators."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = []
    for logged in (False, True):
        model, logger = seeded(Traced), TensorBoardLogger(tmp_path, log_graph=logged)
        make_trainer(tmp_path, precision=precision, logger=logger).fit(model, loader())
        losses.append(torch.stack(model.losses))
    assert torch.equal(*losses)
    graph = EventAccumulator(logger.log_dir).Reload().Graph()
    operators = {node.op for node in graph.node}
    assert ("lightning_fp8::mlp" in operators) == precision.startswith("fp8-")


@pytest.mark.parametrize("kinds", [("mlflow",), ("wandb", "csv")])
def test_records_of_two_runs_lie_in_two_folders(kinds: tuple[str, ...], tmp_path: Path, offline: None) -> None:
    folders = []
    for precision in ("fp8-delayed", "bf16-mixed"):
        loggers = [LOGGERS[kind](tmp_path / kind) for kind in kinds]
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
