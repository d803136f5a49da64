"""Each problem is reported by name when it exists, and only then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lit import Regression, loader, make_trainer, seeded
from logged_runs import rows_of
from processes import run_script
from torch import Tensor, nn
from watched_models import NEVER, Growing, Vanishing

from lightning_fp8 import Fp8Precision, ScaleWatchdog, convert, fall_back, scaling_state
from lightning_fp8.callbacks.watch import CONDITIONS, Findings, Limits, Watch
from lightning_fp8.modules.base import Fp8Module
from lightning_fp8.ops.formats import DELAYED_ROLES


def fit(path: Path, watchdog: ScaleWatchdog, model: Regression | None = None, **kwargs: Any) -> Regression:
    model = model or seeded()
    make_trainer(path, callbacks=[watchdog], **{"max_epochs": 3, **kwargs}).fit(model, loader())
    return model


class EvalLayer(Regression):
    """A model whose last layer trains in eval mode."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[2].eval()


class NormalisedEvalLayer(EvalLayer):
    """The same with a weight that is computed: its parameters have the gradient that shows the layer in use."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.net[2])


class AroundTheTrainer(Regression):
    """Steps torch's optimizer instead of Lightning's, so that nothing updates the scales."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.step(batch))
        optimizer.step()


class LosesGradients(Regression):
    """The amaxes of its last layer's gradients are lost before the update, as if recomputation had discarded them."""

    def on_after_backward(self) -> None:
        state = scaling_state(self)
        state.amax[state.names.index("net.2.grad_output")] = 0


class Poisoned(Regression):
    """From batch 6 on, its first layer's weight and bias gradients are finite, but its input is not."""

    def forward(self, x: Tensor) -> Tensor:
        if self.trainer.global_step >= 6 and self.training:
            x = x.clone()
            x[0, 0] = float("nan")
        return super().forward(x)


@pytest.mark.parametrize(("action", "accumulate"), [("warn", 1), ("raise", 2), ("fallback", 2), ("current", 1)])
def test_a_healthy_run_is_left_alone(
    action: Any, accumulate: int, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    watched, plain = seeded(), seeded()
    options: dict[str, Any] = {"max_epochs": 5, "accumulate_grad_batches": accumulate}
    fit(tmp_path, ScaleWatchdog(action, 2, 2, 1, 0.2, 0.2, 1), watched, **options)
    make_trainer(tmp_path, **options).fit(plain, loader())
    assert torch.equal(torch.stack(watched.losses), torch.stack(plain.losses))
    assert not [warning for warning in recwarn if "ScaleWatchdog" in str(warning.message)]
    state = scaling_state(watched)
    assert state.fallbacks == state.current_modules == ()
    assert state.cast_counts.values is None
    assert state.model.before_update == []


# a model in trouble, the watchdog's arguments, and what it says
TROUBLE: list[tuple[Any, dict[str, Any], str]] = [
    *(
        (
            kind,
            {"every_n_steps": 2, "stale_steps": 4},
            r"step 4: scales not updated for 4 steps or more, although in use: net\.2\.input \(4\), net\.2\.grad_output"
            r" \(4\)\.\n  A layer in eval mode records nothing\.$",
        )
        for kind in (EvalLayer, NormalisedEvalLayer)
    ),
    (
        AroundTheTrainer,
        {"every_n_steps": 2, "stale_steps": 4},
        r"net\.0\.input \(4\), .*, net\.2\.grad_output \(4\)\.\n  No scale has been updated at all: does the loop step",
    ),
    (LosesGradients, {"every_n_steps": 3, "stale_steps": 6}, r"step 6: .* in use: net\.2\.grad_output \(6\)\.\n"),
    # a scale that inf or NaN prevent from changing is not stale
    (
        Poisoned,
        {"every_n_steps": 4, "stale_steps": 2, "nonfinite_steps": 3},
        r"step 12: inf or NaN in 3 optimizer steps in a row or more: net\.0\.input \(6\)",
    ),
    (
        Growing,
        {"every_n_steps": 2, "saturated_above": 0.3, "checks_in_a_row": 3},
        r"step 6: more than 30% of the numbers clipped, at 3 checks in a row: net\.0\.input ",
    ),
    (
        Vanishing,
        {"every_n_steps": 2, "underflowed_above": 0.5, "checks_in_a_row": 2},
        r"step 4: .* turned into zero, at 2 checks in a row: net\.0\.input 496 of 512 \(96\.9%\)\.",
    ),
]


@pytest.mark.parametrize(("kind", "options", "message"), TROUBLE)
def test_trouble_is_said_by_name(kind: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=message) as error:
        fit(tmp_path, ScaleWatchdog("raise", **{**NEVER, **options}), seeded(kind))
    assert kind is not Growing or ".weight" not in str(error.value)
    assert kind is not Poisoned or "not updated" not in str(error.value)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_layer_that_does_not_run_is_not_stale(set_to_none: bool, tmp_path: Path) -> None:
    class Changing(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            # used at first, so that it has a history, with gradients that are zeros later
            return super().forward(self.spare(x) if self.trainer.global_step < 2 else x)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=set_to_none)

    model = fit(tmp_path, ScaleWatchdog("raise", 2, **{**NEVER, "stale_steps": 4}), seeded(Changing))
    state = scaling_state(model)
    assert state.amax_history[:2, state.names.index("spare.input")].gt(0).all()


class WithOutliers(Regression):
    """The first numbers of each batch grow by 16 from step to step, so that past scales always clip them."""

    def __init__(self, outliers: int) -> None:
        super().__init__()
        self.outliers = outliers

    def forward(self, x: Tensor) -> Tensor:
        x = x.bfloat16().clamp(-1, 1)
        x.view(-1)[: self.outliers] = 2.0 * 16.0**self.trainer.global_step
        return super().forward(x)

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().step(batch) * 1e-20


def fit_with_outliers(path: Path, outliers: int, batch_size: int) -> None:
    options: dict[str, Any] = {**NEVER, "saturated_above": 0.01, "checks_in_a_row": 2, "patterns": ("net.0.input",)}
    trainer = make_trainer(path, callbacks=[ScaleWatchdog("raise", 2, **options)], max_steps=8, max_epochs=-1)
    trainer.fit(seeded(WithOutliers, outliers=outliers), loader(60, batch_size))


def test_a_share_of_a_few_numbers_is_no_sign(tmp_path: Path) -> None:
    # 1 of 64 and 9 of 640 are also more than one percent
    fit_with_outliers(tmp_path, outliers=1, batch_size=2)
    fit_with_outliers(tmp_path, outliers=9, batch_size=20)
    with pytest.raises(RuntimeError, match=r"2 checks in a row: net\.0\.input 12 of 640 \(1\.88%\)\.") as error:
        fit_with_outliers(tmp_path, outliers=12, batch_size=20)
    assert "step 4: more than 1% of the numbers clipped" in str(error.value)


def test_said_once_and_again_when_it_comes_back(tmp_path: Path) -> None:
    class Changing(Vanishing):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.trainer.global_step not in (4, 5) else Regression.forward(self, x)

    options = {**NEVER, "underflowed_above": 0.5, "checks_in_a_row": 1}
    with pytest.warns(UserWarning, match="ScaleWatchdog") as caught:
        fit(tmp_path, ScaleWatchdog(every_n_steps=2, **options), seeded(Changing))
    steps = [str(w.message).split(":")[0] for w in caught if "ScaleWatchdog" in str(w.message)]
    assert steps == ["ScaleWatchdog, step 2", "ScaleWatchdog, step 8"]


def test_fallback_moves_the_layer_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    options = {**NEVER, "underflowed_above": 0.5, "checks_in_a_row": 1}
    model, trainer = (
        seeded(Vanishing),
        make_trainer(tmp_path, max_epochs=2, callbacks=[ScaleWatchdog("fallback", 2, **options)]),
    )
    with pytest.warns(UserWarning, match=r"turned into zero.*\n  In bf16 from now on: net.0\."):
        trainer.fit(model, loader())
    assert scaling_state(model).fallbacks == ("net.0",)
    trainer.save_checkpoint(tmp_path / "fallen.ckpt")

    whole = seeded(Vanishing)
    with pytest.warns(UserWarning, match="In bf16 from now on"):
        fit(tmp_path, ScaleWatchdog("fallback", 2, **options), whole, max_epochs=4)
    # without the callback
    resumed = seeded(Vanishing)
    make_trainer(tmp_path, max_epochs=4).fit(resumed, loader(), ckpt_path=tmp_path / "fallen.ckpt")
    assert scaling_state(resumed).fallbacks == ("net.0",)
    assert torch.equal(torch.stack(whole.losses[8:]), torch.stack(resumed.losses))
    evaluated = seeded(Vanishing)
    make_trainer(tmp_path).validate(evaluated, loader(), ckpt_path=tmp_path / "fallen.ckpt", verbose=False)
    assert scaling_state(evaluated).fallbacks == ("net.0",)


@pytest.mark.parametrize(("model", "condition"), [(Poisoned, "inf or NaN"), (AroundTheTrainer, "not updated")])
def test_what_no_single_layer_is_to_blame_for_moves_none(model: Any, condition: str, tmp_path: Path) -> None:
    fitted = seeded(model)
    options = {**NEVER, "nonfinite_steps": 2, "stale_steps": 4}
    with pytest.warns(UserWarning, match=condition) as caught:
        fit(tmp_path, ScaleWatchdog("fallback", 4, **options), fitted)
    assert scaling_state(fitted).fallbacks == ()
    assert all("from now on" not in str(warning.message) for warning in caught)


def test_patterns_choose_what_is_watched(tmp_path: Path) -> None:
    options = {**NEVER, "stale_steps": 4, "patterns": ("net.0.*",)}
    fit(tmp_path, ScaleWatchdog("raise", 2, **options), seeded(EvalLayer))
    with pytest.raises(ValueError, match="ScaleWatchdog: the pattern 'nowhere' matches none of the 6 tensors"):
        fit(tmp_path, ScaleWatchdog(patterns=("nowhere",)))


def test_what_it_logs(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    options = {**NEVER, "stale_steps": 4, "underflowed_above": 0.5, "checks_in_a_row": 1}

    class Both(EvalLayer, Vanishing):
        pass

    with pytest.warns(UserWarning, match="ScaleWatchdog"):
        fit(tmp_path, ScaleWatchdog("fallback", 2, **options), seeded(Both), logger=logger)
    logged = [row for row in rows_of(logger) if row.get("fp8/watchdog/stale")]
    keys = [f"fp8/watchdog/{name}" for name in (*CONDITIONS, "fallbacks", "current")]
    assert {key for row in logged for key in row if key.startswith("fp8/watchdog")} == set(keys)
    values = [(int(row["step"]), *(float(row[key]) for key in keys)) for row in logged]
    # net.0 at the first check; net.2, half of the layers that run, at the second
    assert values[0] == (1, 0, 0, 0, 1, 0, 0, 1, 0)
    assert values[1] == (3, 2, 0, 0, 0, 0, 0, 2, 0)
    assert values[2] == (5, 0, 0, 0, 0, 0, 0, 2, 0)


def test_arguments_outside_their_rules() -> None:
    with pytest.raises(ValueError, match="'warn', 'raise', 'fallback', 'current', got 'shout'"):
        ScaleWatchdog("shout")  # type: ignore[arg-type]
    for name in ("stale_steps", "nonfinite_steps", "checks_in_a_row"):
        with pytest.raises(ValueError, match=f"`{name}` must be an integer of at least 1, got 0"):
            ScaleWatchdog(**{name: 0})
    for name in ("saturated_above", "underflowed_above"):
        with pytest.raises(ValueError, match=f"`{name}` must be a share from 0 to below 1, got 1"):
            ScaleWatchdog(**{name: 1})
    with pytest.raises(TypeError, match="sequence of patterns"):
        ScaleWatchdog(patterns="*")


def test_fallbacks_and_a_gather_in_fp8_exclude_each_other(tmp_path: Path) -> None:
    for action in ("fallback", "current"):
        with pytest.raises(ValueError, match=f"`action='{action}'` and `fp8_all_gather=True` cannot be combined"):
            fit(tmp_path, ScaleWatchdog(action), plugins=Fp8Precision(fp8_all_gather=True))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Regression has no FP8 layer whose weight FSDP2 shards"):
        fit(tmp_path, ScaleWatchdog(), plugins=Fp8Precision(fp8_all_gather=True))


def test_amaxes_of_several_updates_a_batch_and_a_pause() -> None:
    """Sequences of bad steps, worked out by hand."""
    model = convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    state = scaling_state(model)
    watch = Watch(state, Limits(None, 3, None, None, 1))

    def update(first: float, second: float) -> None:
        state.amax[0], state.amax[3] = first, second
        state.update()

    def check() -> Findings:
        return watch.check(0, lambda tensor: tensor)

    nan, inf = float("nan"), float("inf")
    update(nan, nan), update(0.0, 1.0), update(inf, nan), update(nan, nan)
    # a step in which the layer did not run does not end a sequence of bad steps; a good one does
    assert check().tensors["nonfinite"] == {0: 3}
    update(nan, nan)
    assert check().tensors["nonfinite"] == {0: 4, 3: 3}
    update(1.0, 1.0)
    # the sequence continued in this window
    assert check().tensors["nonfinite"] == {0: 4, 3: 3}
    update(nan, 1.0)
    assert check().tensors["nonfinite"] == {}


def watched(stale_steps: int) -> tuple[Any, Watch]:
    state = scaling_state(convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))))
    return state, Watch(state, Limits(stale_steps, None, None, None, 1))


def test_a_scale_that_stops_after_a_while() -> None:
    state, watch = watched(20)
    ages = []
    for step in range(10, 60, 10):
        state.amax.fill_(1.0)
        # the input of the second layer is no longer recorded, and its weight has no gradient that would show it
        state.amax[1] = 0.0 if step > 20 else 1.0
        state.update()
        ages.append(watch.check(step, lambda tensor: tensor).tensors["stale"])
    assert ages == [{}, {}, {}, {1: 20}, {1: 30}]


def test_an_amax_that_waits_for_its_update_is_not_stale() -> None:
    state, watch = watched(10)
    for step in (10, 20):
        # the first layer runs for the first time, during an accumulation
        first, second = [[state.row_of(module, role) for role in DELAYED_ROLES] for module in (0, 1)]
        state.amax[second] = 1.0
        state.update()
        state.amax[first] = 1.0 if step == 20 else 0.0
        assert watch.check(step, lambda tensor: tensor).tensors["stale"] == {}
    # but without any update
    assert watch.check(30, lambda tensor: tensor).tensors["stale"] == dict.fromkeys(first, 30)


SCRIPT = """
import warnings
import torch, torch.distributed as dist
from lit import loader, make_trainer, seeded
from watched_models import NEVER, Growing, Vanishing
from lightning_fp8 import ScaleWatchdog, scaling_state


class OnOneRank(Vanishing):
    def forward(self, x):
        return super().forward(x) if dist.get_rank() == 0 else super(Vanishing, self).forward(x)


torch.set_num_threads(1)
model = seeded(OnOneRank)
# to current scaling, which does not help, and then to bf16
watchdog = ScaleWatchdog("current", 2, **{{**NEVER, "stale_steps": 4, "underflowed_above": 0.4, "checks_in_a_row": 1}})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    make_trainer({path!r}, strategy="ddp", devices=2, max_epochs=4, callbacks=[watchdog]).fit(model, loader())
if dist.get_rank() == 0:
    open({path!r} + "/warnings", "w").write("".join(str(warning.message) for warning in caught))
state = scaling_state(model)
torch.save((scaling_state(model).fallbacks + state.current_modules, state.scale, model.net[0].weight.detach()),
           {path!r} + f"/rank{{dist.get_rank()}}.pt")
"""


@pytest.mark.slow
def test_processes_act_alike(tmp_path: Path) -> None:
    run_script(SCRIPT.format(path=str(tmp_path)), tmp_path)
    # 31 of 64 numbers of both processes together are lost
    assert "net.0.input 496 of 1024 (48.4%)" in (tmp_path / "warnings").read_text()
    (mine, scale, weight), (theirs, their_scale, their_weight) = (
        torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)
    )
    assert mine == theirs == ("net.0",)
    assert torch.equal(scale, their_scale)
    assert torch.equal(weight, their_weight)


def test_fallen_layers_are_not_watched_any_more(tmp_path: Path) -> None:
    model = seeded(EvalLayer)
    plugin = Fp8Precision()
    plugin.convert_module(model)
    fall_back(model, "net.2")
    fit(tmp_path, ScaleWatchdog("raise", 2, **{**NEVER, "stale_steps": 2}), model, plugins=plugin)
    layer = model.net[2]
    assert isinstance(layer, Fp8Module)
    assert not layer.in_fp8
