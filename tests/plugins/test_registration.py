"""The precision strings in Trainer, Fabric and every strategy, and their removal."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import subprocess
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import lightning.fabric as lf
import lightning.fabric.connector as fabric_connector
import lightning.fabric.plugins.precision as fabric_stock
import lightning.pytorch as pl
import lightning.pytorch.plugins.precision as stock
import lightning.pytorch.trainer.connectors.accelerator_connector as trainer_connector
import pytest
import torch
from connectors import trainer, with_cuda
from lightning.fabric import strategies as fabric_strategies
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision as FabricFSDPPrecision
from lightning.pytorch import strategies
from warm import run_warm

import lightning_fp8
from lightning_fp8 import Bf16MixedPrecision, Bf16TruePrecision, Fp8Precision
from lightning_fp8.plugins.fabric import FABRIC_FSDP_PLUGINS, FABRIC_PLUGINS
from lightning_fp8.plugins.settings import PRECISIONS
from lightning_fp8.plugins.trainer import FSDP_PLUGINS, PLUGINS

# the arguments that select the precision; without them, the class's default
NEEDED: dict[str, dict[str, Any]] = {
    "fp8-current": {"recipe": lightning_fp8.CurrentScaling()},
    "fp8-block": {"recipe": lightning_fp8.BlockScaling()},
}
STOCK = {"bf16-mixed": stock.MixedPrecision, "bf16-true": stock.HalfPrecision}
FABRIC_STOCK = {"bf16-mixed": fabric_stock.MixedPrecision, "bf16-true": fabric_stock.HalfPrecision}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    lightning_fp8.register()
    yield
    lightning_fp8.unregister()
    lightning_fp8.register()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", ["auto", "ddp", "ddp_find_unused_parameters_true", "ddp_spawn"])
def test_trainer_string(precision: str, strategy: str) -> None:
    made = trainer(precision=precision, strategy=strategy)
    assert made.precision == precision
    assert type(made.precision_plugin) is PLUGINS[precision]
    assert isinstance(made.precision_plugin, STOCK.get(precision, stock.Precision))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "strategy", [strategies.SingleDeviceStrategy, strategies.DDPStrategy, strategies.ModelParallelStrategy]
)
def test_trainer_strategy_object(precision: str, strategy: Any) -> None:
    made = trainer(
        precision=precision, strategy=strategy() if strategy is not strategies.SingleDeviceStrategy else "auto"
    )
    assert type(made.precision_plugin) is PLUGINS[precision]
    assert made.strategy.precision_plugin is made.precision_plugin
    plugin = PLUGINS[precision](**NEEDED.get(precision, {}))
    by_plugin = trainer(
        plugins=plugin, strategy="auto" if strategy is strategies.SingleDeviceStrategy else made.strategy.__class__()
    )
    assert by_plugin.precision == precision
    assert type(by_plugin.precision_plugin) is PLUGINS[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", ["fsdp", strategies.FSDPStrategy])
def test_trainer_fsdp(monkeypatch: pytest.MonkeyPatch, precision: str, strategy: Any) -> None:
    with_cuda(monkeypatch)
    asked = PLUGINS[precision](**NEEDED.get(precision, {}), keep_fp32=["head"], reduce_dtype="bfloat16")
    for choice in ({"precision": precision}, {"plugins": asked}):
        chosen = strategy if isinstance(strategy, str) else strategy()
        made = trainer(accelerator="cuda", strategy=chosen, **choice)
        plugin = made.precision_plugin
        assert type(plugin) is FSDP_PLUGINS[precision]
        assert isinstance(plugin, stock.FSDPPrecision)
        assert made.precision == precision
        assert plugin.keep_fp32 == (("head",) if "plugins" in choice else ())
        config = plugin.mixed_precision_config
        reduce_dtype = torch.bfloat16 if "plugins" in choice else torch.float32
        assert (config.param_dtype, config.reduce_dtype) == (torch.bfloat16, reduce_dtype)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fabric_fsdp(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    with_cuda(monkeypatch)
    made = lf.Fabric(accelerator="cuda", devices=1, strategy="fsdp", precision=precision)  # type: ignore[arg-type]
    assert type(made._precision) is FABRIC_FSDP_PLUGINS[precision]
    assert isinstance(made._precision, FabricFSDPPrecision)
    assert made._precision.precision == precision


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", ["auto", "ddp", fabric_strategies.ModelParallelStrategy])
def test_fabric(precision: str, strategy: Any) -> None:
    def chosen() -> Any:
        return strategy if isinstance(strategy, str) else strategy(parallelize_fn=lambda model, mesh: model)

    made = lf.Fabric(accelerator="cpu", devices=1, strategy=chosen(), precision=precision)  # type: ignore[arg-type]
    assert type(made._precision) is FABRIC_PLUGINS[precision]
    assert isinstance(made._precision, FABRIC_STOCK.get(precision, fabric_stock.Precision))
    assert made._precision.precision == precision
    plugin = PLUGINS[precision](keep_fp32=["head"])
    from_plugin = lf.Fabric(accelerator="cpu", devices=1, strategy=chosen(), plugins=plugin)
    assert type(from_plugin._precision) is FABRIC_PLUGINS[precision]
    assert from_plugin._precision.settings == plugin.settings


class _Connector:
    """A connector as the replaced method sees it, with a strategy that cannot be built on this machine."""

    def __init__(self, strategy: type, precision: str | None, plugin: Any, fabric: bool) -> None:
        self.strategy = object.__new__(strategy)
        self._strategy_flag = self.strategy
        self.accelerator = None
        names = ("_precision_input", "_precision_instance") if fabric else ("_precision_flag", "_precision_plugin_flag")
        for name, value in zip(names, (precision, plugin), strict=True):
            setattr(self, name, value)

    def _validate_precision_choice(self) -> None:
        pass


FOREIGN = [
    (trainer_connector._AcceleratorConnector, strategies.DeepSpeedStrategy, False, "DeepSpeedPrecision"),
    (trainer_connector._AcceleratorConnector, strategies.XLAStrategy, False, "XLAPrecision"),
    (trainer_connector._AcceleratorConnector, strategies.SingleDeviceXLAStrategy, False, "XLAPrecision"),
    (fabric_connector._Connector, fabric_strategies.DeepSpeedStrategy, True, "DeepSpeedPrecision"),
    (fabric_connector._Connector, fabric_strategies.XLAFSDPStrategy, True, "XLAPrecision"),
]


@pytest.mark.parametrize(("connector", "strategy", "fabric", "plugin_name"), FOREIGN)
def test_xla_and_deepspeed(
    monkeypatch: pytest.MonkeyPatch, connector: Any, strategy: type, fabric: bool, plugin_name: str
) -> None:
    module = fabric_connector if fabric else trainer_connector
    monkeypatch.setattr(module, plugin_name, lambda precision: ("Lightning's own", precision))
    method = connector._check_and_init_precision
    for string in ("bf16-mixed", "bf16-true"):
        assert method(_Connector(strategy, string, None, fabric)) == ("Lightning's own", string)
    for plugin, string in ((None, "fp8-delayed"), (Fp8Precision(), "32-true")):
        with pytest.raises(ValueError, match=f"'fp8-delayed'.* does not run under {strategy.__name__}"):
            method(_Connector(strategy, string, plugin, fabric))


@pytest.mark.parametrize("make", [trainer, lf.Fabric])
def test_unknown_string_fails_and_the_message_lists_ours(make: Any) -> None:
    with pytest.raises(ValueError, match="fp8-delyed") as error:
        make(precision="fp8-delyed")
    assert "'fp8-delayed'" in str(error.value)
    assert "'bf16-mixed'" in str(error.value)


@pytest.mark.parametrize("make", [trainer, lf.Fabric])
@pytest.mark.parametrize(
    ("asked", "meant"),
    [("fp8", "fp8-delayed"), ("fp8_delayed", "fp8-delayed"), ("FP8-delayed", "fp8-delayed"), ("bf16-mix", "bf16-mixed"),
     ("bf16_true", "bf16-true"), ("float8", "fp8-delayed"), ("16-mix", None), ("int8", None), ("transformer", None),
     (8, None)],
)  # fmt: skip
def test_a_misspelt_string_gets_the_right_one(make: Any, asked: Any, meant: str | None) -> None:
    with pytest.raises(ValueError, match="is invalid") as error:
        make(precision=asked)
    lightnings, _, said = str(error.value).partition(" Did you mean ")
    assert said == (f"{meant!r}?" if meant else "")
    assert lightnings.startswith(f"Precision {asked!r} is invalid. Allowed precision values: (")
    assert lightnings.endswith(")")


def test_an_error_about_another_argument_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match="invalid strategy name") as error:
        trainer(precision="fp8", strategy="nonsense")
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("precision", "cls"),
    [("32-true", stock.Precision), ("16-true", stock.HalfPrecision), ("64-true", stock.DoublePrecision)],
)
def test_other_strings_stay_lightnings(precision: Any, cls: type) -> None:
    assert type(trainer(precision=precision).precision_plugin) is cls
    assert type(trainer(plugins=cls() if cls is not stock.HalfPrecision else cls("16-true")).precision_plugin) is cls


def test_plugin_and_string_together_are_refused_by_lightning() -> None:
    with pytest.raises(ValueError, match="Choose one"):
        trainer(precision="fp8-delayed", plugins=Fp8Precision())


# where Lightning has the types of a precision
TYPES = {
    "lightning.fabric.plugins.precision.precision": ("_PRECISION_INPUT", "_PRECISION_INPUT_STR"),
    "lightning.fabric.connector": ("_PRECISION_INPUT", "_PRECISION_INPUT_STR"),
    "lightning.fabric.fabric": ("_PRECISION_INPUT",),
    "lightning.pytorch.trainer.trainer": ("_PRECISION_INPUT", "_PRECISION_INPUT_STR"),
    "lightning.pytorch.trainer.connectors.accelerator_connector": ("_PRECISION_INPUT", "_PRECISION_INPUT_STR"),
}


def seam() -> list[Any]:
    return [
        vars(trainer_connector._AcceleratorConnector)["_check_and_init_precision"],
        vars(fabric_connector._Connector)["_check_and_init_precision"],
        *(getattr(import_module(module), name) for module, names in TYPES.items() for name in names),
        inspect.unwrap(pl.Trainer.__init__).__annotations__["precision"],
        vars(strategies.Strategy)["setup_precision_plugin"],
        *(vars(lf.Fabric)[name] for name in ("setup", "setup_module", "save", "load")),
    ]


def test_register_is_idempotent_and_unregister_restores_lightning_exactly() -> None:
    registered = seam()
    lightning_fp8.register()
    assert all(a is b for a, b in zip(seam(), registered, strict=True))
    lightning_fp8.unregister()
    original = seam()
    assert all(a is not b for a, b in zip(original, registered, strict=True))
    for place in original:
        assert "lightning_fp8" not in getattr(place, "__module__", "")
        assert "lightning_fp8" not in getattr(place, "__globals__", {}).get("__name__", "")
    lightning_fp8.unregister()
    with pytest.raises(ValueError, match="is invalid"):
        trainer(precision="fp8-delayed")
    assert type(trainer(precision="bf16-mixed").precision_plugin) is stock.MixedPrecision
    lightning_fp8.register()
    lightning_fp8.unregister()
    assert all(a is b for a, b in zip(seam(), original, strict=True))


def types_of_bf16() -> list[type]:
    """The plugins that the bf16 strings create in a Trainer and in Fabric."""
    made = [trainer(precision=precision).precision_plugin for precision in STOCK]
    return [*map(type, made), *(type(lf.Fabric(accelerator="cpu", precision=name)._precision) for name in STOCK)]


OURS = [*(PLUGINS[precision] for precision in STOCK), *(FABRIC_PLUGINS[precision] for precision in STOCK)]
LIGHTNINGS = [*STOCK.values(), *FABRIC_STOCK.values()]


def test_bf16_can_stay_lightnings_and_become_ours_again() -> None:
    assert types_of_bf16() == OURS
    registered = seam()
    for _ in range(2):
        lightning_fp8.register(bf16=False)
        assert types_of_bf16() == LIGHTNINGS
        assert type(trainer(precision="fp8-delayed").precision_plugin) is Fp8Precision
        # the class can still be passed; the string selects Lightning's own plugin
        assert type(trainer(plugins=Bf16MixedPrecision()).precision_plugin) is Bf16MixedPrecision
        made = lf.Fabric(accelerator="cpu", plugins=Bf16TruePrecision())
        assert type(made._precision) is FABRIC_PLUGINS["bf16-true"]
    for _ in range(2):
        lightning_fp8.register()
        assert types_of_bf16() == OURS
    assert all(a is b for a, b in zip(seam(), registered, strict=True))


def test_undone_after_bf16_was_declined_and_registered_anew() -> None:
    lightning_fp8.unregister()
    original = seam()
    lightning_fp8.register(bf16=False)
    lightning_fp8.unregister()
    assert all(a is b for a, b in zip(seam(), original, strict=True))
    assert types_of_bf16() == LIGHTNINGS
    lightning_fp8.register()
    assert types_of_bf16() == OURS


FRESH = """
import lightning.pytorch as pl
import lightning.pytorch.plugins.precision as stock
import lightning_fp8

def kinds():
    trainers = [pl.Trainer(accelerator="cpu", logger=False, precision=name) for name in ("bf16-mixed", "bf16-true")]
    return [type(trainer.precision_plugin) for trainer in trainers]

lightnings = [stock.MixedPrecision, stock.HalfPrecision]
ours = [lightning_fp8.Bf16MixedPrecision, lightning_fp8.Bf16TruePrecision]
"""
CHECKS = {
    None: "assert kinds() == ours; lightning_fp8.register(bf16=False); assert kinds() == lightnings",
    "1": "assert kinds() == ours",
    "0": "assert kinds() == lightnings; lightning_fp8.register(bf16=True); assert kinds() == ours",
}


def run_fresh(program: str, value: str | None) -> subprocess.CompletedProcess[str]:
    """Run a program in a separate process, with a value of ``LIGHTNING_FP8_REPLACE_BF16``."""
    env = {name: text for name, text in os.environ.items() if name != "LIGHTNING_FP8_REPLACE_BF16"}
    if value is not None:
        env["LIGHTNING_FP8_REPLACE_BF16"] = value
    return run_warm("-c", program, env=env)


@pytest.mark.parametrize("value", CHECKS)
def test_importing_the_package_replaces_bf16_unless_told_not_to(value: str | None) -> None:
    fp8 = 'pl.Trainer(accelerator="cpu", logger=False, precision="fp8-delayed").precision_plugin'
    run = run_fresh(f"{FRESH}{CHECKS[value]}; assert type({fp8}) is lightning_fp8.Fp8Precision", value)
    assert run.returncode == 0, run.stderr[-3000:]


def test_another_value_of_the_variable_is_refused_at_import() -> None:
    run = run_fresh("import lightning_fp8", "no")
    assert run.returncode == 1
    assert "ValueError: LIGHTNING_FP8_REPLACE_BF16 must be 1, to replace" in run.stderr
    assert "or 0, to leave them alone; got 'no'." in run.stderr


def test_a_lightning_without_the_seam_is_told_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    lightning_fp8.unregister()
    before = seam()[1:]
    monkeypatch.delattr(trainer_connector._AcceleratorConnector, "_check_and_init_precision")
    with pytest.raises(RuntimeError, match=r"has no `.*_AcceleratorConnector._check_and_init_precision`") as error:
        lightning_fp8.register()
    assert "Trainer(plugins=lightning_fp8.Fp8Precision())" in str(error.value)
    monkeypatch.undo()
    assert all(a is b for a, b in zip(seam()[1:], before, strict=True))


PLACES = [
    (strategies.Strategy, "setup_precision_plugin"),
    (lf.Fabric, "setup"),
    (lf.Fabric, "setup_module"),
    (lf.Fabric, "save"),
    (lf.Fabric, "load"),
]


@pytest.mark.parametrize(("owner", "name"), PLACES)
def test_methods_that_say_more_keep_their_signatures_and_are_missed_by_name(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    registered = inspect.signature(getattr(owner, name))
    lightning_fp8.unregister()
    assert inspect.signature(getattr(owner, name)) == registered
    before = [place for place in seam() if place is not vars(owner)[name]]
    monkeypatch.delattr(owner, name)
    with pytest.raises(RuntimeError, match=rf"has no `lightning\..*\.{owner.__name__}\.{name}`"):
        lightning_fp8.register()
    monkeypatch.undo()
    assert all(any(a is b for b in seam()) for a in before)


class Mine(stock.Precision):
    """A user's plugin with its own settings and conversion."""

    def __init__(self, settings: list[str]) -> None:
        self.settings = settings

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        self.settings.append(type(module).__name__)
        return module


def test_plugins_that_are_not_ours_are_left_as_they_are() -> None:
    for kwargs in ({"precision": "32-true"}, {"precision": "16-true"}, {"plugins": Mine(["a"])}):
        plugin = trainer(**kwargs).precision_plugin
        before = dict(vars(plugin))
        for other in (copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin)), copy.copy(plugin)):
            assert type(other) is type(plugin)
            assert vars(other) == before
        if isinstance(plugin, Mine):
            made = copy.deepcopy(plugin)
            made.convert_module(torch.nn.Linear(2, 2))
            assert (made.settings, plugin.settings) == (["a", "Linear"], ["a"])


@pytest.mark.parametrize(
    "choice", [["--trainer.precision=fp8-delayed"], ["--trainer.plugins=lightning_fp8.Fp8Precision"]]
)
def test_stock_lightning_cli(monkeypatch: pytest.MonkeyPatch, choice: list[str]) -> None:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    args = [*choice, "--trainer.accelerator=cpu", "--trainer.logger=false"]
    assert LightningCLI(BoringModel, run=False, args=args).trainer.precision == "fp8-delayed"
    lightning_fp8.unregister()
    if "precision" in choice[0]:
        with pytest.raises(SystemExit):
            LightningCLI(BoringModel, run=False, args=args)


def test_env_variable_of_fabric() -> None:
    os.environ["LT_CLI_USED"], os.environ["LT_PRECISION"] = "1", "fp8-delayed"
    try:
        assert lf.Fabric(accelerator="cpu", devices=1)._precision.precision == "fp8-delayed"
    finally:
        del os.environ["LT_CLI_USED"], os.environ["LT_PRECISION"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_plugins_copy_and_pickle(precision: Any) -> None:
    plugin = PLUGINS[precision](keep_fp32=["a"])
    for other in (copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))):
        assert type(other) is type(plugin)
        assert other.settings == plugin.settings


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"param_dtype": torch.float16}, ValueError, "torch.float32 or torch.bfloat16, got torch.float16"),
        ({"recipe": {"margin": -1}}, ValueError, "`margin`"),
        ({"recipe": "default"}, ValueError, "must be one of 'fp8-delayed', 'fp8-current', 'fp8-block', got 'default'"),
        ({"recipe": {"class_path": "mine.Recipe"}}, ValueError, "'DelayedScaling', .*'BlockScaling', got 'Recipe'"),
        ({"recipe": 1}, TypeError, "a CurrentScaling or a BlockScaling or a mapping"),
        ({"ignore_modules": "head"}, TypeError, "sequence of patterns"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Fp8Precision(**kwargs)
