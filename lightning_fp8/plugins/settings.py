"""Precision strings, the arguments of the plugins, and the errors for wrong ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, Literal, TypeVar, cast

import torch

from lightning_fp8.runtime.after_import import after_import
from lightning_fp8.runtime.choice import check_choice
from lightning_fp8.runtime.did_you_mean import closest, did_you_mean
from lightning_fp8.scalings.recipe import RECIPES, Recipe, as_recipe

PRECISIONS = (*RECIPES, "bf16-mixed", "bf16-true")
FP8_PRECISIONS = tuple(RECIPES)
# names of the arguments of each plugin, filled in by `arguments_of`
ARGUMENTS: dict[str, tuple[str, ...]] = {}
# fp16 is refused everywhere: without loss scaling its gradients underflow
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_Init = TypeVar("_Init", bound=Callable[..., None])


def precision(name: Literal["fp8-delayed", "fp8-current", "fp8-mx", "fp8-block", "bf16-mixed", "bf16-true"]) -> Any:
    """A precision string that type checkers accept: ``Trainer(precision=precision("fp8-delayed"))``.

    At run time, the Trainer and Fabric accept the string itself, but their annotations list only Lightning's strings.
    With this function, a type checker also finds misspelt strings.

    Raises:
        ValueError: for another string.

    >>> precision("fp8-delayed")
    'fp8-delayed'
    """
    check_choice("`precision`", name, PRECISIONS)
    return name


def arguments_of(plugin: str, *precisions: str) -> Callable[[_Init], _Init]:
    """Decorate the ``__init__`` of a plugin: an unknown argument raises a TypeError that lists the known ones.

    If other plugins have the argument, the error names them instead.
    """

    def decorate(init: _Init) -> _Init:
        ARGUMENTS[plugin] = tuple(signature(init).parameters)[1:]

        @wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            for key in kwargs:
                if key in ARGUMENTS[plugin]:
                    continue
                takers = " and ".join(f"`{other}`" for other, names in ARGUMENTS.items() if key in names)
                own = f"its arguments are {', '.join(ARGUMENTS[plugin])}.{did_you_mean(key, ARGUMENTS[plugin])}"
                raise TypeError(
                    f"`{type(self).__name__}`, for {' and '.join(map(repr, precisions))}, has no argument `{key}`:"
                    f" {f'it belongs to {takers}.' if takers else own}"
                )
            init(self, *args, **kwargs)

        return cast("_Init", checked)

    return decorate


class RecipeOfConfiguration(dict[str, Any]):
    """Marks an argument for :func:`recipe_argument`, given in a configuration; jsonargparse makes its fields."""


def recipe_argument(recipe: Any) -> Recipe | None:
    """The recipe for an argument: a recipe, its precision string, its fields, or its class as configurations name it.

    Raises:
        ValueError: for another string or class, a field out of range.
        TypeError: for anything else, a field that the recipe does not have.
    """
    return as_recipe(_fields(recipe) if isinstance(recipe, (str, Mapping)) else recipe)


def _fields(recipe: str | Mapping[str, Any]) -> dict[str, Any]:
    """The mapping for :func:`~lightning_fp8.scalings.recipe.as_recipe`.

    Raises:
        ValueError: for another string or class.
        AttributeError: for anything but a string or a mapping.
    """
    precisions = {kind.__name__: precision for precision, kind in RECIPES.items()}
    if isinstance(recipe, str):
        recipe = {"class_path" if recipe.rpartition(".")[2] in precisions else "precision": recipe}
    fields: dict[str, Any] = {}
    # in their order, as overrides are added to what a file has
    for key, value in recipe.items():
        if key == "class_path":
            name = str(value).rpartition(".")[2]
            check_choice("`recipe`: `class_path`", name, precisions)
            fields["precision"] = precisions[name]
        else:
            fields |= (value or {}) if key == "init_args" else {key: value}
    if "precision" in fields:
        check_choice("`recipe`: `precision`", fields["precision"], RECIPES)
    return fields


def _register_with_jsonargparse() -> None:
    sys.modules["jsonargparse.typing"].register_type(RecipeOfConfiguration, dict, _fields)


# For a string followed by an override, such as `recipe=fp8-current` and `recipe.margin=1`, jsonargparse would keep only
# the override. For a class it would keep only the fields, which may belong to another class.
after_import("jsonargparse", _register_with_jsonargparse)


def as_torch_dtype(argument: str, dtype: torch.dtype | str) -> torch.dtype:
    """``torch.float32`` or ``torch.bfloat16``, from the dtype or its name."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"`{argument}` must be torch.float32 or torch.bfloat16, got {dtype!r}.")
    return _DTYPES[name]


def suggestion(precision: Any) -> str:
    """``" Did you mean ...?"``, with a leading space, for the closest of our strings; empty if none is close."""
    if not isinstance(precision, str):
        return ""
    if precision.lower().startswith(("fp8", "float8")):
        return f" Did you mean {closest(precision, FP8_PRECISIONS) or FP8_PRECISIONS[0]!r}?"
    # Lightning's own strings are candidates too: if one of them is closer, Lightning's message suffices
    match = closest(precision, (*PRECISIONS, "16-mixed", "16-true", "32-true", "64-true"))
    return f" Did you mean {match!r}?" if match in PRECISIONS else ""
