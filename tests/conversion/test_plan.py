"""Conversion starts with a plan, which is then carried out exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_models import small_mlp
from torch import nn
from transformer_models import HUGGING_FACE

from lightning_fp8 import convert, describe
from lightning_fp8.conversion.plan import conversion_plan
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.modules.paths import plain_path


class Experts(nn.Module):
    """Layers of each kind, a shared one, experts in a parameter, and what cannot run in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.shared = self.first
        self.attention = nn.MultiheadAttention(32, 4, kdim=16)
        self.block = nn.TransformerEncoderLayer(32, 4, 64)
        self.weights = nn.Parameter(torch.randn(4, 32, 32))
        self.bilinear = nn.Bilinear(8, 8, 8)
        self.small = nn.Linear(8, 32)
        self.parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.lazy = nn.LazyLinear(8)
        self.head = nn.Sequential(small_mlp())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(32, 32),
    "experts": Experts,
    **{name: lambda make=make: make()[0] for name, make in HUGGING_FACE.items()},  # type: ignore[misc]
}
PATTERNS = {"experts": ("head", "*.linear1"), "bert": ("*.attention",), "gpt2": ("*.mlp",)}


@pytest.mark.parametrize(("ignores", "limit"), [(False, 0), (True, 32)], ids=["all", "some-large"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_described_before_is_what_is_converted(name: str, ignores: bool, limit: int) -> None:
    model = MODELS[name]()
    ignored = PATTERNS.get(name, ()) if ignores else ()
    kinds = {path: (type(layer), set(vars(layer))) for path, layer in model.named_modules()}
    before = describe(model, ignored, limit)
    conversion_plan(model, ignored, min_features=limit).check()
    # a plan changes nothing
    assert kinds == {path: (type(layer), set(vars(layer))) for path, layer in model.named_modules()}
    convert(model, ignore_modules=ignored, min_features=limit)
    after = describe(model, ignored, limit)
    announced = {row.path for row in before if row.reason == "not converted yet: call `convert`"}
    # the classes show what was done, independently of the plan's rows
    done = {plain_path(path) for path, layer in model.named_modules() if isinstance(layer, Fp8Module)}
    assert done
    assert announced == done == {row.path for row in after if row.converted}
    assert [row.path for row in before] == [row.path for row in after]
    assert [row for row in before if row.path not in done] == [row for row in after if row.path not in done]
