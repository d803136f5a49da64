"""Every configuration from the command line, for a few steps; the demo's text and logger."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.loggers.logger import DummyLogger
from repository import ROOT
from warm import run_warm

from lightning_fp8.cli import main
from lightning_fp8.examples import StdlibText, loggers, tensorboard_if_present

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def test_stdlib_text_is_text_and_held_out_text_is_other_text() -> None:
    data = StdlibText(context=64, batch_size=8, val_windows=32, max_bytes=200_000)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch.shape == (8, 65)
    assert batch.dtype == torch.uint8
    assert len(data.val_set) == 32
    text = bytes(data.train_set.flatten().tolist())
    assert text.count(b"import ") > 20
    assert not any(bytes(data.val_set[i].tolist()) in text for i in range(32))


def small(config: Path, tmp_path: Path) -> Path:
    """The configuration unchanged, except for few steps on few texts, and two narrow blocks for a large model."""
    parsed = yaml.safe_load(config.read_text())
    if "context" in parsed["data"]["init_args"]:
        parsed["data"]["init_args"].update(batch_size=4, max_bytes=100_000)
    if parsed["model"]["init_args"].get("create_on_device"):
        parsed["model"]["init_args"].update(layers=2, width=64, heads=2, context=64)
        parsed["data"]["init_args"].update(context=64)
    for callback in parsed["trainer"].get("callbacks", ()):
        if "every_n_steps" in callback.get("init_args", {}):
            callback["init_args"]["every_n_steps"] = 2
    batches = parsed["trainer"].get("accumulate_grad_batches", 1)
    parsed["trainer"].update(max_steps=4, val_check_interval=2 * batches, limit_val_batches=2, accelerator="cpu")
    path = tmp_path / config.name
    path.write_text(yaml.safe_dump(parsed))
    return path


@pytest.mark.filterwarnings("ignore:.*args parameter is intended.*")
@pytest.mark.parametrize("config", CONFIGS, ids=[config.stem for config in CONFIGS])
def test_every_configuration_runs(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with caplog.at_level("INFO"):
        main(["fit", "--config", str(small(config, tmp_path))])
    assert "optimizer steps: 4" in caplog.text
    assert re.search(r"val_loss: \d\.\d{4}", caplog.text)
    log_dir = re.search(r"logs: (\S+)", caplog.text)
    assert log_dir is not None
    with (tmp_path / log_dir[1] / "metrics.csv").open(newline="") as file:
        scales = [row["fp8/weight/scale/median"] for row in csv.DictReader(file) if row["fp8/weight/scale/median"]]
    assert len(scales) == 2
    # weights start below one, so FP8 makes them larger
    assert all(float(scale) > 448 for scale in scales)


def test_plugin_with_arguments_from_the_command_line(tmp_path: Path) -> None:
    parsed = yaml.safe_load(small(ROOT / "configs" / "tiny_gpt_fp8.yaml", tmp_path).read_text())
    parsed["trainer"].pop("precision")
    arguments = {"recipe": {"margin": 1, "amax_history_len": 16}, "ignore_modules": ["head"], "param_dtype": "bfloat16"}
    parsed["trainer"]["plugins"] = {"class_path": "lightning_fp8.Fp8Precision", "init_args": arguments}
    path = tmp_path / "plugin.yaml"
    path.write_text(yaml.safe_dump(parsed))
    run = run_warm("-m", "lightning_fp8", "fit", "--config", str(path), cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "8 of 9 linear layers run in FP8" in run.stdout + run.stderr
    assert re.search(r"optimizer steps: 4", run.stdout + run.stderr)
    saved = next((tmp_path / "runs").rglob("config.yaml")).read_text()
    assert "margin: 1" in saved
    checkpoint = torch.load(next((tmp_path / "runs").rglob("*.ckpt")), weights_only=False)
    assert checkpoint["state_dict"]["blocks.0.qkv.weight"].dtype == torch.bfloat16
    assert not any(name.startswith("head") for name in checkpoint["Fp8Precision"])


def test_unknown_precision_on_the_command_line(tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "tiny_gpt_fp8.yaml")
    arguments = ("fit", "--config", config, "--trainer.precision", "fp8-delyed")
    run = run_warm("-m", "lightning_fp8", *arguments, cwd=tmp_path)
    assert run.returncode != 0
    assert "fp8-delayed" in run.stderr


def test_tensorboard_if_present(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(tensorboard_if_present(str(tmp_path))).__name__ == "TensorBoardLogger"
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    assert isinstance(tensorboard_if_present(str(tmp_path)), DummyLogger)
