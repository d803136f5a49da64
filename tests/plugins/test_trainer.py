"""All Trainer features in ``fp8-delayed``."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.tuner import Tuner
from lit import Regression, by_hand, loader, make_trainer, same, seeded, warned
from processes import run_script
from torch import Tensor, nn

import lightning_fp8
from lightning_fp8 import DelayedScaling, Fp8Precision, convert, fall_back, scaling_state, unconvert
from lightning_fp8.modules import Fp8Linear, feed_forward
from lightning_fp8.plugins.trainer import PLUGINS


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip": 0.1}])
def test_fit_equals_a_plain_loop_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    model = seeded()
    trainer = make_trainer(
        tmp_path,
        accumulate_grad_batches=options.get("accumulate", 1),
        gradient_clip_val=options.get("clip"),
    )
    trainer.fit(model, loader())
    assert trainer.precision == "fp8-delayed"
    assert trainer.global_step == 4 // options.get("accumulate", 1)
    assert same(model, by_hand(trainer.global_step, **options))
    # one entry of history per optimizer step
    assert (scaling_state(model).amax_history > 0).sum(0).tolist() == [trainer.global_step] * 4


def test_compiled_model_trains_the_same(tmp_path: Path) -> None:
    torch._dynamo.reset()
    eager, compiled = seeded(), seeded()
    make_trainer(tmp_path, max_epochs=2).fit(eager, loader(), loader())
    make_trainer(tmp_path, max_epochs=2).fit(torch.compile(compiled, backend="aot_eager"), loader(), loader())
    assert torch.equal(torch.stack(eager.losses), torch.stack(compiled.losses))
    assert same(eager, compiled)


def test_training_learns(tmp_path: Path) -> None:
    model = seeded()
    make_trainer(tmp_path, max_epochs=30).fit(model, loader())
    assert torch.stack(model.losses[-4:]).mean() < 0.25 * torch.stack(model.losses[:4]).mean()


def test_parameters_are_fp32_masters_and_the_rest_runs_in_bf16(tmp_path: Path) -> None:
    class Checked(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            assert torch.is_autocast_enabled("cpu")
            assert self(batch[0]).dtype == torch.bfloat16
            return super().training_step(batch, batch_idx)

    model = seeded(Checked)
    trainer = make_trainer(tmp_path)
    trainer.fit(model, loader())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    optimizer_state = trainer.optimizers[0].state[model.net[0].weight]
    assert optimizer_state["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_param_dtype_on_request(tmp_path: Path, dtype: Any) -> None:
    model = seeded()
    model.register_buffer("counter", torch.ones(3, dtype=torch.float32))
    weight = model.net[0].weight
    trainer = make_trainer(tmp_path, plugins=Fp8Precision(param_dtype=dtype))
    with trainer.init_module():
        assert nn.Linear(2, 2).weight.dtype == torch.bfloat16
    trainer.fit(model, loader())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.net[0].weight is weight
    assert model.counter.dtype == torch.float32


def test_bf16_weights_become_masters(tmp_path: Path) -> None:
    model = seeded().bfloat16()
    make_trainer(tmp_path).fit(model, loader())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


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


def test_plugin_can_be_pickled_after_a_run(tmp_path: Path) -> None:
    # as launchers that spawn processes do at a second `fit`
    trainer = make_trainer(tmp_path)
    trainer.fit(seeded(), loader())
    other = pickle.loads(pickle.dumps(trainer.precision_plugin))
    assert set(other.state_dict()) == set(trainer.precision_plugin.state_dict())


def test_contexts_set_the_default_dtype_and_restore_it() -> None:
    for precision in ("fp8-delayed", "bf16-mixed", "bf16-true"):
        plugin = PLUGINS[precision](**({} if precision == "bf16-true" else {"param_dtype": torch.bfloat16}))
        computes_in = torch.bfloat16 if precision == "bf16-true" else torch.float32
        for context, within in (
            (plugin.forward_context, computes_in),
            (plugin.recomputation_context, computes_in),
            (plugin.tensor_init_context, torch.bfloat16),
            (plugin.module_init_context, torch.bfloat16),
        ):
            with context():
                assert torch.get_default_dtype() == within
            with pytest.raises(KeyError), context():
                raise KeyError
            assert torch.get_default_dtype() == torch.float32
            assert not torch.is_autocast_enabled("cpu")
            assert torch.backends.mha.get_fastpath_enabled()


def test_transformer_encoder_validates_with_the_fp8_layers_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Encoder(Regression):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(self.encoder(x[:, None])[:, 0])

    # counted where both linear layers run fused: a hook on a layer would itself disable torch's fast path
    calls: list[tuple[str, bool]] = []
    original = feed_forward.fp8_feed_forward

    def counting(first: Fp8Linear, activation: str, second: Fp8Linear, x: torch.Tensor) -> torch.Tensor:
        calls.extend((layer.fp8[""].name, layer.training) for layer in (first, second))
        return original(first, activation, second, x)

    monkeypatch.setattr(feed_forward, "fp8_feed_forward", counting)
    model, trainer = seeded(Encoder), make_trainer(tmp_path)
    trainer.fit(model, loader(), loader())
    for name in ("encoder.layers.0.linear1", "encoder.layers.1.linear2"):
        # four batches; in evaluation two more, of the sanity check
        assert calls.count((name, True)) == 4
        assert calls.count((name, False)) == 4 + 2
    assert torch.backends.mha.get_fastpath_enabled()


def test_validation_inside_training_changes_nothing(tmp_path: Path) -> None:
    plain, validated = seeded(), seeded()
    make_trainer(tmp_path, max_epochs=2).fit(plain, loader())
    make_trainer(tmp_path, max_epochs=2, val_check_interval=1).fit(validated, loader(), loader())
    # the weights after the last step were cast only in validation
    for model in (plain, validated):
        model(torch.randn(4, 32))
    assert same(plain, validated)


def test_manual_optimization_with_two_optimizers(tmp_path: Path) -> None:
    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
            self.critic = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for_generator, for_critic = self.optimizers()
            fake = self.generator(torch.randn(16, 16))
            self.toggle_optimizer(for_generator)
            self.manual_backward(-self.critic(fake).mean())
            for_generator.step()
            for_generator.zero_grad()
            self.untoggle_optimizer(for_generator)
            self.toggle_optimizer(for_critic)
            self.manual_backward((self.critic(fake.detach()) - self.critic(batch[1])).mean())
            for_critic.step()
            for_critic.zero_grad()
            self.untoggle_optimizer(for_critic)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=1e-2) for part in (self.generator, self.critic)]

    model = Gan()
    start = {name: p.clone() for name, p in model.named_parameters()}
    make_trainer(tmp_path).fit(model, loader())
    assert all(not torch.equal(p, start[name]) for name, p in model.named_parameters() if name.endswith("weight"))
    # weights, which come last, have no history
    entries = dict(
        zip(scaling_state(model).names, (scaling_state(model).amax_history > 0).sum(0).tolist(), strict=False)
    )
    assert len(entries) == 2 * 4
    # four batches: the critic runs before both steps of each, the generator before the first
    assert entries["critic.0.input"] == entries["critic.0.grad_output"] == 8
    assert entries["generator.0.input"] == entries["generator.0.grad_output"] == 4


def test_skipped_training_step(tmp_path: Path) -> None:
    class Skipping(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    model = seeded(Skipping)
    make_trainer(tmp_path).fit(model, loader())
    assert scaling_state(model).scale.isfinite().all()


def test_overfit_batches(tmp_path: Path) -> None:
    model = seeded()
    make_trainer(tmp_path, overfit_batches=1, max_epochs=60).fit(model, loader())
    assert model.losses[-1] < 0.1 * model.losses[0]


def test_lr_find_restores_weights_and_scales(tmp_path: Path) -> None:
    model = seeded()
    weights = [p.clone() for p in model.parameters()]
    trainer = make_trainer(tmp_path)
    found = Tuner(trainer).lr_find(model, loader(), num_training=20, early_stop_threshold=None, update_attr=False)
    assert found is not None
    rates = found.results["lr"]
    assert len(rates) > 3
    assert rates == sorted(rates)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), weights, strict=True))
    trainer.fit(model, loader())
    assert same(model, by_hand(4))


def test_recipe_and_ignore_modules_through_the_plugin(tmp_path: Path) -> None:
    model = seeded()
    plugin = Fp8Precision(recipe={"amax_history_len": 3, "margin": 1}, ignore_modules=["net.2"])
    make_trainer(tmp_path, plugins=plugin).fit(model, loader())
    assert scaling_state(model).recipe == DelayedScaling(amax_history_len=3, margin=1)
    assert scaling_state(model).module_names == ("net.0",)
    with pytest.raises(ValueError, match="already converted with"):
        make_trainer(tmp_path, plugins=Fp8Precision(recipe=DelayedScaling(margin=5))).fit(model, loader())


def test_a_plugin_that_is_used_again_has_the_state_of_the_new_model_alone(tmp_path: Path) -> None:
    plugin, first, second = Fp8Precision(), seeded(), seeded()
    for model in (first, second):
        make_trainer(tmp_path, plugins=plugin, max_epochs=1).fit(model, loader())
    assert scaling_state(first).updates == scaling_state(second).updates == 4
    assert same(first, second)
    # what the next checkpoint holds
    scaling_state(second).nonfinite_steps[0] = 7
    assert plugin.state_dict()["net.0.input"]["nonfinite_steps"] == 7


def test_a_model_converted_by_hand_stays_as_it_is(tmp_path: Path) -> None:
    model = seeded()
    convert(model.net[0], DelayedScaling(margin=3))
    make_trainer(tmp_path).fit(model, loader())
    assert [type(layer) for layer in model.net] == [Fp8Linear, nn.GELU, nn.Linear]
    assert scaling_state(model).recipe.margin == 3


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


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_precisions_train_as_lightnings_own(tmp_path: Path, precision: str) -> None:
    import lightning_fp8

    ours, stock = seeded(), seeded()
    make_trainer(tmp_path, precision=precision, max_epochs=2).fit(ours, loader())
    lightning_fp8.plugins.unregister()
    try:
        make_trainer(tmp_path, precision=precision, max_epochs=2).fit(stock, loader())
    finally:
        lightning_fp8.plugins.register()
    assert torch.equal(torch.stack(ours.losses), torch.stack(stock.losses))
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), stock.parameters(), strict=True))


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


def test_unconvert_after_fit_gives_the_plain_model(tmp_path: Path) -> None:
    model, plain = seeded(), seeded()
    make_trainer(tmp_path).fit(model, loader())
    plain.load_state_dict(model.state_dict())
    x = torch.randn(3, 32)
    assert torch.equal(unconvert(model)(x), plain(x))


# --- a converted model under another precision ---


class Mine(Precision):
    """A user's plugin."""

    precision: Any = "mine"


OTHERS = [
    ("32-true", "'32-true' (Precision)"),
    # Lightning's own fp16 autocast is bf16 on the CPU
    ("16-mixed", "'bf16-mixed' (MixedPrecision)"),
    ("16-true", "'16-true' (HalfPrecision)"),
    (Mine(), "'mine' (Mine)"),
]


def of_another(precision: Any, path: Path, **kwargs: Any) -> pl.Trainer:
    choice = {"precision": precision} if isinstance(precision, str) else {"plugins": precision}
    return make_trainer(path, **choice, **kwargs)


@pytest.mark.parametrize(("precision", "name"), OTHERS)
def test_another_precision_says_that_scales_stand_still(tmp_path: Path, precision: Any, name: str) -> None:
    model, trainer = convert(seeded()), of_another(precision, tmp_path, max_epochs=2)
    (message,) = warned("Trainer", lambda: trainer.fit(model, loader(), loader()))
    layers = "Regression has 2 converted layers, which this precision leaves in FP8: net.0, net.2."
    assert message.startswith(
        f"Trainer, precision {name}: {layers} This Trainer neither updates their scales nor saves"
    )
    for advice in ('precision="fp8-delayed"', "unconvert(model)", "scaling_state(model).update()"):
        assert advice in message
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
        (message,) = warned("Trainer", lambda run=run: run(model, loader()))
        assert message.startswith(f"Trainer, precision {name}: {layers} Their scales stay as they are")
        for advice in ('a checkpoint use `Trainer(precision="fp8-delayed")`', "unconvert(model)"):
            assert advice in message
        assert "update" not in message
    # following the advice works
    assert warned("Trainer", lambda: make_trainer(tmp_path).fit(model, loader())) == []
    assert warned("Trainer", lambda: of_another(precision, tmp_path).fit(unconvert(model), loader())) == []


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "16-true", "64-true", "bf16-mixed", "bf16-true", Mine()])
def test_a_plain_model_is_told_nothing(tmp_path: Path, precision: Any) -> None:
    class Matching(Regression):
        def step(self, batch: Any) -> Tensor:
            return super().step((batch[0].to(self.dtype), batch[1]))

    trainer = of_another(precision, tmp_path)
    assert warned("Trainer", lambda: trainer.fit(seeded(Matching), loader(), loader())) == []


@pytest.mark.parametrize("precision", ["fp8-delayed", "bf16-mixed", "bf16-true", Fp8Precision()])
def test_under_our_plugins_nothing_stands_still(tmp_path: Path, precision: Any) -> None:
    trainer = of_another(precision, tmp_path)
    assert warned("Trainer", lambda: trainer.fit(convert(seeded()), loader(), loader())) == []


def test_a_converted_part_of_a_model_is_named(tmp_path: Path) -> None:
    class Whole(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(32, 32)
            self.part = seeded()
            self.net = nn.Identity()

        def configure_model(self) -> None:
            convert(self.part, ignore_modules=("net.0",))

        def forward(self, x: Tensor) -> Tensor:
            return self.part(self.before(x))

    (message,) = warned("Trainer", lambda: of_another("32-true", tmp_path).fit(seeded(Whole), loader()))
    assert ": Whole has 1 converted layer, which this precision leaves in FP8: part.net.2. This" in message


def test_the_update_that_the_warning_advises(tmp_path: Path) -> None:
    class Updating(Regression):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            scaling_state(self).update()

        def step(self, batch: Any) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().step(batch)

    model = convert(seeded(Updating))
    trainer = of_another("32-true", tmp_path, accumulate_grad_batches=2)
    assert len(warned("Trainer", lambda: trainer.fit(model, loader()))) == 1
    assert same(model, by_hand(2, accumulate=2))


def test_layers_that_fell_back_are_not_in_fp8(tmp_path: Path) -> None:
    model = convert(seeded())
    fall_back(model, "net.0")
    (message,) = warned("Trainer", lambda: of_another("32-true", tmp_path).fit(model, loader()))
    assert "1 converted layer, which this precision leaves in FP8: net.2." in message
    fall_back(model, "net.2")
    assert warned("Trainer", lambda: of_another("32-true", tmp_path).fit(model, loader())) == []


def test_after_unregister_nothing_is_said_even_by_a_trainer_of_before(tmp_path: Path) -> None:
    trainer = of_another("32-true", tmp_path)
    lightning_fp8.plugins.unregister()
    try:
        assert warned("Trainer", lambda: trainer.fit(convert(seeded()), loader())) == []
    finally:
        lightning_fp8.plugins.register()


STRATEGIES = """
import os, warnings
from lit import Regression, loader, make_trainer, seeded
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning_fp8 import convert
import torch


class Configured(Regression):
    def configure_model(self):
        convert(self)


strategy = {strategy}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trainer = make_trainer({path!r}, precision="32-true", strategy=strategy, devices=2)
    trainer.fit(seeded(Configured), loader())
said = [str(warning.message) for warning in caught if "leaves in FP8" in str(warning.message)]
torch.save(said, {path!r} + f"/rank{{os.environ['RANK']}}.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["DDPStrategy()", "ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)"]
)
def test_of_several_processes_the_first_says_it(tmp_path: Path, strategy: str) -> None:
    run_script(STRATEGIES.format(path=str(tmp_path), strategy=strategy), tmp_path)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert len(first) == 1
    assert "Configured has 2 converted layers" in first[0]
    assert second == []


def recorded(model: nn.Module) -> Tensor:
    """Amaxes recorded since the last update, for the tensors that have histories."""
    state = scaling_state(model)
    return state.amax[: state.amax_history.shape[1]]


class Fails(Regression):
    """A step that runs forward and backward, and ends with an error."""

    def on_after_backward(self) -> None:
        assert recorded(self).all()
        raise KeyError("a step")


def test_what_a_failed_step_recorded_is_in_no_later_update(tmp_path: Path) -> None:
    model = Fails()
    with pytest.raises(KeyError, match="a step"):
        make_trainer(tmp_path).fit(model, loader())
    assert not recorded(model).any()
