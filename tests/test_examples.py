"""The demo at small size: real text, loss parity with bf16, every configuration."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from conftest import ROOT
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_fp8 import scaling_state
from lightning_fp8.examples import ByteGPT, StdlibText, loggers, tensorboard_if_present

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def test_stdlib_text_is_text_and_held_out_text_is_other_text() -> None:
    data = StdlibText(context=64, batch_size=8, val_windows=32, max_bytes=200_000)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch.shape == (8, 65)
    assert batch.dtype == torch.uint8
    assert len(data.val_set) == 32
    text = bytes(data.train_set.rows.flatten().tolist())
    assert text.count(b"import ") > 20
    assert not any(bytes(data.val_set[i].tolist()) in text for i in range(32))


def final_losses(precision: str, tmp_path: Path) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    model = ByteGPT(layers=2, width=96, heads=2, context=64)
    data = StdlibText(context=64, batch_size=32, val_windows=256)
    trainer = pl.Trainer(
        precision=precision,  # type: ignore[arg-type]
        accelerator="cpu",
        devices=1,
        max_steps=300,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, data)
    if precision == "fp8-delayed":
        assert (scaling_state(model).amax_history > 0).sum(0).unique().tolist() == [300]
    return trainer.validate(model, data, verbose=False)[0]


@pytest.mark.slow
def test_validation_loss_within_one_percent_of_bf16(tmp_path: Path) -> None:
    fp8 = final_losses("fp8-delayed", tmp_path)["val_loss"]
    bf16 = final_losses("bf16-mixed", tmp_path)["val_loss"]
    print(f"validation loss: fp8-delayed {fp8:.4f}, bf16-mixed {bf16:.4f}, {100 * (fp8 / bf16 - 1):+.2f}%")
    assert bf16 < 2.5  # nats per byte; an untrained model has 5.55
    assert abs(fp8 / bf16 - 1) < 0.01


def small(config: Path, tmp_path: Path) -> Path:
    """The configuration as it stands, but for a few steps."""
    parsed = yaml.safe_load(config.read_text())
    for callback in parsed["trainer"].get("callbacks", ()):
        if "every_n_steps" in callback.get("init_args", {}):
            callback["init_args"]["every_n_steps"] = 2
    parsed["trainer"].update(max_steps=4, val_check_interval=2, limit_val_batches=2, accelerator="cpu")
    path = tmp_path / config.name
    path.write_text(yaml.safe_dump(parsed))
    return path


@pytest.mark.parametrize("config", CONFIGS, ids=[config.stem for config in CONFIGS])
def test_every_configuration_runs_from_the_command_line(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_fp8", "fit", "--config", str(small(config, tmp_path))]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    output = run.stdout + run.stderr
    assert re.search(r"optimizer steps: 4", output)
    assert re.search(r"val_loss: \d\.\d{4}", output)
    log_dir = re.search(r"logs: (\S+)", output)
    assert log_dir is not None
    assert "fp8/blocks.0.qkv.input/scale" in (tmp_path / log_dir[1] / "metrics.csv").read_text()


def cli(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_fp8", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)


def test_plugin_with_arguments_from_the_command_line(tmp_path: Path) -> None:
    parsed = yaml.safe_load(small(ROOT / "configs" / "tiny_gpt_fp8.yaml", tmp_path).read_text())
    parsed["trainer"].pop("precision")
    arguments = {"recipe": {"margin": 1, "amax_history_len": 16}, "ignore_modules": ["head"], "param_dtype": "bfloat16"}
    parsed["trainer"]["plugins"] = {"class_path": "lightning_fp8.Fp8Precision", "init_args": arguments}
    path = tmp_path / "plugin.yaml"
    path.write_text(yaml.safe_dump(parsed))
    run = cli("fit", "--config", str(path), cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "8 of 9 linear layers run in FP8" in run.stdout + run.stderr
    saved = next((tmp_path / "runs").rglob("config.yaml")).read_text()
    assert "margin: 1" in saved
    checkpoint = torch.load(next((tmp_path / "runs").rglob("*.ckpt")), weights_only=False)
    assert checkpoint["state_dict"]["blocks.0.qkv.weight"].dtype == torch.bfloat16
    assert not any(name.startswith("head") for name in checkpoint["Fp8Precision"])


def test_unknown_precision_on_the_command_line(tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "tiny_gpt_fp8.yaml")
    run = cli("fit", "--config", config, "--trainer.precision", "fp8-delyed", cwd=tmp_path)
    assert run.returncode != 0
    assert "fp8-delayed" in run.stderr


def test_tensorboard_if_present(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(tensorboard_if_present(str(tmp_path))).__name__ == "TensorBoardLogger"
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    assert isinstance(tensorboard_if_present(str(tmp_path)), DummyLogger)


def test_width_must_divide_by_heads() -> None:
    with pytest.raises(ValueError, match="multiple of `heads`, got width=10 and heads=4"):
        ByteGPT(width=10, heads=4)
