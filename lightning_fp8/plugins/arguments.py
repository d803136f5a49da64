"""Which of the three plugins takes which argument, and the errors for calls that mix them up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from lightning_fp8.runtime.choice import check_choice
from lightning_fp8.scaling.recipe import RECIPES, Recipe, as_recipe

_P = ParamSpec("_P")
_Self = TypeVar("_Self")

PLUGIN_OF = {
    "fp8-delayed": "Fp8Precision",
    "fp8-current": "Fp8Precision",
    "fp8-block": "Fp8Precision",
    "bf16-mixed": "Bf16MixedPrecision",
    "bf16-true": "Bf16TruePrecision",
}
# names of the arguments by precision, filled in by `arguments_of`
ARGUMENTS: dict[str, tuple[str, ...]] = {}

_Init = Callable[Concatenate[_Self, _P], None]


def arguments_of(*precisions: str) -> Callable[[_Init[_Self, _P]], _Init[_Self, _P]]:
    """Decorate the ``__init__`` of a precision: arguments of other plugins give helpful errors.

    Raises:
        TypeError: by the decorated ``__init__``.
    """

    def decorate(init: _Init[_Self, _P]) -> _Init[_Self, _P]:
        ARGUMENTS.update(dict.fromkeys(precisions, tuple(signature(init).parameters)[1:]))

        @wraps(init)
        def checked(self: _Self, *args: _P.args, **kwargs: _P.kwargs) -> None:
            _check(type(self).__name__, precisions, kwargs)
            init(self, *args, **kwargs)

        return cast("_Init[_Self, _P]", checked)

    return decorate


def _check(name: str, precisions: Sequence[str], kwargs: Iterable[str]) -> None:
    for key in kwargs:
        if key not in ARGUMENTS[precisions[0]] and _takers(key):
            raise TypeError(
                f"`{name}`, for {_quoted(precisions)}, has no argument `{key}`: it belongs to {_words(_takers(key))}."
            )


def recipe_argument(recipe: Any) -> Recipe | None:
    """The recipe for an argument: a recipe, its precision string, its fields, or its class as configurations name it.

    Raises:
        ValueError: for another string or class, a field out of range.
        TypeError: for anything else, a field that the recipe does not have.
    """
    if isinstance(recipe, str):
        recipe = {"precision": recipe}
    elif isinstance(recipe, Mapping) and "class_path" in recipe:
        precisions = {kind.__name__: precision for precision, kind in RECIPES.items()}
        name = str(recipe["class_path"]).rpartition(".")[2]
        check_choice("`recipe`: `class_path`", name, precisions)
        others = {key: value for key, value in recipe.items() if key not in ("class_path", "init_args")}
        recipe = {"precision": precisions[name], **(recipe.get("init_args") or {}), **others}
    return as_recipe(recipe)


def _takers(key: str) -> list[str]:
    return [PLUGIN_OF[precision] for precision, names in ARGUMENTS.items() if key in names]


def _quoted(precisions: Iterable[str]) -> str:
    return " and ".join(map(repr, precisions))


def _words(plugins: Iterable[str]) -> str:
    return " and ".join(f"`{plugin}`" for plugin in dict.fromkeys(plugins))
