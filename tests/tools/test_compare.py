"""``python -m lightning_fp8 compare``: the table matches what the runs logged, and the advice follows its rules."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.plugins import Precision
from lit import Regression, loader, make_trainer, seeded
from processes import start
from warm import run_warm

import lightning_fp8
from lightning_fp8.tools.compare import command
from lightning_fp8.tools.compare import run as compare_run
from lightning_fp8.tools.compare.advice import advise
from lightning_fp8.tools.compare.command import main
from lightning_fp8.tools.compare.measure import Measure, tokens_of
from lightning_fp8.tools.report.runs import read_runs
from lightning_fp8.tools.tables import percentiles

STEPS, WARMUP = 12, 4
BATCH, CONTEXT = 4, 16
THREE = ["bf16-mixed", "bf16-true", "fp8-delayed"]
CONFIG: dict[str, Any] = {
    "seed_everything": True,
    "trainer": {
        "accelerator": "cpu",
        # all of these would end or disturb the run
        "max_steps": 3,
        "max_epochs": 1,
        "val_check_interval": 2,
        "precision": "64-true",
        "callbacks": [
            {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"},
            {"class_path": "lightning_fp8.ScaleFactorLogger"},
            {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"},
        ],
        "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "users_own"}},
    },
    "model": {
        "class_path": "lightning_fp8.examples.ByteGPT",
        "init_args": {"layers": 1, "width": 32, "heads": 2, "context": CONTEXT},
    },
    "data": {
        "class_path": "lightning_fp8.examples.StdlibText",
        "init_args": {"context": CONTEXT, "batch_size": BATCH, "val_windows": 8, "max_bytes": 20_000},
    },
}
PLUGIN = {
    "class_path": "lightning_fp8.Fp8Precision",
    "init_args": {
        "recipe": {"margin": 1, "dgrad": "bf16"},
        "ignore_modules": ["head"],
        "keep_fp32": ["*norm*"],
        "overrides": {"*.out": "bf16", "blocks.0.down": {"wgrad": "bf16"}},
    },
}


def run_in_warm_processes(patch: pytest.MonkeyPatch) -> None:
    """The runs of comparisons, in warm processes; `test_a_signal_ends_what_it_started` starts a real one."""

    def run(command: Sequence[str], output: IO[str]) -> int:
        ran = run_warm(*command[1:], cwd=Path.cwd())
        output.write(ran.stdout + ran.stderr)
        return ran.returncode

    patch.setattr(command.worker, "run", run)


def write_config(folder: Path, **trainer: Any) -> Path:
    config = {**CONFIG, "trainer": {**CONFIG["trainer"], **trainer}}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The four variants that run by default on a CPU with bf16 products, with a user's plugin; folder and output."""
    folder = tmp_path_factory.mktemp("compare")
    write_config(folder, precision=None, plugins=PLUGIN)
    arguments = ["--config", "tiny.yaml", "--steps", str(STEPS), "--warmup", str(WARMUP), "--precisions", *THREE]
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        run_in_warm_processes(patch)
        # Lightning leaves the seed of an earlier test there
        patch.delenv("PL_GLOBAL_SEED", raising=False)
        main([*arguments, "--trainer.gradient_clip_val=0.5"])
    return folder / "runs" / "compare" / "tiny", printed.getvalue()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "compare.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_numbers_are_those_that_the_runs_logged(compared: tuple[Path, str]) -> None:
    folder, printed = compared
    rows = rows_of(folder)
    assert [row["variant"] for row in rows] == THREE
    for row, run in zip(rows, read_runs([folder / name for name in THREE]), strict=True):
        logged = run.scalars["train_loss"]
        assert logged.steps.tolist() == list(range(STEPS))
        assert row["steps"] == STEPS
        # a tenth of 12 steps is one
        assert row["loss"] == pytest.approx(logged.values[-1], rel=1e-6)
        assert row["first_loss"] == pytest.approx(logged.values[0], rel=1e-6)
        # once, at the end
        assert run.scalars["val_loss"].steps.tolist() == [STEPS - 1]
        assert row["val_loss"] == pytest.approx(run.scalars["val_loss"].values[0], rel=1e-6)
        assert len(run.scalars["lr-AdamW"].steps) == STEPS
        assert run.precision == row["variant"].partition("+")[0]
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        assert row["samples_per_s"] == pytest.approx(1e3 * BATCH / row["mean_ms"])
        assert row["tokens_per_s"] == pytest.approx(row["samples_per_s"] * (CONTEXT + 1))
        assert (row["device"], row["gpu"], row["world_size"]) == ("cpu", None, 1)
        assert row["torch"] == torch.__version__
        assert 0 < row["peak_bytes"] < 2**30
        assert row["command"].startswith("python -m lightning_fp8 compare --config tiny.yaml")
    assert "\n".join(advise(rows)) in printed
    assert not (folder.parents[2] / "users_own").exists()
    assert not list(folder.rglob("*.ckpt"))


@pytest.mark.slow
def test_fit_gives_the_losses_of_the_comparison(compared: tuple[Path, str], tmp_path: Path) -> None:
    config = str(compared[0].parents[2] / "tiny.yaml")
    settings = {"max_steps": STEPS, "max_epochs": -1, "val_check_interval": STEPS // 2, "log_every_n_steps": 1}
    options = [f"--trainer.{name}={value}" for name, value in {**settings, "gradient_clip_val": 0.5}.items()]
    options.append("--seed_everything=0")
    run = run_warm("-m", "lightning_fp8", "fit", "--config", config, *options, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    (row,) = (row for row in rows_of(compared[0]) if row["variant"] == "fp8-delayed")
    (fitted,) = read_runs([tmp_path / "users_own" / "lightning_logs"])
    for key, logged in {"loss": "train_loss", "val_loss": "val_loss"}.items():
        assert fitted.scalars[logged].values[-1] == pytest.approx(row[key], rel=1e-5)


def test_same_seed_and_data(compared: tuple[Path, str]) -> None:
    mixed, *others = rows_of(compared[0])
    assert mixed["seed"] == 0
    assert len({row["batches"] for row in (mixed, *others)}) == 1
    for row in others:
        # FP8 has 4 significant bits, and an untrained model's logits hardly affect its loss
        assert row["first_loss"] == pytest.approx(mixed["first_loss"], rel=2**-9)
        assert row["first_loss"] != mixed["first_loss"]


def test_settings_of_the_users_plugin(compared: tuple[Path, str]) -> None:
    folder, _ = compared
    record = json.loads((folder / "fp8-delayed" / "fp8_run.json").read_text())
    assert (record["recipe"]["margin"], record["recipe"]["dgrad"]) == (1, "bf16")
    # the pattern of an override has dots
    assert record["modules"] == ["blocks.0.qkv", "blocks.0.up", "blocks.0.down"]
    elements = record["parameters"]
    # three norms, weight and bias
    norms = 3 * 2 * 32
    state = {row["variant"]: row["parameter_bytes"] for row in rows_of(folder)}
    assert state == dict.fromkeys(THREE, 4 * elements) | {"bf16-true": 2 * elements + 2 * norms}
    for row in rows_of(folder):
        assert row["gradient_bytes"] == row["parameter_bytes"]
        # two moments and a step count of 4 bytes for each of the 17 parameters
        assert row["optimizer_bytes"] == 2 * row["parameter_bytes"] + 4 * 17
        assert row["state_bytes"] == sum(row[f"{of}_bytes"] for of in ("parameter", "gradient", "optimizer"))


FAILING = """
from lightning_fp8.examples import ByteGPT

class Fails(ByteGPT):
    def training_step(self, batch, batch_index):
        if str(self.trainer.precision) == "bf16-true" and self.trainer.global_step == 2:
            raise ValueError("no bf16 weights, please\\nand more")
        return super().training_step(batch, batch_index)
"""


@pytest.mark.slow
def test_a_failing_precision_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    config = write_config(tmp_path, callbacks=None)
    monkeypatch.chdir(tmp_path)
    run_in_warm_processes(monkeypatch)
    # left by an earlier run
    (tmp_path / "out" / "bf16-true").mkdir(parents=True)
    (tmp_path / "out" / "bf16-true" / "measured.json").write_text('{"steps": 1}')
    arguments = ["--config", str(config), "--steps", "5", "--warmup", "1", "--precisions", "bf16-true", "bf16-mixed"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--out", "out", "--model.class_path", "failing.Fails"])
    assert ended.value.code == 1
    failed, ran = rows_of(tmp_path / "out")
    assert failed["error"] == "ValueError: no bf16 weights, please (see out/bf16-true/log.txt)"
    assert "Traceback" in (tmp_path / "out" / "bf16-true" / "log.txt").read_text()
    assert (ran["variant"], ran["steps"]) == ("bf16-mixed", 5)
    printed = capsys.readouterr().out
    assert re.search(r"^bf16-true( +-)+$", printed, re.MULTILINE)
    assert "bf16-true failed: ValueError: no bf16 weights, please" in printed
    assert printed.rstrip().endswith("report out/bf16-mixed")


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_config(tmp_path))
    for arguments, said in {
        (): "--config",
        ("--config", "nowhere.yaml"): "nowhere.yaml",
        ("--config", config, "--warmup", "30"): "--warmup",
        ("--config", config, "--steps", "none"): "'none'",
        ("--config", config, "--precisions", "fp8-delyed"): "Did you mean 'fp8-delayed'?",
        ("--config", config, "--precisions", "bf16-true,margin=1"): "must be one of bf16-mixed, ",
        ("--config", config, "--precisions", "fp8-block,margin=1"): "BlockScaling has no field",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_a_configuration_that_is_refused_is_refused_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_warm_processes(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        main(["--config", str(write_config(tmp_path, max_stepz=1)), "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "does not accept option 'trainer.max_stepz'" in printed.err
    assert len(printed.err.splitlines()) < 5
    assert printed.out.count("steps ...") == 1


def compare(arguments: list[str], folder: Path) -> None:
    # tests that run in the background ignore SIGINT, and so would the processes that they start
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    # in place of a new Python, which would import Lightning first
    sys.executable = str(folder / "waiting")
    with Path("printed").open("w") as file, redirect_stdout(file), redirect_stderr(file):
        main(arguments)


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_signal_ends_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    # its first run says who it is, and waits
    (tmp_path / "waiting").write_text(f"#!/bin/sh\nprintf '%s ' $$ >{pids}\nexec sleep 300\n")
    (tmp_path / "waiting").chmod(0o755)
    arguments = ["--out", str(tmp_path / "out"), "--precisions", "fp8-delayed"]
    parent = start(compare, ["--config", str(write_config(tmp_path)), *arguments], tmp_path)
    until = time.monotonic() + 120
    while not (pids.exists() and pids.read_text().endswith(" ")):
        assert time.monotonic() < until, (tmp_path / "printed").read_text()
        time.sleep(0.1)
    os.kill(parent.pid or 0, signal.SIGINT)
    parent.join(60)
    assert parent.exitcode == 130
    assert not is_running(int(pids.read_text()))
    printed = (tmp_path / "printed").read_text()
    assert "Stopped." in printed
    assert "Traceback" not in printed


def test_a_signal_while_a_run_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the process exists, but has not been registered yet
    started: list[subprocess.Popen[bytes]] = []

    class Started(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **kwargs)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Started)
    former = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        command.run("bf16-mixed", tmp_path / "out", 10, 2, [])
    assert started[0].returncode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is former


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("bf16-mixed", lightning_fp8.plugins.Bf16MixedPrecision),
        ("fp8-current,margin=1,wgrad=bf16", lightning_fp8.Fp8Precision),
        ("32-true", Precision),
    ],
)
def test_each_variant_runs_under_its_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, kind: type
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["fit", "--config", str(write_config(tmp_path))]
    lightning_fp8.plugins.register(bf16=False)
    try:
        cli = compare_run.CompareCLI(variant, tmp_path / "out" / variant, 2, 1, arguments)
    finally:
        lightning_fp8.plugins.register(bf16=True)
    assert type(cli.trainer.precision_plugin) is kind
    precision = re.split("[+,]", variant)[0]
    record = json.loads((tmp_path / "out" / variant / "fp8_run.json").read_text())
    assert cli.trainer.precision == record["precision"] == precision
    if precision == "fp8-current":
        assert (record["recipe"]["wgrad"], record["recipe"]["margin"]) == ("bf16", 1)


# measuring


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    model, measure = seeded(), Measure(warmup=2)
    trainer = make_trainer(
        tmp_path, callbacks=[measure], max_epochs=-1, max_steps=7, accumulate_grad_batches=2, precision="bf16-mixed"
    )
    trainer.fit(model, loader())
    results = measure.results(trainer)
    losses = torch.stack(model.losses).float()
    assert len(losses) == 14
    torch.testing.assert_close(torch.tensor(results["losses"]), losses.view(7, 2).mean(1))
    assert results["steps"] == 7
    assert results["samples_per_s"] == pytest.approx(1e3 * 2 * 16 / results["mean_ms"])
    assert results["tokens_per_s"] is None
    assert results["val_loss"] is None


def test_manual_optimization_and_losses_that_are_only_logged(tmp_path: Path) -> None:
    class Manual(Regression):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.step(batch)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            self.losses.append(loss.detach().clone())
            self.log("train_loss", loss)

    pl.seed_everything(0, verbose=False)
    model, measure = Manual(), Measure(warmup=1)
    model.automatic_optimization = False
    trainer = make_trainer(tmp_path, callbacks=[measure], max_epochs=-1, max_steps=5)
    trainer.fit(model, loader())
    assert measure.results(trainer)["losses"] == pytest.approx([loss.item() for loss in model.losses])
    measure = Measure(warmup=9)
    trainer = make_trainer(tmp_path, callbacks=[measure], max_epochs=1)
    trainer.fit(seeded(), loader())
    with pytest.raises(RuntimeError, match="ended after 4 steps, and nothing is measured in the first 9"):
        measure.results(trainer)


def test_tokens_of_batches() -> None:
    tokens, numbers = torch.arange(6).view(2, 3), torch.rand(2, 3)
    assert tokens_of(tokens) == tokens_of([tokens, None]) == tokens_of({"input_ids": tokens}) == 6
    others = (numbers, tokens.bool(), tokens[0], tokens[None], {"labels": tokens}, (), None, (tokens[0], tokens))
    assert [tokens_of(other) for other in others] == [None] * len(others)


def test_percentiles_stay_within_what_was_measured() -> None:
    assert percentiles([7.0]) == (7.0, 7.0, 7.0)
    assert percentiles([1.0, 2.0]) == pytest.approx((1.2, 1.5, 1.8))
