"""A model has one scaling state, which follows it: further conversions, replaced layers, parts and copies of parts."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from csv import DictReader
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lit import Regression, loader, make_trainer, seeded, warned
from projections import Shared
from torch import Tensor, nn

from lightning_fp8 import (
    BlockScaling,
    DelayedScaling,
    Fp8Monitor,
    PrecisionSchedule,
    ScaleFactorLogger,
    convert,
    scaling_state,
    unconvert,
)
from lightning_fp8.modules import Fp8Linear

WIDTH = 32


def chain(*names: str) -> nn.Sequential:
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(WIDTH, WIDTH))
    return model


def step(model: nn.Module, factor: float = 1.0, loss: Callable[[Tensor], Tensor] = torch.mean) -> None:
    loss(model(factor * torch.randn(8, WIDTH))).backward()
    scaling_state(model).update()


def history(model: nn.Module, name: str) -> list[float]:
    """What has been pushed, newest first."""
    state = scaling_state(model)
    return [amax for amax in state.amax_history[:, state.names.index(name)].tolist() if amax]


def relative_error(model: nn.Module, x: Tensor) -> float:
    """Of a forward in training, to that of the same weights in fp32."""
    with torch.no_grad():
        y, exact = model.train()(x), unconvert(copy.deepcopy(model))(x)
    return ((y - exact).norm() / exact.norm()).item()


# --- layers that come later -------------------------------------------------------------------------------------------


def test_a_replaced_layer_begins_empty_and_the_others_go_on() -> None:
    model = convert(chain("a", "b"))
    state, former = scaling_state(model), model.b
    step(model)
    model.b = nn.Linear(WIDTH, WIDTH)
    convert(model)
    assert scaling_state(model) is state
    assert (len(history(model, "a.input")), history(model, "b.input")) == (1, [])
    # who still has the former layer has it with its histories
    assert history(former, "b.input")
    step(nn.Sequential(former))
    assert scaling_state(former) is not state
    assert len(history(former, "b.input")) == 2


def test_a_backward_that_is_under_way_records_nothing_in_the_rows_of_others() -> None:
    model = convert(nn.Sequential(*chain("a", "b")))
    y = model(torch.randn(8, WIDTH))
    model.insert(0, nn.Linear(WIDTH, WIDTH))
    convert(model)
    state = scaling_state(model)
    (1e6 * y).sum().backward()
    gradients = slice(len(state.module_names), state.delayed)
    assert state.amax[gradients].tolist() == [0] * 3
    # that of the forward came along
    assert (state.amax[: len(state.module_names)] > 0).tolist() == [False, True, True]


def test_groups_of_layers_that_share_an_input_move_together() -> None:
    whole = convert(nn.ModuleDict({"first": Shared(), "second": nn.Linear(WIDTH, WIDTH)}))
    state = scaling_state(whole)
    owners = {state.module_names[user]: state.module_names[owner] for user, owner in state.input_owners.items()}
    assert owners
    whole["second"] = chain("x", "y")
    convert(whole["second"])
    # a conversion of another part
    convert(whole)
    assert owners == {state.module_names[user]: state.module_names[owner] for user, owner in state.input_owners.items()}


def test_the_last_layer_ends_the_state() -> None:
    model = convert(chain("a", "b"))
    state = scaling_state(model)
    unconvert(model.a)
    state.update()
    unconvert(model)
    gc.collect()
    with pytest.raises(RuntimeError, match=r"no layers any more.*scaling_state\(model\)\.update"):
        state.update()
    assert scaling_state(convert(model)) is not state


def test_late_layers_are_named_once() -> None:
    model = convert(nn.ModuleDict({"stack": nn.ModuleList([nn.Linear(WIDTH, WIDTH)]), "head": nn.Linear(WIDTH, 4)}))
    outer = nn.ModuleDict({"model": model, "plain": nn.Linear(WIDTH, WIDTH)})

    def asked() -> list[str]:
        return warned("lightning_fp8: Layers that were added", lambda: scaling_state(outer))

    assert not asked()
    model["stack"].append(nn.Linear(WIDTH, WIDTH))
    # one more that is too small to be converted, and one outside of what was converted
    model["stack"].append(nn.Linear(WIDTH, 4))
    outer["other"] = nn.Linear(WIDTH, WIDTH)
    (said,) = asked()
    assert "'model.stack.1'. Call `lightning_fp8.convert(model)`" in said
    assert not asked()


# --- parts ------------------------------------------------------------------------------------------------------------


def test_parts_with_different_recipes_have_no_common_state() -> None:
    whole = nn.Sequential(convert(chain("a")), convert(chain("a"), BlockScaling()))
    with pytest.raises(ValueError, match=r"parts with different recipes, DelayedScaling.*BlockScaling"):
        scaling_state(whole)
    assert scaling_state(whole[0]).recipe == DelayedScaling()


def test_a_copy_joins_its_whole_with_its_histories() -> None:
    model = convert(nn.ModuleDict({"actor": chain("a", "b")}))
    run = nn.ModuleDict({"module": model})
    state = scaling_state(model)
    step(model["actor"])
    model["critic"] = copy.deepcopy(model["actor"])
    assert scaling_state(run) is state
    assert state.module_names == ("actor.a", "actor.b", "critic.a", "critic.b")
    assert history(model, "critic.b.input") == history(model, "actor.b.input")
    # inputs grow, and the copy trains: its scales follow
    for _ in range(2):
        step(model["critic"], 1000.0)
    assert len(history(model, "critic.a.input")) == 3
    assert len(history(model, "actor.a.input")) == 1
    assert relative_error(model["critic"], 1000 * torch.randn(64, WIDTH)) < 0.1
    assert relative_error(model["actor"], torch.randn(64, WIDTH)) < 0.1


# --- in runs ----------------------------------------------------------------------------------------------------------


class Grows(Regression):
    """Inputs grow by 1000, and a layer comes, while it trains."""

    def __init__(self, late: bool = True) -> None:
        super().__init__()
        self.late = late
        self.extra: nn.Module = nn.Identity()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.late and self.global_step == 2:
            self.extra = nn.Linear(16, 16)
            convert(self)
            self.trainer.optimizers[0].add_param_group({"params": [*self.extra.parameters()]})

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(self.net(x * (1000 if self.trainer.global_step >= 2 else 1)))


def test_a_conversion_in_a_trainers_run(tmp_path: Path) -> None:
    model = seeded(Grows)
    callbacks: list[pl.Callback] = [
        ScaleFactorLogger(every_n_steps=1),
        Fp8Monitor(every_n_steps=8),
        PrecisionSchedule({6: "bf16"}),
    ]
    logger = pl.loggers.CSVLogger(tmp_path, "logs")
    trainer = make_trainer(tmp_path, max_epochs=2, callbacks=callbacks, logger=logger, log_every_n_steps=1)
    trainer.fit(model, loader())
    state = scaling_state(model)
    assert state.updates == 8
    assert state.module_names == ("net.0", "net.2", "extra")
    # the schedule holds for the late layer too
    assert all(precision.of("schedule").is_bf16 for precision in state.precisions)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = list(DictReader(file))
    # the scales follow inputs that grow
    for name in ("net.0", "extra"):
        assert float([row[f"fp8/{name}.input/amax"] for row in rows if row[f"fp8/{name}.input/amax"]][-1]) > 500
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["Fp8Precision"]
    assert {"extra.input", "net.0.input"} <= set(saved)


def test_a_second_conversion_under_fabric(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="fp8-delayed")
    net = chain("a")
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 1e-3))
    for number in range(4):
        if number == 2:
            net.add_module("b", nn.Linear(WIDTH, WIDTH))
            convert(net)
        fabric.backward(model(torch.randn(8, WIDTH) * (1000 if number >= 2 else 1)).mean())
        optimizer.step()
    assert scaling_state(net).updates == 4
    assert [len(history(net, f"{name}.input")) for name in "ab"] == [4, 2]
    fabric.save(tmp_path / "run.ckpt", {"model": model})
    assert set(torch.load(tmp_path / "run.ckpt", weights_only=True)["model_fp8_scales"]) == {
        f"{name}.{role}" for name in "ab" for role in ("input", "grad_output")
    }


def test_nothing_is_said_of_layers_that_the_settings_leave_out(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.ModuleList([nn.Linear(WIDTH, WIDTH)])})
    convert(model, ignore_modules=("b",))
    model["b"].append(nn.Linear(WIDTH, WIDTH))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaling_state(model)
    assert isinstance(model["a"], Fp8Linear)
