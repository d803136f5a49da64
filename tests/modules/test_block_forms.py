"""Classes whose feed-forward block is known by what they compute, and classes that are left alone."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

import pytest
import torch
from feed_forward_blocks import HIDDEN, WIDTH, Mine, Scaled, SequentialOfAnotherKind, converted, part_by_part
from feed_forward_step import assert_same_steps
from torch import Tensor, nn

from lightning_fp8 import convert, unconvert
from lightning_fp8.modules.block_forms import form_of_class
from lightning_fp8.modules.class_swap import own_class


def test_classes_of_transformers() -> None:
    expected = {
        "llama.LlamaMLP": "gated",
        "mistral.MistralMLP": "gated",
        "qwen2.Qwen2MLP": "gated",
        "qwen3.Qwen3MLP": "gated",
        "gemma.GemmaMLP": "gated",
        "phi3.Phi3MLP": "packed",
        "gpt2.GPT2MLP": "chain",
        "vit.ViTMLP": "chain",
        "clip.CLIPMLP": "chain",
        "siglip.SiglipMLP": "chain",
    }
    for path, kind in expected.items():
        module, name = path.split(".")
        form = form_of_class(getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name), {})
        assert form is not None, path
        assert form.kind == kind, path
    for module, name in {"bert": "Bert", "roberta": "Roberta", "electra": "Electra"}.items():
        file = import_module(f"transformers.models.{module}.modeling_{module}")
        parts = {"intermediate": getattr(file, f"{name}Intermediate"), "output": getattr(file, f"{name}Output")}
        form = form_of_class(getattr(file, f"{name}Layer"), parts)
        assert form is not None
        assert form.kind == "two modules"


class Inheriting(Mine):
    pass


class Registered(Mine):
    known: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        cls.known.append(cls)


def decorated(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    seen: list[Tensor] = []

    @functools.wraps(method)
    def noting(self: nn.Module, hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return method(self, hidden)

    return noting


class Decorated(Mine):
    @decorated
    def forward(self, hidden: Tensor) -> Tensor:
        return self.two(self.act(self.one(hidden)))


@pytest.mark.parametrize("kind", [Mine, Inheriting])
def test_a_class_is_known_by_what_it_computes(kind: type[nn.Module], fused: list[str]) -> None:
    model = converted(kind)
    assert_same_steps(part_by_part(model), model, steps=2)
    assert fused == ["relu"] * 2
    # a keyword argument is part of the class's own signature
    x = torch.randn(2, WIDTH)
    assert torch.equal(model(hidden=x), model(x))
    with pytest.raises(TypeError, match="other"):
        model(other=x)


@pytest.mark.parametrize("kind", [Scaled, Registered, Decorated])
def test_any_other_is_left_alone(kind: type[nn.Module], fused: list[str]) -> None:
    model = converted(kind)
    assert type(model) is kind
    model(torch.randn(2, WIDTH)).sum().backward()
    assert fused == []
    assert Registered.known == []


def test_sequences(fused: list[str]) -> None:
    parts = [nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)]
    model = converted(lambda: nn.Sequential(*parts, nn.ReLU(), nn.LayerNorm(WIDTH), *copy.deepcopy(parts)))
    assert_same_steps(part_by_part(model), model, steps=2)
    assert fused == ["relu"] * 2 * 2
    fused.clear()
    assert torch.equal(model[:3](x := torch.randn(5, WIDTH)), model[2](model[1](model[0](x))))
    for left_alone in (
        nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)),
        nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WIDTH)),
        nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU()),
    ):
        assert type(convert(left_alone)) is nn.Sequential
    assert type(convert(SequentialOfAnotherKind(*copy.deepcopy(parts)))) is SequentialOfAnotherKind
    partly = convert(nn.Sequential(*map(copy.deepcopy, parts[:3])), ignore_modules=("2",))
    assert type(partly) is nn.Sequential


def test_conversion_of_parts_comes_and_goes() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0)
    for ignored in ("linear2", None, "linear1"):
        convert(model, ignore_modules=() if ignored is None else (ignored,))
        assert (type(model) is nn.TransformerEncoderLayer) == (ignored is not None)
        assert isinstance(model, nn.TransformerEncoderLayer)
        assert type(model).__name__ == ("Fp8" if ignored is None else "") + "TransformerEncoderLayer"
    unconvert(convert(model))
    assert type(model) is nn.TransformerEncoderLayer


def test_a_class_changed_since_conversion_is_no_longer_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted(Mine)
    data = pickle.dumps(model)
    monkeypatch.setattr(Mine, "forward", Scaled.forward)
    assert type(pickle.loads(data)) is Mine
    assert own_class(convert(Mine())) is Mine


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.act, self.down = nn.ReLU(), nn.Linear(HIDDEN, WIDTH)


def with_forward(body: str, arguments: str = "x") -> type[nn.Module]:
    """A class whose forward has no source file."""
    found: dict[str, Any] = {}
    exec(f"def forward(self, {arguments}):\n    " + body.replace("; ", "\n    "), found)
    return type("Block", (Parts,), {"forward": found["forward"]})


CHAIN, GATED = "return self.down(self.act(self.up(x)))", "return self.down(self.act(self.gate(x)) * self.up(x))"


@pytest.mark.parametrize("body", [CHAIN, GATED, "y = self.up(x); z = self.gate(x); return self.down(self.act(z) * y)"])
def test_a_method_without_source_is_known(body: str) -> None:
    model = converted(with_forward(body))
    assert type(model).__name__ == "Fp8Block"
    assert_same_steps(part_by_part(model), model, steps=1)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        *(
            (f"{before}; {CHAIN}", "x")
            for before in ("self.seen = x", "print(x)", "import math", "for _ in 'a': x = x")
        ),
        *((CHAIN, arguments) for arguments in ("x=1", "*x")),
        (f"x = x if self.up is None else x; {CHAIN}", "x"),
        (f"{CHAIN} * 2", "x"),
        # a module that is called twice
        (f"self.up(x); {GATED}", "x"),
        (f"self.down(x); {CHAIN}", "x"),
        ("one, two = self.up(x).chunk(2, dim=0); return self.down(two * self.act(one))", "x"),
        ("'Docstring only.'", "x"),
    ],
)
def test_a_method_that_may_do_more_is_left_alone(body: str, arguments: str) -> None:
    kind = with_forward(body, arguments)
    assert type(converted(kind)) is kind
