from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, Fp8Precision, MXScaling
from lightning_fp8.ops.formats import E4M3, E5M2
from lightning_fp8.scalings.recipe import as_recipe

FIELDS = ["margin", "fp8_format", "amax_history_len", "amax_compute_algo", "reduce_amax", "fprop", "dgrad", "wgrad"]


def test_defaults() -> None:
    # docs/recipes.md has the measurements
    assert DelayedScaling() == DelayedScaling(0, "HYBRID", 16, "max", True, fprop="fp8", dgrad="fp8", wgrad="fp8")
    with pytest.raises(FrozenInstanceError):
        DelayedScaling().margin = 1  # type: ignore[misc]
    # later fields are keyword-only, so that positions keep their meaning
    assert list(inspect.signature(DelayedScaling).parameters) == FIELDS
    with pytest.raises(TypeError, match="takes from 1 to 6 positional arguments"):
        DelayedScaling(0, "HYBRID", 1, "max", True, "fp8")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        *(("margin", value, "an integer from 0 to 127") for value in (-1, 128, True, 0.5)),
        *(("fp8_format", value, "one of 'HYBRID', 'E4M3'") for value in ("E5M2", None)),
        *(("amax_history_len", value, "an integer of at least 1") for value in (0, "16")),
        ("amax_compute_algo", "mean", "one of 'max', 'most_recent'"),
        ("reduce_amax", 1, "True or False"),
        *(("wgrad", value, "one of 'fp8', 'bf16'") for value in ("fp16", None)),
        ("fprop", True, "one of 'fp8', 'bf16'"),
    ],
)
def test_bad_field_names_field_rule_and_value(field: str, value: object, rule: str) -> None:
    with pytest.raises(ValueError, match="DelayedScaling") as error:
        DelayedScaling(**{field: value})  # type: ignore[arg-type]
    assert str(error.value).startswith(f"DelayedScaling: `{field}` must be {rule}, got {value!r}.")


@pytest.mark.parametrize("make", [lambda given: DelayedScaling(**given), lambda given: Fp8Precision(recipe=given)])
@pytest.mark.parametrize(("field", "meant"), [("margn", "margin"), ("FP8_Format", "fp8_format"), ("scale", None)])
def test_another_field_names_the_right_ones(make: Callable[[Any], Any], field: str, meant: str | None) -> None:
    with pytest.raises(TypeError) as error:
        make({field: 1, "margin": 2})
    said = f" Did you mean {meant!r}?" if meant else ""
    assert str(error.value) == f"DelayedScaling has no field {field!r}.{said} Its fields are {', '.join(FIELDS)}."


def test_fields_of_block_scaling() -> None:
    assert as_recipe({"precision": "fp8-block", "power_of_2_scales": True}) == BlockScaling(power_of_2_scales=True)
    with pytest.raises(TypeError, match=r"BlockScaling has no field 'margin'\. Its fields are power_of_2_scales"):
        as_recipe({"precision": "fp8-block", "margin": 1})
    with pytest.raises(ValueError, match="BlockScaling: `power_of_2_scales` must be True or False, got 1"):
        BlockScaling(power_of_2_scales=1)  # type: ignore[arg-type]


HYBRID, E4M3_ONLY = (
    (DelayedScaling(), CurrentScaling()),
    (DelayedScaling(fp8_format="E4M3"), BlockScaling(), MXScaling()),
)


@pytest.mark.parametrize(
    ("recipe", "of_gradients"), [*((one, E5M2) for one in HYBRID), *((one, E4M3) for one in E4M3_ONLY)]
)
def test_formats_by_role(recipe: Any, of_gradients: Any) -> None:
    assert [recipe.format_of(role) for role in ("input", "weight", "grad_output")] == [E4M3, E4M3, of_gradients]
