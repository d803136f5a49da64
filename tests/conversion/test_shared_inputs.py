"""Which layers share an input cast: what is found in the source of a forward, and what conversion does with it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformer_models import HUGGING_FACE

from lightning_fp8 import convert, describe, scaling_state, unconvert
from lightning_fp8.conversion.shared_inputs import find_shared_inputs


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "qkv":
            self.add_module(name, nn.Linear(16, 16))


class Straight(Projections):
    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).relu()
        k, v = self.k(x), self.v(x)
        return q + k + v


class OneExpression(Projections):
    def forward(self, x: Tensor) -> Tensor:
        return self.v(self.q(x) * self.k(x)) + x


class InsideWith(Projections):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            q = self.q(x)
            return q + self.k(x)


class OfALoop(Projections):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            y = self.q(x) + self.k(x)
            x = self.v(x) + y
        return x


class Assigned(Projections):
    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        x = x * 2
        return q + self.k(x) + self.v(x)


class AssignedFromItself(Projections):
    def forward(self, x: Tensor) -> Tensor:
        x = self.q(x) + self.k(x)
        return self.v(x)


class Walrus(Projections):
    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x := x + 1) + self.v(x)


class AssignedInABranch(Projections):
    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        if x.sum() > 0:
            x = x * 2
        return q + self.k(x) + self.v(x)


class LoopTarget(Projections):
    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        for x in (q, q + 1):
            q = q + self.k(x)
        return q + self.v(x)


class InPlace(Projections):
    def forward(self, x: Tensor) -> Tensor:
        q, other = self.q(x), x
        other.mul_(2)
        return q + self.k(x) + self.v(x)


class Augmented(Projections):
    def forward(self, x: Tensor) -> Tensor:
        q, other = self.q(x), x
        other += 1
        return q + self.k(x) + self.v(x)


class Element(Projections):
    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        x[0] = 1
        return q + self.k(x) + self.v(x)


class OutArgument(Projections):
    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        torch.add(x, 1, out=x)
        return q + self.k(x) + self.v(x)


class GivenAway(Projections):
    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        return self.k(x) + self.act(*[x], q) + self.v(x)


class Data(Projections):
    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        x.data = x * 2
        return q + self.k(x) + self.v(x)


class Branches(Projections):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            y = self.q(x)
            return y + self.v(x)
        return self.k(x)


class Conditional(Projections):
    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + (self.k(x) if x.sum() > 0 else self.v(x))


class Twice(Projections):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.q(x) + self.k(x) + self.v(x) + self.q(y)


class PassedOn(Projections):
    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x) + self.k(x) + self.v(x)
        return torch.utils.checkpoint.checkpoint(self.q, y, use_reentrant=False)


class OwnWeight(Projections):
    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.q.weight.dtype)
        return self.q(x) + self.k(x)


class OtherNames(Projections):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.q(x) + self.k(y) + self.v(y)


class OtherArguments(Projections):
    def forward(self, x: Tensor, y: Any = None) -> Tensor:
        return self.q(x) + self.k(x + 1) + self.v(input=x)


class Nonlocal(Projections):
    def forward(self, x: Tensor) -> Tensor:
        def double() -> int:
            nonlocal x
            x = 2 * x
            return 1

        return self.q(x) * double() + self.k(x)


class Tied(Projections):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.k

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x) + self.v(x) + self.again(x)


FOUND: dict[type[nn.Module], list[str]] = {
    Straight: ["qkv"],
    OneExpression: ["qk"],
    InsideWith: ["qk"],
    OfALoop: ["qkv"],
    Assigned: ["kv"],
    AssignedFromItself: ["qk"],
    Walrus: [],
    AssignedInABranch: ["kv"],
    LoopTarget: [],
    InPlace: ["kv"],
    Augmented: ["kv"],
    Element: ["kv"],
    OutArgument: ["kv"],
    GivenAway: ["qk"],
    Data: ["kv"],
    Branches: ["qv"],
    Conditional: [],
    Twice: ["kv"],
    PassedOn: ["kv"],
    OwnWeight: ["qk"],
    OtherNames: ["kv"],
    OtherArguments: [],
    Nonlocal: [],
    Tied: ["qv"],
}


def found(model: nn.Module) -> list[str]:
    names = {layer: name for name, layer in model.named_modules()}
    return ["".join(names[layer] for layer in group) for group in find_shared_inputs(model.modules())]


@pytest.mark.parametrize("kind", FOUND, ids=lambda kind: kind.__name__)
def test_what_the_source_shows(kind: type[nn.Module]) -> None:
    assert found(kind()) == []
    assert found(convert(kind())) == FOUND[kind]


def test_source_that_is_not_there_or_not_run() -> None:
    scope: dict[str, Any] = {"Projections": Projections}
    exec("class Made(Projections):\n    def forward(self, x):\n        return self.q(x) + self.k(x)", scope)
    assert found(convert(scope["Made"]())) == []
    replaced = convert(Straight())
    replaced.forward = lambda x: replaced.q(x) + replaced.k(x + 1)
    assert found(replaced) == []


def leaders(model: nn.Module) -> dict[str, str]:
    return {
        row.path: row.reason.partition("; shares its input with ")[2].partition(";")[0]
        for row in describe(model)
        if "shares" in row.reason
    }


OF_BLOCK = {
    "gpt2": {},
    "llama": {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"},
    "bert": {"key": "query", "value": "query"},
    "vit": {"k_proj": "q_proj", "v_proj": "q_proj"},
    "t5": {"v": "k"},
}


@pytest.mark.parametrize("name", OF_BLOCK)
def test_models_of_hugging_face(name: str) -> None:
    model = convert(HUGGING_FACE[name]()[0])
    of_all = leaders(model)
    assert {path.rpartition(".")[2]: leader.rpartition(".")[2] for path, leader in of_all.items()} == OF_BLOCK[name]
    # the same after feed-forward blocks have been given their own classes
    convert(model)
    assert leaders(model) == of_all
    # in the same module, in every block
    assert all(path.rpartition(".")[0] == leader.rpartition(".")[0] for path, leader in of_all.items())
    # in each of the blocks
    names = [path.rpartition(".")[2] for path, _ in model.named_modules()]
    assert len(of_all) == sum(names.count(name) for name in OF_BLOCK[name])


def test_what_is_not_converted_shares_nothing() -> None:
    assert leaders(convert(Straight(), ignore_modules=["q"])) == {"v": "k"}
    assert leaders(convert(Straight(), ignore_modules=["q", "k"])) == {}
    narrow = Straight()
    narrow.q = nn.Linear(16, 8)
    assert leaders(convert(narrow)) == {"v": "k"}


def test_conversion_again_and_back() -> None:
    model = convert(Straight())
    state = scaling_state(model)
    assert (leaders(model), state.input_leaders) == ({"k": "q", "v": "q"}, {1: 0, 2: 0})
    assert scaling_state(convert(model)) is state
    # the leader becomes plain: the next layer records for the group
    convert(model, ignore_modules=["q"])
    assert (leaders(model), scaling_state(model).input_leaders) == ({"v": "k"}, {1: 0})
    convert(model)
    assert leaders(model) == {"k": "q", "v": "q"}
    assert leaders(copy.deepcopy(model)) == {"k": "q", "v": "q"}
    # only a part of the model
    unconvert(model.q)
    assert leaders(model) == {"v": "k"}
    model(torch.randn(4, 16)).sum().backward()
    scaling_state(model).update()
    unconvert(model)
    assert leaders(model) == {}
