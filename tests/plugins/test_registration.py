"""The precision strings in Trainer, Fabric and every strategy, and their removal."""

from __future__ import annotations

import inspect
import os
import subprocess
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from types import SimpleNamespace
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
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from warm import run_warm

from lightning_fp8 import Fp8Precision
from lightning_fp8.plugins import Bf16MixedPrecision, Bf16TruePrecision, register, unregister
from lightning_fp8.plugins.fabric import FabricPrecision
from lightning_fp8.plugins.settings import PRECISIONS
from lightning_fp8.plugins.trainer import PLUGINS, plugin_of

STOCK = {"bf16-mixed": stock.MixedPrecision, "bf16-true": stock.HalfPrecision}
FABRIC_STOCK = {"bf16-mixed": fabric_stock.MixedPrecision, "bf16-true": fabric_stock.HalfPrecision}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register()
    yield
    unregister()
    register()


def parallel(strategy: Any) -> Any:
    return strategy(parallelize_fn=lambda model, mesh: model)


STRATEGIES = ["ddp", "ddp_find_unused_parameters_true", "ddp_spawn", strategies.ModelParallelStrategy, "fsdp"]


def with_each(strategies: list[Any]) -> list[tuple[str, Any]]:
    """Every string with the default strategy, and one of each plugin with each of the others."""
    return [*product(PRECISIONS, ["auto"]), *product(["fp8-delayed", "bf16-mixed", "bf16-true"], strategies)]


@pytest.mark.parametrize(("precision", "strategy"), with_each(STRATEGIES))
def test_trainer(precision: str, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = "cuda" if strategy == "fsdp" else "cpu"
    if strategy == "fsdp":
        with_cuda(monkeypatch)
    given = plugin_of(precision)
    for choice in ({"precision": precision}, {"plugins": given}):
        chosen = strategy if isinstance(strategy, str) else strategy()
        made = trainer(strategy=chosen, accelerator=accelerator, **choice)
        assert made.precision == precision
        assert type(made.precision_plugin) is PLUGINS[precision]
        assert isinstance(made.precision_plugin, (STOCK.get(precision, stock.Precision)))
        assert made.strategy.precision_plugin is made.precision_plugin
        assert isinstance(made.precision_plugin, stock.FSDPPrecision)
    assert made.precision_plugin is given


@pytest.mark.parametrize(("precision", "strategy"), with_each(["ddp", fabric_strategies.ModelParallelStrategy, "fsdp"]))
def test_fabric(precision: str, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = "cuda" if strategy == "fsdp" else "cpu"
    if strategy == "fsdp":
        with_cuda(monkeypatch)
    given = plugin_of(precision)
    for choice in ({"precision": precision}, {"plugins": given}):
        chosen = strategy if isinstance(strategy, str) else parallel(strategy)
        made = lf.Fabric(accelerator=accelerator, devices=1, strategy=chosen, **choice)._precision
        assert isinstance(made, FabricPrecision)
        assert isinstance(made, FabricFSDPPrecision)
        assert type(made.plugin) is PLUGINS[precision]
        assert made.precision == made.plugin.precision == precision
    assert made.plugin is not given


@pytest.mark.parametrize("kind", [trainer, lf.Fabric])
def test_fsdp(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch)
    for precision in PRECISIONS:
        plugin = PLUGINS[precision](reduce_dtype="bfloat16")
        made = kind(accelerator="cuda", devices=1, strategy="fsdp", plugins=plugin)
        config = made.strategy.mixed_precision_config
        assert (config.param_dtype, config.reduce_dtype, config.buffer_dtype) == (torch.bfloat16, torch.bfloat16, None)
    with pytest.raises(ValueError, match="`frozen_weights='fp8'` does not work under FSDP"):
        kind(accelerator="cuda", devices=1, strategy="fsdp", plugins=Fp8Precision(frozen_weights="fp8"))


@pytest.mark.parametrize("strategy", [strategies.FSDPStrategy, strategies.DDPStrategy])
def test_norms_of_shards_clip_nothing(strategy: Any) -> None:
    """Lightning refuses to clip by norm under FSDP, where a process has the norm of its shards alone."""
    for plugin in (Fp8Precision(), Bf16MixedPrecision(), Bf16TruePrecision()):
        model = plugin.convert_module(nn.Linear(16, 16))
        model._trainer = SimpleNamespace(strategy=strategy())
        optimizer = torch.optim.SGD(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if strategy is strategies.FSDPStrategy:
            with pytest.raises(MisconfigurationException, match="`gradient_clip_algorithm='norm'` is currently not"):
                plugin.clip_gradients(optimizer, 1e-2)
        else:
            plugin.clip_gradients(optimizer, 1e-2)
            norm = torch.stack([parameter.grad.float().norm() for parameter in model.parameters()]).norm()
            assert norm == pytest.approx(1e-2, rel=1e-2)


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
    (trainer_connector, strategies.DeepSpeedStrategy, "DeepSpeedPrecision"),
    (trainer_connector, strategies.XLAStrategy, "XLAPrecision"),
    (trainer_connector, strategies.SingleDeviceXLAStrategy, "XLAPrecision"),
    (fabric_connector, fabric_strategies.DeepSpeedStrategy, "DeepSpeedPrecision"),
    (fabric_connector, fabric_strategies.XLAFSDPStrategy, "XLAPrecision"),
]


@pytest.mark.parametrize(("module", "strategy", "plugin_name"), FOREIGN)
def test_xla_and_deepspeed(monkeypatch: pytest.MonkeyPatch, module: Any, strategy: type, plugin_name: str) -> None:
    monkeypatch.setattr(module, plugin_name, lambda precision: ("Lightning's own", precision))
    fabric = module is fabric_connector
    method = (module._Connector if fabric else module._AcceleratorConnector)._check_and_init_precision
    for string in ("bf16-mixed", "bf16-true"):
        assert method(_Connector(strategy, string, None, fabric)) == ("Lightning's own", string)
    for plugin, string in ((None, "fp8-delayed"), (Fp8Precision(), "32-true")):
        with pytest.raises(ValueError, match=f"'fp8-delayed'.* does not run under {strategy.__name__}"):
            method(_Connector(strategy, string, plugin, fabric))


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("fp8", "fp8-delayed"), ("FP8-delayed", "fp8-delayed"), ("bf16_true", "bf16-true"), ("float8", "fp8-delayed"),
     ("16-mix", None), (8, None)],
)  # fmt: skip
def test_a_misspelt_string_gets_the_right_one(asked: Any, meant: str | None) -> None:
    for make in (trainer, lf.Fabric):
        with pytest.raises(ValueError, match="is invalid") as error:
            make(precision=asked)
        lightnings, _, said = str(error.value).partition(" Did you mean ")
        assert said == (f"{meant!r}?" if meant else "")
        assert "'fp8-delayed'" in lightnings


@pytest.mark.parametrize(("precision", "options"), [("16-mixed", {}), (16, {"strategy": "ddp"})])
@pytest.mark.filterwarnings("ignore:.*fp16 is not supported on CPU")
def test_what_lightning_replaces_with_bf16_is_ours(precision: Any, options: dict[str, Any]) -> None:
    """On a CPU, Lightning replaces fp16 by ``bf16-mixed``, with a warning."""
    options = {"accelerator": "cpu", "devices": 1, **options, "precision": precision}
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"):
        made = trainer(**options)
    assert (type(made.precision_plugin), made.precision) == (Bf16MixedPrecision, "bf16-mixed")
    assert made.strategy.precision_plugin is made.precision_plugin
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"):
        plugin = lf.Fabric(**options)._precision
    assert (type(plugin), type(plugin.plugin), plugin.precision) == (FabricPrecision, Bf16MixedPrecision, "bf16-mixed")
    register(bf16=False)
    assert type(trainer(**options).precision_plugin) is stock.MixedPrecision
    assert type(lf.Fabric(**options)._precision) is fabric_stock.MixedPrecision


def test_fp16_on_a_gpu_and_plugins_stay_lightnings(monkeypatch: pytest.MonkeyPatch) -> None:
    given = stock.MixedPrecision("bf16-mixed", "cpu")
    assert trainer(plugins=given).precision_plugin is given
    with_cuda(monkeypatch)
    made = trainer(precision="16-mixed", accelerator="cuda")
    assert (type(made.precision_plugin), made.precision) == (stock.MixedPrecision, "16-mixed")


def test_what_stays_lightnings() -> None:
    with pytest.raises(ValueError, match="invalid strategy name") as error:
        trainer(precision="fp8", strategy="nonsense")
    assert "Did you mean" not in str(error.value)
    with pytest.raises(ValueError, match="Choose one"):
        trainer(precision="fp8-delayed", plugins=Fp8Precision())
    for precision, kind in (("32-true", stock.Precision), ("64-true", stock.DoublePrecision)):
        given = kind()
        assert type(trainer(precision=precision).precision_plugin) is kind
        assert trainer(plugins=given).precision_plugin is given


# --- the patch, and its removal ---

# where Lightning has the types of a precision
TYPES = {
    "lightning.fabric.plugins.precision.precision": ("_PRECISION_INPUT", "_PRECISION_INPUT_STR"),
    "lightning.fabric.connector": ("_PRECISION_INPUT", "_PRECISION_INPUT_STR"),
    "lightning.fabric.fabric": ("_PRECISION_INPUT",),
    "lightning.pytorch.trainer.trainer": ("_PRECISION_INPUT", "_PRECISION_INPUT_STR"),
    "lightning.pytorch.trainer.connectors.accelerator_connector": ("_PRECISION_INPUT", "_PRECISION_INPUT_STR"),
}
METHODS = [
    (trainer_connector._AcceleratorConnector, "_check_and_init_precision"),
    (fabric_connector._Connector, "_check_and_init_precision"),
    (strategies.Strategy, "setup_precision_plugin"),
    *((lf.Fabric, name) for name in ("setup", "setup_module", "save", "load")),
]


def seam() -> list[Any]:
    return [
        *(vars(owner).get(name) for owner, name in METHODS),
        *(getattr(import_module(module), name) for module, names in TYPES.items() for name in names),
        inspect.unwrap(pl.Trainer.__init__).__annotations__["precision"],
    ]


def kinds() -> list[type]:
    """The plugins that the bf16 strings create in a Trainer and in Fabric."""
    made = [trainer(precision=precision).precision_plugin for precision in STOCK]
    return [*map(type, made), *(type(lf.Fabric(accelerator="cpu", precision=name)._precision) for name in STOCK)]


OURS = [Bf16MixedPrecision, Bf16TruePrecision, FabricPrecision, FabricPrecision]
LIGHTNINGS = [*STOCK.values(), *FABRIC_STOCK.values()]


def test_register_is_idempotent_and_unregister_restores_lightning_exactly() -> None:
    registered = seam()
    register()
    assert all(a is b for a, b in zip(seam(), registered, strict=True))
    # those that call what they replace
    signatures = [inspect.signature(getattr(*place)) for place in METHODS[2:]]
    for _ in range(2):
        unregister()
        original = seam()
        assert all(a is not b for a, b in zip(original, registered, strict=True))
    assert [inspect.signature(getattr(*place)) for place in METHODS[2:]] == signatures
    for place in original:
        assert "lightning_fp8" not in getattr(place, "__module__", "")
        assert "lightning_fp8" not in getattr(place, "__globals__", {}).get("__name__", "")
    with pytest.raises(ValueError, match="is invalid"):
        trainer(precision="fp8-delayed")
    assert kinds() == LIGHTNINGS
    register(bf16=False)
    unregister()
    assert all(a is b for a, b in zip(seam(), original, strict=True))


def test_bf16_can_stay_lightnings_and_become_ours_again() -> None:
    assert kinds() == OURS
    registered = seam()
    for _ in range(2):
        register(bf16=False)
        assert kinds() == LIGHTNINGS
        assert type(trainer(precision="fp8-delayed").precision_plugin) is Fp8Precision
        # the class can still be passed; the string selects Lightning's own plugin
        assert type(trainer(plugins=Bf16MixedPrecision()).precision_plugin) is Bf16MixedPrecision
        made = lf.Fabric(accelerator="cpu", plugins=Bf16TruePrecision())
        assert type(made._precision) is FabricPrecision
    register()
    assert kinds() == OURS
    assert all(a is b for a, b in zip(seam(), registered, strict=True))


FRESH = """
import lightning.pytorch as pl
import lightning.pytorch.plugins.precision as stock
import lightning_fp8
from lightning_fp8.plugins import register

def kinds():
    trainers = [pl.Trainer(accelerator="cpu", logger=False, precision=name) for name in ("bf16-mixed", "bf16-true")]
    return [type(trainer.precision_plugin) for trainer in trainers]

lightnings = [stock.MixedPrecision, stock.HalfPrecision]
ours = [lightning_fp8.plugins.Bf16MixedPrecision, lightning_fp8.plugins.Bf16TruePrecision]
fp8 = pl.Trainer(accelerator="cpu", logger=False, precision="fp8-delayed").precision_plugin
assert type(fp8) is lightning_fp8.Fp8Precision
"""
CHECKS = {
    None: "assert kinds() == ours; register(bf16=False); assert kinds() == lightnings",
    "0": "assert kinds() == lightnings; register(bf16=True); assert kinds() == ours",
}


def run_fresh(program: str, value: str | None) -> subprocess.CompletedProcess[str]:
    """Run a program in a separate process, with a value of ``LIGHTNING_FP8_REPLACE_BF16``."""
    env = {name: text for name, text in os.environ.items() if name != "LIGHTNING_FP8_REPLACE_BF16"}
    return run_warm("-c", program, env=env if value is None else {**env, "LIGHTNING_FP8_REPLACE_BF16": value})


@pytest.mark.parametrize("value", CHECKS)
def test_importing_the_package_replaces_bf16_unless_told_not_to(value: str | None) -> None:
    run = run_fresh(f"{FRESH}{CHECKS[value]}", value)
    assert run.returncode == 0, run.stderr[-3000:]


def test_another_value_of_the_variable_is_refused_at_import() -> None:
    run = run_fresh("import lightning_fp8", "no")
    assert run.returncode == 1
    assert "ValueError: LIGHTNING_FP8_REPLACE_BF16 must be 1" in run.stderr


@pytest.mark.parametrize(("owner", "name"), METHODS)
def test_a_lightning_without_a_place_is_told_plainly(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    unregister()
    before = seam()
    monkeypatch.delattr(owner, name)
    with pytest.raises(RuntimeError, match=rf"has no `lightning\..*\.{owner.__name__}\.{name}`") as error:
        register()
    assert "Trainer(plugins=lightning_fp8.Fp8Precision())" in str(error.value)
    monkeypatch.undo()
    assert all(a is b for a, b in zip(seam(), before, strict=True))


@pytest.mark.parametrize("choice", ["--trainer.precision=fp8-delayed", "--trainer.plugins=lightning_fp8.Fp8Precision"])
def test_stock_lightning_cli(choice: str) -> None:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    args = [choice, "--trainer.accelerator=cpu", "--trainer.logger=false"]
    assert LightningCLI(BoringModel, run=False, args=args).trainer.precision == "fp8-delayed"
    unregister()
    if "precision" in choice:
        with pytest.raises(SystemExit):
            LightningCLI(BoringModel, run=False, args=args)


def test_env_variable_of_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_CLI_USED", "1")
    monkeypatch.setenv("LT_PRECISION", "fp8-delayed")
    assert lf.Fabric(accelerator="cpu", devices=1)._precision.precision == "fp8-delayed"
