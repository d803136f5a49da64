"""The arguments of the three plugins, by class and by YAML, and the errors for those of another plugin."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import lightning.fabric as lf
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, Fp8Precision, MXScaling
from lightning_fp8.plugins.fabric import FabricPrecision
from lightning_fp8.plugins.trainer import PLUGINS
from lightning_fp8.scalings.recipe import RECIPES

# every argument of each, with a value that is not its default
SHARED = {"keep_fp32": ("layer",), "dtype_mismatch": "warn", "reduce_dtype": torch.bfloat16}
FP8 = {
    **SHARED,
    "recipe": DelayedScaling(margin=1),
    "ignore_modules": ("layer",),
    "param_dtype": torch.bfloat16,
    "compute_dtype": torch.bfloat16,
    "fp8_all_gather": True,
    "min_features": 64,
    "frozen_weights": "fp8",
    "overrides": {"layer": {"wgrad": "bf16"}},
}
MIXED = {**SHARED, "param_dtype": torch.float32}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "fp8-delayed": FP8,
    "fp8-current": {**FP8, "recipe": CurrentScaling(margin=1)},
    "fp8-block": {**FP8, "recipe": BlockScaling(power_of_2_scales=True)},
    "bf16-mixed": MIXED,
    "bf16-true": SHARED,
}


@pytest.mark.parametrize("precision", ARGUMENTS)
def test_a_plugin_is_shown_as_the_call_that_makes_it(precision: str) -> None:
    names = {kind.__name__: kind for kind in (*PLUGINS.values(), *RECIPES.values())} | {"torch": torch}
    given = ARGUMENTS[precision]
    for some in ({}, given, *({name: value} for name, value in given.items())):
        plugin = PLUGINS[precision](**some)
        pasted = eval(repr(plugin), names)
        assert {name: getattr(pasted, name) for name in given} == {name: getattr(plugin, name) for name in given}
        assert repr(pasted) == repr(plugin)
        assert len(repr(plugin).split("=")) >= len(some)
    # from a string, as a Trainer makes it
    plugin = pl.Trainer(precision=precision, logger=False, barebones=True).precision_plugin
    assert eval(repr(plugin), names).precision == precision


def test_defaults_are_not_shown() -> None:
    assert repr(Fp8Precision()) == repr(Fp8Precision(param_dtype="float32", keep_fp32=[])) == "Fp8Precision()"
    given = Fp8Precision(DelayedScaling(margin=1, wgrad="bf16"), ignore_modules=["head"], param_dtype="bfloat16")
    assert repr(given) == (
        "Fp8Precision(recipe=DelayedScaling(margin=1, wgrad='bf16'), ignore_modules=('head',),"
        " param_dtype=torch.bfloat16)"
    )
    assert repr(PLUGINS["bf16-mixed"]()) == "Bf16MixedPrecision()"
    assert repr(PLUGINS["bf16-mixed"](param_dtype="float32")) == "Bf16MixedPrecision(param_dtype=torch.float32)"

    class Mine(Fp8Precision):
        def __init__(self, size: int) -> None:
            super().__init__(min_features=size)

    assert repr(Mine(32)) == "Mine(min_features=32)"


@pytest.mark.parametrize("precision", ARGUMENTS)
def test_each_takes_its_own_arguments(precision: str) -> None:
    given = ARGUMENTS[precision]
    taken = inspect.signature(PLUGINS[precision]).parameters
    assert set(taken) == set(given)
    by_position = [name for name, parameter in taken.items() if parameter.kind != parameter.KEYWORD_ONLY]
    assert by_position == [name for name in taken if name == "recipe"]
    plugin = PLUGINS[precision](**given)
    in_fabric = FabricPrecision(plugin).plugin
    assert in_fabric is not plugin
    for other in (plugin, copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin)), in_fabric):
        assert type(other) is PLUGINS[precision]
        assert other.precision == precision
        assert {name: getattr(other, name) for name in given} == given


def from_yaml(folder: Path, plugins: Any, *arguments: str) -> Any:
    (folder / "config.yaml").write_text(json.dumps({"trainer": {"plugins": plugins}}))  # JSON is YAML
    quiet = ("--trainer.accelerator=cpu", "--trainer.logger=false")
    args = ["--config", str(folder / "config.yaml"), *arguments, *quiet]
    return LightningCLI(BoringModel, run=False, args=args).trainer.precision_plugin


@pytest.mark.parametrize("precision", ["fp8-delayed", "bf16-mixed", "bf16-true"])
def test_by_yaml(tmp_path: Path, precision: str) -> None:
    expected = {name: value for name, value in ARGUMENTS[precision].items() if name != "recipe"}
    values = {name: str(value) if isinstance(value, torch.dtype) else value for name, value in expected.items()}
    name = f"lightning_fp8.plugins.{PLUGINS[precision].__name__}"
    plugin = from_yaml(tmp_path, {"class_path": name, "init_args": values})
    assert type(plugin) is PLUGINS[precision]
    assert {name: getattr(plugin, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        *((precision, recipe()) for precision, recipe in RECIPES.items()),
        (CurrentScaling(margin=1), CurrentScaling(margin=1)),
        ({"precision": "fp8-current", "margin": 1}, CurrentScaling(margin=1)),
        ({"margin": 1}, DelayedScaling(margin=1)),
    ],
)
def test_the_recipe_comes_first(recipe: Any, expected: Any) -> None:
    plugin = Fp8Precision(recipe, min_features=32)
    assert (plugin.recipe, plugin.precision, plugin.min_features) == (expected, expected.precision, 32)


RECIPE = "--trainer.plugins.recipe"
CURRENT = "lightning_fp8.CurrentScaling"
SHORT = {"class_path": "DelayedScaling", "init_args": {"margin": 1, "amax_history_len": 4}}


@pytest.mark.parametrize(
    ("given", "arguments", "expected"),
    [
        ("fp8-block", [], BlockScaling()),
        ("MXScaling", [], MXScaling()),
        ({"precision": "fp8-block", "power_of_2_scales": True}, [], BlockScaling(power_of_2_scales=True)),
        ({"class_path": CURRENT}, [], CurrentScaling()),
        ({"class_path": CURRENT, "init_args": {"margin": 1}}, [], CurrentScaling(margin=1)),
        (SHORT, [], DelayedScaling(margin=1, amax_history_len=4)),
        # overrides of what a file has, and of what an override has
        ("fp8-current", [f"{RECIPE}.margin=1"], CurrentScaling(margin=1)),
        ("fp8-mx", [f"{RECIPE}.weight_blocks=[32,32]"], MXScaling(weight_blocks=(32, 32))),
        ({"margin": 1}, [f"{RECIPE}.wgrad=bf16"], DelayedScaling(margin=1, wgrad="bf16")),
        (SHORT, [f"{RECIPE}.margin=2"], DelayedScaling(margin=2, amax_history_len=4)),
        (SHORT, [f"{RECIPE}.init_args.margin=2"], DelayedScaling(margin=2, amax_history_len=4)),
        (SHORT, [f"{RECIPE}=fp8-block"], BlockScaling()),
        ({"margin": 1}, [f"{RECIPE}.class_path=CurrentScaling"], CurrentScaling(margin=1)),
        (None, [f"{RECIPE}.precision=fp8-current", f"{RECIPE}.margin=1"], CurrentScaling(margin=1)),
        (None, [f"{RECIPE}.class_path={CURRENT}", f"{RECIPE}.init_args.margin=1"], CurrentScaling(margin=1)),
        (None, [f"{RECIPE}={CURRENT}", f"{RECIPE}.margin=1"], CurrentScaling(margin=1)),
    ],
)
def test_recipes_in_configurations(tmp_path: Path, given: Any, arguments: list[str], expected: Any) -> None:
    plugin = {"class_path": "lightning_fp8.Fp8Precision", "init_args": {} if given is None else {"recipe": given}}
    # one by itself, or a list
    in_list = not arguments or given is SHORT
    assert from_yaml(tmp_path, [plugin] if in_list else plugin, *arguments).recipe == expected


def test_a_recipe_among_other_settings_and_plugins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init_args = {"recipe": "fp8-block", "overrides": {"layer": {"wgrad": "bf16"}}, "keep_fp32": ["layer"]}
    plugins = [
        {"class_path": "lightning.pytorch.plugins.io.AsyncCheckpointIO"},
        {"class_path": "Fp8Precision", "init_args": init_args},
    ]
    plugin = from_yaml(tmp_path, plugins)
    assert (plugin.recipe, plugin.overrides, plugin.keep_fp32) == (BlockScaling(), init_args["overrides"], ("layer",))
    # a configuration that the command line writes is one that it reads
    with pytest.raises(SystemExit):
        from_yaml(tmp_path, plugins, "--print_config")
    (tmp_path / "written.yaml").write_text(capsys.readouterr().out)
    again = LightningCLI(BoringModel, run=False, args=["--config", str(tmp_path / "written.yaml")]).trainer
    assert again.precision_plugin.recipe == BlockScaling()
    assert again.precision_plugin.overrides == plugin.overrides


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("fp8-delay", "must be one of 'fp8-delayed', 'fp8-current', 'fp8-mx', 'fp8-block', got 'fp8-delay'"),
        ({"class_path": "lightning_fp8.DelayScaling"}, "must be one of 'DelayedScaling', 'CurrentScaling', 'MXS"),
    ],
)
def test_a_wrong_recipe_in_a_configuration(
    wrong: Any, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = {"class_path": "lightning_fp8.Fp8Precision", "init_args": {"recipe": wrong}}
    # a mapping is refused by the plugin, a string by the parser
    with pytest.raises((SystemExit, ValueError)) as error:
        from_yaml(tmp_path, [plugin] if isinstance(wrong, str) else plugin)
    assert named in f"{error.value}{capsys.readouterr().err}"


# the advice in an error is correct: it names every plugin that takes the argument, and no other
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_an_argument_of_another_plugin_is_refused_by_its_name(precision: str) -> None:
    others = {name for given in ARGUMENTS.values() for name in given} - set(ARGUMENTS[precision])
    assert len(others) == {"bf16-mixed": 7, "bf16-true": 8}[precision]
    for name in others:
        # for any value, including the other plugin's default
        with pytest.raises(TypeError) as error:
            PLUGINS[precision](**{name: None})
        _, _, named = str(error.value).partition(f"`{name}`: it belongs to ")
        takers = {PLUGINS[other].__name__ for other, given in ARGUMENTS.items() if name in given}
        assert {*named.rstrip(".").split(" and ")} == {f"`{taker}`" for taker in takers}


class Mine(Fp8Precision):
    """A user's plugin with its own argument"""

    def __init__(self, param_dtypes: bool, **kwargs: Any) -> None:
        self.param_dtypes = param_dtypes
        super().__init__(**kwargs)


def test_subclasses_have_arguments_of_their_own_in_fabric_too() -> None:
    given = Mine(True, min_features=8)
    assert pl.Trainer(plugins=given, accelerator="cpu", logger=False).precision_plugin is given
    made = lf.Fabric(accelerator="cpu", plugins=given)._precision.plugin  # type: ignore[attr-defined]
    assert isinstance(made, Mine)
    assert (made.param_dtypes, made.min_features) == (True, 8)


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"recipe": {"margin": -1}}, ValueError, "`margin`"),
        (
            {"recipe": "default"},
            ValueError,
            "must be one of 'fp8-delayed', .*'fp8-block', got 'default'",
        ),
        ({"recipe": {"class_path": "mine.Recipe"}}, ValueError, "'DelayedScaling', .*'BlockScaling', got 'Recipe'"),
        ({"recipe": 1}, TypeError, "a BlockScaling, the precision string of one, or a mapping of its"),
        ({"keep_fp32": "head"}, TypeError, "`keep_fp32` must be a sequence of patterns, got the string 'head'"),
        ({"dtype_mismatch": "ignore"}, ValueError, "must be one of 'align', 'warn', 'error', got 'ignore'"),
        ({"frozen_weights": "float8"}, ValueError, "`frozen_weights` must be one of 'master', 'fp8', got 'float8'"),
        ({"overides": {}}, TypeError, "no argument `overides`: its arguments are recipe, .*Did you mean 'overrides'"),
        ({"param_dtype": torch.float16}, ValueError, "must be torch.float32 or torch.bfloat16, got torch.float16"),
        ({"compute_dtype": "float16"}, ValueError, "`compute_dtype` must be torch.float32 or .* got 'float16'"),
        ({"reduce_dtype": "fp32"}, ValueError, "`reduce_dtype` must be torch.float32 or torch.bfloat16, got 'fp32'"),
        ({"compute_dtype": "float32", "param_dtype": "bfloat16"}, ValueError, "needs `param_dtype=torch.float32`"),
    ],
)
def test_wrong_values(kwargs: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Fp8Precision(**kwargs)
