"""A schedule of precisions: the precision of a model's layers, by optimizer step."""

from __future__ import annotations

import json
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, get_args

from torch import nn

from lightning_fp8.conversion.one_state import state_now, state_of
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.fp8_parameter import is_frozen
from lightning_fp8.modules.paths import check_patterns_among, matches, named_modules
from lightning_fp8.ops.formats import PRODUCTS
from lightning_fp8.runtime.did_you_mean import did_you_mean
from lightning_fp8.scaling.precision import AS_SET, BF16, Choice
from lightning_fp8.scaling.state import ScalingState
from lightning_fp8.scalings.recipe import RECIPES, ProductPrecision, Recipe

_PRECISIONS: tuple[str, ...] = get_args(ProductPrecision)
# layers without FP8 are in bf16 by autocast
_IN_BF16 = ("bf16", "bf16-mixed")
_NAMES = (*_PRECISIONS, *RECIPES, _IN_BF16[1])


class Schedule:
    """Changes the precision of a model's layers at given optimizer steps; see :class:`lightning_fp8.PrecisionSchedule`.

    Args:
        entries: precisions by step, or by share of the planned steps, in increasing order.

    Attributes:
        entries: the same, with numbers as keys.

    Raises:
        TypeError, ValueError: for invalid keys or values, or keys in another order.
    """

    def __init__(self, entries: Mapping[Any, Any]) -> None:
        if not isinstance(entries, Mapping) or not entries:
            raise TypeError(
                "PrecisionSchedule: `schedule` must be a mapping of steps or shares to precisions, such as"
                f' {{0.9: "bf16"}}, got {entries!r}.'
            )
        self.entries = {_key(key): value for key, value in entries.items()}
        for key, value in self.entries.items():
            _check_value(key, value)
        for kind in (int, float):
            _check_order([key for key in self.entries if isinstance(key, kind)], self.entries)
        # the model that it was started for, and its number of planned steps
        self._run: tuple[weakref.ref[nn.Module], int | None] | None = None
        # the positions in `_choices` refer to this state's layers at this time
        self._state: weakref.ref[ScalingState] | None = None
        self._generation = 0
        self._steps: list[int] = []
        self._choices: list[dict[int, Choice]] = []
        # the entry in force, counted from 1; 0: as converted, None: not known
        self.now: int | None = None

    def start(self, model: nn.Module, planned_steps: int | None) -> None:
        """Prepare for a run of this model.

        Args:
            model: the converted model.
            planned_steps: how many optimizer steps the whole run will make, including those before a resumption; None
                if unknown.

        Raises:
            ValueError: if any entry asks for something that the model or the run does not support; nothing is changed.
        """
        modules = list(named_modules(model))
        layers = [layer for _, layer in modules if isinstance(layer, Fp8Module)]
        steps = [_step(key, planned_steps) for key in self.entries]
        _check_order(steps, self.entries)
        state = state_of(model, layers)
        choices = self._choices_for(modules, state)
        for position, key in enumerate(self.entries):
            _check_weights(key, layers, choices[position])
        last = math.inf if planned_steps is None else planned_steps
        late = ", ".join(f"{key!r}" for key, step in zip(self.entries, steps) if step >= last)
        if late:
            warnings.warn(f"PrecisionSchedule: the run has {last} steps, and never reaches {late}.", stacklevel=2)
        self._run, self._steps = (weakref.ref(model), planned_steps), steps
        self._choose(choices, state)

    def _choose(self, choices: list[dict[int, Choice]], state: ScalingState) -> None:
        self._choices, self._state, self._generation = choices, weakref.ref(state), state.model.generation
        self.now = None

    def _choices_for(self, modules: Sequence[tuple[str, nn.Module]], state: ScalingState) -> list[dict[int, Choice]]:
        return [_choices(key, value, modules, state) for key, value in self.entries.items()]

    def is_for(self, model: nn.Module, planned_steps: int | None) -> bool:
        """Whether it was last started for such a run."""
        return self._run is not None and self._run[0]() is model and self._run[1] == planned_steps

    @property
    def needs_weights(self) -> bool:
        """Whether a product that takes a weight itself will be in bf16."""
        return any(choice.needs_weight for choices in self._choices for choice in choices.values())

    def entry_at(self, step: int) -> int:
        """The entry in force when this many optimizer steps have been made, counted from 1; 0 before the first."""
        return sum(first <= step for first in self._steps)

    def _is_in_force(self, entry: int, state: ScalingState) -> bool:
        """Whether the layers still run as this entry says: another run may have ended the schedule, for all of them."""
        choices = self._choices[entry - 1] if entry else {}
        first = next((position for position, choice in choices.items() if choice != AS_SET), None)
        return first is None or state.precisions[first].of("schedule") != AS_SET

    def apply(self, step: int) -> str:
        """Apply the schedule after this many optimizer steps; returns what changed, in words."""
        entry, model = self.entry_at(step), None if self._run is None else self._run[0]()
        state = None if model is None else state_now(model)
        if model is None or state is None:
            return ""
        is_same = self._state is not None and self._state() is state and state.model.generation == self._generation
        if not is_same:
            self._choose(self._choices_for(list(named_modules(model)), state), state)
        if entry == self.now and self._is_in_force(entry, state):
            return ""
        before, self.now = self.now, entry
        every = dict.fromkeys(range(len(state.module_names)), AS_SET)
        state.switch("schedule", {**every, **(self._choices[entry - 1] if entry else {})})
        if not entry and before is None:
            return ""
        changed = sum(precision.of("schedule") != AS_SET for precision in state.precisions)
        value = list(self.entries.values())[entry - 1]
        return (
            f"PrecisionSchedule: {value!r} from optimizer step {step} on. {changed} of {len(state.precisions)} layers"
            " run in another precision than the conversion gave them."
        )


def _key(key: Any) -> int | float:
    number = key
    if isinstance(key, str):
        # from JSON, whose keys are strings
        try:
            number = json.loads(key)
        except json.JSONDecodeError:
            number = None
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or number < 0 or (isinstance(number, float) and not number < 1):
        raise ValueError(
            "PrecisionSchedule: a key must be an optimizer step, an integer of at least 0, or a share of the run's"
            f" planned steps, a float from 0 to below 1, got {key!r}."
        )
    return number  # type: ignore[return-value]


def _check_order(numbers: list[int | float] | list[int], keys: Mapping[Any, Any]) -> None:
    if any(not first < second for first, second in pairwise(numbers)):
        raise ValueError(
            f"PrecisionSchedule: keys must be in increasing order, got {', '.join(map(repr, keys))}"
            f"{'' if numbers == [*keys] else f', which are the steps {numbers}'}."
        )


def _step(key: int | float, planned_steps: int | None) -> int:
    if isinstance(key, int):
        return key
    if planned_steps is None and key:
        raise ValueError(
            f"PrecisionSchedule: {key!r} is a share of the planned steps, and this run does not say how many it will"
            " make. Set `max_steps` (with manual optimization nothing else says it), or `max_epochs` with data of a"
            " known length, or give the step as an integer."
        )
    # as it is written: 0.7 is not the double below it
    return math.floor(Fraction(repr(key)) * (planned_steps or 0))


def _is_of_products(value: Mapping[Any, Any]) -> bool:
    return all(key in PRODUCTS for key in value)


def _check_value(key: Any, value: Any, pattern: str | None = None) -> None:
    at = f"PrecisionSchedule: the value at {key!r}" + ("" if pattern is None else f" for {pattern!r}")
    if isinstance(value, str):
        if value not in _NAMES:
            names = ", ".join(map(repr, _NAMES))
            raise ValueError(f"{at} must be one of {names}, got {value!r}.{did_you_mean(value, _NAMES)}")
    elif not isinstance(value, Mapping) or not value or (pattern is not None and not _is_of_products(value)):
        form = "a precision, or precisions by product" + (", or either by pattern of layers" if pattern is None else "")
        raise ValueError(f"{at} must be {form}, got {value!r}. The products are {', '.join(map(repr, PRODUCTS))}.")
    elif _is_of_products(value):
        wrong = {product: chosen for product, chosen in value.items() if chosen not in _PRECISIONS}
        if wrong:
            raise ValueError(f"{at}: a product has {' or '.join(map(repr, _PRECISIONS))}, got {wrong!r}.")
    else:
        for inner, chosen in value.items():
            if not isinstance(inner, str) or inner in PRODUCTS:
                raise ValueError(f"{at} must have products alone, or patterns of layers alone, got {value!r}.")
            _check_value(key, chosen, inner)


def _choices(
    key: int | float, value: Any, modules: Sequence[tuple[str, nn.Module]], state: ScalingState
) -> dict[int, Choice]:
    """An entry's choice for each layer, by position in the state. Later patterns win, product by product."""
    by_pattern = {"*": value} if isinstance(value, str) or _is_of_products(value) else dict(value)
    at = f"PrecisionSchedule at {key!r}"
    for pattern in by_pattern:
        if hint := did_you_mean(pattern, PRODUCTS):
            raise ValueError(f"{at}: {pattern!r} is none of the products {', '.join(map(repr, PRODUCTS))}.{hint}")
    check_patterns_among(modules, tuple(by_pattern), at)
    choices: dict[int, Choice] = {}
    for pattern, chosen in by_pattern.items():
        change = _change(at, chosen, state.recipe)
        parts = {part for path, module in modules if matches(path, (pattern,)) for part in module.modules()}
        positions = [gemm.module for part in parts if isinstance(part, Fp8Module) for gemm in part.fp8.values()]
        if not positions:
            raise ValueError(f"{at}: the pattern {pattern!r} matches no layer that runs in FP8: see `describe(model)`.")
        choices |= {position: change(choices.get(position, AS_SET)) for position in positions}
    return choices


def _change(at: str, chosen: Any, recipe: Recipe) -> Callable[[Choice], Choice]:
    if isinstance(chosen, Mapping):
        return lambda before: before._replace(
            in_bf16=tuple(p for p in PRODUCTS if chosen.get(p, "bf16" if p in before.in_bf16 else "fp8") == "bf16")
        )
    by_precision = {name: Choice(is_current=is_current) for name, is_current in recipe.precisions.items()}
    choice = {**by_precision, **dict.fromkeys(_IN_BF16, BF16)}.get(chosen)
    if choice is not None:
        return lambda before: choice
    alternative = "".join(f" or {name!r}" for name, possible in by_precision.items() if possible.is_current)
    raise ValueError(
        f"{at}: a run in {recipe.precision!r} cannot go on in {chosen!r}, whose scales have another layout. It can in"
        f" 'bf16'{alternative}; for {chosen!r}, resume from a checkpoint in a run with that precision."
    )


def _check_weights(key: int | float, layers: list[Fp8Module], choices: Mapping[int, Choice]) -> None:
    for layer in layers:
        for gemm, weight in layer.gemms():
            choice = choices.get(gemm.module, AS_SET)
            gemm.precision.check(gemm.name, choice)
            if choice.needs_weight and (is_frozen(weight) or gemm.weight_cast.fp8_only):
                raise ValueError(
                    f"PrecisionSchedule at {key!r}: the frozen weight of {gemm.name!r} exists in FP8 only, and {choice}"
                    " needs more precise values. Choose other layers by pattern, or keep masters"
                    " (`frozen_weights='master'`)."
                )
