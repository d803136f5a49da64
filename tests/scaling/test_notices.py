"""Notices that are given once: evaluation without scales, scales that nobody updates, the first inf or NaN."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lit import TRUSTED, Regression, loader, long_window, make_trainer, seeded
from small_models import small_mlp
from torch import Tensor, nn

from lightning_fp8 import convert, fall_back, load_scales, scaling_state

OTHER_WEIGHTS = "evaluated with weights other than"
WITHOUT_SCALES, WITHOUT_UPDATE, NONFINITE = (
    "evaluated without scales",
    "nothing has updated its scales",
    "inf or NaN in",
)


@contextmanager
def told(*subjects: str) -> Iterator[None]:
    """Each of these is said once inside, at a line of this package, and nothing else by it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    ours = [str(one.message) for one in said if str(one.message).startswith("lightning_fp8:")]
    assert all("lightning_fp8" in one.filename for one in said if str(one.message) in ours)
    assert len(ours) == len(subjects), ours
    for subject in subjects:
        assert any(subject in message for message in ours), (subject, ours)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, update: bool = True, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 32) * factor).square().mean().backward()
    if update:
        scaling_state(model).update()
    optimizer.step()


# --- evaluation without scales ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loop_that_evaluates_without_scales(compiled: bool) -> None:
    model = convert(small_mlp()).eval()
    call = torch.compile(model, backend="aot_eager") if compiled else model
    x = torch.randn(8, 32)
    with torch.no_grad():
        with told():
            outputs = [call(batch) for batch in (x, x)]
        with told(WITHOUT_SCALES):
            # the reason: each batch is scaled by its own values
            assert not torch.allclose(call(x[:1]), outputs[0][:1], rtol=1e-3)


def test_with_scales_nothing_is_said() -> None:
    model = convert(small_mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with told():
        step(model, optimizer)
        # the step of another optimizer, without a forward of this model
        scaling_state(model).update()
        with torch.no_grad():
            x = torch.randn(8, 32)
            whole = model.eval()(x)
            torch.testing.assert_close(model(x[:1]), whole[:1], rtol=1e-5, atol=1e-6)
            copy.deepcopy(model)(x)
    # weights from elsewhere: the scales do not belong to them
    with told(OTHER_WEIGHTS), torch.no_grad():
        model.load_state_dict(small_mlp().state_dict())
        for _ in range(3):
            model(x)


def test_a_frozen_encoder_inside_training_is_no_evaluation() -> None:
    model = nn.Sequential(convert(small_mlp()).eval(), nn.Linear(16, 1))
    with told():
        model(torch.randn(8, 32)).sum().backward()


@pytest.mark.parametrize("trains", [True, False])
def test_a_sanity_check_by_hand_is_no_evaluation_of_a_model_that_trains(trains: bool) -> None:
    fabric = Fabric(precision="fp8-delayed", accelerator="cpu", devices=1)
    net = seeded().net
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def validate(batches: int) -> None:
        model.eval()
        with torch.no_grad():
            for x, _ in itertools.islice(loader(), batches):
                model(x)
        model.train()

    with told():
        validate(2)
        if trains:
            fabric.backward(model(torch.randn(8, 32)).square().mean())
            optimizer.step()
            validate(4)
    with told(*([] if trains else [WITHOUT_SCALES])):
        validate(4)


class Teacher(Regression):
    """Calls its own layers without gradients, before the first update."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.net.eval()(batch[0])
        self.net.train()
        return super().training_step(batch, batch_idx)


class Summarized(Regression):
    """The summary runs a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.randn(4, 32)


class Baseline(Regression):
    """Evaluates all data before it trains."""

    def on_fit_start(self) -> None:
        with torch.no_grad():
            for x, _ in loader():
                self(x)


@pytest.mark.parametrize("model", [Regression, Teacher, Summarized, Baseline])
def test_a_trainer_that_fits_has_nothing_to_say(model: type[Regression], tmp_path: Path) -> None:
    with told():
        trainer = make_trainer(tmp_path, max_steps=4, num_sanity_val_steps=-1, enable_model_summary=True)
        trainer.fit(seeded(model), loader(), loader())


def test_a_fit_that_validates_weights_from_elsewhere(tmp_path: Path) -> None:
    class Swaps(Regression):
        def on_validation_start(self) -> None:
            self.net.load_state_dict(small_mlp().state_dict())

    with told(OTHER_WEIGHTS):
        make_trainer(tmp_path).fit(seeded(Swaps), loader(), loader())


def test_after_a_fit_that_ended_early_an_evaluation_is_one_again(tmp_path: Path) -> None:
    class Ends(Regression):
        def on_fit_start(self) -> None:
            raise RuntimeError("given up")

    model = seeded(Ends)
    with pytest.raises(RuntimeError, match="given up"):
        make_trainer(tmp_path).fit(model, loader())
    with told(WITHOUT_SCALES), torch.no_grad():
        for x, _ in loader():
            model(x)


def test_a_trainer_that_evaluates_without_scales(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=4, enable_checkpointing=True)
    trainer.fit(seeded(), loader(), loader())
    path = tmp_path / "run.ckpt"
    trainer.save_checkpoint(path)
    expected = trainer.validate(seeded(), loader(batch_size=4), ckpt_path=path, **TRUSTED)[0]["val_loss"]
    saved = torch.load(path, weights_only=True)
    for evaluate in ("validate", "test", "predict"):
        model = Regression()
        model.load_state_dict(saved["state_dict"])
        # from the first batch on
        with told(WITHOUT_SCALES):
            getattr(make_trainer(tmp_path), evaluate)(model, loader(batch_size=64))
    # without weights from elsewhere, and the two remedies
    with told():
        model = Regression.load_from_checkpoint(path)
        assert make_trainer(tmp_path).validate(model, loader(batch_size=4))[0]["val_loss"] == expected
        model = seeded()
        assert make_trainer(tmp_path).validate(model, loader(batch_size=4), ckpt_path=path)[0]["val_loss"] == expected
        model = Regression()
        model.load_state_dict(saved["state_dict"])
        assert (
            make_trainer(tmp_path).validate(load_scales(model, path), loader(batch_size=4))[0]["val_loss"] == expected
        )


@pytest.mark.parametrize("weights_only", [False, True])
def test_the_best_weights_loaded_by_hand_are_told_how_to_get_their_scales(weights_only: bool, tmp_path: Path) -> None:
    """As packages do after ``fit``: the model stays converted, and its scales are those of the last weights."""
    best = ModelCheckpoint(tmp_path, monitor="val_loss", save_weights_only=weights_only)
    trainer, model = make_trainer(tmp_path, max_epochs=3, enable_checkpointing=True, callbacks=[best]), seeded(lr=0.3)
    trainer.fit(model, loader(), loader())
    best_loss = trainer.validate(ckpt_path="best", dataloaders=loader(batch_size=4), **TRUSTED)[0]["val_loss"]
    model.load_state_dict(torch.load(best.best_model_path, weights_only=True)["state_dict"])
    with told("after it call `lightning_fp8.load_scales(model, file)` with the file of the weights"):
        for _ in range(2):
            make_trainer(tmp_path).validate(model, loader(batch_size=4))
    with told():
        load_scales(model, best.best_model_path)
        assert make_trainer(tmp_path).validate(model, loader(batch_size=4))[0]["val_loss"] == best_loss


def test_a_bf16_checkpoint_in_a_trainer_that_had_already_fit(tmp_path: Path) -> None:
    other = make_trainer(tmp_path, precision="bf16-mixed", max_steps=8)
    other.fit(seeded(lr=0.1), loader())
    other.save_checkpoint(tmp_path / "bf16.ckpt")
    trainer, model = make_trainer(tmp_path, max_steps=4), seeded()
    trainer.fit(model, loader())
    with told(OTHER_WEIGHTS):
        found = trainer.validate(model, loader(batch_size=64), ckpt_path=tmp_path / "bf16.ckpt")[0]["val_loss"]
    expected = other.validate(other.model, loader(batch_size=64))[0]["val_loss"]
    assert found == pytest.approx(expected, rel=0.03)


# --- scales that nobody updates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loop_that_forgets_to_update(compiled: bool) -> None:
    model = convert(small_mlp())
    call = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters())
    with told():
        for _ in range(2):
            step(call, optimizer, update=False)
    with told(WITHOUT_UPDATE):
        for _ in range(10):
            step(call, optimizer, update=False)


def test_a_loop_that_updates_is_left_alone() -> None:
    models = [convert(small_mlp()) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with told():
        for _ in range(6):
            # the second is stepped five times as often, like a critic
            step(models[0], optimizers[0])
            for _ in range(5):
                step(models[1], optimizers[1])
            with torch.no_grad():
                models[0](torch.randn(4, 32))
            # an optimizer of another model
            torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()


def test_layers_that_record_nothing_need_no_update() -> None:
    model = convert(small_mlp()).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with told():
        for _ in range(6):
            step(model, optimizer, update=False)


def test_an_optimizer_in_backward() -> None:
    model = convert(small_mlp())
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with told():
        for _ in range(2):
            model(torch.randn(8, 32)).sum().backward()
    with told(WITHOUT_UPDATE):
        for _ in range(4):
            model(torch.randn(8, 32)).sum().backward()


class RawOptimizer(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        loss = self.step(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def test_a_raw_optimizer_under_the_trainer(tmp_path: Path) -> None:
    with told(WITHOUT_UPDATE):
        make_trainer(tmp_path, max_epochs=2, max_steps=-1).fit(seeded(RawOptimizer), loader())


class Lbfgs(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=5)


def test_an_optimizer_that_calls_its_closure_several_times(tmp_path: Path) -> None:
    model = seeded(Lbfgs)
    trainer = make_trainer(tmp_path, max_steps=4, plugins=long_window())
    trainer.fit(model, loader())
    assert len(model.losses) > 2 * 4
    assert scaling_state(model).updates == 4
    assert (scaling_state(model).amax_history > 0).sum(0).tolist() == [4] * 4


def test_optimizer_steps_without_a_forward_ask_for_no_update() -> None:
    model = convert(small_mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with told():
        step(model, optimizer)
        for _ in range(4):
            optimizer.step()


# --- inf and NaN ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_the_first_inf_or_nan_is_named_with_its_step(value: float) -> None:
    model = convert(small_mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with told():
        for _ in range(3):
            step(model, optimizer)
    x = torch.randn(8, 32)
    x[3, 5] = value
    with told(f"{NONFINITE} '0.input'"):
        for _ in range(3):
            model(x).sum().backward()
            scaling_state(model).update()


def test_the_step_and_the_tensors_of_it() -> None:
    model = convert(small_mlp())
    for _ in range(4):
        model(torch.randn(8, 32)).sum().backward()
        scaling_state(model).update()
    with torch.no_grad():
        model[2].weight[0, 0] = float("inf")
    with told("'2.weight' at optimizer step 5 of this model"):
        model(torch.randn(8, 32)).sum().backward()
        scaling_state(model).update()


def test_under_a_trainer_without_callbacks(tmp_path: Path) -> None:
    class Bad(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            x = torch.where(torch.arange(len(x))[:, None] == batch_idx, float("inf"), x) if batch_idx == 2 else x
            return super().training_step((x, y), batch_idx)

    with told("'net.0.input' at optimizer step 3 of this model"):
        make_trainer(tmp_path, max_steps=4).fit(seeded(Bad), loader())


def test_what_a_checkpoint_counts_is_no_news() -> None:
    model = convert(small_mlp())
    with told(NONFINITE):
        model(torch.full((8, 32), float("inf"))).sum().backward()
        scaling_state(model).update()
    saved = scaling_state(model).state_dict()
    other = convert(small_mlp())
    with told():
        scaling_state(other).load_state_dict(saved)
        other(torch.randn(8, 32)).sum().backward()
        scaling_state(other).update()
    with told(NONFINITE):
        other(torch.full((8, 32), float("inf"))).sum().backward()
        scaling_state(other).update()


# --- abandoned steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["training_step", "backward", "on_before_optimizer_step"])
def test_an_error_leaves_no_amax_for_the_next_update(where: str, tmp_path: Path) -> None:
    class Breaks(Regression):
        broken = True

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step((batch[0] * (1e6 if self.broken else 1), batch[1]), batch_idx)
            self.fail("training_step")
            return loss

        def on_after_backward(self) -> None:
            self.fail("backward")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.fail("on_before_optimizer_step")

        def fail(self, place: str) -> None:
            if self.broken and place == where:
                raise RuntimeError("given up")

    model = seeded(Breaks)
    with pytest.raises(RuntimeError, match="given up"):
        make_trainer(tmp_path, max_steps=2).fit(model, loader())
    state = scaling_state(model)
    assert state.amax[: state.delayed].tolist() == [0] * 4
    model.broken = False
    make_trainer(tmp_path, max_steps=1).fit(model, loader())
    assert state.amax_history[0].max() < 1e3


# --- scales out of a checkpoint ---------------------------------------------------------------------------------------


def trained() -> nn.Module:
    model = convert(small_mlp(), ignore_modules=())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer)
    return model


@pytest.mark.parametrize("form", ["entries", "under a key", "file"])
def test_load_scales(form: str, tmp_path: Path) -> None:
    source, x = trained(), torch.randn(4, 32)
    fall_back(source, "2")
    saved: Any = scaling_state(source).state_dict()
    if form != "entries":
        saved = {"model": source.state_dict(), "scaling": saved, "step": 3}
    if form == "file":
        torch.save(saved, tmp_path / "run.pt")
        saved = tmp_path / "run.pt"
    with torch.no_grad():
        expected = source.eval()(x)
        # a plain model is converted; into a converted one only the scales are loaded
        for model in (small_mlp(), convert(small_mlp())):
            model.load_state_dict(source.state_dict())
            assert load_scales(model, saved) is model
            assert torch.equal(model.eval()(x), expected)
            assert scaling_state(model).fallbacks == ("2",)


def test_load_scales_converts_what_the_checkpoint_knows() -> None:
    source = convert(small_mlp(), ignore_modules=("2",))
    step(source, torch.optim.SGD(source.parameters(), lr=0.1))
    model = load_scales(small_mlp(), scaling_state(source).state_dict())
    assert scaling_state(model).module_names == ("0",)
    assert type(model[2]) is nn.Linear


def test_load_scales_of_something_else(tmp_path: Path) -> None:
    model = small_mlp()
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_scales(model, tmp_path / "missing.ckpt")
    with pytest.raises(ValueError, match=r"has no scales.*Its keys are 'state_dict', 'epoch'\."):
        load_scales(model, {"state_dict": model.state_dict(), "epoch": 1})
    two = {name: scaling_state(trained()).state_dict() for name in ("generator", "critic")}
    with pytest.raises(ValueError, match="2 scaling states: pass the one"):
        load_scales(model, two)
    other = convert(nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16)))
    with pytest.raises(ValueError, match=r"In the checkpoint but not in the model: '1\.input', '1\.grad_output'"):
        load_scales(model, scaling_state(other).state_dict())
    # nothing has been changed
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, nn.Linear]


def test_load_scales_of_a_trainers_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=3)
    trainer.fit(seeded(), loader())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    model = load_scales(Regression.load_from_checkpoint(tmp_path / "run.ckpt"), tmp_path / "run.ckpt")
    mine, theirs = scaling_state(model), scaling_state(trainer.model)
    assert mine.names == theirs.names
    assert torch.equal(mine.scale[: mine.delayed], theirs.scale[: mine.delayed])
    assert isinstance(trainer, pl.Trainer)
