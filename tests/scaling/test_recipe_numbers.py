"""Precision and clipping of each recipe, as docs/which-recipe.md has them: a layer, an outlier, a growing gradient."""

from __future__ import annotations

import pytest
import torch
from in_blocks import linear
from repository import ROOT
from sqnr import sqnr

from lightning_fp8 import BlockScaling, CurrentScaling, DelayedScaling, MXScaling, scaling_state
from lightning_fp8.scalings.recipe import Recipe

COMPARED = (DelayedScaling(), CurrentScaling(), BlockScaling(), MXScaling())
SQUARES = MXScaling(weight_blocks=(32, 32))


def in_docs(row: str) -> list[float]:
    """The numbers that the page has for the recipes."""
    lines = (ROOT / "docs" / "which-recipe.md").read_text(encoding="utf-8").splitlines()
    (cells,) = (line.split(" | ") for line in lines if line.startswith(f"| {row} |"))
    return [float(cell.strip(" |")) for cell in cells[1:]]


def layer_db(recipe: Recipe) -> tuple[float, float, float]:
    """SQNR of output, input gradient and weight gradient of one layer on N(0, 1)."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(512, 512, generator=generator) for _ in range(3))
    model = linear(recipe, 512, 512)
    with torch.no_grad():
        model.weight.copy_(w)
    x.requires_grad_()
    y = model(x)
    y.backward(dy)
    exact = x.detach().double(), w.double(), dy.double()
    return (
        sqnr(y, exact[0] @ exact[1].T),
        sqnr(x.grad, exact[2] @ exact[1]),
        sqnr(model.weight.grad, exact[2].T @ exact[0]),
    )


def test_signal_to_noise_of_one_layer() -> None:
    found = [layer_db(recipe) for recipe in COMPARED]
    delayed, current, block, mx = found
    assert delayed == current
    rows = "N(0, 1), signal to noise in dB: output", "N(0, 1): gradient of the input", "N(0, 1): gradient of the weight"
    for row, name in enumerate(rows):
        assert in_docs(name) == pytest.approx([one[row] for one in found], abs=0.1)
    assert layer_db(SQUARES) == pytest.approx((28.5, 28.5, 28.5), abs=0.15)
    # gradients in E4M3 have one bit more than in E5M2, which is meant for tensors of wide range
    assert all(one > least for one, least in zip(delayed, (28.2, 24.2, 24.2)))
    assert all(one > max(28.4, other) for one, other in (*zip(block, delayed), *zip(mx, delayed)))


def contribution_db(recipe: Recipe, factor: float) -> float:
    """SQNR of the other channels' contribution if one channel of 4096 is ``factor`` times larger."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 4096, generator=generator), torch.randn(64, 4096, generator=generator)
    w[:, 7] = 0
    model = linear(recipe, 4096, 64)
    with torch.no_grad():
        model.weight.copy_(w)
    exact = x.double() @ w.double().T
    x[:, 7] *= factor
    return sqnr(model(x), exact)


def test_an_outlier_channel_takes_precision_from_its_block_only() -> None:
    delayed, current, block, mx = ([contribution_db(recipe, 10.0**n) for n in (3, 4, 5)] for recipe in COMPARED)
    assert delayed == current
    # E4M3 keeps its precision down to 1/28,672 of its largest number, so a thousandfold channel costs no precision
    assert min(delayed[0], block[0]) > 28
    assert min(block[2], mx[2]) > delayed[2] + 15
    assert contribution_db(SQUARES, 1e5) > 24
    rows = (
        "output of the other channels, one of 4096 being 1,000 times larger",
        "the same, 10,000 times larger",
        "the same, 100,000 times larger",
    )
    for name, *found in zip(rows, delayed, current, block, mx, strict=True):
        assert in_docs(name) == pytest.approx(found, abs=0.1)


def saturated_steps(recipe: Recipe) -> list[int]:
    """The steps that clip more than 1% of the gradient, which grows a hundredfold at step 3 and stays so."""
    model = linear(recipe, 16, 16)
    state, found = scaling_state(model), []
    for step in range(6):
        state.cast_counts.start("test")
        generator = torch.Generator().manual_seed(step)
        x, dy = torch.randn(64, 16, generator=generator), torch.randn(64, 16, generator=generator)
        model(x).backward(dy * (100 if step >= 3 else 1))
        counts = state.cast_counts.values
        assert counts is not None
        assert counts[:2, 0].tolist() == [1024, 1024]
        found += [step] if counts[1, 1] > 0.01 * counts[1, 0] else []
        state.cast_counts.stop("test")
        state.update()
    return found


def test_growth_within_a_step_is_clipped_by_delayed_scaling_only() -> None:
    steps = [saturated_steps(recipe) for recipe in COMPARED]
    assert steps == [[3], [], [], []]
    assert saturated_steps(DelayedScaling(amax_compute_algo="most_recent")) == [3]
    row = "steps that clip a gradient which [grows a hundredfold](recipes.md#a-growth-within-one-step)"
    assert in_docs(row) == [len(one) for one in steps]


def test_numbers_lost_in_a_block_are_counted() -> None:
    model = linear(BlockScaling(), 256, 8)
    state = scaling_state(model)
    x = torch.ones(2, 256)
    # half of E4M3's smallest number, 2**-10, is 1/458752 of its largest: zero next to a million, not next to a one
    x[0, 0], x[0, 128] = 1e6, 1.0
    state.cast_counts.start("test")
    model(x)
    assert state.cast_counts.values is not None
    assert state.cast_counts.values[0].tolist() == [512, 0, 512, 127]
