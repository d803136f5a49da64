"""Lightning under its other name, ``pytorch_lightning``: the same strings, plugins, callbacks and results."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning_fabric
import pytest
import pytorch_lightning as mirror
import torch
from connectors import QUIET, with_cuda
from lightning.pytorch.loggers import CSVLogger
from lit import TRUSTED, Regression, by_hand, loader, make_trainer, same, seeded
from pytorch_lightning.loggers import CSVLogger as MirrorCSVLogger
from pytorch_lightning.plugins.precision import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from pytorch_lightning.trainer.connectors.accelerator_connector import _AcceleratorConnector
from small_models import small_mlp
from warm import run_warm

import lightning_fp8
from lightning_fp8 import callbacks
from lightning_fp8.plugins.fabric import FabricPrecision
from lightning_fp8.plugins.settings import FP8_PRECISIONS, PRECISIONS
from lightning_fp8.plugins.trainer import PLUGINS

THEIRS = {**dict.fromkeys(FP8_PRECISIONS, Precision), "bf16-mixed": MixedPrecision, "bf16-true": HalfPrecision}


class Mirrored(mirror.LightningModule):
    """``Regression`` with the other package's base class."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.net = small_mlp()
        self.lr = lr
        self.losses: list[torch.Tensor] = []

    forward, step = Regression.forward, Regression.step
    training_step, configure_optimizers = Regression.training_step, Regression.configure_optimizers


def trainer(**kwargs: Any) -> mirror.Trainer:
    return mirror.Trainer(**{"devices": 1, "enable_model_summary": False, **QUIET, **kwargs})


ORDERS = {
    "before": "import lightning_fp8\nassert not {'pytorch_lightning', 'lightning_fabric'} & {*sys.modules}"
    "\nimport pytorch_lightning as pl",
    "after": "import pytorch_lightning as pl\nimport lightning_fp8",
    "cli first": "import lightning_fp8\nimport pytorch_lightning.cli\nimport pytorch_lightning as pl",
}
IN_EITHER_ORDER = """
import lightning_fabric
from lightning_fp8.plugins.trainer import PLUGINS

def made(**kwargs):
    return pl.Trainer(accelerator="cpu", logger=False, **kwargs).precision_plugin

for name, plugin in PLUGINS.items():
    assert type(made(precision=name)) is plugin
    given = plugin(keep_fp32=["head"])
    assert made(plugins=given) is given
    assert lightning_fabric.Fabric(accelerator="cpu", precision=name)._precision.precision == name
finders = len(sys.meta_path)
lightning_fp8.plugins.unregister()
assert len(sys.meta_path) == finders
assert type(made(precision="bf16-mixed")).__module__.startswith("pytorch_lightning.")
for kwargs in ({"precision": "fp8-delayed"}, {"plugins": lightning_fp8.Fp8Precision()}):
    try:
        made(**kwargs)
    except Exception as error:
        assert "is invalid" in str(error) or "Expected one of: Precision" in str(error)
    else:
        raise AssertionError(kwargs)
lightning_fp8.plugins.register()
assert type(made(precision="fp8-delayed")) is lightning_fp8.Fp8Precision
"""


TYPES_OF_A_PRECISION = """
from importlib import import_module
from typing import get_args

def strings():
    fabric, trainer = "fabric.plugins.precision.precision", "pytorch.trainer.connectors.accelerator_connector"
    found = set()
    for name in (fabric, "fabric.connector", "fabric.fabric", "pytorch.trainer.trainer", trainer):
        renamed = name.replace("pytorch.", "pytorch_lightning.").replace("fabric.", "lightning_fabric.", 1)
        for module in (import_module(f"lightning.{name}"), import_module(renamed)):
            union = frozenset(string for part in get_args(module._PRECISION_INPUT) for string in get_args(part))
            found |= {union, frozenset(get_args(getattr(module, "_PRECISION_INPUT_STR", None))) or union}
    return found

fp8 = {"fp8-delayed", "fp8-current", "fp8-block"}
assert all({*fp8, "bf16-mixed", "32-true"} <= one for one in strings())
lightning_fp8.plugins.unregister()
assert all("bf16-mixed" in one and not fp8 & one for one in strings())
assert "fp8" not in str(pl.Trainer.__init__.__annotations__["precision"])
"""


@pytest.mark.parametrize("order", ORDERS)
def test_whichever_is_imported_first(order: str) -> None:
    ran = run_warm("-c", f"import sys\n{ORDERS[order]}\n{IN_EITHER_ORDER}\n{TYPES_OF_A_PRECISION}")
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_plugins_are_of_both_names(precision: str) -> None:
    plugin = trainer(precision=precision).precision_plugin
    assert type(plugin) is PLUGINS[precision]
    assert isinstance(plugin, THEIRS[precision])
    assert type(pickle.loads(pickle.dumps(plugin))) is PLUGINS[precision]
    # the same object in either Trainer
    assert pl.Trainer(plugins=plugin, **QUIET).precision_plugin is plugin
    fabric = lightning_fabric.Fabric(accelerator="cpu", plugins=PLUGINS[precision](keep_fp32=["head"]))
    assert type(fabric._precision) is FabricPrecision
    assert isinstance(fabric._precision, lightning_fabric.plugins.precision.fsdp.FSDPPrecision)
    assert fabric._precision.plugin.keep_fp32 == ("head",)


@pytest.mark.parametrize("precision", ["fp8-delayed", "bf16-true"])
def test_fsdp(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    with_cuda(monkeypatch, (mirror, lightning_fabric))
    for choice in ({"precision": precision}, {"plugins": PLUGINS[precision](keep_fp32=["head"])}):
        plugin = trainer(accelerator="cuda", strategy="fsdp", **choice).precision_plugin
        assert type(plugin) is PLUGINS[precision]
        assert isinstance(plugin, FSDPPrecision)
        assert plugin.keep_fp32 == (("head",) if "plugins" in choice else ())


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_training_is_that_of_a_plain_loop(clip: float | None) -> None:
    """Gradients are clipped, which Lightning's own plugins do only for a LightningModule of their own package."""
    torch.manual_seed(7)
    model = Mirrored()
    trainer(precision="fp8-delayed", gradient_clip_val=clip, max_steps=3, max_epochs=1).fit(model, loader())
    assert same(model, by_hand(3, clip=clip))
    assert same(model, by_hand(3)) is (clip is None)


def fitted(kind: Any, path: Path, epochs: int, **kwargs: Any) -> Any:
    """A model trained and saved by a Trainer of its own package."""
    run = (
        trainer(precision="fp8-delayed", max_epochs=epochs)
        if kind is Mirrored
        else make_trainer(path, max_epochs=epochs)
    )
    model = seeded(kind)
    run.fit(model, loader(), **kwargs)
    run.save_checkpoint(path / f"{epochs}.ckpt")
    return model


@pytest.mark.parametrize("kinds", [(Mirrored, Regression)])
def test_a_run_is_resumed_under_the_other_name(kinds: tuple[Any, Any], tmp_path: Path) -> None:
    whole = fitted(kinds[0], tmp_path, 2)
    fitted(kinds[0], tmp_path, 1)
    resumed = fitted(kinds[1], tmp_path, 2, ckpt_path=tmp_path / "1.ckpt", **TRUSTED)
    assert torch.equal(torch.stack(whole.losses[4:]), torch.stack(resumed.losses))
    assert same(resumed, whole)


def every_callback() -> list[Any]:
    often = ("Fp8Monitor", "ScaleFactorLogger")
    every: dict[str, dict[str, Any]] = {name: {"every_n_steps": 1} for name in often}
    given = {
        **every,
        "Fp8ThroughputMonitor": {"batch_size_fn": len, "window_size": 2},
        "PrecisionSchedule": {"schedule": {2: "bf16"}},
    }
    return [getattr(callbacks, name)(**given.get(name, {})) for name in callbacks.__all__]


def logged(kind: Any, folder: Path) -> dict[str, list[str]]:
    """The metrics of a run with every callback, by name."""
    maker, csv_logger = (mirror.Trainer, MirrorCSVLogger) if kind is Mirrored else (pl.Trainer, CSVLogger)
    logger = csv_logger(folder, "", "")
    kwargs: Any = {**QUIET, "logger": logger, "callbacks": every_callback()}
    run = maker(precision="fp8-delayed", max_steps=4, max_epochs=1, log_every_n_steps=1, **kwargs)
    run.fit(seeded(kind), loader())
    assert [type(callback).__name__ for callback in run.callbacks if callback in kwargs["callbacks"]]
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [row[name] for row in rows if row[name]] for name in rows[0]}


def test_every_callback_logs_the_same(tmp_path: Path) -> None:
    theirs, ours = logged(Mirrored, tmp_path / "mirror"), logged(Regression, tmp_path / "lightning")
    assert theirs.keys() == ours.keys()
    for start in ("fp8/health/", "fp8/input/", "fp8/net.", "fp8/schedule", "train/samples"):
        assert any(name.startswith(start) for name in theirs), start
    numbers = [name for name in theirs if name.startswith(("fp8/", "train/samples"))]
    assert {name: theirs[name] for name in numbers} == {name: ours[name] for name in numbers}
    for name in ("fp8_dtypes.json", "fp8_run.json"):
        records = [json.loads((tmp_path / folder / name).read_text()) for folder in ("mirror", "lightning")]
        assert records[0] == records[1]


def test_throughput_under_a_precision_of_the_other_name_is_refused(tmp_path: Path) -> None:
    monitor = callbacks.Fp8ThroughputMonitor(batch_size_fn=len)
    with pytest.raises(TypeError, match=r"Import `lightning\.pytorch` in place of `pytorch_lightning`, or use"):
        trainer(precision="32-true", callbacks=monitor, logger=MirrorCSVLogger(tmp_path)).fit(Mirrored(), loader())


def test_a_version_without_the_seam_is_told_what_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    lightning_fp8.plugins.unregister()
    monkeypatch.delattr(_AcceleratorConnector, "_check_and_init_precision")
    with pytest.warns(UserWarning, match="lightning_fp8 does not work with pytorch_lightning") as warned:
        lightning_fp8.plugins.register()
    (message,) = (str(warning.message) for warning in warned)
    assert "_check_and_init_precision" in message
    assert "Import `lightning.pytorch`" in message
    # nothing is left half done, and the package in use works
    assert not issubclass(lightning_fp8.Fp8Precision, Precision)
    assert type(pl.Trainer(precision="fp8-delayed", **QUIET).precision_plugin) is lightning_fp8.Fp8Precision
    lightning_fp8.plugins.unregister()
    monkeypatch.undo()
    lightning_fp8.plugins.register()
    assert issubclass(lightning_fp8.Fp8Precision, Precision)
