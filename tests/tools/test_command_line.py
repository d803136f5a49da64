"""The program itself: its commands, its name, and its messages about missing or misspelt arguments."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning as mirror
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from repository import ROOT
from warm import run_warm

from lightning_fp8 import __main__ as entry
from lightning_fp8.cli import Fp8CLI, main
from lightning_fp8.examples import ByteGPT
from lightning_fp8.tools.compare import command as compare
from lightning_fp8.tools.compare.command import UsageError

TOOLS = sorted(path.parent.name for path in (ROOT / "lightning_fp8" / "tools").glob("*/command.py"))
EXTRAS = [
    "jsonargparse",
    "docstring_parser",
    "typeshed_client",
    "rich",
    "matplotlib",
    "plotly",
    "sklearn",
    "safetensors",
]
WITHOUT_EXTRAS = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))
from lightning_fp8.__main__ import run
for arguments in {[["--help"], [], *([tool, "--help"] for tool in TOOLS), ["fit", "--help"], ["compare", "-c", "x"]]!r}:
    sys.argv = ["/somewhere/lightning-fp8", *arguments]
    print("# " + " ".join(arguments))
    try:
        run()
    except SystemExit as ended:
        print(ended)
"""


def test_help_without_any_extra() -> None:
    ran = run_warm("-c", WITHOUT_EXTRAS)
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = dict(part.split("\n", 1) for part in ran.stdout.removeprefix("# ").split("\n# "))
    for text in (said["--help"], said[""]):
        assert {*LightningCLI.subcommands(), *TOOLS} <= {*re.findall(r"^  (\w+) ", text, re.MULTILINE)}
    for tool in TOOLS:
        assert f"usage: lightning-fp8 {tool} " in said[f"{tool} --help"]
    for needing in ("fit --help", "compare -c x"):
        assert "pip install 'jsonargparse[signatures]" in said[needing]


@pytest.mark.parametrize(("word", "meant"), [("comprae", " Did you mean 'compare'?"), ("nonsense", "")])
def test_an_unknown_command(
    word: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/site/lightning_fp8/__main__.py", word])
    with pytest.raises(SystemExit) as ended:
        entry.run()
    assert ended.value.code == 2
    assert f"'{word}'.{meant}\n" in capsys.readouterr().err


MODEL = """
import lightning.pytorch as pl, torch
class Own(pl.LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)
    def training_step(self, batch, index):
        return self.layer(batch).sum()
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(2, self.layer.in_features))
    def configure_optimizers(self):
        print("width", self.layer.in_features)
        return torch.optim.SGD(self.parameters(), 0.1)
"""
QUIET = {"accelerator": "cpu", "logger": False, "max_steps": 1, "enable_progress_bar": False}


def test_the_program_finds_the_users_modules_and_needs_no_data(tmp_path: Path) -> None:
    """Unlike with ``python -m``, Python's path has the script's folder in place of the current one."""
    (tmp_path / "my_module.py").write_text(MODEL)
    config = {"trainer": QUIET, "model": {"class_path": "my_module.Own", "init_args": {"width": 6}}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    program = (
        f"import sys\nsys.path[:] = [{str(ROOT)!r}, *filter(None, sys.path[1:])]\n"
        "sys.argv = ['/bin/lightning-fp8', 'fit', '-c', 'mine.yaml']\n"
        "from lightning_fp8.__main__ import run\nrun()"
    )
    ran = run_warm("-c", program, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "width 6" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trainer.plugins={}", "--trainer.plugins.recipe.margn=1"], "DelayedScaling has no field 'margn'."),
        (["-c", "list.yaml"], "DelayedScaling has no field 'margn'."),
        (["-c", "class.yaml"], "CurrentScaling: `margin`"),
        (
            ["--trainer.callbacks=lightning_fp8.ScaleFactorLogger", "--trainer.callbacks.every_n_steps=0"],
            "ScaleFactorLogger: `every_n_steps`",
        ),
    ],
)
def test_what_our_classes_refuse_is_one_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    recipes = {
        "list": {"margn": 1},
        "class": {"class_path": "lightning_fp8.CurrentScaling", "init_args": {"margin": -1}},
    }
    for name, recipe in recipes.items():
        plugin = {"class_path": "lightning_fp8.Fp8Precision", "init_args": {"recipe": recipe}}
        Path(f"{name}.yaml").write_text(yaml.safe_dump({"trainer": {"plugins": [plugin]}}))
    monkeypatch.setattr(sys, "argv", ["lightning-fp8"])
    given = [argument.format("lightning_fp8.Fp8Precision") for argument in arguments]
    with pytest.raises(SystemExit) as ended:
        Fp8CLI(Own, run=False, args=[*given, "--trainer.accelerator=cpu", "--trainer.logger=false"])
    printed = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert printed[-1].startswith(f"error: {said}")
    assert [line[:5] for line in printed if not line.startswith("Seed")] == ["usage", "tip: ", "error"]


class Own(pl.LightningModule):
    pass


class Picky(pl.Callback):
    def __init__(self) -> None:
        raise ValueError("my own rule")


def test_a_checkpoint_of_a_run_resumes_it_and_is_validated(tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "tiny_gpt_fp8.yaml")
    small = ["--model.init_args.width=64", "--data.init_args.batch_size=4", "--data.init_args.max_bytes=100000"]
    once = ["--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"]
    fit = ["-m", "lightning_fp8", "fit", "-c", config, *small, *once]
    run_warm(*fit, "--trainer.max_steps=2", cwd=tmp_path, check=True)
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    resumed = run_warm(*fit, "--trainer.max_steps=4", f"--ckpt_path={checkpoint}", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "validation after step 4" in resumed.stdout
    validate = ["-m", "lightning_fp8", "validate", "-c", config, *small, "--trainer.limit_val_batches=1"]
    run_warm(*validate, f"--ckpt_path={checkpoint}", cwd=tmp_path, check=True)


def test_what_a_users_callback_raises_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-fp8"])
    with pytest.raises(ValueError, match="my own rule"):
        Fp8CLI(Own, run=False, args=[f"--trainer.callbacks={__name__}.Picky", "--trainer.accelerator=cpu"])


class Shuffled(pl.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        # takes as many random numbers
        self.layer = torch.nn.Linear(width, 1)
        self.seen: list[float] = []

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(8.0), shuffle=True)

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        self.seen += batch.tolist()

    def configure_optimizers(self) -> None:
        pass


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_the_order_of_the_data_follows_from_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # seeding sets this variable too; pytest restores it
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    monkeypatch.setattr(sys, "argv", ["lightning-fp8"])
    quiet = [f"--trainer.{name}=false" for name in ("logger", "enable_checkpointing", "enable_progress_bar")]
    orders = []
    for width in (4, 5):
        arguments = [f"--model={__name__}.Shuffled", f"--model.width={width}", "--seed_everything=3"]
        arguments += [*quiet, "--trainer.accelerator=cpu", "--trainer.max_epochs=1"]
        cli = Fp8CLI(args=["fit", *arguments], save_config_callback=None)
        orders.append(cli.model.seen)
    assert orders[0] == orders[1] != sorted(orders[0])


class OfLightning(pl.LightningModule):
    def __init__(self, fails_in: str = "") -> None:
        super().__init__()
        self.layer, self.fails_in = torch.nn.Linear(16, 16), fails_in
        if fails_in == "constructor":
            raise ValueError("my own rule")

    def training_step(self, batch: Any, index: int) -> Any:
        if self.fails_in == "training_step":
            raise ValueError("my own rule")
        # our layers refuse such an input
        return self.layer(batch.double()).sum()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(2, 16))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class OfTheOtherName(mirror.LightningModule):
    pass


@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        (["--trainer.precision=FP8_Delayed"], "Did you mean 'fp8-delayed'?"),
        (["--trainer.precision=bf16-mix"], "Did you mean 'bf16-mixed'?"),
        (["--trainer.precision=16-mix"], "got '16-mix'. Did you mean '16-mixed'?"),
        (["--trainer.max_stepz=1"], "Did you mean 'max_steps'?"),
        (["--trainer.max_steps=many"], "error: `trainer.max_steps` must be int, got 'many'."),
        (["--trainer.callbacks=lightning_fp8.RunRecrod"], "no class 'RunRecrod'. Did you mean 'RunRecord'?"),
        (["--model=nowhere.Model"], "`model`: there is no module 'nowhere' for the class 'nowhere.Model'."),
        (["--model.widht=3"], "Did you mean 'width'?"),
        (["--model.width=33", "--data=lightning_fp8.examples.StdlibText"], "got width=33 and heads=4."),
        ([f"--model={__name__}.OfTheOtherName"], "import it in place of `pytorch_lightning`."),
    ],
)
def test_what_a_refused_value_should_be(
    arguments: list[str], last: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-fp8"])
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--model=lightning_fp8.examples.ByteGPT", *arguments])
    assert ended.value.code == 2
    printed = capsys.readouterr().err.rstrip()
    assert printed.endswith(last)
    assert len(printed.partition("error: ")[2].splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"recipe": "fp8-delay"}, "'fp8-block', got 'fp8-delay'. Did you mean 'fp8-delayed'?"),
        ({"frozen_weights": "fp9"}, "`frozen_weights` must be 'master', 'fp8' or null, got 'fp9'."),
        ({"min_features": "many"}, "`min_features` must be int or null, got 'many'."),
        ({"ignore_module": ["head"]}, "has no argument `ignore_module`: its arguments are recipe, ignore_modules, "),
        ({"ignore_modules": ["lyer"]}, "The `ignore_modules` pattern 'lyer' matches no module of OfLightning. "),
    ],
)
def test_a_wrong_argument_of_a_plugin_is_one_sentence(
    arguments: dict[str, Any],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    plugin = {"class_path": "lightning_fp8.Fp8Precision", "init_args": arguments}
    config = {"trainer": {**QUIET, "plugins": [plugin]}, "model": f"{__name__}.OfLightning"}
    Path("wrong.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(sys, "argv", ["lightning-fp8"])
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config=wrong.yaml"])
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trainer.accelerator=cudaa"], "invalid accelerator name: `accelerator='cudaa'`"),
        (["--trainer.plugins=lightning_fp8.Fp8Precision", "--trainer.precision=fp8-block"], "Choose one."),
    ],
)
def test_what_lightning_refuses_is_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-fp8"])
    with pytest.raises(SystemExit) as ended:
        main(["fit", f"--model={__name__}.OfLightning", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("where", ["constructor", "training_step", "forward"])
def test_an_error_in_the_users_model_keeps_its_traceback(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-fp8"])
    quiet = [f"--trainer.{name}={value}" for name, value in QUIET.items()]
    arguments = [f"--model={__name__}.OfLightning", f"--model.fails_in={where}", "--trainer.precision=fp8-current"]
    with pytest.raises((ValueError, TypeError), match=r"my own rule|float64"):
        main(["fit", *arguments, *quiet])


# --- configurations for a user's command line with a fixed model class ---


def given_to_fit(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> list[str]:
    """The arguments that ``compare`` would pass to ``fit``."""
    given: list[list[str]] = []

    def run(variant: str, folder: Path, steps: int, warmup: int, fit: list[str]) -> dict[str, Any]:
        given.append(fit)
        raise UsageError("Lightning's own words")

    monkeypatch.setattr(compare, "run", run)
    with pytest.raises(SystemExit):
        compare.main(arguments)
    return given[0]


@pytest.mark.parametrize("has_class", [False, True])
def test_compare_names_the_class_that_a_configuration_leaves_out(
    has_class: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = {"layers": 1, "width": 32, "heads": 4, "context": 16}
    digits = {"class_path": "lightning_fp8.examples.EncoderClassifier"}
    Path("fixed.yaml").write_text(yaml.safe_dump({"trainer": QUIET, "model": digits if has_class else arguments}))
    config = ["--config=fixed.yaml", "--trainer.max_steps=7"]
    given_to_fit(monkeypatch, config)
    words = "`model` in the configuration names no class, as for a `LightningCLI` with a fixed class. Name it: --model"
    assert (words in capsys.readouterr().err) is not has_class
    named = ["--model", "lightning_fp8.examples.ByteGPT"]
    monkeypatch.setattr(sys, "argv", ["lightning-fp8"])
    # in any order
    for given in ([*config, *named], [*named, *config], [config[1], *named, config[0], "--steps=20"]):
        cli = Fp8CLI(args=given_to_fit(monkeypatch, given)[1:], run=False)
        assert type(cli.model) is ByteGPT
        assert cli.trainer.max_steps == 7
        if not has_class:
            assert {name: cli.model.hparams[name] for name in arguments} == arguments
