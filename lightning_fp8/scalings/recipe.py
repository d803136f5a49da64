"""What a recipe is: plain, validated values that say how scales follow the tensors.

Each recipe stands beside its kind of scaling, and registers under its precision string.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

import torch.distributed as dist
from torch import Tensor

from lightning_fp8.ops.formats import PRODUCTS, Fp8Format, Product, Role
from lightning_fp8.runtime.choice import check_choice
from lightning_fp8.runtime.did_you_mean import did_you_mean

if TYPE_CHECKING:
    from lightning_fp8.scalings.base import Scaling

ProductPrecision = Literal["fp8", "bf16"]
_T = TypeVar("_T")
# keyed by precision string
RECIPES: dict[str, type[Recipe]] = {}


def _names(kind: Any) -> list[str]:
    """The names of the fields, products last: they would come first, as the base class defines them."""
    return sorted((field.name for field in fields(kind)), key=PRODUCTS.__contains__)


def knows_its_fields(kind: type[_T]) -> type[_T]:
    """Decorate a dataclass: a misspelt field gives an error that lists the right ones."""
    init = kind.__init__

    @wraps(init)
    def checked(self: _T, *args: Any, **kwargs: Any) -> None:
        field_names = _names(kind)
        for name in kwargs:
            if name not in field_names:
                raise TypeError(
                    f"{kind.__name__} has no field {name!r}.{did_you_mean(str(name), field_names)} Its fields are"
                    f" {', '.join(field_names)}."
                )
        init(self, *args, **kwargs)

    setattr(kind, "__init__", checked)  # noqa: B010 mypy allows no other way
    return kind


@dataclass(frozen=True, repr=False)
class Recipe(ABC):
    """How scales follow the tensors: what a cast needs, what an update does, what a checkpoint holds.

    Under every recipe, a weight is scaled by its own current values.

    Attributes:
        precision: the string from which Lightning makes a plugin with this recipe and its defaults.
        from_history: whether, in training, inputs and gradients are cast with scales of their past values, which
            checkpoints hold. Otherwise they are cast by their own values, and checkpoints hold no histories.
        fprop, dgrad, wgrad: the precision of each of the three products: output, gradient of the input, gradient of
            the weight. ``"bf16"`` stands for the dtype of the output, which is fp32 for an fp32 input without autocast;
            the operands of such a product are rounded to that dtype and not cast to FP8. Keyword-only.
    """

    precision: ClassVar[str]
    from_history: ClassVar[bool] = False

    fprop: ProductPrecision = field(default="fp8", kw_only=True)
    dgrad: ProductPrecision = field(default="fp8", kw_only=True)
    wgrad: ProductPrecision = field(default="fp8", kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "precision" in cls.__dict__:
            RECIPES[cls.precision] = cls

    def __post_init__(self) -> None:
        for product in PRODUCTS:
            self.require_choice(product, get_args(ProductPrecision))

    def __repr__(self) -> str:
        defaults = {field.name: field.default for field in fields(self)}
        values = {name: getattr(self, name) for name in _names(type(self))}
        shown = (f"{name}={value!r}" for name, value in values.items() if value != defaults[name])
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def in_bf16(self) -> tuple[Product, ...]:
        """The products that are computed in bf16, if the layer has no precisions of its own."""
        return tuple(product for product in PRODUCTS if getattr(self, product) == "bf16")

    @abstractmethod
    def scaling(self, role: Role) -> Scaling:
        """How a tensor of this role is scaled."""

    @property
    def margin_factor(self) -> float:
        """What amaxes in the window are multiplied by before the scale is computed."""
        return 1.0

    @property
    def window(self) -> int:
        """The number of updates whose amaxes are kept, newest first."""
        return 1

    @property
    def newest_only(self) -> bool:
        """Whether an update computes the scale from the newest amax, rather than from the largest in the window."""
        return True

    @property
    def reduce_amax(self) -> bool:
        """Whether an update takes the maximum of each amax over all processes."""
        return True

    @property
    def precisions(self) -> dict[str, bool]:
        """The precisions that layers can run in with scales of this layout; for each, whether it is a move to current
        scaling."""
        return {"fp8": False, self.precision: False}

    def processes(self) -> tuple[int, int]:
        """The rank of this process, and how many there are, among those over which an update takes the maximum."""
        if self.reduce_amax and dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    def window_amax(self, amax_history: Tensor) -> Tensor:
        """The amaxes ``[D]`` that scales are computed from, of ``amax_history [window, D]``."""
        return amax_history[0] if self.newest_only else amax_history.amax(dim=0)

    def note_histories(self, has_history: Tensor, newest: Tensor) -> None:
        """Write which tensors have a history, ``[D] bool`` on the CPU, by their newest amaxes, without waiting."""
        if self.from_history:
            has_history.copy_(newest > 0, non_blocking=True)

    def saved(self, entry: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint holds of a tensor."""
        of_histories = () if self.from_history else ("amax_history", "is_current")
        return {name: value for name, value in entry.items() if name not in of_histories}

    def check_gather(self) -> None:
        """ValueError unless weights can be gathered in FP8: with one scale each, the same on all processes."""
        raise ValueError(
            f"`fp8_all_gather` gathers each weight with one scale, and {self} gives each block of it a scale of its"
            " own. Leave the argument out: the weights are gathered in bf16, and cast then."
        )

    def require_same(self, other: Recipe, message: str) -> None:
        """ValueError with this message for a different recipe."""
        if self != other:
            raise ValueError(message)

    def require_precision(self, precision: str) -> None:
        """ValueError if a run has another precision than the model."""
        if self.precision != precision:
            raise ValueError(
                f"The model is already converted with {self}, but this run has precision={precision!r}."
                f" Pass `precision={self.precision!r}`, or call `lightning_fp8.unconvert(model)` first."
            )

    def require_choice(self, field: str, choices: tuple[str, ...]) -> None:
        """ValueError unless a field is one of these."""
        check_choice(f"{type(self).__name__}: `{field}`", getattr(self, field), choices)

    def require(self, field: str, rule: str, holds: bool) -> None:
        """ValueError with this rule for a field, unless it holds."""
        if not holds:
            raise ValueError(f"{type(self).__name__}: `{field}` must be {rule}, got {getattr(self, field)!r}.")

    def format_of(self, role: Role) -> Fp8Format:
        """The FP8 format in which a tensor of this role is cast."""
        return self.scaling(role).fp8

    def as_dict(self) -> dict[str, Any]:
        """Plain values from which :func:`as_recipe` makes the recipe again."""
        return {"precision": self.precision, **asdict(self)}


def names_of_recipes() -> str:
    """The classes of all recipes, for messages: "a DelayedScaling or a CurrentScaling"."""
    kinds = (kind.__name__ for kind in RECIPES.values())
    return " or ".join(f"{'an' if kind[0] in 'AEFHILMNORSX' and kind[1].isupper() else 'a'} {kind}" for kind in kinds)


def is_int(value: Any) -> bool:
    """Whether a value is a whole number, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_recipe(recipe: Any) -> None:
    """TypeError for anything but a recipe."""
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"`recipe` must be {names_of_recipes()}, or the precision string of one, got {type(recipe).__name__}:"
            f" {recipe!r}."
        )


def as_recipe(recipe: Any) -> Recipe | None:
    """The recipe for a recipe, a precision string, or a mapping of fields, whose ``precision`` selects the class."""
    if isinstance(recipe, str):
        check_choice("`recipe`", recipe, RECIPES)
        return RECIPES[recipe]()
    if isinstance(recipe, Mapping):
        values = dict(recipe)
        precision = values.pop("precision", "fp8-delayed")
        check_choice("`recipe`: `precision`", precision, RECIPES)
        return RECIPES[precision](**values)
    if recipe is None or isinstance(recipe, Recipe):
        return recipe
    raise TypeError(
        f"`recipe` must be {names_of_recipes()}, the precision string of one, or a mapping of its fields, got"
        f" {recipe!r}."
    )


def recipe_fields(text: str) -> dict[str, Any]:
    """A precision string with comma-separated fields, as on a command line -> the mapping for :func:`as_recipe`.

    Raises:
        ValueError: for a field that is given twice.

    >>> recipe_fields("fp8-delayed,margin=1,wgrad=bf16")
    {'precision': 'fp8-delayed', 'margin': 1, 'wgrad': 'bf16'}
    >>> recipe_fields("fp8-mx,weight_blocks=[32,32]")
    {'precision': 'fp8-mx', 'weight_blocks': [32, 32]}
    """
    # at commas that are not inside brackets
    pairs = [part.partition("=") for part in re.split(r",(?![^\[]*\])", f"precision={text}")]
    mapping = {name: _value(value) for name, _, value in pairs}
    if len(mapping) < len(pairs):
        raise ValueError(f"A field is given twice in {text!r}.")
    return mapping


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text
