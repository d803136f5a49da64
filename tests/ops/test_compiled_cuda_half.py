"""The CUDA half under inductor, which checks sizes and strides of what operators return against their fakes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

from lightning_fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    convert,
    feed_forward,
    scaling_state,
)
from lightning_fp8.scalings.recipe import Recipe

pytestmark = pytest.mark.filterwarnings("ignore:.*only once for all operators.*", "ignore:dynamo_pgo force disabled")
# compiled again, in this process
SETTINGS = {"size_asserts": True, "force_disable_caches": True, "compile_threads": 1, "cpp.vec_isa_ok": False}
INPUTS, HIDDEN, OUTPUTS = 200, 144, 40
# numbers of tokens of consecutive steps
TOKENS = (48, 15, 130, 17, 333)
MIXED = "bf16-mixed"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, MIXED: torch.float32}
# each recipe, each dtype, and products outside of FP8
CASES: list[tuple[Recipe, str]] = [
    (DelayedScaling(wgrad="bf16"), MIXED),
    (CurrentScaling(margin=1, fprop="bf16"), "fp16"),
    (BlockScaling(dgrad="bf16"), "fp32"),
    (BlockScaling(power_of_2_scales=True), "bf16"),
    (MXScaling(weight_blocks=(32, 32)), MIXED),
]


def named(value: Recipe | str) -> str:
    return value if isinstance(value, str) else value.precision


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(INPUTS, HIDDEN, bias=False) for _ in range(2))
        self.down, self.act = nn.Linear(HIDDEN, INPUTS), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return feed_forward((self.gate, self.up), self.act, self.down, x)


def converted(recipe: Recipe, dtype: str) -> nn.Module:
    """Each kind of layer, in blocks a linear one."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, INPUTS))
    parts = [] if recipe.scaling("input").has_blocks else [Gated(), block]
    model = nn.Sequential(*parts, nn.Linear(INPUTS, HIDDEN, bias=False), nn.Linear(HIDDEN, OUTPUTS, bias=False))
    return convert(model.to(DTYPES[dtype]), recipe, min_features=0)


def step(model: nn.Module, run: Any, tokens: int, dtype: str) -> list[Tensor]:
    """Output, gradients and histories."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, INPUTS, generator=generator).to(DTYPES[dtype]).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == MIXED):
        y = run(x)
    model.zero_grad()
    y.sum().backward()
    scaling_state(model).update()
    return [y, x.grad, *(parameter.grad for parameter in model.parameters()), scaling_state(model).amax_history]  # type: ignore[list-item]


@pytest.fixture(autouse=True)
def _inductor() -> Iterator[None]:
    counters.clear()
    torch.compiler.reset()
    # torch keeps what it has found for the process, whatever the settings say; graphs in its cache have instructions
    valid_vec_isa_list.cache_clear()
    with torch._inductor.config.patch(SETTINGS):
        yield
    valid_vec_isa_list.cache_clear()


@pytest.mark.usefixtures("idle_half")
@pytest.mark.parametrize(("recipe", "dtype"), CASES, ids=named)
def test_one_graph_has_every_number_of_tokens(recipe: Recipe, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the C++ of what is between the operators would take a minute to compile, and has no part in this
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    model = converted(recipe, dtype)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for tokens in TOKENS:
        y, dx, *_ = step(model, compiled, tokens, dtype)
        assert (y.shape, dx.shape) == ((tokens, OUTPUTS), (tokens, INPUTS))
    # one graph for all; with scales in fp32 for blocks another one for more than 128 tokens, whose payloads by columns
    # have two scales a row
    assert counters["stats"]["unique_graphs"] == (2 if recipe.precision == "fp8-block" else 1)


@pytest.mark.parametrize("recipe", [DelayedScaling(), BlockScaling(), MXScaling(), "every layout"], ids=named)
def test_compiled_steps_are_the_eager_ones(
    cuda_half: Counter[str], recipe: Recipe | str, request: pytest.FixtureRequest
) -> None:
    if isinstance(recipe, str):
        request.getfixturevalue("every_layout")
        recipe = CurrentScaling()
    # without autocast, in which the CPU's `_scaled_mm` rounds twice, but not inside a graph
    eager = converted(recipe, "bf16")
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for tokens in TOKENS[:3]:
        expected = step(eager, eager, tokens, "bf16")
        cuda_half.clear()
        actual = step(model, compiled, tokens, "bf16")
        assert sum(cuda_half.values()) > 0
        assert all(map(torch.equal, actual, expected))
