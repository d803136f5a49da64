from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from lightning_fp8 import DelayedScaling, Fp8Precision
from lightning_fp8.ops.formats import E4M3, E5M2


def test_defaults() -> None:
    # docs/recipes.md has the measurements
    recipe = DelayedScaling()
    assert (recipe.margin, recipe.fp8_format, recipe.amax_history_len) == (0, "HYBRID", 16)
    assert (recipe.amax_compute_algo, recipe.reduce_amax) == ("max", True)


def test_recipe_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        DelayedScaling().margin = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("margin", -1, "an integer from 0 to 127"),
        ("margin", 128, "an integer from 0 to 127"),
        ("margin", True, "an integer from 0 to 127"),
        ("margin", 0.5, "an integer from 0 to 127"),
        ("fp8_format", "E5M2", "one of 'HYBRID', 'E4M3'"),
        ("fp8_format", None, "one of 'HYBRID', 'E4M3'"),
        ("amax_history_len", 0, "an integer of at least 1"),
        ("amax_history_len", "16", "an integer of at least 1"),
        ("amax_compute_algo", "mean", "one of 'max', 'most_recent'"),
        ("reduce_amax", 1, "True or False"),
        ("fprop", "fp16", "one of 'fp8', 'bf16'"),
        ("dgrad", None, "one of 'fp8', 'bf16'"),
        ("wgrad", True, "one of 'fp8', 'bf16'"),
    ],
)
def test_bad_field_names_field_rule_and_value(field: str, value: object, rule: str) -> None:
    with pytest.raises(ValueError, match="DelayedScaling") as error:
        DelayedScaling(**{field: value})  # type: ignore[arg-type]
    assert f"`{field}`" in str(error.value)
    assert rule in str(error.value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("field", "meant"),
    [("margn", "margin"), ("amax_history", "amax_history_len"), ("scale", None), ("FP8_Format", "fp8_format")],
)
def test_another_field_names_the_right_ones(field: str, meant: str | None) -> None:
    wanted = "margin, fp8_format, amax_history_len, amax_compute_algo, reduce_amax, fprop, dgrad, wgrad"

    def by_name(given: dict[str, Any]) -> object:
        return DelayedScaling(**given)

    def by_mapping(given: dict[str, Any]) -> object:
        return Fp8Precision(recipe=given)

    for make in (by_name, by_mapping):
        with pytest.raises(TypeError) as error:
            make({field: 1, "margin": 2})
        said = f" Did you mean {meant!r}?" if meant else ""
        assert str(error.value) == f"DelayedScaling has no field {field!r}.{said} Its fields are {wanted}."


def test_the_signature_stays_that_of_the_fields() -> None:
    # later additions come last, so that positions keep their meaning
    positional = [field.name for field in fields(DelayedScaling) if not field.kw_only]
    later = [field.name for field in fields(DelayedScaling) if field.kw_only]
    assert list(inspect.signature(DelayedScaling).parameters) == [*positional, *later]
    assert positional == ["margin", "fp8_format", "amax_history_len", "amax_compute_algo", "reduce_amax"]
    with pytest.raises(TypeError, match="takes from 1 to 6 positional arguments"):
        DelayedScaling(0, "HYBRID", 1, "max", True, 7)  # type: ignore[call-arg]


def test_formats_by_role() -> None:
    hybrid, e4m3 = DelayedScaling(), DelayedScaling(fp8_format="E4M3")
    assert [hybrid.format_of(role) for role in ("input", "weight", "grad_output")] == [E4M3, E4M3, E5M2]
    assert [e4m3.format_of(role) for role in ("input", "weight", "grad_output")] == [E4M3, E4M3, E4M3]
