"""Which layers share an input cast: what is found in the source of a forward, and what conversion does with it."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
from projections import Shared
from torch import nn
from transformer_models import HUGGING_FACE

from lightning_fp8 import convert, describe, scaling_state, unconvert
from lightning_fp8.conversion.shared_inputs import find_shared_inputs

MODULE = """
import torch
from torch import nn


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        for name in "qkv":
            self.add_module(name, nn.Linear(16, 16))
        self.again = self.k if {tied} else None

    def forward(self, x, y=None):
{body}
"""

# bodies of a forward, and the groups of layers that share their input in it
BODIES: dict[str, list[str]] = {
    "q = self.q(x).relu()\nk, v = self.k(x), self.v(x)\nreturn q + k + v": ["qkv"],
    "return self.v(self.q(x) * self.k(x)) + x": ["qk"],
    "with torch.autocast('cpu', torch.bfloat16):\n    q = self.q(x)\n    return q + self.k(x)": ["qk"],
    "for _ in range(2):\n    y = self.q(x) + self.k(x)\n    x = self.v(x) + y\nreturn x": ["qkv"],
    # x is assigned: by a statement, from itself, in an expression, in a branch, by a loop
    "q = self.q(x)\nx = x * 2\nreturn q + self.k(x) + self.v(x)": ["kv"],
    "x = self.q(x) + self.k(x)\nreturn self.v(x)": ["qk"],
    "return self.q(x) + self.k(x := x + 1) + self.v(x)": [],
    "q = self.q(x)\nif x.sum() > 0:\n    x = x * 2\nreturn q + self.k(x) + self.v(x)": ["kv"],
    "q = self.q(x)\nfor x in (q, q + 1):\n    q = q + self.k(x)\nreturn q + self.v(x)": [],
    # a tensor is changed in place, or may be
    "q, other = self.q(x), x\nother.mul_(2)\nreturn q + self.k(x) + self.v(x)": ["kv"],
    "q, other = self.q(x), x\nother += 1\nreturn q + self.k(x) + self.v(x)": ["kv"],
    "q = self.q(x)\nx[0] = 1\nreturn q + self.k(x) + self.v(x)": ["kv"],
    "q = self.q(x)\ntorch.add(x, 1, out=x)\nreturn q + self.k(x) + self.v(x)": ["kv"],
    "q = self.q(x)\nx.data = x * 2\nreturn q + self.k(x) + self.v(x)": ["kv"],
    "q = self.q(x)\nreturn self.k(x) + self.act(*[x], q) + self.v(x)": ["qk"],
    "def double():\n    nonlocal x\n    x = 2 * x\n    return 1\nreturn self.q(x) * double() + self.k(x)": [],
    # not all of them run, or not once
    "if x.sum() > 0:\n    y = self.q(x)\n    return y + self.v(x)\nreturn self.k(x)": ["qv"],
    "return self.q(x) + (self.k(x) if x.sum() > 0 else self.v(x))": [],
    "return self.q(x) + self.k(x) + self.v(x) + self.q(y)": ["kv"],
    "y = self.q(x) + self.k(x) + self.v(x)\nreturn torch.utils.checkpoint.checkpoint(self.q, y)": ["kv"],
    "return self.q(x) + self.k(x) + self.v(x) + self.again(x)  # tied": ["qv"],
    # other tensors, and other uses of a layer
    "x = x.to(self.q.weight.dtype)\nreturn self.q(x) + self.k(x)": ["qk"],
    "return self.q(x) + self.k(y) + self.v(y)": ["kv"],
    "return self.q(x) + self.k(x + 1) + self.v(input=x)": [],
}


def found(model: nn.Module) -> list[str]:
    names = {layer: name for name, layer in model.named_modules()}
    return ["".join(names[layer] for layer in group) for group in find_shared_inputs(model.modules())]


@pytest.mark.parametrize("body", BODIES)
def test_what_the_source_shows(body: str, tmp_path: Path) -> None:
    file = tmp_path / "projections.py"
    file.write_text(MODULE.format(body=indent(body, " " * 8), tied="tied" in body))
    spec: Any = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.Projections()
    assert found(model) == []
    assert found(convert(model)) == BODIES[body]


def test_source_that_is_not_there_or_not_run() -> None:
    scope: dict[str, Any] = {"Shared": Shared}
    exec("class Made(Shared):\n    def forward(self, x):\n        return self.q(x) + self.k(x)", scope)
    assert found(convert(scope["Made"]())) == []
    replaced = convert(Shared())
    replaced.forward = lambda x: replaced.q(x) + replaced.k(x + 1)
    assert found(replaced) == []


def owners(model: nn.Module) -> dict[str, str]:
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
    of_all = owners(model)
    assert {path.rpartition(".")[2]: owner.rpartition(".")[2] for path, owner in of_all.items()} == OF_BLOCK[name]
    # the same after feed-forward blocks have been given their own classes
    convert(model)
    assert owners(model) == of_all
    # in the same module, in each of the blocks
    assert all(path.rpartition(".")[0] == owner.rpartition(".")[0] for path, owner in of_all.items())
    names = [path.rpartition(".")[2] for path, _ in model.named_modules()]
    assert len(of_all) == sum(names.count(name) for name in OF_BLOCK[name])


def test_conversion_again_and_back() -> None:
    assert owners(convert(Shared(), ignore_modules=["q", "k"])) == {}
    model = convert(Shared())
    state = scaling_state(model)
    assert (owners(model), state.input_owners) == ({"k": "q", "v": "q"}, {1: 0, 2: 0})
    assert scaling_state(convert(model)) is state
    # the owner becomes plain: the next layer records for the group
    convert(model, ignore_modules=["q"])
    assert (owners(model), scaling_state(model).input_owners) == ({"v": "k"}, {1: 0})
    convert(model)
    assert owners(model) == owners(copy.deepcopy(model)) == {"k": "q", "v": "q"}
    # only a part of the model
    unconvert(model.q)
    assert owners(model) == {"v": "k"}
    model(torch.randn(4, 16)).sum().backward()
    scaling_state(model).update()
    unconvert(model)
    assert owners(model) == {}
