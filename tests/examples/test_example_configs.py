"""The model sizes that configurations state, and a step of each in every precision."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import yaml
from example_step import one_step
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from logged_runs import rows_of
from repository import ROOT

from lightning_fp8 import examples
from lightning_fp8.cli import Fp8CLI, main
from lightning_fp8.examples import loggers, tensorboard_if_present

CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
# the parameters that the name states, blocks, width, heads, context
SIZES = {
    "gpt_124m_fp8": (124e6, 17, 768, 12, 1024),
    "gpt_350m_fp8": (350e6, 28, 1024, 16, 1024),
    "gpt_1b3_fp8": (1.3e9, 26, 2048, 16, 2048),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*(enable_nested_tensor|args parameter is intended).*")


def parsed(config: str) -> Fp8CLI:
    """The configuration as its command line parses it, without a run."""
    return Fp8CLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=None,
        run=False,
        args=["--config", str(ROOT / "configs" / f"{config}.yaml"), "--trainer.accelerator", "cpu"],
    )


def reduced(config: str) -> tuple[LightningModule, LightningDataModule]:
    """Model and data of a configuration; a GPT has one narrow block, with heads of the original width."""
    settings = yaml.safe_load((ROOT / "configs" / f"{config}.yaml").read_text())
    model, data = settings["model"], settings["data"]
    if "context" in data["init_args"]:
        head_width = model["init_args"]["width"] // model["init_args"]["heads"]
        model["init_args"].update(layers=1, width=2 * head_width, heads=2, context=64)
        data["init_args"].update(context=64, max_bytes=50_000)
    data["init_args"].update(batch_size=4)
    made = [getattr(examples, part["class_path"].rpartition(".")[2])(**part["init_args"]) for part in (model, data)]
    return made[0], made[1]


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    yield
    # a Trainer, its model and the windows of its text reference each other
    gc.collect()


# sizes


@pytest.mark.parametrize("config", SIZES)
def test_parameters_of_the_large_models(config: str) -> None:
    promised, layers, width, heads, context = SIZES[config]
    cli = parsed(config)
    # no memory or time for a billion numbers
    with torch.device("meta"):
        cli.model.configure_model()
    assert (len(cli.model.blocks), cli.model.blocks[0].heads) == (layers, heads)
    block = 4 * width**2 + 2 * 4 * width**2 + (3 + 1 + 4 + 1) * width + 2 * 2 * width
    expected = layers * block + 256 * width + context * width + 2 * width + 256 * width
    counted = sum(parameter.numel() for parameter in cli.model.parameters())
    assert counted == expected
    assert abs(counted / promised - 1) < 0.05
    assert cli.datamodule.context == cli.model.context == context


# a run of each configuration


@pytest.mark.parametrize("config", CONFIGS)
def test_first_loss_is_the_same_in_fp8_and_in_bf16(config: str, tmp_path: Path) -> None:
    losses = {}
    for precision in ("fp8-delayed", "bf16-mixed"):
        pl.seed_everything(0, verbose=False)
        model, data = reduced(config)
        trainer = one_step(model, data, precision, tmp_path)
        losses[precision] = trainer.callback_metrics["train_loss"].item()
    chance = 256 if "gpt" in config else 10
    assert losses["bf16-mixed"] == pytest.approx(math.log(chance), rel=0.25)
    assert losses["fp8-delayed"] == pytest.approx(losses["bf16-mixed"], rel=0.01)
    assert losses["fp8-delayed"] != losses["bf16-mixed"]


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
