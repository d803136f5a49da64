"""``python -m lightning_fp8 compare``: the table matches what the runs logged, and the advice follows its rules."""

from __future__ import annotations

import io
import json
import math
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
from jsonargparse import Namespace
from lightning.pytorch.plugins import Precision
from lit import Regression, loader, make_trainer, seeded
from processes import start
from warm import run_warm

import lightning_fp8
from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling
from lightning_fp8.examples import ByteGPT, StdlibText
from lightning_fp8.scaling.recipe import RECIPES, as_recipe
from lightning_fp8.tools.compare import command, processes
from lightning_fp8.tools.compare import run as compare_run
from lightning_fp8.tools.compare.advice import advise, overlap, worse_loss
from lightning_fp8.tools.compare.command import main
from lightning_fp8.tools.compare.measure import Measure, _digest, tokens_of
from lightning_fp8.tools.compare.results import as_table, draw
from lightning_fp8.tools.compare.variants import VARIANTS, plugin_settings
from lightning_fp8.tools.report.runs import read_runs

STEPS, WARMUP = 12, 4
BATCH, CONTEXT = 4, 16
FOUR = ["bf16-mixed", "bf16-mixed+weight_copy", "bf16-true", "fp8-delayed"]
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
            {"class_path": "lightning_fp8.ScaleWatchdog"},
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
    """The runs of comparisons, in warm processes; `test_control_c_ends_what_it_started` starts a real one."""

    def run(command: Sequence[str], output: IO[str]) -> int:
        ran = run_warm(*command[1:], cwd=Path.cwd())
        output.write(ran.stdout + ran.stderr)
        return ran.returncode

    patch.setattr(processes.worker, "run", run)


def write_config(folder: Path, **trainer: Any) -> Path:
    config = {**CONFIG, "trainer": {**CONFIG["trainer"], **trainer}}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The four variants that run by default on a CPU with bf16 products, with a user's plugin; folder and output."""
    folder = tmp_path_factory.mktemp("compare")
    config = CONFIG | {"trainer": {key: value for key, value in CONFIG["trainer"].items() if key != "precision"}}
    config["trainer"]["plugins"] = PLUGIN
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    arguments = ["--config", "tiny.yaml", "--steps", str(STEPS), "--warmup", str(WARMUP), "--precisions", *FOUR]
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
    folder, _ = compared
    rows = rows_of(folder)
    assert [row["variant"] for row in rows] == FOUR
    for row, run in zip(rows, read_runs([folder / name for name in FOUR]), strict=True):
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


def test_times_rates_and_memory(compared: tuple[Path, str]) -> None:
    for row in rows_of(compared[0]):
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        assert row["samples_per_s"] == pytest.approx(1e3 * BATCH / row["mean_ms"])
        assert row["tokens_per_s"] == pytest.approx(row["samples_per_s"] * (CONTEXT + 1))
        assert (row["device"], row["gpu"], row["world_size"]) == ("cpu", None, 1)
        assert row["torch"] == torch.__version__
        assert 0 < row["peak_bytes"] < 2**30
        assert row["command"].startswith("python -m lightning_fp8 compare --config tiny.yaml")


def test_same_seed_and_data(compared: tuple[Path, str]) -> None:
    mixed, copied, *others = rows_of(compared[0])
    assert mixed["seed"] == 0
    assert len({row["batches"] for row in (mixed, copied, *others)}) == 1
    assert mixed["first_loss"] == copied["first_loss"]
    for row in others:
        # FP8 has 4 significant bits, and an untrained model's logits hardly affect its loss
        assert row["first_loss"] == pytest.approx(mixed["first_loss"], rel=2**-9)
        assert row["first_loss"] != mixed["first_loss"]


def test_a_run_is_seeded_twice_with_the_number_that_stands_for_true(monkeypatch: pytest.MonkeyPatch) -> None:
    # seeding sets this variable too; pytest restores it
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    cli = compare_run.CompareCLI.__new__(compare_run.CompareCLI)
    cli.variant, cli.folder, cli.steps, cli.left_out = "bf16-mixed", Path("run"), 1, []
    trainer = Namespace(accelerator="cpu", plugins=None, callbacks=None)
    cli.config = Namespace(fit=Namespace(seed_everything=True, trainer=trainer))
    cli.before_instantiate_classes()
    made = torch.rand(3)
    cli.before_fit()
    assert (cli.seed, torch.initial_seed()) == (0, 0)
    assert torch.equal(torch.rand(3), made)


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
    assert state == dict.fromkeys(FOUR, 4 * elements) | {"bf16-true": 2 * elements + 2 * norms}
    for row in rows_of(folder):
        assert row["gradient_bytes"] == row["parameter_bytes"]
        # two moments and a step count of 4 bytes for each of the 17 parameters
        assert row["optimizer_bytes"] == 2 * row["parameter_bytes"] + 4 * 17
        assert row["state_bytes"] == sum(row[f"{of}_bytes"] for of in ("parameter", "gradient", "optimizer"))


def test_what_is_printed(compared: tuple[Path, str]) -> None:
    folder, printed = compared
    lines = printed.splitlines()
    for row in rows_of(folder):
        cells = next(line for line in lines if re.match(rf"{re.escape(row['variant'])} +\d[\d,]* ", line)
                     and "steps" not in line).replace(",", "").split()  # fmt: skip
        assert cells[1] == f"{row['tokens_per_s']:.0f}"
        assert cells[4] == f"{row['p50_ms']:.2f}"
        assert cells[-2:] == [f"{row['loss']:.4f}", f"{row['val_loss']:.4f}"]
    advice = advise(rows_of(folder))
    assert "\n".join(advice) in printed
    assert advice[0].startswith("These are times of a CPU. They say nothing about speed on a GPU")
    assert "Callbacks left out: ModelCheckpoint, ScaleWatchdog." in lines
    assert not (folder.parents[2] / "users_own").exists()
    assert not list(folder.rglob("*.ckpt"))
    assert "Recommended until measured on a GPU: bf16-mixed" in (folder / "compare.md").read_text()
    assert lines[-1].startswith(
        "Everything the runs logged: python -m lightning_fp8 report runs/compare/tiny/bf16-mixed "
    )


def test_picture_is_not_blank(compared: tuple[Path, str]) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    from lightning_fp8.tools.report.pictures import COLOURS

    image = torch.from_numpy(imread(compared[0] / "compare.png"))[..., :3]
    for colour in COLOURS[: len(FOUR)]:
        is_bar = (image - torch.tensor(to_rgb(colour))).abs().amax(-1) < 0.02
        assert is_bar.sum() > 2000, colour


def test_the_picture_names_the_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    draw([row(name, 1.0, losses=[1.0], baseline="32-true") for name in ("32-true", "fp8-delayed")], tmp_path)
    labels = [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()]
    assert labels == ["32-true, the baseline", "fp8-delayed"]


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
        ("--config", "nowhere.yaml"): "there is no file nowhere.yaml",
        ("--config", config, "--steps", "10"): "--warmup must be smaller than the number of steps, 10, got 10",
        ("--config", config, "--warmup", "30"): "--warmup must be smaller than the number of steps, 30, got 30",
        ("--config", config, "--steps", "none"): "must be an integer of at least 1, got 'none'",
        ("--config", config, "--warmup", "0"): "must be an integer of at least 1, got '0'",
        ("--config", config, "--precisions", "fp8-delyed"): "got 'fp8-delyed'. Did you mean 'fp8-delayed'?",
        ("--config", config, "--precisions", "fp8"): "got 'fp8'. Did you mean 'fp8-delayed'?",
        ("--config", config, "--precisions", "bf16-true,margin=1"): "must be one of bf16-mixed, ",
        ("--config", config, "--precisions", "fp8-block,margin=1"): "fp8-block,margin=1: BlockScaling has no field",
        ("--config", config, "--precisions", "fp8-current,margin=-1"): "`margin` must be an integer from 0 to 127",
        ("--config", config, "--precisions", "fp8-delayed,precision=fp8-block"): "A field is given twice",
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


def compare(arguments: list[str], printed: Path) -> None:
    # tests that run in the background ignore SIGINT, and so would the processes that they start
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with printed.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        main(arguments)


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_it_started(by: signal.Signals, tmp_path: Path) -> None:
    # named explicitly, because the default depends on the CPU
    arguments = ["--out", str(tmp_path / "out"), "--precisions", "fp8-delayed", "--steps", "1000000"]
    parent = start(compare, ["--config", str(write_config(tmp_path)), *arguments], tmp_path / "printed")
    try:
        deadline = time.monotonic() + 300
        while not running(tmp_path / "out") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert running(tmp_path / "out")
        os.kill(parent.pid, by)
        parent.join(60)
    finally:
        parent.kill()
        left = running(tmp_path / "out")
        for process in left:
            os.kill(int(process), signal.SIGKILL)
    printed = (tmp_path / "printed").read_text()
    assert parent.exitcode == 130
    assert f"Stopped. What has run is in {tmp_path / 'out'}." in printed
    assert "Traceback" not in printed
    assert not left


def running(folder: Path) -> list[str]:
    """Processes of runs that write into the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"lightning_fp8.tools.compare.run" in arguments and str(folder / "fp8-delayed").encode() in arguments:
            found.append(path.parent.name)
    return found


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


def test_a_run_that_ends_within_the_warmup(tmp_path: Path) -> None:
    measure = Measure(warmup=9)
    trainer = make_trainer(tmp_path, callbacks=[measure], max_epochs=1)
    trainer.fit(seeded(), loader())
    with pytest.raises(RuntimeError, match="ended after 4 steps, and nothing is measured in the first 9"):
        measure.results(trainer)


def test_tokens() -> None:
    tokens = torch.zeros(4, 33, dtype=torch.long)
    assert tokens_of(tokens) == tokens_of([tokens, None]) == tokens_of({"input_ids": tokens}) == 132
    for other in (
        tokens.float(),
        tokens.bool(),
        tokens[0],
        tokens[None],
        {"labels": tokens},
        (),
        None,
        (tokens[0], tokens),
    ):
        assert tokens_of(other) is None


def test_digest_of_batches() -> None:
    tokens, numbers = torch.arange(6).view(2, 3), torch.rand(2, 3)
    first = _digest((tokens, numbers, torch.tensor(1), "text"), 0)
    assert first == _digest((tokens, numbers.bfloat16(), torch.tensor(1), "text"), 0)
    assert first != _digest((tokens.flip(0), numbers, torch.tensor(1), "text"), 0)
    assert first != _digest((tokens, numbers, torch.tensor(2), "text"), 0)
    assert first != _digest((tokens, numbers, torch.tensor(1), "text"), first)


@pytest.mark.parametrize("variant", [*VARIANTS, "fp8-current,margin=1,wgrad=bf16"])
def test_each_variant_runs_under_its_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["fit", "--config", str(write_config(tmp_path))]
    lightning_fp8.plugins.register(bf16=False)
    try:
        cli = compare_run.CompareCLI(variant, tmp_path / "out" / variant, 2, 1, arguments)
    finally:
        lightning_fp8.plugins.register(bf16=True)
    kinds = {"bf16-mixed": lightning_fp8.Bf16MixedPrecision, "bf16-true": lightning_fp8.Bf16TruePrecision,
             **dict.fromkeys(RECIPES, lightning_fp8.Fp8Precision), "32-true": Precision}  # fmt: skip
    precision = re.split("[+,]", variant)[0]
    assert type(cli.trainer.precision_plugin) is kinds[precision]
    assert cli.trainer.precision == precision
    record = json.loads((tmp_path / "out" / variant / "fp8_run.json").read_text())
    assert record["precision"] == precision
    if precision in RECIPES:
        assert (record["recipe"]["wgrad"], record["recipe"].get("margin")) == (
            ("bf16", 1) if "," in variant else ("fp8", None if precision == "fp8-block" else 0)
        )


def test_32_true_is_lightnings_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["fit", "--config", str(write_config(tmp_path, plugins=PLUGIN, precision=None))]
    cli = compare_run.CompareCLI("32-true", tmp_path / "out" / "32-true", 2, 1, arguments)
    losses = Measure(warmup=1)
    pl.seed_everything(0, workers=True)
    model = ByteGPT(**CONFIG["model"]["init_args"])
    pl.seed_everything(0, workers=True)
    trainer = make_trainer(tmp_path / "own", precision="32-true", max_steps=2, callbacks=[losses])
    trainer.fit(model, StdlibText(**CONFIG["data"]["init_args"]))
    assert torch.equal(torch.stack(cli.measure.losses), torch.stack(losses.losses))


def test_plugin_settings() -> None:
    own = {"recipe": {"margin": 1}, "ignore_modules": ["a"], "keep_fp32": ["b"], "param_dtype": "bfloat16",
           "dtype_mismatch": "warn", "weight_copy": False, "frozen_weights": "fp8"}  # fmt: skip
    for_all = {"keep_fp32": ["b"], "dtype_mismatch": "warn"}
    assert plugin_settings("bf16-mixed", own) == for_all
    assert plugin_settings("bf16-mixed+weight_copy", own) == {**for_all, "weight_copy": True}
    assert plugin_settings("bf16-true", own) == for_all
    assert plugin_settings("32-true", own) == {}
    of_fp8 = {**own, "recipe": DelayedScaling(margin=1).as_dict()}
    assert plugin_settings("fp8-delayed", own) == {key: value for key, value in of_fp8.items() if key != "weight_copy"}


# a CPU that emulates bf16 products


LEFT_OUT = "The baseline is 32-true, and bf16-mixed, bf16-mixed+weight_copy, bf16-true run only if `--precisions` names"
SLOW = "Steps of {} take many times as long as in fp32; `--precisions 32-true fp8-delayed` avoids them."
# whether bf16 products are emulated, the precisions named -> those that run, the baseline, and the message
MACHINES = {
    "with bf16 products": (False, [], FOUR, "bf16-mixed", None),
    "without": (True, [], ["32-true", "fp8-delayed"], "32-true", LEFT_OUT),
    "asked for bf16": (True, ["fp8-delayed", "bf16-true", "32-true"], None, "32-true", SLOW.format("bf16-true")),
    "asked for no fp32": (True, ["bf16-mixed", "fp8-delayed"], None, "bf16-mixed", SLOW.format("bf16-mixed")),
    "fp32 with bf16 products": (False, ["32-true", "bf16-mixed"], None, "bf16-mixed", None),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_what_runs_where_bf16_products_are_emulated(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    emulated, named, expected, baseline, said = MACHINES[machine]
    ran = []

    def run(variant: str, folder: Path, steps: int, warmup: int, fit: Any) -> dict[str, Any]:
        ran.append(variant)
        # 2% worse than the others
        loss = 2.04 if variant == "fp8-delayed" else 2.0
        found = row(variant, 1.0, gpu=None, loss=loss, losses=[3.0, loss], device="cpu", seed=0, left_out=[])
        return {**found, "warmup": warmup}

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "emulates_bf16", lambda: emulated)
    precisions = ["--precisions", *named] if named else []
    main(["--config", str(write_config(tmp_path)), "--out", str(tmp_path), *precisions])
    assert ran == (expected or named)
    written = rows_of(tmp_path)
    assert [row["baseline"] for row in written] == [baseline] * len(ran)
    printed = capsys.readouterr().out
    assert printed.count("emulates bf16 products. ") == emulated
    assert (said or "") in printed
    if "fp8-delayed" in ran:
        assert f"Not fp8-delayed: its training loss 2.0400 is worse by 2.0% than {baseline}'s 2.0000" in printed
    # for the GPU that the user will train on
    assert "Recommended until measured on a GPU: bf16-mixed." in printed
    assert ("compared with those of 32-true: this CPU emulates" in printed) == (baseline == "32-true")


def test_a_gpu_is_not_asked_about_its_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []
    monkeypatch.setattr(command, "_on_gpu", lambda *_: True)
    monkeypatch.setattr(command, "emulates_bf16", lambda: True)
    monkeypatch.setattr(command, "run", lambda variant, *_: {"error": "none"} if ran.append(variant) is None else {})
    with pytest.raises(SystemExit):
        main(["--config", str(write_config(tmp_path)), "--out", str(tmp_path)])
    assert ran == FOUR
    assert "emulates" not in capsys.readouterr().out


def test_recipes_of_the_fp8_precisions() -> None:
    delayed = {"recipe": {"margin": 1}, "gemm": "cublaslt"}
    current = {"recipe": {"precision": "fp8-current", "margin": 2}, "gemm": "cublaslt"}
    for variant, own, expected in (
        ("fp8-delayed", delayed, DelayedScaling(margin=1)),
        ("fp8-current", current, CurrentScaling(margin=2)),
        ("fp8-delayed", current, DelayedScaling()),
        ("fp8-current", delayed, CurrentScaling()),
        # named fields come before the user's
        ("fp8-delayed,amax_history_len=4,reduce_amax=False", delayed, DelayedScaling(1, "HYBRID", 4, "max", False)),
        ("fp8-current,margin=0,wgrad=bf16", current, CurrentScaling(wgrad="bf16")),
        ("fp8-block,power_of_2_scales=true", delayed, BlockScaling(power_of_2_scales=True)),
    ):
        settings = plugin_settings(variant, own)
        assert as_recipe(settings.pop("recipe")) == expected
        assert settings == {"gemm": "cublaslt"}
    assert plugin_settings("bf16-mixed", current) == {}


# advice


def row(variant: str, milliseconds: float, peak: int = 1000, **more: Any) -> dict[str, Any]:
    return {
        "variant": variant, "gpu": "H100", "steps": 200, "p20_ms": 0.99 * milliseconds, "p50_ms": milliseconds,
        "p80_ms": 1.01 * milliseconds, "peak_bytes": peak << 20, "state_bytes": peak << 20, "loss": 2.0,
        "val_loss": 2.0, "batches": "ab", **more,
    }  # fmt: skip


def recommended(*rows: dict[str, Any]) -> str | None:
    found = re.search(r"^Recommended: (\S+)\. ", "\n".join(advise(rows)), re.MULTILINE)
    return found and found[1]


def test_on_a_gpu_the_fastest_whose_loss_passes() -> None:
    mixed, fp8, true = row("bf16-mixed", 10), row("fp8-delayed", 7), row("bf16-true", 8)
    assert recommended(mixed, true, fp8) == "fp8-delayed"
    assert "30% less time" in "\n".join(advise([mixed, fp8]))
    assert recommended(mixed, true, {**fp8, "loss": 2.021}) == "bf16-true"
    assert recommended(mixed, true, {**fp8, "loss": 2.019}) == "fp8-delayed"
    assert recommended(mixed, true, {**fp8, "val_loss": 2.021}) == "bf16-true"
    assert recommended(mixed, true, {**fp8, "val_loss": None, "loss": math.nan}) == "bf16-true"
    assert recommended({**mixed, "val_loss": None}, {**fp8, "val_loss": None}) == "fp8-delayed"
    assert recommended(mixed, {"variant": "fp8-delayed", "error": "no"}) == "bf16-mixed"
    # five percent
    assert recommended(mixed, row("fp8-delayed", 9.4)) == "fp8-delayed"
    assert recommended(mixed, row("fp8-delayed", 9.6)) == "bf16-mixed"


def test_memory_decides_between_those_about_as_fast() -> None:
    mixed, fp8 = row("bf16-mixed", 10), row("fp8-delayed", 7)
    assert recommended(mixed, fp8, row("bf16-true", 7.1, peak=600)) == "bf16-true"
    assert recommended(mixed, fp8, row("bf16-true", 7.2, peak=600)) == "fp8-delayed"
    assert "If memory is short: bf16-true." in "\n".join(advise([mixed, fp8, row("bf16-true", 7.2, peak=600)]))
    assert "If memory" not in "\n".join(advise([mixed, fp8, row("bf16-true", 7.2, peak=990)]))


def test_noise_is_no_reason() -> None:
    mixed, noisy = row("bf16-mixed", 10), row("fp8-delayed", 8, p80_ms=9.95)
    assert overlap(mixed, noisy)
    assert overlap(noisy, mixed)
    assert not overlap(mixed, row("fp8-delayed", 8))
    assert recommended(mixed, noisy) == "bf16-mixed"
    assert "Within the noise: the step times of fp8-delayed and of bf16-mixed overlap" in "\n".join(
        advise([mixed, noisy])
    )
    assert "noise:" not in "\n".join(advise([mixed, row("fp8-delayed", 8)]))


def test_on_the_cpu_speed_counts_for_nothing() -> None:
    mixed, fast, small = (row(*of, gpu=None) for of in (("bf16-mixed", 10), ("fp8-delayed", 1), ("bf16-true", 9, 500)))
    lines = advise([mixed, fast, small])
    assert lines[0].startswith("These are times of a CPU. They say nothing about speed on a GPU")
    assert lines[1].startswith("Recommended until measured on a GPU: bf16-mixed.")
    assert lines[2].startswith("If memory is short: bf16-true.")
    assert "run the same command on the GPU" in lines[-1]
    assert not any("fp8-delayed" in line for line in lines)
    refused = advise([mixed, fast, {**small, "loss": 2.1}])
    assert not any("memory" in line for line in refused)
    assert any(line.startswith("Not bf16-true: its training loss 2.1000 is worse by 5.0%") for line in refused)
    assert any("Repeat with more `--steps`" in line for line in refused)


def test_without_a_reference_there_is_no_recommendation() -> None:
    for rows in (
        [row("fp8-delayed", 1)],
        [{"variant": "bf16-mixed", "error": "x"}, row("fp8-delayed", 1)],
        [row("bf16-mixed", 10, loss=math.inf), row("fp8-delayed", 1)],
        [{"variant": "bf16-mixed", "error": "x"}],
    ):
        assert recommended(*rows) is None
        assert "No recommendation: " in "\n".join(advise(rows))


def test_doubts() -> None:
    mixed, other = row("bf16-mixed", 10), row("fp8-delayed", 8, batches="cd")
    assert "fp8-delayed did not get the batches that bf16-mixed got" in "\n".join(advise([mixed, other]))
    nothing = {"loss": None, "val_loss": None}
    assert "No loss is known" in advise([mixed | nothing, other | nothing])[0]
    assert worse_loss(row("bf16-true", 1, loss=-1.0), row("bf16-mixed", 1, loss=-2.0)).startswith("its training loss")
    assert not worse_loss(row("bf16-true", 1, loss=-3.0), row("bf16-mixed", 1, loss=-2.0))


def test_losses_near_zero_are_compared_with_the_first() -> None:
    learnt = row("bf16-mixed", 1, loss=0.0026, val_loss=None, first_loss=2.4)
    near, far = (row("fp8-delayed", 1, loss=loss, val_loss=None, first_loss=2.4) for loss in (0.0049, 0.0051))
    assert not worse_loss(near, learnt)
    assert worse_loss(far, learnt)
    for first in (None, math.nan, math.inf):
        assert worse_loss(near, {**learnt, "first_loss": first})
    # for a loss that is still large, 1% is the limit
    assert not worse_loss({**near, "loss": 2.02}, {**learnt, "loss": 2.001})
    assert worse_loss({**near, "loss": 2.03}, {**learnt, "loss": 2.0})


def test_table_without_tokens_and_with_a_failure() -> None:
    table = as_table([row("bf16-mixed", 10, val_loss=None), {"variant": "bf16-true", "error": "x"}])
    assert "tokens/s" not in table
    assert "val loss" not in table
    assert table.splitlines()[-1].split() == ["bf16-true", *"------"]


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_run_is_started(by: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the process exists, but has not been registered yet
    started: list[subprocess.Popen[bytes]] = []

    class Started(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **kwargs)
            started.append(self)
            signal.raise_signal(by)

    monkeypatch.setattr(subprocess, "Popen", Started)
    before = signal.signal(by, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            processes.run("bf16-mixed", tmp_path / "out", 10, 2, [])
    finally:
        signal.signal(by, before)
    assert started[0].returncode == -signal.SIGTERM
