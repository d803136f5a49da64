"""The recipe of delayed scaling: a plain, validated value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, Literal, TypeVar, get_args

from lightning_fp8.ops.formats import E4M3, E5M2, Fp8Format, Role
from lightning_fp8.runtime.did_you_mean import did_you_mean

FormatChoice = Literal["HYBRID", "E4M3"]
AmaxAlgorithm = Literal["max", "most_recent"]
_T = TypeVar("_T")


def _knows_its_fields(kind: type[_T]) -> type[_T]:
    """Decorate a dataclass: a misspelt field gives an error that lists the right ones."""
    init = kind.__init__

    @wraps(init)
    def checked(self: _T, *args: Any, **kwargs: Any) -> None:
        known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"{kind.__name__} has no field {name!r}.{did_you_mean(str(name), known)} Its fields are"
                    f" {', '.join(known)}."
                )
        init(self, *args, **kwargs)

    setattr(kind, "__init__", checked)  # noqa: B010 mypy allows no other way
    return kind


@_knows_its_fields
@dataclass(frozen=True)
class DelayedScaling:
    """How scales follow the tensors: ``scale = FP8_MAX / (amax * 2**margin)``, with ``amax`` from past steps.

    The field names and defaults are those of the field's reference implementation, so a recipe can be copied unchanged.

    Args:
        margin: powers of two kept free above the largest past value, an integer from 0 to 127.
        fp8_format: ``"HYBRID"``: E4M3 forward, E5M2 for the gradient of the output. ``"E4M3"``: E4M3 everywhere.
        amax_history_len: optimizer steps that the window holds, an integer of at least 1.
        amax_compute_algo: ``"max"``: the largest value in the window; ``"most_recent"``: the newest one.
        reduce_amax: under ``torch.distributed``, take the maximum over all ranks, so that scales agree on every rank.

    Raises:
        ValueError: for an invalid field; the message has the field, the rule and the value.
        TypeError: for a field of another name; the message has the right ones.

    >>> DelayedScaling(amax_history_len=16).amax_compute_algo
    'max'
    """

    margin: int = 0
    fp8_format: FormatChoice = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        # 2**127 is the largest power of two that fp32 holds
        self._require("margin", "an integer from 0 to 127", _is_int(self.margin) and 0 <= self.margin <= 127)
        self._require_choice("fp8_format", get_args(FormatChoice))
        self._require(
            "amax_history_len",
            "an integer of at least 1",
            _is_int(self.amax_history_len) and self.amax_history_len >= 1,
        )
        self._require_choice("amax_compute_algo", get_args(AmaxAlgorithm))
        self._require("reduce_amax", "True or False", isinstance(self.reduce_amax, bool))

    def _require_choice(self, field: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, field)
        self._require(field, "one of " + ", ".join(map(repr, choices)), isinstance(value, str) and value in choices)

    def _require(self, field: str, rule: str, holds: bool) -> None:
        if not holds:
            raise ValueError(f"DelayedScaling: `{field}` must be {rule}, got {getattr(self, field)!r}.")

    def format_of(self, role: Role) -> Fp8Format:
        """The FP8 format in which a tensor of this role is cast."""
        return E5M2 if role == "grad_output" and self.fp8_format == "HYBRID" else E4M3


def as_recipe(recipe: Any) -> DelayedScaling | None:
    """A recipe, from one or from a mapping of its fields."""
    if isinstance(recipe, Mapping):
        return DelayedScaling(**recipe)
    if recipe is None or isinstance(recipe, DelayedScaling):
        return recipe
    raise TypeError(f"`recipe` must be a DelayedScaling or a mapping of its fields, got {recipe!r}.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
