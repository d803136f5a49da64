"""``ScaleWatchdog(action="current")``: a layer with problems moves to current scaling, then to bf16."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lit import Regression, loader, make_trainer, same, seeded
from logged_runs import rows_of
from moved import to_current
from small_models import small_mlp
from torch import Tensor, nn
from watched_models import NEVER, Growing, Vanishing

from lightning_fp8 import (
    CurrentScaling,
    DelayedScaling,
    Fp8Precision,
    ScaleWatchdog,
    convert,
    describe,
    export,
    scaling_state,
    unconvert,
)
from lightning_fp8.callbacks.watch import Limits, Watch


def clips(every: int = 2, **kwargs: Any) -> ScaleWatchdog:
    options: Any = {**NEVER, "saturated_above": 0.3, "checks_in_a_row": 1, **kwargs}
    return ScaleWatchdog("current", every, **options)


def underflows(**kwargs: Any) -> ScaleWatchdog:
    return clips(saturated_above=None, underflowed_above=0.5, **kwargs)


def logged(logger: CSVLogger) -> list[tuple[float, ...]]:
    names = ("saturated", "underflowed", "current", "fallbacks")
    rows = [row for row in rows_of(logger) if row.get("fp8/watchdog/current")]
    return [tuple(float(row[f"fp8/watchdog/{name}"]) for name in names) for row in rows]


def test_a_tensor_that_grows_is_clipped_no_more(tmp_path: Path) -> None:
    logger, model = CSVLogger(tmp_path), seeded(Growing)
    trainer = make_trainer(tmp_path, callbacks=[clips(4, patterns=("*.input",))], max_epochs=3, logger=logger)
    with pytest.warns(UserWarning, match="numbers clipped") as caught:
        trainer.fit(model, loader())
    said = [str(warning.message) for warning in caught if "ScaleWatchdog" in str(warning.message)]
    # no second message
    assert len(said) == 1
    assert said[0].endswith("\n  With current scaling from now on: net.0.")
    assert logged(logger) == [(1, 0, 1, 0), (0, 0, 1, 0), (0, 0, 1, 0)]
    assert scaling_state(model).fallbacks == ()
    rows = {row.path: row for row in describe(model)}
    assert "moved to current scaling: net.0" in rows["net.0"].reason
    assert "current" not in rows["net.2"].reason
    # the scale shown is the one that the last step used, not one from the largest amax of the window
    state = scaling_state(model)
    newest = state.amax_history[0, 0]
    assert torch.equal(state.scale[0], 448 / newest)


def test_what_it_does_not_help_moves_to_bf16(tmp_path: Path) -> None:
    logger, model = CSVLogger(tmp_path), seeded(Vanishing)
    trainer = make_trainer(tmp_path, callbacks=[underflows(checks_in_a_row=2)], max_epochs=3, logger=logger)
    with pytest.warns(UserWarning, match="turned into zero") as caught:
        trainer.fit(model, loader())
    said = [str(warning.message).splitlines()[-1].strip() for warning in caught if "ScaleWatch" in str(warning.message)]
    assert said == ["With current scaling from now on: net.0.", "In bf16 from now on: net.0."]
    # two checks in a row for each move
    in_current, in_bf16 = [(0, 1, 1, 0), (0, 0, 1, 0)], [(0, 1, 0, 1), (0, 0, 0, 1), (0, 0, 0, 1)]
    assert logged(logger) == [(0, 0, 0, 0), *in_current, *in_bf16]
    assert scaling_state(model).fallbacks == ("net.0",)
    assert "fell back to bf16: net.0" in describe(model)[0].reason


def test_inf_and_nan_move_a_layer_to_bf16_at_once(tmp_path: Path) -> None:
    class Poisoned(Regression):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x[0, 0] = float("inf")
            return super().forward(x).nan_to_num()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.parameters():
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)

    model = seeded(Poisoned)
    model.net.insert(0, nn.Linear(32, 32))
    model.net.append(nn.Linear(16, 16))
    watchdog = clips(saturated_above=None, nonfinite_steps=2, patterns=("net.0.input",))
    with pytest.warns(UserWarning, match=r"In bf16 from now on: net\.0\."):
        make_trainer(tmp_path, callbacks=[watchdog], max_epochs=1).fit(model, loader())
    assert scaling_state(model).current_modules == ()


def test_a_resumed_run_goes_on_exactly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trainer(epochs: int, **kwargs: Any) -> pl.Trainer:
        return make_trainer(tmp_path, max_epochs=epochs, **kwargs)

    whole, first = seeded(Growing), seeded(Growing)
    with pytest.warns(UserWarning, match="current scaling from now on"):
        trainer(2, callbacks=[clips(4)]).fit(whole, loader())
    half = trainer(1, callbacks=[clips(4)])
    with pytest.warns(UserWarning, match="current scaling from now on"):
        half.fit(first, loader())
    half.save_checkpoint(tmp_path / "half.ckpt")
    # without the callback
    again = seeded(Growing)
    with caplog.at_level("INFO"):
        trainer(2).fit(again, loader(), ckpt_path=str(tmp_path / "half.ckpt"))
    assert "2 layers moved to current scaling in the run that saved this checkpoint, and stay there" in caplog.text
    assert scaling_state(again).current_modules == scaling_state(whole).current_modules == ("net.0", "net.2")
    assert same(again, whole)


def step(model: nn.Module, size: float) -> list[Tensor]:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).mul_(size).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    y.float().square().sum().backward()
    scaling_state(model).update()
    return [y.detach(), x.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("half", ["reference", "kernels", "compiled"])
def test_the_moved_layers_are_those_of_current_scaling(half: str, request: pytest.FixtureRequest) -> None:
    if "kernels" in half:
        request.getfixturevalue("cuda_half")
    torch.manual_seed(0)
    delayed = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    current = convert(copy.deepcopy(delayed), CurrentScaling(margin=1))
    convert(delayed, DelayedScaling(margin=1))
    models: list[Any] = [delayed, current]
    if "compiled" in half:
        models = [torch.compile(model, backend="aot_eager", fullgraph=True) for model in models]
    for _ in range(2):
        step(models[0], 1.0)
    state = scaling_state(delayed)
    assert state.every_tensor_has_history
    # a scale from past steps would clip
    to_current(state, 0, 1)
    for size in (100.0, 1e4, 1.0):
        assert all(torch.equal(one, other) for one, other in zip(*(step(model, size) for model in models), strict=True))
        assert torch.equal(state.scale, scaling_state(current).scale)
    # the same in a copy and in evaluation
    clone = copy.deepcopy(delayed)
    assert scaling_state(clone).current_modules == ("0", "1")
    x = torch.randn(8, 32) * 1e3
    with torch.no_grad():
        assert torch.equal(clone.eval()(x), current.eval()(x))
    assert not hasattr(unconvert(clone)[0], "fp8")


def test_a_scale_that_is_not_used_is_not_stale() -> None:
    state = scaling_state(convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))))
    watch, found = Watch(state, Limits(10, None, None, None, 1)), []
    for step in range(10, 50, 10):
        # both layers run, and the amaxes of their inputs are lost
        state.amax.fill_(1.0)
        state.amax[:2] = 0.0
        state.update()
        found.append(sorted(watch.check(step, lambda tensor: tensor).tensors["stale"]))
        if step == 20:
            to_current(state, 0)
    assert found == [[0, 1], [0, 1], [1], [1]]


def test_other_recipes_fall_back_and_say_so_once(tmp_path: Path) -> None:
    model = seeded(Vanishing)
    plugin = Fp8Precision(recipe=CurrentScaling())
    with pytest.warns(UserWarning, match="ScaleWatchdog") as caught:
        make_trainer(tmp_path, plugins=plugin, callbacks=[underflows()], max_epochs=2).fit(model, loader())
    said = [str(warning.message) for warning in caught if "ScaleWatchdog" in str(warning.message)]
    assert len(said) == 2
    assert "all layers are scaled by their own values already: `action='current'` moves a layer" in said[0]
    assert said[1].endswith("In bf16 from now on: net.0.")
    assert scaling_state(model).fallbacks == ("net.0",)


def test_an_export_has_no_scales_for_them(tmp_path: Path) -> None:
    model = convert(small_mlp())
    step(model, 1.0)
    to_current(scaling_state(model), 0)
    with pytest.warns(UserWarning, match=r"readers will scale each input.* on current scaling: 0\.input\.$"):
        export(model, tmp_path / "model")
