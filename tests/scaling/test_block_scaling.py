"""``BlockScaling``: products, logged values, states, checkpoints, and runs."""

from __future__ import annotations

from csv import DictReader
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_blocks import in_fp8, linear, spread
from lightning.pytorch.loggers import CSVLogger
from lit import loader, make_trainer, seeded
from small_models import small_mlp

from lightning_fp8 import (
    BlockScaling,
    DelayedScaling,
    QuantizationProbe,
    RunRecord,
    ScaleFactorLogger,
    ScaleWatchdog,
    convert,
    scaling_state,
)
from lightning_fp8.scaling.recipe import as_recipe

RECIPES = [BlockScaling(), BlockScaling(power_of_2_scales=True)]
# tokens, inputs, outputs: rows and columns that end within a block, and several blocks each way
SIZES = [(16, 32, 48), (200, 300, 136)]


def check_products(recipe: BlockScaling, sizes: tuple[int, int, int]) -> None:
    """Output and gradients of one layer are products of the quantized operands, each in blocks along its K."""
    tokens, inputs, outputs = sizes
    model = linear(recipe, inputs, outputs, bias=True)
    with torch.no_grad():
        model.weight.copy_(spread(outputs, inputs, seed=2))
    x, dy = spread(tokens, inputs, seed=3).requires_grad_(), spread(tokens, outputs, seed=4)
    y = model(x)
    y.backward(dy)
    w = in_fp8(model.weight, 128, recipe)
    # inputs and gradients have different blocks along the tokens than along their features
    expected = {
        "y": in_fp8(x, 1, recipe) @ w.T + model.bias.detach().numpy(),
        "dx": in_fp8(dy, 1, recipe) @ w,
        "dw": in_fp8(dy.T, 1, recipe) @ in_fp8(x.T, 1, recipe).T,
        "db": dy.numpy().astype(np.float64).sum(0),
    }
    assert x.grad is not None
    assert model.weight.grad is not None
    assert model.bias.grad is not None
    found = {"y": y.detach(), "dx": x.grad, "dw": model.weight.grad, "db": model.bias.grad}
    for name, value in expected.items():
        error = np.abs(found[name].numpy() - value).max()
        assert error < 2e-6 * np.abs(value).max(), name


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_products_of_blocks(recipe: BlockScaling, sizes: tuple[int, int, int]) -> None:
    check_products(recipe, sizes)


def test_products_of_blocks_where_operands_are_k_major(cuda_half: Any) -> None:
    check_products(BlockScaling(), SIZES[1])


def test_what_is_logged_is_the_largest_value_and_its_scale() -> None:
    for recipe in RECIPES:
        model = linear(recipe, 300, 136)
        x, dy = spread(40, 300, seed=5), spread(40, 136, seed=6)
        model(x.requires_grad_()).backward(dy)
        state = scaling_state(model)
        state.update()
        amax = [float(tensor.detach().abs().max()) for tensor in (x, dy, model.weight)]
        assert [*state.amax_history[0].tolist(), float(state.amax[2])] == amax
        scales = 448 / np.float32(amax)
        assert state.scale.tolist() == list(2.0 ** np.floor(np.log2(scales)) if recipe.power_of_2_scales else scales)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_block_that_is_not_finite_harms_no_other(bad: float) -> None:
    model = linear(BlockScaling(), 256, 8)
    x = spread(4, 256, seed=7)
    exact = in_fp8(x, 1, BlockScaling())
    x[1, 5] = bad
    x.requires_grad_()
    y = model(x)
    y.backward(torch.ones_like(y))
    w = in_fp8(model.weight, 128, BlockScaling())
    # with a scale of 1, the finite values of the block survive
    assert np.allclose(in_fp8(x, 1, BlockScaling())[1, 128:], exact[1, 128:])
    expected = in_fp8(x, 1, BlockScaling()) @ w.T
    np.testing.assert_allclose(y.detach().numpy(), expected, rtol=0, atol=1e-5 * np.nanmax(np.abs(expected)))
    assert bool(y[[0, 2, 3]].isfinite().all())
    state = scaling_state(model)
    before = state.amax_history.clone()
    state.update()
    assert state.nonfinite_steps.tolist() == [1, 0, 0]
    assert torch.equal(state.amax_history[:, 0], before[:, 0])


# states and checkpoints


def test_a_state_has_no_scales_in_its_checkpoint() -> None:
    model = convert(small_mlp(), BlockScaling())
    model(torch.randn(8, 32)).sum().backward()
    scaling_state(model).update()
    entries = scaling_state(model).state_dict()
    assert {tuple(entry) for entry in entries.values()} == {("nonfinite_steps", "in_fp8")}
    other = convert(small_mlp(), DelayedScaling())
    scaling_state(other).load_state_dict(entries)


def test_the_fields() -> None:
    assert as_recipe({"precision": "fp8-block", "power_of_2_scales": True}) == BlockScaling(power_of_2_scales=True)
    with pytest.raises(
        TypeError, match=r"BlockScaling has no field 'margin'\. Its fields are power_of_2_scales, fprop"
    ):
        as_recipe({"precision": "fp8-block", "margin": 1})
    with pytest.raises(ValueError, match="BlockScaling: `power_of_2_scales` must be True or False, got 1"):
        BlockScaling(power_of_2_scales=1)  # type: ignore[arg-type]


def test_callbacks_and_compiled_code_see_the_run(tmp_path: Path) -> None:
    """A compiled model, whose weights are cast before each step; and an eager one, whose layers can be watched."""
    runs = []
    for compiled in (False, True):
        model = seeded()
        if compiled:
            model.net.compile(backend="aot_eager")
        probe, logger = QuantizationProbe(every_n_steps=1), ScaleFactorLogger(every_n_steps=1)
        watchdog = ScaleWatchdog()
        watching = [logger, watchdog, RunRecord()] if compiled else [logger, watchdog, probe]
        csv = CSVLogger(tmp_path, version=int(compiled))
        trainer = make_trainer(
            tmp_path, precision="fp8-block", max_epochs=2, callbacks=watching, logger=csv, log_every_n_steps=1
        )
        trainer.fit(model, loader())
        trainer.validate(model, loader(), verbose=False)
        runs.append([*model.losses, *model.parameters(), scaling_state(model).scale])
        if not compiled:
            # as for one layer on N(0, 1): no layer has lost precision
            assert min(probe.sqnr_db.values()) > 25
        with open(Path(csv.log_dir) / "metrics.csv") as file:
            rows = [row for row in DictReader(file) if row.get("fp8/net.0.input/scale")]
        assert len(rows) == 8
        for row in rows:
            assert float(row["fp8/net.0.input/scale"]) == 448 / np.float32(row["fp8/net.0.input/amax"])
            assert float(row["fp8/net.0.grad_output/saturated_fraction"]) == 0
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
