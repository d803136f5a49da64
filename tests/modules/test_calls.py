"""Calls that the plain layers take: arguments by name, nested tensors, no rows, and more elements than 2^31."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import feed_forward_blocks
import pytest
import torch
import torch.nn.functional as F
from pairwise import pairwise
from torch import Tensor, nn

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, convert, scaling_state
from lightning_fp8.conversion import register_linear
from lightning_fp8.scalings.recipe import Recipe

WIDTH = 32
RECIPES = [DelayedScaling(), CurrentScaling(), BlockScaling(), MXScaling()]


class Inherits(nn.Linear):
    pass


@register_linear
class Named(nn.Linear):
    """Its argument has a name of its own."""

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return F.linear(hidden, self.weight, self.bias)


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.q_proj(x) + self.k_proj(x)


def conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(WIDTH, WIDTH)


def stacked() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


# each with the name of its argument
NAMED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), "input"),
    "inherited": (lambda: Inherits(WIDTH, WIDTH), "input"),
    "registered": (lambda: Named(WIDTH, WIDTH), "hidden"),
    "Conv1D": (conv1d, "x"),
    "sequential": (lambda: feed_forward_blocks.sequential(nn.GELU()), "input"),
    "Llama": (feed_forward_blocks.llama, "x"),
}


@pytest.mark.parametrize("kind", NAMED)
def test_the_argument_by_name(kind: str) -> None:
    build, name = NAMED[kind]
    plain, x = build(), torch.randn(8, WIDTH)
    model = convert(copy.deepcopy(plain), min_features=0)
    expected = model(x)
    assert (expected - plain(x)).norm() < 0.1 * expected.norm()
    assert torch.equal(model(**{name: x}), expected)
    assert torch.equal(torch.compile(model, backend="eager")(**{name: x}), expected)
    for wrong in ({}, {"other": x}, {name: x, "other": x}):
        with pytest.raises(TypeError):
            model(**wrong)


def test_the_argument_of_a_block_by_name() -> None:
    block, x = convert(feed_forward_blocks.BertFeedForward(), min_features=0), torch.randn(8, WIDTH)
    chunk: Any = block.layer.feed_forward_chunk  # type: ignore[union-attr]
    torch.testing.assert_close(chunk(attention_output=x), chunk(x))


@pytest.mark.parametrize(
    ("build", "layout", "recipe"),
    list(
        zip(
            [NAMED["linear"][0], conv1d, stacked, Projections],
            [torch.jagged, torch.strided, torch.sparse_coo, torch.sparse_csr],
            RECIPES,
        )
    ),
)
def test_nested_and_sparse_tensors_are_refused(build: Any, layout: torch.layout, recipe: Recipe) -> None:
    plain, rows = build(), [torch.randn(3, WIDTH), torch.randn(5, WIDTH)]
    model, is_nested = convert(copy.deepcopy(plain), recipe, min_features=0), layout in (torch.jagged, torch.strided)
    x = torch.cat(rows)
    given = torch.nested.nested_tensor(rows, layout=layout) if is_nested else x.to_sparse(layout=layout)
    for training in (True, False):
        model.train(training)
        with pytest.raises(TypeError, match=r"must not be a nested or sparse tensor\. Pass `x\.to_dense"):
            model(given)
    assert not scaling_state(model).amax.any()
    # the remedies
    given = {torch.jagged: given.values, torch.strided: x.clone}.get(layout, given.to_dense)()
    expected = plain(x)
    assert (model(given) - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize(
    ("kind", "recipe", "shape", "half"),
    pairwise([*NAMED], RECIPES, [(0, WIDTH), (2, 0, WIDTH), (0, 3, WIDTH)], ["reference", "kernels"]),
)
def test_no_rows(kind: str, recipe: Recipe, shape: tuple[int, ...], half: str, request: pytest.FixtureRequest) -> None:
    if half == "kernels":
        request.getfixturevalue("cuda_half")
    model, x = convert(NAMED[kind][0](), recipe, min_features=0), torch.randn(shape, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == shape
    assert x.grad is not None
    assert x.grad.shape == shape
    gradients = [layer.weight.grad for layer in model.modules() if hasattr(layer, "fp8")]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
    before = scaling_state(model).scale.clone()
    scaling_state(model).update()
    assert torch.equal(scaling_state(model).scale, before)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_shapes_of_more_than_2_to_the_31_elements(recipe: Recipe) -> None:
    rows = 2**27 + 3
    for kind in ("linear", "Conv1D", "sequential", "Llama"):
        model = convert(NAMED[kind][0](), recipe, min_features=0).to("meta")
        x = torch.empty(rows, WIDTH, device="meta", requires_grad=True)
        y = model(x)
        y.sum().backward()
        assert y.shape == x.shape
        assert x.grad is not None
        assert x.grad.shape == x.shape
