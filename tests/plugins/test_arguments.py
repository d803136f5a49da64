"""The three plugins by class and by YAML, the arguments of each, and the errors for arguments of another plugin."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import lightning.fabric as lf
import lightning.pytorch as pl
import lightning.pytorch.plugins.precision as stock
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lit import loader, make_trainer, seeded

import lightning_fp8
from lightning_fp8 import (
    Bf16MixedPrecision,
    Bf16TruePrecision,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8FabricPrecision,
    Fp8FSDPPrecision,
    Fp8Precision,
)
from lightning_fp8.plugins.fabric import FABRIC_FSDP_PLUGINS, FABRIC_PLUGINS
from lightning_fp8.plugins.trainer import FSDP_PLUGINS, PLUGINS

# every argument of each, with a value that is not its default
SHARED = {"keep_fp32": ("layer",), "dtype_mismatch": "warn", "reduce_dtype": torch.bfloat16}
FP8 = {
    **SHARED,
    "recipe": DelayedScaling(margin=1),
    "ignore_modules": ("layer",),
    "param_dtype": torch.bfloat16,
    "compute_dtype": torch.bfloat16,
    "fp8_all_gather": True,
    "gemm": "cublaslt",
    "min_features": 64,
    "adapters": True,
    # "fp8" is refused under FSDP
    "frozen_weights": "master",
    "overrides": {"layer": {"wgrad": "bf16"}},
    "bf16_blocks": (1, 2),
}
MIXED = {**SHARED, "param_dtype": torch.float32, "weight_copy": True}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "fp8-delayed": FP8,
    "fp8-current": {**FP8, "recipe": CurrentScaling(margin=1)},
    "fp8-block": {**FP8, "recipe": BlockScaling(power_of_2_scales=True)},
    "bf16-mixed": MIXED,
    "bf16-true": SHARED,
}
# the arguments that select the precision; without them, the class's default
NEEDED: dict[str, dict[str, Any]] = {
    "fp8-current": {"recipe": CurrentScaling()},
    "fp8-block": {"recipe": BlockScaling()},
}
FAMILIES = [PLUGINS, FSDP_PLUGINS, FABRIC_PLUGINS, FABRIC_FSDP_PLUGINS]


@pytest.mark.parametrize("precision", ARGUMENTS)
def test_each_takes_its_own_arguments_in_every_front_end_and_strategy(precision: str) -> None:
    given = ARGUMENTS[precision]
    for family in FAMILIES:
        assert list(family) == list(ARGUMENTS)
        taken = inspect.signature(family[precision]).parameters
        assert set(taken) == set(given)
        by_position = [name for name, parameter in taken.items() if parameter.kind != parameter.KEYWORD_ONLY]
        assert by_position == [name for name in taken if name == "recipe"]
        plugin = family[precision](**given)
        assert plugin.precision == precision
        assert plugin.settings == given
        # so has the plugin of every other front end and strategy, which registration creates from these settings
        for other in FAMILIES:
            assert other[precision](**plugin.settings).settings == given


def test_no_class_makes_another() -> None:
    kinds = [Fp8Precision, Bf16MixedPrecision, Bf16TruePrecision]
    for kind in kinds:
        assert type(kind()) is kind
        assert [isinstance(kind(), other) for other in kinds] == [kind is other for other in kinds]
    assert isinstance(Bf16MixedPrecision(), stock.MixedPrecision)
    assert isinstance(Bf16TruePrecision(), stock.HalfPrecision)


@pytest.mark.parametrize("precision", ARGUMENTS)
def test_class_and_string_train_alike(tmp_path: Path, precision: str) -> None:
    losses = []
    for choice in (
        {"precision": precision},
        {"precision": None, "plugins": PLUGINS[precision](**NEEDED.get(precision, {}))},
    ):
        model = seeded()
        make_trainer(tmp_path, **choice).fit(model, loader())
        losses.append(torch.stack(model.losses))
    assert torch.equal(*losses)


def from_yaml(folder: Path, **trainer: Any) -> pl.Trainer:
    config = folder / "config.yaml"
    # JSON is YAML
    config.write_text(json.dumps({"trainer": {"accelerator": "cpu", "logger": False, **trainer}}))
    return LightningCLI(BoringModel, run=False, args=["--config", str(config)], save_config_callback=None).trainer


@pytest.mark.parametrize("precision", ARGUMENTS)
def test_by_yaml(tmp_path: Path, precision: str) -> None:
    assert type(from_yaml(tmp_path, precision=precision).precision_plugin) is PLUGINS[precision]
    given = {name: str(value) if isinstance(value, torch.dtype) else value for name, value in SHARED.items()}
    if precision == "fp8-delayed":
        given |= {"recipe": {"margin": 1, "amax_history_len": 3}, "min_features": 64}
    if precision == "fp8-current":
        given |= {"recipe": {"precision": "fp8-current", "margin": 1}}
    if precision == "fp8-block":
        given |= {"recipe": {"precision": "fp8-block", "power_of_2_scales": True}}
    name = f"lightning_fp8.{PLUGINS[precision].__name__}"
    made = from_yaml(tmp_path, plugins={"class_path": name, "init_args": given})
    assert made.precision == precision
    plugin = made.precision_plugin
    assert type(plugin) is PLUGINS[precision]
    expected = {**PLUGINS[precision]().settings, **SHARED}
    if precision == "fp8-delayed":
        expected |= {"recipe": DelayedScaling(margin=1, amax_history_len=3), "min_features": 64}
    if precision == "fp8-current":
        expected |= {"recipe": CurrentScaling(margin=1)}
    if precision == "fp8-block":
        expected |= {"recipe": BlockScaling(power_of_2_scales=True)}
    assert plugin.settings == expected


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("fp8-delayed", DelayedScaling()),
        ("fp8-current", CurrentScaling()),
        ("fp8-block", BlockScaling()),
        (CurrentScaling(margin=1), CurrentScaling(margin=1)),
        ({"precision": "fp8-current", "margin": 1}, CurrentScaling(margin=1)),
    ],
)
def test_the_recipe_comes_first(recipe: Any, expected: Any) -> None:
    for kind in (Fp8Precision, Fp8FSDPPrecision, Fp8FabricPrecision):
        plugin = kind(recipe, min_features=32)
        assert (plugin.recipe, plugin.precision, plugin.min_features) == (expected, expected.precision, 32)


RECIPE = "--trainer.plugins.recipe"


@pytest.mark.parametrize(
    ("given", "arguments", "expected"),
    [
        ({"class_path": "lightning_fp8.CurrentScaling"}, [], CurrentScaling()),
        ({"class_path": "lightning_fp8.CurrentScaling", "init_args": {"margin": 1}}, [], CurrentScaling(margin=1)),
        ({"class_path": "lightning_fp8.DelayedScaling", "init_args": {"margin": 1}}, [], DelayedScaling(margin=1)),
        ({"class_path": "lightning_fp8.BlockScaling"}, [], BlockScaling()),
        ({"margin": 1}, [f"{RECIPE}.wgrad=bf16"], DelayedScaling(margin=1, wgrad="bf16")),
        (None, [f"{RECIPE}.precision=fp8-current", f"{RECIPE}.margin=1"], CurrentScaling(margin=1)),
        (
            None,
            [f"{RECIPE}.class_path=lightning_fp8.CurrentScaling", f"{RECIPE}.init_args.margin=1"],
            CurrentScaling(margin=1),
        ),
        # of these jsonargparse would keep the margin alone
        (None, [f"{RECIPE}=fp8-current", f"{RECIPE}.margin=1"], SystemExit),
        (None, [f"{RECIPE}=lightning_fp8.CurrentScaling", f"{RECIPE}.margin=1"], SystemExit),
    ],
)
@pytest.mark.parametrize("in_list", [False, True])
def test_recipes_in_configurations(
    tmp_path: Path, given: Any, arguments: list[str], expected: Any, in_list: bool
) -> None:
    plugin = {"class_path": "lightning_fp8.Fp8Precision", "init_args": {} if given is None else {"recipe": given}}
    (tmp_path / "config.yaml").write_text(json.dumps({"trainer": {"plugins": [plugin] if in_list else plugin}}))
    quiet = ["--trainer.accelerator=cpu", "--trainer.logger=false"]
    args = ["--config", str(tmp_path / "config.yaml"), *arguments, *quiet]
    if expected is SystemExit:
        with pytest.raises(SystemExit):
            LightningCLI(BoringModel, run=False, args=args)
    else:
        assert LightningCLI(BoringModel, run=False, args=args).trainer.precision_plugin.recipe == expected


def test_yaml_refuses_an_argument_of_another_class_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_yaml(
            tmp_path, plugins={"class_path": "lightning_fp8.Bf16TruePrecision", "init_args": {"weight_copy": True}}
        )
    said = capsys.readouterr().err
    assert "Problem with given class_path 'lightning_fp8.Bf16TruePrecision'" in said
    assert "Option 'weight_copy' is not accepted" in said


# the advice in an error is correct: it names every plugin that takes the argument, and no other
@pytest.mark.parametrize("precision", ARGUMENTS)
def test_an_argument_of_another_plugin_is_refused_by_its_name(precision: str) -> None:
    others = {name for given in ARGUMENTS.values() for name in given} - set(ARGUMENTS[precision])
    assert len(others) == {"bf16-mixed": 10, "bf16-true": 12}.get(precision, 1)
    for family in FAMILIES:
        for name in others:
            # for any value, including the other plugin's default
            with pytest.raises(TypeError) as error:
                family[precision](**{name: None})
            message = str(error.value)
            assert message.startswith(f"`{family[precision].__name__}`, for ")
            assert repr(precision) in message.partition(", has no")[0]
            assert f", has no argument `{name}`" in message
            takers = {PLUGINS[other].__name__ for other, given in ARGUMENTS.items() if name in given}
            named = message.partition("it belongs to ")[2]
            assert {kind.__name__ for kind in PLUGINS.values() if f"`{kind.__name__}`" in named} == takers


def test_other_wrong_calls_stay_pythons() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'margins'"):
        Bf16MixedPrecision(margins=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional argument"):
        Fp8Precision(DelayedScaling(), ["head"])  # type: ignore[misc]


class Mine(Fp8Precision):
    """A user's plugin with its own argument, which has the name of an argument of one of ours."""

    def __init__(self, weight_copy: bool, **kwargs: Any) -> None:
        self.weight_copy = weight_copy
        super().__init__(**kwargs)


def test_subclasses_have_arguments_of_their_own() -> None:
    made = pl.Trainer(plugins=Mine(True, min_features=8), accelerator="cpu", logger=False).precision_plugin
    assert isinstance(made, Mine)
    assert (made.weight_copy, made.min_features) == (True, 8)


def test_names_that_are_exported() -> None:
    for kind in PLUGINS.values():
        assert getattr(lightning_fp8, kind.__name__) is kind
        assert kind.__name__ in lightning_fp8.__all__


def test_parameters_stay_as_they_came_in_fabric_too() -> None:
    """The default of ``param_dtype`` reaches the plugin that Fabric creates, and does not count as a request."""
    fabric = lf.Fabric(accelerator="cpu", devices=1, plugins=Bf16MixedPrecision())
    model = fabric.setup(torch.nn.Linear(4, 4, dtype=torch.bfloat16))
    assert model.weight.dtype == torch.bfloat16
