"""Feed-forward blocks of widely used models run fused, with the results of their parts, and unfused otherwise."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import pytest
import torch
from feed_forward_blocks import (
    BLOCKS,
    HIDDEN,
    WIDTH,
    BertFeedForward,
    Scaled,
    SequentialOfAnotherKind,
    converted,
    encoder,
    gpt2,
    llama,
    part_by_part,
    phi3,
    sequential,
    vit,
)
from feed_forward_step import assert_same_steps, training_step
from no_gradient import NoGradient
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import convert, describe, unconvert
from lightning_fp8.conversion import fall_back
from lightning_fp8.modules.fused_blocks import Fp8FeedForward

# numbers


MODES = ["fp32", "autocast", "bf16"]
# one block of each form: the others differ only in the activation or in biases
FORMS = ["gelu", "GPT-2", "Llama", "Phi-3", "BERT", "encoder layer"]


# each block in one mode, and one of each form in another
@pytest.mark.parametrize(("block", "mode"), [*zip(BLOCKS, cycle(MODES)), *zip(FORMS, cycle(MODES))])
def test_numbers_are_those_of_the_parts(block: str, mode: str, fused: list[str]) -> None:
    model = converted(BLOCKS[block])
    if mode == "bf16":
        model.bfloat16()
    assert_same_steps(part_by_part(model), model, autocast=mode == "autocast")
    assert len(fused) == 3


FROZEN = {
    "first": lambda name: name.startswith(("gate", "up")),
    "gate": lambda name: name.startswith("gate"),
    "up's weight": lambda name: name == "up_proj.weight",
    "second": lambda name: name.startswith("down"),
    "weights": lambda name: name.endswith("weight"),
    "biases": lambda name: name.endswith("bias"),
}


@pytest.mark.parametrize("case", FROZEN)
def test_frozen_layers(case: str, fused: list[str]) -> None:
    model = converted(lambda: llama(bias=True))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[case](name))
    assert_same_steps(part_by_part(model), model)
    assert len(fused) == 3


@pytest.mark.parametrize("make", [lambda: nn.Linear(WIDTH, WIDTH), lambda: sequential(nn.GELU())[1:4], llama])
def test_without_a_gradient_of_the_output_there_are_none(make: Callable[[], nn.Module]) -> None:
    model, x = converted(make), torch.randn(5, WIDTH, requires_grad=True)
    # as of plain layers
    for one in (model, unconvert(copy.deepcopy(model))):
        (NoGradient.apply(one(x)) + 2 * x).sum().backward()
        assert all(parameter.grad is None for parameter in one.parameters())
        assert torch.equal(x.grad, torch.full_like(x, 2))
        x.grad = None


@pytest.mark.parametrize("make", [lambda: sequential(nn.GELU())[1:4], llama, phi3])
def test_strides_and_sizes_of_the_input(make: Callable[[], nn.Module], fused: list[str]) -> None:
    model = converted(make)
    parts = part_by_part(model)
    rows = torch.randn(6, 2 * WIDTH)
    inputs = [rows[:, ::2], rows.view(2, 3, 2, WIDTH).transpose(0, 2), torch.randn(WIDTH, 5).t(), rows[0, :WIDTH]]
    for x in [*inputs, torch.randn(0, WIDTH)]:
        one, two = training_step(parts, parts, x), training_step(model, model, x)
        assert all(map(torch.equal, one, two))
    assert len(fused) == 5


WAYS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "compiled": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
    "recomputed reentrantly": lambda model: lambda x: checkpoint(model, x, use_reentrant=True),
    "recomputed": lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
}


@pytest.mark.parametrize(("way", "block"), [*product(["compiled"], FORMS[:3:2]), *zip(cycle([*WAYS][1:]), FORMS)])
def test_compilation_and_recomputation_change_nothing(block: str, way: str, fused: list[str]) -> None:
    model = converted(BLOCKS[block])
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    call = WAYS[way](model)
    for _ in range(2):
        x = torch.randn(2, 5, WIDTH)
        assert all(map(torch.equal, training_step(eager, eager, x), training_step(model, call, x)))
    assert len(fused) >= 3


@pytest.mark.parametrize("block", FORMS)
def test_copies_pickles_and_the_way_back(block: str, fused: list[str]) -> None:
    torch.manual_seed(0)
    plain = BLOCKS[block]()
    classes = [type(module) for module in plain.modules()]
    names = list(plain.state_dict())
    model = convert(plain)
    (block_module,) = (module for module in model.modules() if isinstance(module, Fp8FeedForward))
    assert type(block_module).__module__ == block_module.plain_class.__module__
    x = torch.randn(2, 5, WIDTH)
    y = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
        assert torch.equal(other(x), y)
        assert_same_steps(other, copy.deepcopy(model), steps=1)
    assert len(fused) == 1 + 2 * 3
    assert list(model.state_dict()) == names
    assert set(described(model).values()) == {"feed-forward fused"}
    assert [type(module) for module in unconvert(model).modules()] == classes


# running unfused


def hook(part: nn.Module) -> None:
    # shows that it was called
    part.register_forward_hook(lambda *of_call: 2 * of_call[2])


def own_forward(part: nn.Module) -> None:
    part.forward = part.forward


class Adapter(nn.Module):
    """Wraps a linear layer, as adapters do."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.weight = base.in_features, base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x.sum()


def adapt(model: nn.Module, name: str) -> None:
    setattr(model, name, Adapter(getattr(model, name)))


def hook_on_all_modules(model: nn.Module) -> Any:
    return nn.modules.module.register_module_forward_hook(lambda module, _, y: None)


HOOKED = "a part has hooks, or a `forward` of its own"
APART = "a linear layer is not converted, has an adapter, or is sharded by itself"
# parts that get a hook
HOOKED_PARTS: list[tuple[Callable[[], nn.Module], str]] = [
    *((llama, name) for name in ("gate_proj", "up_proj", "act_fn")),
    (vit, "fc1"),
    *((BertFeedForward, name) for name in ("layer.intermediate", "layer.output", "layer.output.dense")),
    (lambda: sequential(nn.ReLU(), 0.0), "3"),
    (encoder, "dropout"),
]
# how a block is built and changed, and why it does not run fused
ASIDE: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    **{
        f"a hook on {name}": (make, lambda model, name=name: hook(model.get_submodule(name)), HOOKED)
        for make, name in HOOKED_PARTS
    },
    "a hook on the backward of down": (
        llama,
        lambda model: model.down_proj.register_full_backward_hook(lambda *_: None) and None,
        HOOKED,
    ),
    "a hook on all modules": (vit, hook_on_all_modules, HOOKED),
    "another forward": (vit, lambda model: own_forward(model.fc2), HOOKED),
    "an adapter of gate": (llama, lambda model: adapt(model, "gate_proj"), APART),
    "an adapter of the second": (vit, lambda model: adapt(model, "fc2"), ""),
    "another activation": (vit, lambda model: setattr(model, "activation_fn", nn.Tanh()), "Tanh is not supported"),
    "gelu as a gate": (
        lambda: llama("gelu_pytorch_tanh"),
        lambda model: None,
        "GELUTanh is not supported for a gate",
    ),
    "inputs that are not shared": (
        llama,
        lambda model: model.up_proj.fp8[""].share_input(None),
        "gate and up do not share their input",
    ),
    "a fallback of up": (llama, lambda model: fall_back(model, "up_proj"), "a layer fell back"),
    "a fallback": (vit, lambda model: fall_back(model, "fc1"), "a layer fell back"),
    "another mode": (phi3, lambda model: model.down_proj.eval() and None, "its layers differ in training mode"),
    "dropout": (lambda: sequential(nn.GELU(), 0.3), lambda model: None, "dropout between its layers"),
    "dropout of an encoder layer": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, 0.3, batch_first=True),
        lambda model: None,
        "dropout between its layers",
    ),
}


@pytest.mark.parametrize("case", ASIDE)
def test_it_steps_aside_and_says_why(case: str, fused: list[str]) -> None:
    make, change, reason = ASIDE[case]
    model = converted(make)
    parts = part_by_part(model)
    handles = [change(one) for one in (parts, model)]
    x = torch.randn(3, 5, WIDTH)
    results = []
    for one in (parts, model):
        torch.manual_seed(1)  # of dropout
        results.append(training_step(one, one, x))
    assert all(map(torch.equal, *results))
    assert fused == []
    found = described(model)
    for handle in filter(None, handles):
        handle.remove()
    # without its second layer it is no block
    assert set(found.values()) == ({f"feed-forward not fused: {reason}"} if reason else set())


def test_dropout_is_not_skipped(fused: list[str]) -> None:
    model = converted(lambda: sequential(nn.GELU(), 0.5))
    x = torch.randn(64, WIDTH)
    hidden: list[Tensor] = []
    handle = model[4].register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    model(x)
    handle.remove()
    assert 0.4 < (hidden[0] == 0).float().mean() < 0.6
    model.eval()
    assert torch.equal(model(x), model(x))
    assert fused == ["gelu"] * 2
    # behind the block
    model = converted(lambda: gpt2(dropout=0.5))
    assert 0.4 < (model(x) == 0).float().mean() < 0.6
    model = converted(lambda: BertFeedForward(dropout=0.5))
    assert not torch.equal(model(x), model(x))
    assert fused == ["gelu"] * 2 + ["gelu_tanh", "gelu", "gelu"]


# rows of `describe`


def described(model: nn.Module) -> dict[str, str]:
    """The remarks of the rows on the block, by path."""
    rows = {row.path: row.reason.split("; ") for row in describe(model)}
    return {path: remarks[-1] for path, remarks in rows.items() if "feed-forward" in remarks[-1]}


def test_describe_follows_the_model() -> None:
    model = converted(lambda: sequential(nn.GELU(), 0.3))
    assert set(described(model.eval()).values()) == {"feed-forward fused"}
    partly = convert(vit(), ignore_modules=("fc2",))
    assert described(partly) == {
        "fc1": "feed-forward not fused: a linear layer is not converted, has an adapter, or is sharded by itself"
    }
    of_a_subclass = convert(SequentialOfAnotherKind(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)))
    assert set(described(of_a_subclass).values()) == {
        "feed-forward not fused: SequentialOfAnotherKind overrides `forward` of Sequential"
    }
    assert set(described(convert(Scaled())).values()) == {"feed-forward not fused: Scaled overrides `forward` of Mine"}
    late = convert(vit("tanh"))
    late.activation_fn = nn.ReLU()
    assert set(described(late).values()) == {
        "feed-forward not fused: built since the conversion, so call `convert` again"
    }
    assert set(described(convert(late)).values()) == {"feed-forward fused"}
