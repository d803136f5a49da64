"""All Trainer features in ``fp8-delayed``."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lit import Regression, by_hand, loader, long_window, make_trainer, same, seeded, warned
from torch import Tensor, nn

from lightning_fp8 import DelayedScaling, Fp8Precision, convert, scaling_state, unconvert
from lightning_fp8.conversion import fall_back
from lightning_fp8.modules import Fp8Linear
from lightning_fp8.plugins import register, unregister
from lightning_fp8.scalings.recipe import RECIPES


@pytest.mark.parametrize("precision", RECIPES)
def test_fit_equals_a_plain_loop_bit_for_bit(tmp_path: Path, precision: str) -> None:
    model = seeded()
    trainer = make_trainer(tmp_path, precision=precision, accumulate_grad_batches=2)
    trainer.fit(model, loader())
    assert trainer.precision == precision
    assert trainer.global_step == scaling_state(model).updates == 2
    assert same(model, by_hand(2, accumulate=2, recipe=RECIPES[precision]()))


def test_autocast_is_for_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, model = Fp8Precision(), nn.Linear(16, 16)
    plugin.convert_module(model)
    for question in ("is_available", "is_bf16_supported"):
        monkeypatch.setattr(torch.cuda, question, lambda: True)
    with plugin.forward_context():
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cuda")


def test_fp64_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'net.0.weight' is float64"):
        make_trainer(tmp_path).fit(seeded().double(), loader())


def test_validate_test_and_predict_run_fp8_and_move_no_scale(tmp_path: Path) -> None:
    model, trainer = seeded(), make_trainer(tmp_path)
    trainer.fit(model, loader())
    before = {
        name: {k: v.clone() for k, v in entry.items()} for name, entry in scaling_state(model).state_dict().items()
    }
    calls: list[str] = []
    model.net[0].register_forward_hook(lambda module, *_: calls.append(type(module).__name__))
    validated = trainer.validate(model, loader(), verbose=False)[0]["val_loss"]
    tested = trainer.test(model, loader(), verbose=False)[0]["test_loss"]
    predicted = trainer.predict(model, loader())
    assert validated == tested
    assert calls == ["Fp8Linear"] * 12
    assert predicted[0].shape == (16, 16)
    after = scaling_state(model).state_dict()
    assert all(torch.equal(after[name][k], v) for name, entry in before.items() for k, v in entry.items())


def test_a_plugin_that_is_used_again_has_the_state_of_the_new_model_alone(tmp_path: Path) -> None:
    plugin, first, second = Fp8Precision(), seeded(), seeded()
    for model in (first, second):
        make_trainer(tmp_path, plugins=plugin, max_epochs=1).fit(model, loader())
    assert scaling_state(first).updates == scaling_state(second).updates == 4
    assert same(first, second)
    # what the next checkpoint holds
    scaling_state(second).nonfinite_steps[0] = 7
    assert plugin.state_dict()["net.0.input"]["nonfinite_steps"] == 7
    # launchers that spawn processes pickle the plugin at a second `fit`, and connect it there
    assert pickle.loads(pickle.dumps(plugin)).state_dict() == {}


def test_weights_that_a_strategy_writes_at_set_up_keep_their_histories(tmp_path: Path) -> None:
    """As DDP broadcasts them: written in place, with the same values."""

    class Written(Regression):
        def configure_optimizers(self) -> Any:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.copy_(parameter.clone())
            return super().configure_optimizers()

    model = seeded(Written)
    for steps in (4, 8):
        make_trainer(tmp_path, plugins=long_window()).fit(model, loader())
        assert (scaling_state(model).amax_history > 0).sum(0).tolist() == [steps] * 4


def test_a_model_converted_by_hand_stays_as_it_is(tmp_path: Path) -> None:
    model = seeded()
    convert(model.net[0], DelayedScaling(margin=3))
    make_trainer(tmp_path).fit(model, loader())
    assert [type(layer) for layer in model.net] == [Fp8Linear, nn.GELU, nn.Linear]
    assert scaling_state(model).recipe.margin == 3
    with pytest.raises(ValueError, match=r"already converted with .*, but this run has DelayedScaling"):
        make_trainer(tmp_path, plugins=Fp8Precision({"margin": 5})).fit(model, loader())
    with pytest.raises(ValueError, match=r"this run has precision='fp8-block'.* Pass `precision='fp8-delayed'`"):
        make_trainer(tmp_path, precision="fp8-block").fit(model, loader())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_after_fp8_is_really_bf16(tmp_path: Path, precision: str) -> None:
    model, reference = seeded(), seeded()
    make_trainer(tmp_path).fit(model, loader())
    reference.load_state_dict(model.state_dict())
    trainer = make_trainer(tmp_path, precision=precision)
    found = trainer.validate(model, loader(), verbose=False)
    assert not any(isinstance(module, Fp8Linear) for module in model.modules())
    assert found == make_trainer(tmp_path, precision=precision).validate(reference, loader(), verbose=False)
    assert trainer.precision == precision


class Fused(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=self.fused)


@pytest.mark.parametrize("precision", ["fp8-delayed", "bf16-mixed", "bf16-true"])
def test_gradients_of_fused_optimizers_are_clipped(tmp_path: Path, precision: str) -> None:
    weights = {}
    for fused, clip in ((True, 1e-3), (False, 1e-3), (True, None)):
        model = seeded(Fused)
        model.fused = fused
        norms: list[Tensor] = []
        model.on_before_optimizer_step = lambda optimizer: norms.append(  # noqa: B023
            torch.stack([p.grad.float().norm() for p in model.parameters()]).norm()  # noqa: B023
        )
        make_trainer(tmp_path, precision=precision, gradient_clip_val=clip).fit(model, loader())
        clipped = torch.stack([p.grad.float().norm() for p in model.parameters()]).norm()
        assert min(norms) > 1e-2
        assert clipped <= 1.01e-3 if clip else clipped > 1e-2
        weights[fused, clip] = [p.detach().float() for p in model.parameters()]
    for fused, plain in zip(weights[True, 1e-3], weights[False, 1e-3], strict=True):
        # of four updates of about 1e-2, each rounded by bf16 weights and moments
        torch.testing.assert_close(fused, plain, rtol=2**-6, atol=4e-3 if precision == "bf16-true" else 1e-5)


# --- a converted model under another precision ---


class Mine(Precision):
    """A user's plugin."""

    precision: Any = "mine"


OTHERS = [
    (MixedPrecision("bf16-mixed", "cpu"), "'bf16-mixed' (MixedPrecision)"),
    (Mine(), "'mine' (Mine)"),
]


def of_another(precision: Any, path: Path, **kwargs: Any) -> pl.Trainer:
    choice = {"precision": precision} if isinstance(precision, str) else {"plugins": precision}
    return make_trainer(path, **choice, **kwargs)


@pytest.mark.parametrize(("precision", "name"), OTHERS)
def test_another_precision_says_that_scales_stand_still(tmp_path: Path, precision: Any, name: str) -> None:
    model, trainer = convert(seeded()), of_another(precision, tmp_path, max_epochs=2)
    (message,) = warned("Trainer", lambda: trainer.fit(model, loader(), loader()))
    for words in (f"precision {name}", "2 converted layers", ": net.0, net.2.", 'precision="fp8-delayed"'):
        assert words in message
    # the message is correct
    assert isinstance(model.net[0], Fp8Linear)
    state = scaling_state(model)
    assert (state.scale[: state.delayed] == 1).all()
    # recorded, but not used
    assert (scaling_state(model).amax != 0).all()
    trainer.save_checkpoint(tmp_path / "without.ckpt")
    saved = torch.load(tmp_path / "without.ckpt", weights_only=True)
    assert "net.0.input" not in str(saved)

    for run in (trainer.validate, trainer.test, trainer.predict):
        # evaluation needs no scales
        assert not warned("Trainer", lambda run=run: run(model, loader()))
    # following the advice works
    assert warned("Trainer", lambda: make_trainer(tmp_path).fit(model, loader())) == []
    assert warned("Trainer", lambda: of_another(precision, tmp_path).fit(unconvert(model), loader())) == []


def test_layers_that_fell_back_are_not_in_fp8(tmp_path: Path) -> None:
    model = convert(seeded())
    fall_back(model, "net.0")
    (message,) = warned("Trainer", lambda: of_another("32-true", tmp_path).fit(model, loader()))
    assert "1 converted layer, which this precision leaves in FP8: net.2." in message
    fall_back(model, "net.2")
    assert warned("Trainer", lambda: of_another("32-true", tmp_path).fit(model, loader())) == []


def test_after_unregister_nothing_is_said_even_by_a_trainer_of_before(tmp_path: Path) -> None:
    trainer = of_another("32-true", tmp_path)
    unregister()
    try:
        assert warned("Trainer", lambda: trainer.fit(convert(seeded()), loader())) == []
    finally:
        register()


def test_of_several_processes_the_first_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Configured(Regression):
        def configure_model(self) -> None:
            convert(self)

    for rank, messages in ((0, 1), (1, 0)):
        trainer = of_another("32-true", tmp_path)
        monkeypatch.setattr(rank_zero_only, "rank", rank)
        said = warned("Trainer", lambda trainer=trainer: trainer.fit(seeded(Configured), loader()))
        assert ["Configured has 2 converted layers" in one for one in said] == [True] * messages
