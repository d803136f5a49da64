"""Properties of every recipe without histories: in evaluation, recomputed, compiled, exported, in a Trainer."""

from __future__ import annotations

import warnings
from csv import DictReader
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lit import loader, make_trainer, same, seeded
from small_models import small_mlp
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    QuantizationProbe,
    RunRecord,
    ScaleFactorLogger,
    ScaleWatchdog,
    convert,
    scaling_state,
    weights_unchanged,
)
from lightning_fp8.scaling.recipe import Recipe

without_history = pytest.mark.parametrize("recipe", [CurrentScaling(), BlockScaling(), MXScaling()], ids=str)
by_string = pytest.mark.parametrize(
    ("precision", "recipe"), [("fp8-current", CurrentScaling()), ("fp8-block", BlockScaling()), ("fp8-mx", MXScaling())]
)


@without_history
def test_an_evaluation_needs_no_scales(recipe: Recipe) -> None:
    model = convert(small_mlp(), recipe)
    x = torch.randn(8, 32)
    trained = model(x).detach()
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            evaluated = model(x)
            # one scale for a tensor is rounded down to a power of two
            assert torch.equal(evaluated, trained) == bool(recipe.current.blocks)
            # what a training step records changes nothing
            model.train()
            with torch.enable_grad():
                model(1000 * x).sum().backward()
            scaling_state(model).update()
            model.eval()
            assert torch.equal(model(x), evaluated)
            with weights_unchanged(model):
                # the second call reuses what the first has kept
                assert torch.equal(model(x), evaluated)
                assert torch.equal(model(x), evaluated)


@without_history
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


@pytest.mark.parametrize(
    "recipe",
    [CurrentScaling(), CurrentScaling(2), BlockScaling(), MXScaling()],
    ids=str,
)
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


@pytest.mark.parametrize("recipe", [CurrentScaling(1), BlockScaling(), MXScaling()], ids=str)
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


# states and checkpoints


def trained_state(recipe: Recipe) -> Any:
    model = convert(small_mlp(), recipe)
    model(torch.randn(8, 32)).sum().backward()
    scaling_state(model).update()
    return scaling_state(model)


@pytest.mark.parametrize(
    ("saved", "loading"),
    [
        (CurrentScaling(), CurrentScaling(1)),
        (DelayedScaling(), CurrentScaling()),
        (CurrentScaling(), DelayedScaling(amax_history_len=3)),
        (BlockScaling(), DelayedScaling()),
    ],
)
def test_a_run_goes_on_with_another_recipe(saved: Recipe, loading: Recipe) -> None:
    state = trained_state(saved)
    state.nonfinite_steps[1] = 3
    entries = state.state_dict()
    if not saved.from_history:
        # a state has no scales in its checkpoint
        assert {tuple(entry) for entry in entries.values()} == {("nonfinite_steps", "in_fp8")}
    other = trained_state(loading)
    other.load_state_dict(entries)
    assert other.nonfinite_steps[: other.delayed].tolist() == state.nonfinite_steps[: state.delayed].tolist()
    # histories that are not in the checkpoint start anew
    assert not (loading.from_history and other.amax_history.any())
    half = {name: {"nonfinite_steps": torch.zeros(())} for name in entries}
    with pytest.raises(ValueError, match="is of another form: it has the fields 'nonfinite_steps', and this version"):
        other.load_state_dict(half)


# in a Trainer


def test_a_model_of_another_recipe_is_refused_by_the_string(tmp_path: Path) -> None:
    model = seeded()
    convert(model, CurrentScaling(1))
    with pytest.raises(ValueError, match=r"converted with CurrentScaling\(margin=1.*precision='fp8-current'"):
        make_trainer(tmp_path).fit(model, loader())
    make_trainer(tmp_path, precision="fp8-current").fit(model, loader())
    assert scaling_state(model).recipe == CurrentScaling(1)


@by_string
def test_the_string_trains_and_resumes_exactly(precision: str, recipe: Recipe, tmp_path: Path) -> None:
    whole = seeded()
    make_trainer(tmp_path, precision=precision, max_epochs=2).fit(whole, loader())
    assert scaling_state(whole).recipe == recipe
    saving = ModelCheckpoint(tmp_path, filename="half", save_on_train_epoch_end=True)
    make_trainer(tmp_path, precision=precision, enable_checkpointing=True, callbacks=[saving]).fit(seeded(), loader())
    again = seeded()
    make_trainer(tmp_path, precision=precision, max_epochs=2).fit(again, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert same(again, whole)
    delayed = seeded()
    make_trainer(tmp_path, max_epochs=2).fit(delayed, loader())
    assert not torch.equal(torch.stack(delayed.losses), torch.stack(whole.losses))
    torch.testing.assert_close(torch.stack(delayed.losses), torch.stack(whole.losses), rtol=0.1, atol=0)


@by_string
def test_callbacks_and_compiled_code_see_the_run(precision: str, recipe: Recipe, tmp_path: Path) -> None:
    """A compiled model, whose weights are cast before each step; and an eager one, whose layers can be watched."""
    runs = []
    for compiled in (False, True):
        model = seeded()
        if compiled:
            model.net.compile(backend="aot_eager")
        probe = QuantizationProbe(every_n_steps=1)
        watching = [ScaleFactorLogger(every_n_steps=1), ScaleWatchdog(), RunRecord() if compiled else probe]
        csv = CSVLogger(tmp_path, version=int(compiled))
        trainer = make_trainer(
            tmp_path, precision=precision, max_epochs=2, callbacks=watching, logger=csv, log_every_n_steps=1
        )
        trainer.fit(model, loader())
        trainer.validate(model, loader(), verbose=False)
        runs.append([*model.losses, *model.parameters(), scaling_state(model).scale])
        if not compiled:
            # no layer has lost precision
            assert min(probe.sqnr_db.values()) > 22
        with open(Path(csv.log_dir) / "metrics.csv") as file:
            rows = [row for row in DictReader(file) if row.get("fp8/net.0.input/scale")]
        assert len(rows) == 8
        for row in rows:
            # the logged scale is the one that was used
            scale = 448 / np.float32(row["fp8/net.0.input/amax"])
            used = 2 ** np.floor(np.log2(scale)) if precision == "fp8-mx" else scale
            assert float(row["fp8/net.0.input/scale"]) == used
            assert float(row["fp8/net.0.grad_output/saturated_fraction"]) == 0
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
