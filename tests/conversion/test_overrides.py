"""Precision of single products by layer: what ``overrides`` sets and refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_models import small_mlp
from stacked_blocks import Blocks, experts_of, products

from lightning_fp8 import CurrentScaling, DelayedScaling, Fp8Precision, convert, describe, scaling_state, unconvert
from lightning_fp8.modules.base import Fp8Module


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, {}),
        ({"*.down": {"wgrad": "bf16"}}, dict.fromkeys([f"blocks.{at}.down" for at in range(4)], "w")),
        # everything inside a module that a pattern matches
        ({"blocks.1": "bf16"}, {"blocks.1.up": "fdw", "blocks.1.down": "fdw", **experts_of(1)}),
        # the later override wins, product by product
        (
            {"blocks.1": {"fprop": "bf16", "wgrad": "bf16"}, "blocks.1.*": {"fprop": "fp8", "dgrad": "bf16"}},
            dict.fromkeys(("blocks.1.up", "blocks.1.down", *experts_of(1)), "dw"),
        ),
        ({"*": "bf16", "head": "fp8", "*.up": {"dgrad": "fp8"}, "blocks": "fp8", "others": "fp8"}, {}),
        ({"*.up": {"wgrad": "bf16"}, "blocks.*": "bf16", "blocks.[123].*": "fp8"}, {
            "blocks.0.up": "fdw", "blocks.0.down": "fdw", **experts_of(0),
        }),
    ],
)  # fmt: skip
def test_by_pattern(overrides: Any, expected: dict[str, str]) -> None:
    assert products(convert(Blocks(), overrides=overrides)) == expected


def test_an_override_is_of_the_recipe_too() -> None:
    model = convert(Blocks(), CurrentScaling(wgrad="bf16"), overrides={"head": {"wgrad": "fp8", "fprop": "bf16"}})
    found = products(model)
    assert found.pop("head") == "f"
    assert set(found.values()) == {"w"}
    # and a bf16 override leaves the layers in FP8 that another override sets to FP8
    few = convert(Blocks(), DelayedScaling(fprop="bf16", dgrad="bf16", wgrad="bf16"), overrides={"head": "fp8"})
    assert scaling_state(few).module_names == ("head",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"overrides": {"blok.*": "bf16"}}, r"`overrides` pattern 'blok\.\*' matches no module of Blocks"),
        ({"overrides": {"head": "fp16"}}, r"'head' must have 'fp8' or 'bf16'.*got 'fp16'"),
        ({"overrides": {"head": {"wgrad": 16}}}, r"'head' must have 'fp8' or 'bf16'.*got \{'wgrad': 16\}"),
        ({"overrides": {"head": {"wgrd": "bf16"}}}, r"'fprop', 'dgrad', 'wgrad'\. Did you mean 'wgrad'\?"),
        ({"overrides": {"*": "bf16"}}, r"nothing to convert in Blocks.*\n.*all three products in bf16"),
    ],
)  # fmt: skip
def test_what_is_refused_by_name(arguments: Any, message: str) -> None:
    model = Blocks()
    with pytest.raises(ValueError, match=message):
        convert(model, **arguments)
    assert not any(isinstance(layer, Fp8Module) for layer in model.modules())


@pytest.mark.parametrize("overrides", ["blocks.0", ["blocks.0"], {0: "bf16"}])
def test_patterns_are_keys_of_a_mapping(overrides: Any) -> None:
    with pytest.raises(TypeError, match="`overrides` must be a"):
        Fp8Precision(overrides=overrides)


def test_a_layer_is_described_with_its_products() -> None:
    model = Blocks(1, 1)
    arguments: Any = {"overrides": {"blocks.0.down": {"fprop": "bf16", "wgrad": "bf16"}, "head": "bf16"}}
    before = {row.path: row.reason for row in describe(model, **arguments)}
    assert before["blocks.0.down"] == "not converted yet: call `convert`; then fprop and wgrad in bf16"
    convert(model, **arguments)
    after = {row.path: row.reason for row in describe(model)}
    assert after["blocks.0.down"] == "converted, 48 -> 32; fprop and wgrad in bf16"
    assert after["blocks.0.up"] == "converted, 32 -> 48"
    assert after["head"] == before["head"] == "all three products in bf16 by `overrides`, 'head'"
    assert [row.path for row in describe(model) if not row.converted] == ["head"]
    # nothing else changes them, not even converting a part of the model, where the patterns have a different meaning
    convert(model, min_features=8)
    convert(model.blocks[0])
    assert products(model) == {"blocks.0.down": "fw", "head": "fdw"}
    assert copy.deepcopy(model).blocks[0].down.in_bf16 == ("fprop", "wgrad")
    convert(model, overrides={})
    assert products(model) == {}
    unconvert(model)
    assert not any(isinstance(layer, Fp8Module) for layer in model.modules())


def test_other_products_keep_the_scales_and_no_cast() -> None:
    model = convert(small_mlp(), overrides={"0": {"fprop": "bf16", "wgrad": "bf16"}})
    x, state = torch.randn(8, 32, requires_grad=True), scaling_state(model)
    model(x).sum().backward()
    state.update()
    history = state.amax_history[:, 1:].clone()
    assert state.every_tensor_has_history
    convert(model, overrides={})
    assert scaling_state(model) is state
    assert torch.equal(state.amax_history[:, 1:], history)
    # the input of the first layer has no history yet, and the host waits for it
    assert not state.every_tensor_has_history
    other = convert(small_mlp())
    other.load_state_dict(model.state_dict())
    scaling_state(other).load_state_dict(state.state_dict())
    assert torch.equal(model(x), other(x))
