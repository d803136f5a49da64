"""A run of each configuration."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from lightning.pytorch.loggers.logger import DummyLogger
from logged_runs import rows_of
from repository import ROOT

from lightning_fp8.cli import main
from lightning_fp8.examples import loggers, tensorboard_if_present

CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
pytestmark = pytest.mark.filterwarnings("ignore:.*(enable_nested_tensor|args parameter is intended).*")


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    yield
    # a Trainer, its model and the windows of its text reference each other
    gc.collect()


def small(config: str, tmp_path: Path) -> Path:
    """The configuration unchanged, except for few steps on few texts, and two narrow blocks for a GPT."""
    parsed = yaml.safe_load((ROOT / "configs" / f"{config}.yaml").read_text())
    if "context" in parsed["data"]["init_args"]:
        parsed["data"]["init_args"].update(batch_size=4, max_bytes=50_000, context=64)
        parsed["model"]["init_args"].update(layers=2, width=64, heads=2, context=64)
    for callback in parsed["trainer"].get("callbacks", ()):
        if "every_n_steps" in callback.get("init_args", {}):
            callback["init_args"]["every_n_steps"] = 1
    batches = parsed["trainer"].get("accumulate_grad_batches", 1)
    parsed["trainer"].update(max_steps=2, val_check_interval=batches, limit_val_batches=1, accelerator="cpu")
    path = tmp_path / f"{config}.yaml"
    path.write_text(yaml.safe_dump(parsed))
    return path


@pytest.mark.parametrize("config", CONFIGS)
def test_every_configuration_runs(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with caplog.at_level("INFO"):
        main(["fit", "--config", str(small(config, tmp_path))])
    assert "optimizer steps: 2" in caplog.text
    assert re.search(r"val_loss: \d\.\d{4}", caplog.text)
    log_dir = re.search(r"logs: (\S+)", caplog.text)
    assert log_dir is not None
    rows = rows_of(SimpleNamespace(log_dir=tmp_path / log_dir[1]))
    scales = [row["fp8/weight/scale/median"] for row in rows if row["fp8/weight/scale/median"]]
    assert len(scales) == 2
    # weights start below one, so FP8 makes them larger
    assert all(float(scale) > 448 for scale in scales)


def test_tensorboard_if_present(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(tensorboard_if_present(str(tmp_path))).__name__ == "TensorBoardLogger"
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    assert isinstance(tensorboard_if_present(str(tmp_path)), DummyLogger)
