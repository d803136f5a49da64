"""Properties of every recipe without histories: in evaluation, recomputed, compiled, exported, in a Trainer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lit import loader, make_trainer, same, seeded
from small_models import small_mlp
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import BlockScaling, CurrentScaling, convert, scaling_state, weights_unchanged
from lightning_fp8.scaling.recipe import Recipe

both = pytest.mark.parametrize("recipe", [CurrentScaling(), BlockScaling()], ids=str)


@both
def test_an_evaluation_is_that_of_training_and_needs_no_scales(recipe: Recipe) -> None:
    model = convert(small_mlp(), recipe)
    x = torch.randn(8, 32)
    trained = model(x).detach()
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            assert torch.equal(model(x), trained)
            # what a training step records changes nothing
            model.train()
            with torch.enable_grad():
                model(1000 * x).sum().backward()
            scaling_state(model).update()
            model.eval()
            assert torch.equal(model(x), trained)
            with weights_unchanged(model):
                # the second call reuses what the first has kept
                assert torch.equal(model(x), trained)
                assert torch.equal(model(x), trained)


@both
def test_recomputation_and_micro_batches(recipe: Recipe) -> None:
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = convert(small_mlp(), recipe)
        for scale in (1.0, 30.0):
            x = torch.randn(8, 32) * scale
            y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            y.square().mean().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", [CurrentScaling(), CurrentScaling(2), BlockScaling()], ids=str)
def test_compiled(recipe: Recipe) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = convert(small_mlp(), recipe)
        run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        outputs = []
        for scale in (1.0, 300.0, 0.01):
            y = run(torch.randn(8, 32) * scale)
            y.square().mean().backward()
            scaling_state(model).update()
            outputs.append(y.detach())
        state = scaling_state(model)
        found.append([*outputs, state.scale, state.amax_history, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", [CurrentScaling(1), BlockScaling()], ids=str)
def test_an_exported_program_scales_each_batch_by_itself(recipe: Recipe) -> None:
    model = convert(small_mlp(), recipe)
    # the amaxes of the last step are not in the program
    model(torch.randn(8, 32) * 1000).sum().backward()
    scaling_state(model).update()
    model.eval()
    x = torch.randn(8, 32)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("error", message="lightning_fp8")
        program = torch.export.export(model, (x,)).module()
        for scale in (1.0, 1e4):
            assert torch.equal(program(x * scale), model(x * scale))


@pytest.mark.parametrize(("precision", "recipe"), [("fp8-current", CurrentScaling()), ("fp8-block", BlockScaling())])
def test_the_string_trains_and_resumes_exactly(precision: str, recipe: Recipe, tmp_path: Path) -> None:
    whole = seeded()
    make_trainer(tmp_path, precision=precision, max_epochs=2).fit(whole, loader())
    assert scaling_state(whole).recipe == recipe
    first = seeded()
    saving = ModelCheckpoint(tmp_path, filename="half", save_on_train_epoch_end=True)
    make_trainer(tmp_path, precision=precision, enable_checkpointing=True, callbacks=[saving]).fit(first, loader())
    again = seeded()
    make_trainer(tmp_path, precision=precision, max_epochs=2).fit(
        again, loader(), ckpt_path=str(tmp_path / "half.ckpt")
    )
    assert same(again, whole)
    delayed = seeded()
    make_trainer(tmp_path, max_epochs=2).fit(delayed, loader())
    assert not torch.equal(torch.stack(delayed.losses), torch.stack(whole.losses))
    torch.testing.assert_close(torch.stack(delayed.losses), torch.stack(whole.losses), rtol=0.1, atol=0)
