from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import small_mlp
from torch import nn

from lightning_fp8 import DelayedScaling, Fp8Precision, convert, describe, scaling_state, unconvert
from lightning_fp8.conversion.coverage import coverage
from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.modules import Fp8Linear
from lightning_fp8.runtime import device as fp8_device


def test_same_objects_and_same_state_dict() -> None:
    model = small_mlp()
    model.eval()
    layers, parameters = list(model), dict(model.named_parameters())
    keys = list(model.state_dict())
    assert convert(model) is model
    assert all(a is b for a, b in zip(model, layers, strict=True))
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == keys
    assert [type(layer) for layer in model] == [Fp8Linear, nn.GELU, Fp8Linear]
    assert isinstance(model[0], nn.Linear)
    assert not model[0].training
    unconverted = small_mlp()
    unconverted.load_state_dict(model.state_dict())


def test_hooks_stay() -> None:
    model, calls = small_mlp(), []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    convert(model)(torch.randn(2, 32))
    assert calls == ["forward"]


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 16)
            self.body = nn.Linear(16, 16)
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embedding(tokens)))

    model = convert(Tied())
    assert model.head.weight is model.embedding.weight
    model(torch.tensor([[1, 2]])).sum().backward()
    assert model.embedding.weight.grad is not None
    assert copy.deepcopy(model).head.weight is not model.head.weight


def test_subclasses_and_replaced_forwards_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict({"plain": nn.Linear(16, 16), "special": Special(16, 16), "patched": nn.Linear(16, 16)})
    model["attention"] = nn.MultiheadAttention(16, 1)
    model["patched"].forward = lambda x: x  # type: ignore[method-assign]
    convert(model)
    rows = {row.path: row for row in describe(model)}
    assert {path for path, row in rows.items() if row.converted} == {"plain", "attention", "attention.out_proj"}
    assert "a Special, subclass of nn.Linear; only nn.Linear," in rows["special"].reason
    assert "was replaced on the object" in rows["patched"].reason
    assert rows["attention"].reason == "converted, 16 -> 48"
    assert rows["attention.out_proj"].kind == "NonDynamicallyQuantizableLinear"
    assert str(rows["plain"]).startswith("fp8 plain (Linear)")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda layer: torch.jit.trace(layer, torch.ones(2, 16))])
@pytest.mark.parametrize("ignored", [(), ("scripted",)])
def test_script_modules_are_left_alone(compiled: Callable[[nn.Module], nn.Module], ignored: tuple[str, ...]) -> None:
    model = nn.Sequential()
    model.add_module("plain", nn.Linear(16, 16))
    model.add_module("scripted", compiled(nn.Sequential(nn.Linear(16, 16), nn.ReLU())))
    x = torch.randn(4, 16)
    expected = model.scripted(x)
    convert(model, ignore_modules=ignored)
    assert scaling_state(model).module_names == ("plain",)
    assert torch.equal(model.scripted(x), expected)
    reason = "a torch.jit.ScriptModule: a conversion by class would have no effect"
    assert {row.path: row.reason for row in describe(model)}["scripted.0"] == reason
    short = "matches `ignore_modules`" if ignored else "a torch.jit.ScriptModule"
    assert coverage(conversion_plan(model, ignore_modules=ignored)).endswith(f"; not in FP8: scripted.0 (50%, {short})")
    model(x).sum().backward()
    unconvert(model)


def test_ignore_modules() -> None:
    model = nn.ModuleDict({"encoder": small_mlp(), "head": nn.Linear(16, 16)})
    convert(model, ignore_modules=("head", "encoder.2"))
    assert scaling_state(model).module_names == ("encoder.0",)
    reasons = {row.path: row.reason for row in describe(model, ("head", "encoder.2"))}
    assert reasons["head"] == "matches `ignore_modules`"
    assert type(model["head"]) is nn.Linear


def test_a_pattern_that_matches_nothing_raises() -> None:
    model = small_mlp()
    with pytest.raises(ValueError, match=r"pattern 'haed' matches no module .* layers are: 0, 2"):
        convert(model, ignore_modules=("haed",))
    assert type(model[0]) is nn.Linear
    with pytest.raises(TypeError, match="sequence of patterns"):
        convert(model, ignore_modules="head")


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Sequential(nn.Conv2d(1, 1, 1)), nn.Sequential()])
def test_nothing_to_convert_raises(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="nothing to convert"):
        convert(model)


def test_everything_ignored_raises_and_says_why() -> None:
    with pytest.raises(ValueError, match="matches `ignore_modules`"):
        convert(small_mlp(), ignore_modules=("*",))


def test_a_conversion_that_fails_changes_nothing() -> None:
    model = convert(small_mlp())
    state = scaling_state(model)
    with pytest.raises(ValueError, match="nothing to convert"):
        convert(model, ignore_modules=("*",))
    model.append(nn.Linear(16, 16).double())
    with pytest.raises(TypeError, match=r"3\.weight is torch.float64"):
        convert(model, ignore_modules=("0",))
    assert scaling_state(model) is state
    assert [type(layer) for layer in model] == [Fp8Linear, nn.GELU, Fp8Linear, nn.Linear]


def test_fp64_parameters_raise_and_are_named() -> None:
    model = small_mlp().double()
    with pytest.raises(TypeError, match=r"0\.weight is torch.float64"):
        convert(model)
    assert type(model[0]) is nn.Linear


def test_bad_recipe_type() -> None:
    with pytest.raises(TypeError, match="must be a DelayedScaling or a CurrentScaling or a BlockScaling, got dict"):
        convert(small_mlp(), {"margin": 1})  # type: ignore[arg-type]


def test_unconvert_restores_the_plain_model() -> None:
    model, x = small_mlp(), torch.randn(4, 32)
    expected = model(x)
    assert unconvert(convert(model)) is model
    assert torch.equal(model(x), expected)
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, nn.Linear]
    assert not hasattr(model[0], "fp8")


def test_converting_again_keeps_scales_and_takes_in_new_layers() -> None:
    model = convert(small_mlp(), DelayedScaling(amax_history_len=4))
    state = scaling_state(model)
    model(torch.randn(4, 32)).sum().backward()
    state.update()
    assert scaling_state(convert(model)) is state
    model.append(nn.Linear(16, 16))
    joined = scaling_state(convert(model))
    assert joined.module_names == ("0", "2", "3")
    assert joined.recipe == state.recipe
    kept = [joined.names.index(name) for name in state.names]
    assert torch.equal(joined.scale[kept], state.scale)
    assert torch.equal(joined.amax[kept], state.amax)
    assert torch.equal(joined.amax_history[:, kept[: state.delayed]], state.amax_history)
    assert joined.amax_history.count_nonzero() == state.amax_history.count_nonzero() > 0
    with pytest.raises(ValueError, match="already converted"):
        convert(model, DelayedScaling(margin=1))
    convert(model, ignore_modules=("3",))
    assert type(model[3]) is nn.Linear


def test_parts_converted_one_by_one_are_joined() -> None:
    model = nn.ModuleList([convert(nn.Linear(16, 16)), convert(nn.Linear(16, 16))])
    with pytest.raises(ValueError, match="2 scaling states"):
        scaling_state(model)
    assert scaling_state(convert(model)).module_names == ("0", "1")


def test_scaling_state_of_a_plain_model_raises() -> None:
    with pytest.raises(ValueError, match="no FP8 layers"):
        scaling_state(small_mlp())


def test_names_do_not_depend_on_wrappers() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(16, 16))), torch.compile(nn.Linear(16, 16)))
    assert scaling_state(convert(model)).module_names == ("0.0", "1")


def test_gpus_without_fp8_are_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(RuntimeError, match=r"8\.9 or newer .* cuda:0 is NVIDIA A100, 8\.0.*bf16-mixed"):
        fp8_device.check_device(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    fp8_device.check_device(torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="runs on CUDA GPUs"):
        fp8_device.check_device(torch.device("mps"))


def test_ignoring_a_module_ignores_all_that_is_inside() -> None:
    model = nn.ModuleDict({"encoder": nn.Sequential(small_mlp()), "norm": nn.LayerNorm(16), "head": nn.Linear(16, 16)})
    assert scaling_state(convert(model, ignore_modules=("encoder",))).module_names == ("head",)
    # a leading `*.` also matches at the top level
    assert scaling_state(convert(model, ignore_modules=("*.head",))).module_names == ("encoder.0.0", "encoder.0.2")


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
