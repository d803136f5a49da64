"""The probe: what it accepts and what it finds, and that it leaves everything else as it was."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import FalconLinear

from lightning_fp8.conversion import linear_probe
from lightning_fp8.conversion.linear_probe import difference_from_linear


def layer_with(forward: Any, bias: bool = True, inputs: int = 24, outputs: int = 16, **attributes: Any) -> nn.Linear:
    """A layer of a class of its own, with this forward."""
    kind = type("MyLinear", (nn.Linear,), {"forward": forward})
    layer = kind(inputs, outputs, bias)
    vars(layer).update(attributes)
    return layer  # type: ignore[no-any-return]


def one_argument(compute: Any) -> Any:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return compute(self, x)  # type: ignore[no-any-return]

    return forward


def in_fp32(self: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.linear(x.float(), self.weight.float(), self.bias.float())


def counted(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return F.linear(x, self.weight, self.bias)


def half_of_the_gradient(self: nn.Linear, x: Tensor) -> Tensor:
    y = F.linear(x, self.weight, self.bias)
    return y.detach() + (y - y.detach()) / 2


def scatters(self: nn.Linear, x: Tensor) -> Tensor:
    y = F.linear(x, self.weight, self.bias)
    torch.distributed.all_reduce(y)
    return y


ACCEPTED = {
    "F.linear": lambda self, x: F.linear(x, self.weight, self.bias),
    "addmm": lambda self, x: (
        torch.addmm(self.bias, x.flatten(0, -2), self.weight.t()).view(*x.shape[:-1], 16)
        if x.dim() > 1
        else F.linear(x, self.weight, self.bias)
    ),
    "a bias that is added": lambda self, x: x @ self.weight.T + self.bias,
    "an output that is edited": lambda self, x: F.linear(x, self.weight).add_(self.bias),
    "einsum": lambda self, x: torch.einsum("...k,nk->...n", x, self.weight) + self.bias.to(x.dtype),
    "views by size": lambda self, x: F.linear(x.view(*x.shape[:-1], self.in_features), self.weight, self.bias),
}
FOUND = {
    "is another": lambda self, x: 1.001 * F.linear(x, self.weight, self.bias),
    "its output is another": lambda self, x: F.linear(x, self.weight, self.bias).clamp(-100, 100),
    "output is": lambda self, x: F.dropout(F.linear(x, self.weight, self.bias), 0.1, self.training),
    "for float32 inputs its output": lambda self, x: F.linear(x, self.weight),
    "gives float32 [16], not bfloat16 [16]": in_fp32,
    "gives tuple, not float32": lambda self, x: (F.linear(x, self.weight), self.bias),
    "it draws random numbers": lambda self, x: F.linear(x, self.weight, self.bias) + 0 * torch.rand(()),
    "draws random": lambda self, x: F.linear(x, self.weight, self.bias) + 0 * random.random(),
    "random numbers": lambda self, x: F.linear(x, self.weight, self.bias) + 0 * float(np.random.rand()),
    "it changes its attributes": counted,
    "or its arguments": lambda self, x: F.linear(x, self.weight, self.bias) + x.detach().add_(0).sum() * 0,
    "its gradient of the input": half_of_the_gradient,
    "its gradient of the weight": lambda self, x: F.linear(x, self.weight.detach(), self.bias) + 0 * self.weight.sum(),
    "its gradient of the bias": lambda self, x: F.linear(x, self.weight, self.bias.detach()),
    "it raises KeyError, \"'scale'\"": lambda self, x: {}["scale"],
}


def with_no_grad(change: Any) -> Any:
    return lambda self, x: torch.no_grad()(change)(self, x)


def kept() -> dict[str, Any]:
    generators = {"torch": torch.Generator(), "numpy": np.random.default_rng(0), "python": random.Random(0)}
    return {"list": [], "array": np.zeros(2), **generators}


# what each does before it computes `F.linear`; most change no number
EFFECTS = {
    "max norm through data": lambda self, x: setattr(self.weight, "data", self.weight.data.renorm(2, 0, 100)),
    "clips its weight through data": lambda self, x: self.weight.data.clamp_(-100, 100),
    "clears its bias through data": lambda self, x: self.bias.data.zero_(),
    "clips its input through data": lambda self, x: x.data.clamp_(-1, 1),
    "edits its weight": with_no_grad(lambda self, x: self.weight.mul_(1)),
    "edits a view of its weight": with_no_grad(lambda self, x: self.weight[0].copy_(self.weight[0])),
    "edits its weight with others": with_no_grad(lambda self, x: torch._foreach_mul_([torch.ones(2), self.weight], 1)),
    "writes to its weight as an output": with_no_grad(lambda self, x: torch.add(self.bias, 0, out=self.bias)),
    "replaces its weight": lambda self, x: setattr(self, "weight", nn.Parameter(self.weight.detach().clone())),
    "freezes its bias": lambda self, x: self.bias.requires_grad_(False),
    "sets a gradient": lambda self, x: setattr(self.weight, "grad", torch.zeros_like(self.weight)),
    "keeps its input": lambda self, x: setattr(self, "last", x.detach()),
    "keeps the shape": lambda self, x: setattr(self, "rows", tuple(x.shape)),
    "collects in a list": lambda self, x: self.kept["list"].append(x.shape),
    "counts in a dict": lambda self, x: self.kept.update(calls=self.kept.get("calls", 0) + 1),
    "counts in an array": lambda self, x: np.add(self.kept["array"], 1, out=self.kept["array"]),
    "counts in its class": lambda self, x: setattr(type(self), "calls", getattr(type(self), "calls", 0) + 1),
    "counts in backward": lambda self, x: self.weight.register_hook(lambda _: None),
    "registers a buffer": lambda self, x: self.register_buffer("mean", x.detach().mean()),
    "registers a hook": lambda self, x: self.register_forward_hook(lambda *_: None),
    "adds a child": lambda self, x: self.add_module("child", nn.Identity()),
    "changes its mode": lambda self, x: self.train(not self.training),
    "draws from a generator of torch": lambda self, x: torch.rand((), generator=self.kept["torch"]),
    "draws from a generator of numpy": lambda self, x: self.kept["numpy"].random(),
    "draws from a generator of python": lambda self, x: self.kept["python"].random(),
    "seeds": lambda self, x: torch.manual_seed(7),
}
CASTS = {
    "weight in float8": lambda self, x: F.linear(
        x, self.weight.to(torch.float8_e4m3fn).to(x.dtype), self.bias.to(x.dtype)
    ),
    "input in bfloat16": lambda self, x: F.linear(x.bfloat16().to(x.dtype), self.weight, self.bias),
    "all in float16": lambda self, x: F.linear(x.half(), self.weight.half(), self.bias.half()).to(x.dtype),
    "output in float32": lambda self, x: F.linear(x, self.weight, self.bias).float(),
    "rounded weight": lambda self, x: F.linear(
        x, self.weight + (self.weight - self.weight.round()).detach(), self.bias
    ),
}


@pytest.mark.parametrize("effect", EFFECTS.values(), ids=EFFECTS)
def test_side_effects_are_found(effect: Any) -> None:
    def compute(self: nn.Linear, x: Tensor) -> Tensor:
        effect(self, x)
        return F.linear(x, self.weight, self.bias)

    layer = layer_with(one_argument(compute), kept=kept())
    before = layer.weight, layer.weight.clone(), layer.bias.clone(), str(layer.kept)
    assert difference_from_linear(layer) in ("it changes its attributes or its arguments", "it draws random numbers")
    assert layer.weight is before[0]
    assert torch.equal(layer.weight, before[1])
    assert torch.equal(layer.bias, before[2])
    assert str(layer.kept) == before[3]


def test_what_stays_unchanged_does_not_matter() -> None:
    layer = layer_with(one_argument(ACCEPTED["F.linear"]), kept={**kept(), "tensor": torch.ones(2)}, call=lambda: None)
    assert difference_from_linear(layer) is None


def test_hooks_of_its_output_are_found() -> None:
    def counted_in_backward(self: Any, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        y.register_hook(lambda _: setattr(self, "calls", self.calls + 1))
        return y

    layer = layer_with(counted_in_backward, calls=0)
    assert difference_from_linear(layer) == "it changes its attributes or its arguments"


@pytest.mark.parametrize("compute", CASTS.values(), ids=CASTS)
def test_casts_are_found(compute: Any) -> None:
    assert str(difference_from_linear(layer_with(one_argument(compute)))).startswith("for ")


@pytest.mark.parametrize("compute", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted(compute: Any) -> None:
    assert difference_from_linear(layer_with(one_argument(compute))) is None


@pytest.mark.parametrize(("expected", "compute"), FOUND.items(), ids=FOUND)
def test_found(expected: str, compute: Any) -> None:
    layer = layer_with(one_argument(compute), calls=0)
    states = random.getstate(), torch.get_rng_state(), str(np.random.get_state())
    values = {name: one.clone() for name, one in layer.state_dict().items()}
    difference = difference_from_linear(layer)
    assert difference is not None
    assert expected in difference
    assert (random.getstate(), str(np.random.get_state())) == (states[0], states[2])
    assert torch.equal(torch.get_rng_state(), states[1])
    assert layer.calls == 0
    assert layer.training
    assert all(torch.equal(one, values[name]) for name, one in layer.state_dict().items())
    assert all(one.grad is None for one in layer.parameters())


@pytest.mark.usefixtures("one_process")
def test_collectives_are_found_and_not_called() -> None:
    assert "communicates with other processes" in str(difference_from_linear(layer_with(scatters)))


def test_other_tensors_and_arguments_are_named() -> None:
    def adapted(self: Any, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.lora_b @ self.lora_a, self.bias)

    layer = layer_with(adapted)
    layer.lora_a, layer.lora_b = nn.Parameter(torch.randn(2, 24)), nn.Parameter(torch.zeros(16, 2))
    assert difference_from_linear(layer) == "it also has lora_a, lora_b"
    masked = layer_with(lambda self, x: F.linear(x, self.weight * self.mask, self.bias), mask=torch.ones(16, 24))
    assert difference_from_linear(masked) == "it also has mask"
    scaled = layer_with(lambda self, x, scale=1.0: scale * F.linear(x, self.weight, self.bias))
    assert difference_from_linear(scaled) == "it does not take exactly one argument"
    coded = layer_with(one_argument(ACCEPTED["F.linear"]))
    coded.weight = nn.Parameter(torch.zeros(16, 24, dtype=torch.int8), requires_grad=False)
    assert difference_from_linear(coded) == "its weight is int8 [16, 24]"


def test_hooks_do_not_run() -> None:
    layer, calls = layer_with(one_argument(ACCEPTED["F.linear"])), []
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.child = nn.Identity()
    layer.child.register_forward_hook(lambda *_: calls.append("child"))
    kind = type(layer)
    kind.forward = lambda self, x: F.linear(self.child(x), self.weight, self.bias)  # type: ignore[method-assign]
    assert difference_from_linear(layer) is None
    assert not calls


@pytest.mark.parametrize("bias", [False, True])
def test_large_layers_are_tried_with_few_features_and_equal_ones_once(bias: bool, monkeypatch: Any) -> None:
    tried, compare = [], linear_probe._compare

    def seen(layer: nn.Module, *rest: Any) -> None:
        tried.append(tuple(layer.weight.shape))  # type: ignore[arg-type]
        compare(layer, *rest)

    monkeypatch.setattr(linear_probe, "_compare", seen)
    monkeypatch.setattr(linear_probe, "_verdicts", {})
    with torch.device("meta"):
        layers = [FalconLinear(8192, 32768, bias=bias) for _ in range(3)]
        layers += [FalconLinear(24, 16, bias=bias)]
    assert {difference_from_linear(layer) for layer in layers} == {None}
    assert tried == [(64, 64)] * 10 + [(16, 24)] * 10


def test_in_any_mode_of_the_caller() -> None:
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta")):
        with mode:
            layer = layer_with(one_argument(ACCEPTED["a bias that is added"]), calls=str(mode))
            assert difference_from_linear(layer) is None
