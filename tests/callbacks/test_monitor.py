"""``Fp8Monitor``: each problem is found by name where it is, and only then; what it does about it; resumed runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from fp8_numpy import code_values, saturating_cast
from lightning.pytorch.loggers import CSVLogger
from lit import Regression, loader, make_trainer, same, seeded, warned
from logged_runs import rows_of
from moved import to_bf16
from processes import run_script
from torch import Tensor, nn
from watched_models import EvalLayer, Growing, NormalisedEvalLayer, Poisoned, Vanishing, only

from lightning_fp8 import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Monitor,
    Fp8Precision,
    PrecisionSchedule,
    convert,
    describe,
    scaling_state,
)
from lightning_fp8.callbacks.health import CONDITIONS
from lightning_fp8.conversion import fall_back
from lightning_fp8.scalings.recipe import Recipe


def fit(path: Path, monitor: Fp8Monitor, model: Any = None, **options: Any) -> Any:
    model = model or seeded()
    make_trainer(path, callbacks=[monitor], **{"max_epochs": 3, **options}).fit(model, loader())
    return model


def found(monitor: Fp8Monitor) -> dict[str, list[str]]:
    """By condition, where it was found."""
    places: dict[str, list[str]] = {}
    for finding in monitor.verdict().findings:
        places.setdefault(finding.condition, []).append(finding.where)
    return places


# Healthy runs


@pytest.mark.parametrize(("action", "accumulate"), [("warn", 1), ("raise", 2), ("fallback", 2), ("current", 1)])
def test_a_healthy_run_is_left_alone(action: Any, accumulate: int, tmp_path: Path, caplog: Any) -> None:
    watched, plain, monitor = seeded(), seeded(), Fp8Monitor(2, action, checks_in_a_row=1)
    options: dict[str, Any] = {"max_epochs": 5, "accumulate_grad_batches": accumulate}
    with caplog.at_level(logging.INFO):
        assert warned("Fp8Monitor", lambda: fit(tmp_path, monitor, watched, **options)) == []
    make_trainer(tmp_path, **options).fit(plain, loader())
    assert torch.equal(torch.stack(watched.losses), torch.stack(plain.losses))
    steps = 20 // accumulate
    assert str(monitor.verdict()) == f"FP8: healthy (2 layers, {steps} steps)"
    assert str(monitor.verdict()) in caplog.messages
    state = scaling_state(watched)
    assert state.fallbacks == state.current_modules == ()
    # nothing is left behind
    assert state.cast_counts.values is None
    assert state.model.before_update == []


# Runs in a loop of one's own


def trained(
    model: nn.Module,
    monitor: Fp8Monitor,
    steps: int,
    inputs: Any,
    rate: float = 1e-3,
    scale: float = 1.0,
    ascends_from: int = 1000,
    spikes: Collection[int] = (),
) -> Fp8Monitor:
    """Train with SGD on ``inputs(step, x)``, with the loss times ``scale``; from a step on, the loss is increased."""
    optimizer, generator = torch.optim.SGD(model.parameters(), rate), torch.Generator().manual_seed(0)
    for step in range(steps):
        x = torch.randn(32, 32, generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(inputs(step, x))
        target = torch.tanh(x[:, :16]) * (20 if step in spikes else 1)
        loss = (y.float() - target).square().mean() * scale
        (loss if step < ascends_from else -loss).backward()
        optimizer.step()
        scaling_state(model).update()
        monitor.check(model, loss)
        optimizer.zero_grad()
    return monitor


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))


class Embedded(nn.Module):
    """Before the first layer in FP8 there is a table that is trained, so nothing that a layer takes is data; before the
    last one there is NaN where ``nan_at`` says so."""

    def __init__(self, *nan_at: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.eye(32))
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 16)
        self.nan_at, self.steps = nan_at, -1

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = torch.relu(self.first(x.float() @ self.table))
        return self.last(x * (float("nan") if self.steps in self.nan_at else 1))


class Spare(nn.Module):
    """With a layer that nothing calls, and one behind which everything is zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.spare, self.last = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x) - 100))


def same_input(step: int, x: Tensor) -> Tensor:
    return x


def one_large_column(step: int, x: Tensor) -> Tensor:
    return torch.where(torch.arange(32) == 0, 3e6, x)


# by name: the recipe, the inputs by step, other settings; what is found, and the status of the run
RUNS: dict[str, tuple[Recipe, Any, dict[str, Any], dict[str, list[str]], str]] = {
    "healthy": (DelayedScaling(), same_input, {}, {}, "healthy"),
    "inputs grow": (
        DelayedScaling(),
        lambda step, x: x * 1.1 ** min(step, 100),
        {"rate": 1e-9, "every": 20, "steps": 120},
        {"growing": ["0.input"]},
        "unhealthy",
    ),
    "bursts": (
        DelayedScaling(amax_history_len=4),
        lambda step, x: x * (100 if step % 8 == 5 else 1),
        {"rate": 1e-9, "every": 8},
        {"bursts": ["0.input"]},
        "look at",
    ),
    "bursts behind an embedding, with which the loss spikes": (
        DelayedScaling(),
        lambda step, x: x * (100 if step % 8 == 5 and step > 16 else 1),
        {"rate": 1e-9, "every": 8, "model": Embedded},
        {"bursts": ["first.input"]},
        "look at",
    ),
    "window": (
        DelayedScaling(amax_history_len=1),
        same_input,
        {"every": 20, "steps": 120},
        {"window": ["2.input", "2.grad_output"]},
        "look at",
    ),
    "margin": (
        DelayedScaling(margin=9),
        same_input,
        {},
        {"margin": ["0.input", "2.input", "0.grad_output", "2.grad_output"]},
        "look at",
    ),
    "few large values": (
        DelayedScaling(),
        one_large_column,
        {"rate": 1e-15},
        {"underflowed": ["0.input"]},
        "unhealthy",
    ),
    "few large values, and then NaN": (
        DelayedScaling(),
        lambda step, x: one_large_column(step, x) * (float("nan") if step > 30 else 1),
        {"rate": 1e-15},
        {"underflowed": ["0.input"], "nonfinite": ["0.input"]},
        "unhealthy",
    ),
    "tiny gradients": (
        CurrentScaling(),
        same_input,
        {"scale": 1e-18},
        {"tiny": ["0.grad_output", "2.grad_output"]},
        "look at",
    ),
    "limits of scales": (
        DelayedScaling(),
        same_input,
        {"scale": 1e-34},
        {"limit": ["0.grad_output", "2.grad_output"]},
        "unhealthy",
    ),
    "a NaN in a batch": (
        DelayedScaling(),
        lambda step, x: x * (float("nan") if step == 20 else 1),
        {},
        {"nonfinite": ["0.input"]},
        "not FP8",
    ),
    "a NaN in an early batch": (
        DelayedScaling(),
        lambda step, x: x * (float("nan") if step == 2 else 1),
        {},
        {"nonfinite": ["0.input"]},
        "not FP8",
    ),
    "NaN between the layers, early": (
        DelayedScaling(),
        same_input,
        {"every": 8, "model": lambda: Embedded(18)},
        {"unmeasured": [""], "nonfinite": ["last.input"]},
        "look at",
    ),
    "spikes of the loss": (
        DelayedScaling(),
        same_input,
        {"rate": 0.01, "spikes": (30, 40)},
        {"spikes": [""]},
        "not FP8",
    ),
    "the learning rate": (
        DelayedScaling(),
        same_input,
        {"rate": 0.4, "ascends_from": 96, "steps": 136, "every": 8},
        {},
        "not FP8",
    ),
    "the learning rate, behind an embedding": (
        DelayedScaling(),
        same_input,
        {"rate": 0.4, "ascends_from": 96, "steps": 128, "every": 8, "model": Embedded},
        {},
        "not FP8",
    ),
    "few large values after the loss has risen": (
        CurrentScaling(),
        lambda step, x: one_large_column(step, x) if step > 40 else x,
        {"rate": 1e-18, "spikes": range(24, 64), "steps": 64, "model": Embedded},
        {"diverges": [""]},
        "not FP8",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_wrong_is_found_and_nothing_else(name: str, recwarn: Any) -> None:
    recipe, inputs, options, expected, status = RUNS[name]
    options = dict(options)
    monitor = Fp8Monitor(options.pop("every", 4))
    model = options.pop("model", mlp)()
    trained(convert(model, recipe), monitor, options.pop("steps", 48), inputs, **options)
    verdict = monitor.verdict()
    assert verdict.status == status, str(verdict)
    places = found(monitor)
    assert set(expected) <= set(places), str(verdict)
    for condition, where in expected.items():
        # inf and NaN, and large values, reach further layers
        assert set(where) <= set(places[condition])
        assert condition != "nonfinite" or places[condition][0] == where[0]
    assert {CONDITIONS[condition].status for condition in places} <= {status, "look at", "not FP8"}
    heads = {
        "healthy": "FP8: healthy (2 layers, ",
        "unhealthy": "FP8: unhealthy, ",
        "look at": "FP8: look at ",
        "not FP8": "FP8: not the cause of ",
    }
    assert str(verdict).startswith(heads[status])
    said = [str(warning.message) for warning in recwarn if str(warning.message).startswith("Fp8Monitor, step ")]
    assert bool(said) == (status != "healthy")
    for group in verdict.groups:
        assert group[0].remedy in str(verdict)


def test_layers_that_do_not_run_or_do_not_learn() -> None:
    monitor = Fp8Monitor(4)
    with pytest.warns(UserWarning, match="has not run, or had only zeros, at 3 checks in a row"):
        trained(convert(Spare()), monitor, 16, same_input)
    places = found(monitor)
    assert places["unused"] == ["spare"]
    assert set(places["dead"]) == {"first.grad_output", "last.input"}
    assert monitor.verdict().status == "look at"
    # a frozen layer needs no gradient
    model = convert(mlp())
    model[0].requires_grad_(False)
    assert found(trained(model, Fp8Monitor(4, checks_in_a_row=1), 24, same_input)) == {}


def test_a_frozen_part_in_eval_mode_is_healthy() -> None:
    model = convert(mlp())
    model[0].requires_grad_(False).eval()
    assert found(trained(model, Fp8Monitor(4, checks_in_a_row=1), 24, same_input)) == {}


def test_equal_largest_values_are_not_clipped() -> None:
    """By the rounding of a scale and its inverse alone they are beyond the largest value of the format."""
    for largest in torch.linspace(1, 2, 20).tolist():
        monitor = Fp8Monitor(4, checks_in_a_row=1)
        trained(convert(mlp()), monitor, 12, lambda step, x, top=largest: x.clamp(-0.1, 0.1).sign() * top, rate=1e-9)
        assert found(monitor) == {}


def test_a_loss_that_bursts_have_ruined_is_not_called_another_causes() -> None:
    """One batch of large values, clipped under delayed scaling, after which the loss stays high."""
    monitor, model = Fp8Monitor(4), convert(mlp())
    trained(model, monitor, 24, lambda step, x: x * (200 if step == 21 else 1), rate=1e-9)
    with torch.no_grad():
        model[2].bias.add_(10)
    verdict = trained(model, monitor, 16, same_input, rate=1e-9).verdict()
    assert verdict.status != "not FP8"
    assert "0.input" in found(monitor)["bursts"]


def test_where_inf_and_nan_came_in_whatever_the_order_of_the_layers() -> None:
    monitor, model = Fp8Monitor(8), Embedded(26)
    verdict = trained(convert(model), monitor, 40, same_input).verdict()
    assert verdict.status == "not FP8"
    since = {finding.where: finding.since for finding in verdict.findings}
    # the table and the weights have it from the gradients
    assert since == {
        **{"last.input": 27, "first.grad_output": 27, "last.grad_output": 27},
        **{"first.weight": 28, "last.weight": 28, "first.input": 28},
    }


@pytest.mark.parametrize(("begins", "status"), [(25, "look at"), (17, "unhealthy"), (100, "not FP8")])
def test_what_had_begun_before_nan_is_not_called_harmless(begins: int, status: str) -> None:
    def inputs(step: int, x: Tensor) -> Tensor:
        if step == 31:
            with torch.no_grad():
                model.table.fill_(float("nan"))
        if step >= begins:
            x = torch.full_like(x, 2.0**-30)
            x[:, 0] = 1.0
        return x

    model = convert(Embedded(), CurrentScaling())
    verdict = trained(model, Fp8Monitor(4), 40, inputs, rate=1e-15).verdict()
    assert verdict.status == status, str(verdict)
    assert ("cannot tell whether FP8 is the cause" in str(verdict)) == (status == "look at")


@pytest.mark.parametrize("is_known", [False, True])
def test_zeros_behind_nan_are_no_layers_that_do_not_run(is_known: bool) -> None:
    def poison(step: int, x: Tensor) -> Tensor:
        with torch.no_grad():
            if step == (0 if is_known else 24):
                model[0].bias.fill_(-100)
                model[2].bias.fill_(-100)
            if step == 24:
                model[4].bias[0] = float("nan")
        return x

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    monitor = Fp8Monitor(4, thresholds={"stale": 12})
    verdict = trained(convert(model), monitor, 60, poison).verdict()
    assert any("4." in where for where in found(monitor)["nonfinite"])
    assert bool({"unused", "dead", "stale"} & found(monitor).keys()) is is_known
    if not is_known:
        assert verdict.status == "not FP8"


def test_weights_with_nan_from_the_start() -> None:
    model = convert(mlp())
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    verdict = trained(model, Fp8Monitor(4), 24, same_input).verdict()
    assert verdict.status == "look at"
    assert "cannot tell whether FP8 is the cause: inf or NaN after 0 checks (from step 4)" in str(verdict)
    nonfinite = next(finding for finding in verdict.findings if finding.condition == "nonfinite")
    # a loop of one's own is followed from its second step on
    assert (nonfinite.where.endswith("weight"), nonfinite.since) == (True, 2)
    assert "the weights held inf or NaN before any other tensor: go back to an earlier checkpoint" in nonfinite.remedy


IN_BLOCKS = "share no block of 128"
# by recipe: the first finding, the beginning of its remedy, and whether blocks are another
REMEDIES: list[tuple[Recipe, str, str, bool]] = [
    (DelayedScaling(), "underflowed", '`Fp8Precision(overrides={"0": "bf16"})`, or', True),
    (BlockScaling(), "underflowed", '`Fp8Precision(recipe=BlockScaling(), overrides={"0": "bf16"})`', False),
    (DelayedScaling(margin=16), "margin", "a smaller `margin`: `Fp8Precision(recipe=DelayedScaling(margin=0))`", False),
    (
        CurrentScaling(margin=16),
        "underflowed",
        "a smaller `margin`: `Fp8Precision(recipe=CurrentScaling(margin=0))`",
        False,
    ),
    (DelayedScaling(amax_history_len=1), "window", "`Fp8Precision(recipe=DelayedScaling(amax_history_len=16))`", False),
]


@pytest.mark.parametrize(("recipe", "first", "begins", "blocks"), REMEDIES, ids=lambda value: repr(value)[:30])
def test_remedies_are_those_of_the_recipe_in_use(recipe: Recipe, first: str, begins: str, blocks: bool) -> None:
    def inputs(step: int, x: Tensor) -> Tensor:
        if first == "window":
            return x * 10.0 ** (step % 3)
        return x if getattr(recipe, "margin", 0) else one_large_column(step, x)

    verdict = trained(convert(mlp(), recipe), Fp8Monitor(3), 120, inputs, rate=1e-15).verdict()
    assert (verdict.status, verdict.findings[0].condition) == ("unhealthy", first), str(verdict)
    of_input = [one for one in verdict.findings if one.where in ("0.input", "0") and one.condition != "bursts"]
    assert all(one.remedy.startswith(begins.removesuffix(", or")) for one in of_input), str(verdict)
    assert verdict.findings[0].remedy.startswith(begins)
    assert (IN_BLOCKS in str(verdict)) == blocks


def test_without_updates_of_scales_all_are_stale(tmp_path: Path) -> None:
    monitor, model = Fp8Monitor(5, thresholds={"stale": 10}), convert(mlp())
    for _ in range(10):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(8, 32)).float().square().sum().backward()
        monitor.check(model)
    assert set(found(monitor)["stale"]) == {"0.input", "2.input", "0.grad_output", "2.grad_output"}


# What it measures


def test_shares_and_ratios_are_those_of_the_definition() -> None:
    """The numbers of a check, from a cast in NumPy."""
    torch.manual_seed(0)
    model, monitor = nn.Sequential(nn.Linear(64, 32, bias=False)), Fp8Monitor(1)
    convert(model, CurrentScaling())
    x, weight = torch.randn(48, 64), model[0].weight.detach().clone()
    x[0, 0] = 3e5
    monitor.check(model)
    y = model(x)
    y.sum().backward()
    scaling_state(model).update()
    with pytest.MonkeyPatch.context() as patch:
        metrics: dict[str, float] = {}
        patch.setattr(type(monitor), "_write", lambda self, run: None)
        state = scaling_state(model)
        metrics = monitor._step_ends(model, state)
    casts = []
    for tensor in (x, weight):
        exact = tensor.double().numpy()
        scale = np.float32(448) / np.abs(tensor.numpy()).max()
        values = code_values("e4m3")[saturating_cast(tensor.numpy(), scale, "e4m3")] / np.float64(scale)
        casts.append((exact, values))
    (x64, x8), (w64, w8) = casts

    def decibel(exact: Any, rounded: Any) -> float:
        return float(10 * np.log10((exact**2).sum() / ((rounded - exact) ** 2).sum()))

    assert metrics["fp8/health/input/sqnr_db/min"] == pytest.approx(decibel(x64, x8), abs=1e-3)
    assert metrics["fp8/health/weight/sqnr_db/min"] == pytest.approx(decibel(w64, w8), abs=1e-3)
    lost = ((x8 == 0) & (x64 != 0)).sum() / (x64 != 0).sum()
    assert metrics["fp8/health/input/underflowed_fraction/max"] == pytest.approx(lost)
    # the plain layer computes in bf16
    exact = torch.nn.functional.linear(x.bfloat16(), weight.bfloat16()).double().numpy()
    expected = decibel(exact, y.detach().double().numpy())
    assert metrics["fp8/health/product/sqnr_db/min"] == pytest.approx(expected, abs=1e-2)


def test_it_logs_at_most_forty_numbers(tmp_path: Path) -> None:
    class Deep(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net.extend(nn.Linear(16, 16) for _ in range(20))

    logger = CSVLogger(tmp_path)
    fit(tmp_path, Fp8Monitor(2), seeded(Deep), logger=logger)
    rows = [row for row in rows_of(logger) if row.get("fp8/health/findings")]
    assert [int(row["step"]) for row in rows] == [1, 3, 5, 7, 9, 11]
    assert 20 < len([key for key in rows[0] if key.startswith("fp8/health/")]) <= 40


def test_the_verdict_is_written_as_the_run_goes(tmp_path: Path) -> None:
    class Fails(Vanishing):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.trainer.global_step == 9:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    logger, monitor = CSVLogger(tmp_path), Fp8Monitor(2)
    with pytest.warns(UserWarning, match="became 0"), pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(tmp_path, monitor, seeded(Fails), logger=logger)
    written = json.loads((Path(logger.log_dir) / "fp8_health.json").read_text())
    assert (written["status"], written["layers"], written["steps"]) == ("unhealthy", 2, 9)
    assert written["run"] == "failed"
    (finding,) = (one for one in written["findings"] if one["condition"] == "underflowed")
    assert (finding["where"], finding["since"], finding["last"], finding["holds"]) == (["net.0.input"], 6, 8, True)
    assert finding["value"] == pytest.approx(31 / 32)
    assert (finding["threshold"], finding["unit"]) == (0.1, "share of the nonzero numbers")
    groups = monitor.verdict().groups
    assert [(one["what"], one["where"]) for one in written["findings"]] == [(w.what, places) for w, places in groups]


# Under a Trainer

TROUBLE: list[tuple[Any, dict[str, Any], dict[str, float], str]] = [
    (EvalLayer, {}, {"stale": 4}, r"step 4: .*net\.2\.input, net\.2\.grad_output: the scale has not changed for 4 "),
    (NormalisedEvalLayer, {}, {"stale": 4}, r"step 4: .*net\.2\.input, net\.2\.grad_output: the scale has not"),
    (Poisoned, {}, {"nonfinite": 2}, r"step 8: .*\n  net\.0\.input.*: inf or NaN, at most 2 steps in a row"),
    (Growing, {"checks_in_a_row": 3}, {"saturated": 0.3}, r"step 6: .*\n  net\.0\.input.*% of the numbers clipped"),
    (Vanishing, {"checks_in_a_row": 2}, {"underflowed": 0.5}, r"step 4: .*\n  net\.0\.input: 96\.9% of the nonzero"),
]


@pytest.mark.parametrize(("kind", "options", "thresholds", "message"), TROUBLE)
def test_trouble_is_said_by_name(
    kind: Any, options: dict[str, Any], thresholds: dict[str, float], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=rf"(?s)^Fp8Monitor, {message}"):
        fit(tmp_path, Fp8Monitor(2, "raise", thresholds=only(**thresholds), **options), seeded(kind))


def test_a_loop_that_steps_around_the_trainer(tmp_path: Path) -> None:
    class AroundTheTrainer(Regression):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            self.manual_backward(self.step(batch))
            optimizer.step()

    monitor = Fp8Monitor(2, "fallback", thresholds=only(stale=4))
    with pytest.warns(UserWarning, match="has not changed for 4 steps"):
        model = fit(tmp_path, monitor, seeded(AroundTheTrainer))
    # no single layer is to blame
    assert scaling_state(model).fallbacks == ()


def test_a_lost_amax_is_no_dead_layer(tmp_path: Path) -> None:
    class LosesGradients(Regression):
        def on_after_backward(self) -> None:
            state = scaling_state(self)
            state.amax[state.names.index("net.2.grad_output")] = 0

    monitor = Fp8Monitor(2, thresholds={"stale": 6})
    with pytest.warns(UserWarning, match=r"net\.2\.grad_output: the scale has not changed for 6 steps"):
        fit(tmp_path, monitor, seeded(LosesGradients))
    assert found(monitor) == {"stale": ["net.2.grad_output"]}


def test_said_once_and_again_when_it_comes_back(tmp_path: Path) -> None:
    class Changing(Vanishing):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.trainer.global_step not in (4, 5) else Regression.forward(self, x)

    monitor = Fp8Monitor(2, thresholds=only(underflowed=0.5), checks_in_a_row=1)
    said = warned("Fp8Monitor", lambda: fit(tmp_path, monitor, seeded(Changing)))
    assert [text.partition(":")[0] for text in said] == ["Fp8Monitor, step 2", "Fp8Monitor, step 8"]
    (finding,) = monitor.verdict().findings
    assert (finding.since, finding.last, finding.holds) == (2, 12, True)


def test_one_number_of_a_small_tensor_is_no_sign(tmp_path: Path) -> None:
    class Few(Regression):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clamp(-1, 1)
            x.view(-1)[:9] = 2.0**-30
            return super().forward(x)

    monitor = Fp8Monitor(2, thresholds=only(underflowed=0.01), checks_in_a_row=1)
    fit(tmp_path, monitor, seeded(Few))
    assert found(monitor) == {}


# Moves


def vanishing(action: Any, **options: Any) -> Fp8Monitor:
    return Fp8Monitor(2, action, thresholds=only(underflowed=0.5), checks_in_a_row=1, **options)


def test_fallback_moves_the_layer_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    model, trainer = seeded(Vanishing), make_trainer(tmp_path, max_epochs=2, callbacks=[vanishing("fallback")])
    with pytest.warns(UserWarning, match=r"(?s)became 0.*\n  In bf16 from now on: net.0\."):
        trainer.fit(model, loader())
    assert scaling_state(model).fallbacks == ("net.0",)
    (finding,) = trainer.callbacks[0].verdict().findings
    assert finding.remedy == "`action='fallback'`: net.0 runs in bf16 from step 2 on"
    trainer.save_checkpoint(tmp_path / "fallen.ckpt")
    with pytest.warns(UserWarning, match="In bf16 from now on"):
        whole = fit(tmp_path, vanishing("fallback"), seeded(Vanishing), max_epochs=4)
    # without the callback
    resumed = seeded(Vanishing)
    make_trainer(tmp_path, max_epochs=4).fit(resumed, loader(), ckpt_path=tmp_path / "fallen.ckpt")
    assert scaling_state(resumed).fallbacks == ("net.0",)
    assert torch.equal(torch.stack(whole.losses[8:]), torch.stack(resumed.losses))


def test_current_scaling_ends_clipping_and_bf16_the_rest(tmp_path: Path) -> None:
    clips = Fp8Monitor(4, "current", thresholds=only(saturated=0.3), checks_in_a_row=1)
    with pytest.warns(UserWarning, match=r"With current scaling from now on: net\.0, net\.2\.$"):
        model = fit(tmp_path, clips, seeded(Growing))
    state = scaling_state(model)
    assert (state.current_modules, state.fallbacks) == (("net.0", "net.2"), ())
    assert {finding.last for finding in clips.verdict().findings} == {4}
    assert "moved to current scaling: net.0" in next(row.reason for row in describe(model) if row.path == "net.0")
    said = warned("Fp8Monitor", lambda: fit(tmp_path, vanishing("current"), seeded(Vanishing)))
    assert [text.splitlines()[-1].strip() for text in said] == [
        "With current scaling from now on: net.0.",
        "In bf16 from now on: net.0.",
    ]


def test_inf_and_nan_move_few_layers_and_never_most(tmp_path: Path) -> None:
    model = seeded(Poisoned)
    monitor = Fp8Monitor(4, "fallback", thresholds=only(nonfinite=2))
    assert all("from now on" not in text for text in warned("Fp8Monitor", lambda: fit(tmp_path, monitor, model)))
    assert scaling_state(model).fallbacks == ()
    assert found(monitor)["nonfinite"][0] == "net.0.input"


class SometimesVanishing(Vanishing):
    """In trouble in its first four steps. Keeps where its first layer is moved to, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.trainer.global_step < 4 else Regression.forward(self, x)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        precision = scaling_state(self).precisions[0]
        self.places.append("fp8" if precision.in_fp8 else "bf16")
        if precision.is_current and precision.in_fp8:
            self.places[-1] = "current"


class KeepOne(pl.Callback):
    def __init__(self, file: Path, step: int) -> None:
        self.file, self.step = file, step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.file)


def steps(path: Path, *callbacks: Any, start: int = 0, model: Any = SometimesVanishing, epochs: int = 12) -> Any:
    """A run with a step in each epoch, which may be resumed at any of them."""
    model = seeded(model)
    trainer = make_trainer(path, callbacks=list(callbacks), max_epochs=epochs)
    trainer.fit(model, loader(16), ckpt_path=str(path / f"{start}.ckpt") if start else None)
    return model


# moved at the check of step 2, and from current scaling on at 4; back at the first check five steps after that
PLACES = {
    "fallback": ["fp8"] * 2 + ["bf16"] * 6 + ["fp8"] * 4,
    "current": ["fp8"] * 2 + ["current"] * 2 + ["bf16"] * 6 + ["fp8"] * 2,
}


@pytest.mark.parametrize("action", PLACES)
def test_a_layer_comes_back_after_its_cooldown(action: str, tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO), pytest.warns(UserWarning, match="from now on: net.0"):
        whole = steps(tmp_path, vanishing(action, cooldown=5), KeepOne(tmp_path / "6.ckpt", 6))
    assert whole.places == PLACES[action]
    back = PLACES[action].index("fp8", 2)
    assert f"Fp8Monitor, step {back}: back to the precision of the run, 5 steps after" in caplog.text
    resumed = steps(tmp_path, vanishing(action, cooldown=5), start=6)
    assert resumed.places == PLACES[action][6:]
    assert same(whole, resumed)
    # without the callback it stays
    assert set(steps(tmp_path, start=6).places) == {"bf16"}


def test_what_others_have_moved_stays(tmp_path: Path) -> None:
    class ByHand(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            to_bf16(scaling_state(module), "net.2")

    with pytest.warns(UserWarning, match="from now on: net.0"):
        model = steps(tmp_path, vanishing("fallback", cooldown=5), ByHand())
    assert scaling_state(model).fallbacks == ("net.2",)
    with pytest.warns(UserWarning, match="from now on: net.0"):
        model = steps(tmp_path, vanishing("fallback", cooldown=5), PrecisionSchedule({5: {"net.0": {"fprop": "bf16"}}}))
    assert [one.in_bf16 for one in scaling_state(model).precisions] == [("fprop",), ()]


SICK = {
    "vanishing": (SometimesVanishing, lambda: vanishing("current", cooldown=4)),
    "growing": (Growing, lambda: Fp8Monitor(3, thresholds={"stale": 4})),
    "poisoned": (Poisoned, lambda: Fp8Monitor(4, thresholds={"nonfinite": 3})),
    "eval": (EvalLayer, lambda: Fp8Monitor(3, "current", thresholds={"stale": 5})),
}


@pytest.mark.parametrize("name", SICK)
@pytest.mark.parametrize("at", [1, 4, 5, 6, 7, 9])
def test_a_resumed_run_goes_on_exactly(name: str, at: int, tmp_path: Path, recwarn: Any) -> None:
    kind, make = SICK[name]
    whole, resumed = make(), make()
    expected = steps(tmp_path, whole, KeepOne(tmp_path / f"{at}.ckpt", at), model=kind)
    model = steps(tmp_path, resumed, start=at, model=kind)
    assert same(model, expected)
    assert resumed.verdict() == whole.verdict()
    assert resumed.state_dict()["in_a_row"] == whole.state_dict()["in_a_row"]
    ours, theirs = scaling_state(model), scaling_state(expected)
    assert (ours.fallbacks, ours.current_modules) == (theirs.fallbacks, theirs.current_modules)


def test_steps_are_those_of_the_logs_whoever_wrote_the_checkpoint(tmp_path: Path) -> None:
    steps(tmp_path, KeepOne(tmp_path / "5.ckpt", 5), model=Vanishing)
    monitor = Fp8Monitor(2, thresholds=only(underflowed=0.5, stale=4), checks_in_a_row=1)
    with pytest.warns(UserWarning, match=r"Fp8Monitor, step 6: FP8: unhealthy, 1 finding \(2 layers, 6 steps\)"):
        steps(tmp_path, monitor, model=Vanishing, start=5)
    (finding,) = monitor.verdict().findings
    assert (finding.since, finding.last, monitor.verdict().steps) == (6, 12, 12)


def test_a_second_fit_begins_anew(tmp_path: Path) -> None:
    monitor = vanishing("fallback", cooldown=4)
    with pytest.warns(UserWarning, match="In bf16 from now on: net.0"):
        steps(tmp_path, monitor, model=Vanishing, epochs=4)
    assert found(monitor)
    model = convert(seeded())
    fall_back(model, "net.0")
    make_trainer(tmp_path, callbacks=[monitor], max_epochs=10).fit(model, loader(16))
    assert (found(monitor), monitor.verdict().steps) == ({}, 10)
    # by hand
    assert scaling_state(model).fallbacks == ("net.0",)


def test_fallen_layers_are_not_watched(tmp_path: Path) -> None:
    model, plugin = seeded(EvalLayer), Fp8Precision()
    plugin.convert_module(model)
    fall_back(model, "net.2")
    monitor = Fp8Monitor(2, "raise", thresholds={"stale": 2})
    fit(tmp_path, monitor, model, plugins=plugin)
    assert monitor.verdict().layers == 1


# Settings


def test_arguments_outside_their_rules(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'warn', 'raise', 'fallback', 'current', got 'shout'"):
        Fp8Monitor(action="shout")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`cooldown` is for layers that were moved, and 'warn' moves none"):
        Fp8Monitor(cooldown=5)
    with pytest.raises(ValueError, match=r"'saturate'; there are .*Did you mean 'saturated'\?"):
        Fp8Monitor(thresholds={"saturate": 0.1})
    with pytest.raises(ValueError, match="the threshold of 'saturated' must be a finite number or None, got 'much'"):
        Fp8Monitor(thresholds={"saturated": "much"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="`thresholds` must map names to numbers, got 3"):
        Fp8Monitor(thresholds=3)  # type: ignore[arg-type]
    for action in ("fallback", "current"):
        with pytest.raises(ValueError, match=f"`action='{action}'` and `fp8_all_gather=True` cannot be combined"):
            fit(tmp_path, Fp8Monitor(action=action), plugins=Fp8Precision(fp8_all_gather=True))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"call `lightning_fp8\.convert` on it first"):
        Fp8Monitor().check(mlp())


def test_where_there_is_nothing_to_do_it_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no layer runs in FP8 under precision='bf16-mixed'; nothing to monitor"):
        fit(tmp_path, Fp8Monitor(), precision="bf16-mixed")
    with pytest.warns(UserWarning, match="the run made 12 steps and `every_n_steps` is 50, so nothing was checked"):
        fit(tmp_path, Fp8Monitor())
    with pytest.warns(UserWarning, match="all layers are scaled by their own values already"):
        fit(tmp_path, Fp8Monitor(2, "current"), precision="fp8-current")


SCRIPT = """
import warnings
import torch, torch.distributed as dist
from lit import loader, make_trainer, seeded
from watched_models import Vanishing, only
from lightning_fp8 import Fp8Monitor, scaling_state


class OnOneRank(Vanishing):
    def forward(self, x):
        return super().forward(x) if dist.get_rank() == 0 else super(Vanishing, self).forward(x)


torch.set_num_threads(1)
model = seeded(OnOneRank)
# to current scaling, which does not help, and then to bf16
monitor = Fp8Monitor(2, "current", thresholds=only(underflowed=0.4), checks_in_a_row=1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    make_trainer({path!r}, strategy="ddp", devices=2, max_epochs=4, callbacks=[monitor]).fit(model, loader())
state = scaling_state(model)
said = "".join(str(warning.message) for warning in caught)
moved = state.fallbacks + state.current_modules
torch.save((moved, state.scale, model.net[0].weight.detach(), said, str(monitor.verdict())),
           {path!r} + f"/rank{{dist.get_rank()}}.pt")
"""


@pytest.mark.slow
def test_processes_act_alike(tmp_path: Path) -> None:
    run_script(SCRIPT.format(path=str(tmp_path)), tmp_path)
    (mine, scale, weight, said, verdict), (theirs, their_scale, their_weight, nothing, their_verdict) = (
        torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)
    )
    # 31 of 64 numbers of both processes together are lost; the first one says so
    assert "net.0.input: 48.4% of the nonzero numbers became 0" in said
    assert "Fp8Monitor" not in nothing
    assert mine == theirs == ("net.0",)
    assert verdict == their_verdict
    assert torch.equal(scale, their_scale)
    assert torch.equal(weight, their_weight)
