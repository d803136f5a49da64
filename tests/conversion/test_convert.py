"""What a conversion changes, what it leaves alone and why, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from machines import A100, RTX_4090, run_as
from moved import to_bf16
from small_models import small_mlp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_fp8 import DelayedScaling, Fp8Precision, convert, describe, scaling_state, unconvert
from lightning_fp8.modules import Fp8Linear
from lightning_fp8.runtime import device as fp8_device
from lightning_fp8.scalings.recipe import RECIPES


def test_same_objects_and_same_state_dict() -> None:
    model, calls, x = small_mlp().eval(), [], torch.randn(2, 32)
    expected = model(x)
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    layers, parameters, keys = list(model), dict(model.named_parameters()), list(model.state_dict())
    assert convert(model) is model
    assert all(a is b for a, b in zip(model, layers, strict=True))
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == keys
    assert [type(layer) for layer in model] == [Fp8Linear, nn.GELU, Fp8Linear]
    assert isinstance(model[0], nn.Linear)
    assert not model[0].training
    small_mlp().load_state_dict(model.state_dict())
    model(x)
    assert calls == ["forward"]
    assert unconvert(model) is model
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, nn.Linear]
    assert not hasattr(model[0], "fp8")
    assert torch.equal(model(x), expected)


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20, bias=False))
    model[2].weight = model[0].weight
    convert(model)
    assert model[2].weight is model[0].weight
    model(torch.tensor([[1, 2]])).sum().backward()
    assert model[0].weight.grad is not None
    assert copy.deepcopy(model)[2].weight is not model[2].weight


class Special(nn.Linear):
    pass


def test_what_cannot_be_converted_is_named() -> None:
    model = nn.ModuleDict({"plain": nn.Linear(16, 16), "special": Special(16, 16), "patched": nn.Linear(16, 16)})
    model["attention"], model["lazy"], model["empty"] = nn.MultiheadAttention(16, 1), nn.LazyLinear(4), nn.Linear(16, 0)
    model["parametrized"] = nn.utils.parametrize.register_parametrization(nn.Linear(16, 16), "bias", nn.Tanh())
    model["patched"].forward = lambda x: x  # type: ignore[method-assign]
    convert(model, min_features=0)
    rows = {row.path: row for row in describe(model)}
    assert {path for path, row in rows.items() if row.converted} == {
        "plain",
        "special",
        "attention",
        "attention.out_proj",
    }
    assert rows["special"].reason == "converted, 16 -> 16; with the `forward` of nn.Linear"
    assert "was replaced on the object" in rows["patched"].reason
    assert rows["lazy"].reason.startswith("is not initialised yet")
    assert rows["empty"].reason == "has no elements"
    assert rows["parametrized"].reason.startswith("is parametrized")
    assert rows["attention"].reason == "converted, 16 -> 48"
    assert rows["attention.out_proj"].kind == "NonDynamicallyQuantizableLinear"
    assert str(rows["plain"]).startswith("fp8 plain (Linear)")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda layer: torch.jit.trace(layer, torch.ones(2, 16))])
def test_script_modules_are_left_alone(compiled: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential()
    model.add_module("plain", nn.Linear(16, 16))
    model.add_module("scripted", compiled(nn.Sequential(nn.Linear(16, 16), nn.ReLU())))
    x = torch.randn(4, 16)
    expected = model.scripted(x)
    convert(model)
    assert scaling_state(model).module_names == ("plain",)
    assert torch.equal(model.scripted(x), expected)
    reason = "a torch.jit.ScriptModule: a conversion by class would have no effect"
    assert {row.path: row.reason for row in describe(model)}["scripted.0"] == reason
    model(x).sum().backward()
    unconvert(model)


def test_ignore_modules() -> None:
    model = nn.ModuleDict({"encoder": nn.Sequential(small_mlp()), "norm": nn.LayerNorm(16), "head": nn.Linear(16, 16)})
    # all that is inside a module
    assert scaling_state(convert(model, ignore_modules=("encoder",))).module_names == ("head",)
    # a leading `*.` also matches at the top level
    assert scaling_state(convert(model, ignore_modules=("*.head",))).module_names == ("encoder.0.0", "encoder.0.2")
    reason = "matches `ignore_modules`: to convert it, remove 'head'"
    assert {row.path: row.reason for row in describe(model, ("head",))}["head"] == reason
    assert type(model["head"]) is nn.Linear


@pytest.mark.parametrize("ignored", [[nn.LayerNorm], nn.LayerNorm, [nn.LayerNorm(4)]])
@pytest.mark.parametrize("convert_with", [convert, lambda model, **kwargs: Fp8Precision(**kwargs)])
def test_modules_are_ignored_by_path_and_the_error_says_how(ignored: Any, convert_with: Callable[..., Any]) -> None:
    model = nn.ModuleDict({"body": small_mlp(), "head": nn.Linear(16, 16)})
    with pytest.raises(TypeError, match=r"`ignore_modules` must be a sequence of patterns, got .*LayerNorm") as error:
        convert_with(model, ignore_modules=ignored)
    # the argument that the message recommends
    expression = str(error.value).split("`")[-2]
    paths = eval(expression, {"model": model, "Class": nn.Linear})
    assert paths == ["body.0", "body.2", "head"]
    assert scaling_state(convert(model, ignore_modules=paths[:2])).module_names == ("head",)


def nest() -> nn.Module:
    blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(16, 16)})])
    return nn.ModuleDict({"blocks": blocks, "head": nn.Linear(16, 16)})


def test_a_recipe_by_its_precision_string() -> None:
    for precision, kind in RECIPES.items():
        model = convert(nn.Sequential(nn.Linear(128, 128)), precision)
        assert scaling_state(model).recipe == kind()
        # the same again
        assert "converted" in describe(convert(model, precision), recipe=precision)[0].reason


@pytest.mark.parametrize(
    ("make", "settings", "kind", "message"),
    [
        (small_mlp, {"ignore_modules": ("haed",)}, ValueError, r"pattern 'haed' matches no module .* layers are: 0, 2"),
        (nest, {"ignore_modules": ("haed",)}, ValueError, r"Did you mean 'head'\?"),
        (nest, {"ignore_modules": ("upp",)}, ValueError, r"Did you mean '\*\.up'\?"),
        (
            nest,
            {"overrides": {"*.block.upp": "bf16"}},
            ValueError,
            r"`overrides` pattern .*Did you mean 'blocks.0.up'\?",
        ),
        (
            small_mlp,
            {"recipe": "fp8-blok"},
            ValueError,
            r"`recipe` must be one of .*got 'fp8-blok'. Did you mean 'fp8-block'",
        ),
        (small_mlp, {"frozen_weights": "FP8"}, ValueError, r"`frozen_weights` .* got 'FP8'. Did you mean 'fp8'\?"),
        (small_mlp, {"ignore_modules": "head"}, TypeError, "sequence of patterns"),
        (small_mlp, {"ignore_modules": ("*",)}, ValueError, "matches `ignore_modules`"),
        (nn.Sequential, {}, ValueError, "nothing to convert"),
        (lambda: small_mlp().double(), {}, TypeError, r"0\.weight is torch.float64"),
        (small_mlp, {"recipe": {"margin": 1}}, TypeError, "must be a DelayedScaling or a CurrentScaling or an MXS"),
    ],
)
def test_what_is_refused(make: Any, settings: Any, kind: type[Exception], message: str) -> None:
    model = make()
    with pytest.raises(kind, match=message):
        convert(model, **settings)
    assert not any(isinstance(layer, Fp8Linear) for layer in model.modules())


def test_a_conversion_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = convert(small_mlp())
    state = scaling_state(model)
    with pytest.raises(ValueError, match="nothing to convert"):
        convert(model, ignore_modules=("*",))
    with pytest.raises(ValueError, match="already converted with DelayedScaling"):
        convert(model, DelayedScaling(margin=1))
    model.append(nn.Linear(16, 16).double())
    with pytest.raises(TypeError, match=r"3\.weight is torch.float64"):
        convert(model, ignore_modules=("0",))
    monkeypatch.setattr("lightning_fp8.conversion.plan.check_device", lambda device: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(model, ignore_modules=("0", "3"))
    assert scaling_state(model) is state
    assert [type(layer) for layer in model] == [Fp8Linear, nn.GELU, Fp8Linear, nn.Linear]


def test_converting_again_keeps_scales_and_takes_in_new_layers() -> None:
    model = convert(small_mlp(), DelayedScaling(amax_history_len=4))
    state = scaling_state(model)
    model(torch.randn(4, 32)).sum().backward()
    state.update()
    to_bf16(state, "2")
    assert scaling_state(convert(model)) is state
    # a part that was converted by itself, and a new layer before all others
    joined = nn.Sequential(nn.Linear(32, 32), model, convert(nn.Linear(16, 16), DelayedScaling(amax_history_len=4)))
    before = [tensor.clone() for tensor in (state.scale, state.amax, state.amax_history)]
    names = state.names
    other = scaling_state(convert(joined))
    assert other is state
    assert other.module_names == ("0", "1.0", "1.2", "2")
    assert other.recipe == state.recipe
    assert other.fallbacks == ("1.2",)
    kept = [other.names.index(f"1.{name}") for name in names]
    assert torch.equal(other.scale[kept], before[0])
    assert torch.equal(other.amax[kept], before[1])
    assert torch.equal(other.amax_history[:, kept[: before[2].shape[1]]], before[2])
    assert other.amax_history.count_nonzero() == before[2].count_nonzero() > 0
    convert(joined, ignore_modules=("2",))
    assert type(joined[2]) is nn.Linear
    with pytest.raises(ValueError, match="no FP8 layers"):
        scaling_state(unconvert(joined))


def test_names_do_not_depend_on_wrappers() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(16, 16))), torch.compile(nn.Linear(16, 16)))
    assert scaling_state(convert(model)).module_names == ("0.0", "1")


def test_gpus_without_fp8_are_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    run_as(A100, monkeypatch)
    with pytest.raises(RuntimeError, match=r"8\.9 or newer .* cuda:0 is NVIDIA A100.*, 8\.0.*bf16-mixed"):
        fp8_device.check_device(torch.device("cuda", 0))
    run_as(RTX_4090, monkeypatch)
    fp8_device.check_device(torch.device("cuda", 0))
    run_as(None, monkeypatch)
    with pytest.raises(RuntimeError, match="runs on CUDA GPUs"):
        fp8_device.check_device(torch.device("mps"))
