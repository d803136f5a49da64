from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import fp8_numpy
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lit import Regression, loader, make_trainer, seeded, warned
from logged_runs import rows_of
from torch import nn

from lightning_fp8 import (
    BlockScaling,
    DelayedScaling,
    Fp8Monitor,
    Fp8Precision,
    MXScaling,
    PrecisionSchedule,
    ScaleFactorLogger,
    convert,
    scaling_state,
)
from lightning_fp8.modules.feed_forward import fp8_feed_forward
from lightning_fp8.ops.formats import ROLES
from lightning_fp8.scaling import ScalingState
from lightning_fp8.scaling.statistics import QUANTITIES, tensor_statistics
from lightning_fp8.scalings.recipe import Recipe

pytestmark = pytest.mark.filterwarnings("ignore:.*only once for all operators.*")


QUANTITIES_OF = dict.fromkeys(ROLES, QUANTITIES)
# a weight has no window and no headroom
QUANTITIES_OF["weight"] = tuple(q for q in QUANTITIES if q not in ("amax_history_max", "headroom_bits"))


def test_the_progress_bar_shows_the_worst_fractions(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    recipe = DelayedScaling(margin=20)
    callbacks = [ScaleFactorLogger(every_n_steps=3, prog_bar=True)]
    trainer = make_trainer(tmp_path, plugins=Fp8Precision(recipe=recipe), logger=logger, callbacks=callbacks)
    trainer.fit(seeded(), loader())
    (last,) = [row for row in rows_of(logger) if row.get("fp8/net.0.input/scale")]
    assert not [key for key in last if key.count("/") == 1 and key.startswith("fp8/")]
    for shown in (trainer.progress_bar_metrics, trainer.callback_metrics):
        for name in ("saturated_fraction", "underflowed_fraction"):
            expected = max(float(last[f"fp8/{role}/{name}/max"]) for role in ROLES)
            assert float(shown[f"fp8/{name}"]) == pytest.approx(expected, rel=1e-6)
    assert trainer.progress_bar_metrics["fp8/underflowed_fraction"] > 0.1


def test_patterns_and_accumulation(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    callback = ScaleFactorLogger(every_n_steps=1, patterns=("*.weight", "net.0.input"))
    make_trainer(tmp_path, logger=logger, accumulate_grad_batches=2, callbacks=[callback]).fit(seeded(), loader())
    logged = [row for row in rows_of(logger) if row.get("fp8/net.0.weight/scale")]
    keys = {key for row in logged for key in row if key.startswith("fp8/")}
    assert len(logged) == 2
    assert {key.split("/")[1] for key in keys} == {"net.0.weight", "net.2.weight", "net.0.input", *ROLES}


def test_what_matches_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pattern 'net.7.\*' matches none of the 6 tensors"):
        make_trainer(tmp_path, callbacks=[ScaleFactorLogger(patterns=("net.7.*",))]).fit(seeded(), loader())
    with pytest.raises(TypeError, match="sequence of patterns"):
        ScaleFactorLogger(patterns="*")


class Failing(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [ScaleFactorLogger, Fp8Monitor])
def test_what_holds_for_all_that_act_every_n_steps(tmp_path: Path, kind: Any) -> None:
    def warnings_of(callback: Any, **kwargs: Any) -> list[str]:
        trainer = make_trainer(tmp_path, callbacks=[callback], **kwargs)
        return warned(kind.__name__, lambda: trainer.fit(seeded(), loader()))

    interval = kind().every_n_steps
    (said,) = warnings_of(kind())
    assert f"made 4 steps and `every_n_steps` is {interval}" in said
    assert warnings_of(kind(every_n_steps=4)) == warnings_of(kind(), fast_dev_run=True) == []
    # where there is nothing to log, that alone is said
    (said,) = warnings_of(kind(), precision="bf16-mixed")
    assert "no layer runs in FP8 under precision='bf16-mixed'; nothing to" in said
    model = seeded(Failing)
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, callbacks=[kind(every_n_steps=1)]).fit(model, loader())
    assert not model.net[0]._forward_hooks
    assert scaling_state(model).cast_counts.values is None
    assert scaling_state(model).model.before_update == []


def quantities_by_hand(state: ScalingState, row: int) -> dict[str, float]:
    scale = state.scale[row].item()
    if row >= state.delayed:
        # scaled by its values at the last cast: no window, and no headroom
        nonfinite = state.nonfinite_steps[row].item()
        return {"scale": scale, "amax": 448 / scale, "nonfinite_steps": nonfinite}
    history = state.amax_history[:, row].tolist()
    return {
        "scale": scale,
        "amax": history[0],
        "amax_history_max": max(history),
        "headroom_bits": math.log2(state.fp8_max[row].item() / (history[0] * scale)),
        "nonfinite_steps": state.nonfinite_steps[row].item(),
    }


def test_every_quantity_and_its_summaries(tmp_path: Path) -> None:
    class Infinite(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return super().training_step((x * float("inf"), y) if batch_idx == 1 else (x, y), batch_idx)

    model, logger = seeded(Infinite), CSVLogger(tmp_path)
    recipe = DelayedScaling(margin=1, amax_history_len=3)
    plugin = Fp8Precision(recipe=recipe)
    trainer = make_trainer(tmp_path, plugins=plugin, logger=logger, callbacks=[ScaleFactorLogger(every_n_steps=2)])
    trainer.fit(model, loader())
    state, last = scaling_state(model), [row for row in rows_of(logger) if row.get("fp8/input/scale/min")][-1]
    expected = {name: quantities_by_hand(state, row) for row, name in enumerate(state.names)}
    for name, quantities in expected.items():
        for quantity, value in quantities.items():
            assert float(last[f"fp8/{name}/{quantity}"]) == pytest.approx(value, rel=1e-6), (name, quantity)
        assert 0 <= float(last[f"fp8/{name}/saturated_fraction"]) <= 1
        assert 0 <= float(last[f"fp8/{name}/underflowed_fraction"]) <= 1
    assert expected["net.0.input"]["nonfinite_steps"] == 1
    for role in ROLES:
        for quantity in QUANTITIES_OF[role]:
            values = [float(last[f"fp8/{name}/{quantity}"]) for name in state.names if name.endswith(role)]
            for summary, value in (("min", min(values)), ("median", statistics.median(values)), ("max", max(values))):
                assert float(last[f"fp8/{role}/{quantity}/{summary}"]) == pytest.approx(value, rel=1e-6, abs=1e-12)


def known_counts() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A layer whose tensors all have scale 448 or 57344, and an input and a gradient with every kind of value."""
    model = convert(nn.Linear(8, 8), min_features=0)
    state = scaling_state(model)
    state.amax[: state.delayed] = 1.0
    state.update()
    tie = 2.0**-10 / 448
    x = torch.tensor([[2.0, -1.5, 1.0, 0.0, 1e-9, tie, tie * 1.01, 0.5], [float("inf"), *[0.25] * 7]])
    dy = torch.tensor([[3.0, 1e-12, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5], [0.5] * 8])
    return model, x, dy


@pytest.fixture(params=["reference", "kernels", "plain"])
def half(request: pytest.FixtureRequest) -> None:
    """What casts: the CPU's half of the operators, the kernels, or torch's operators in place of the kernels."""
    if request.param != "reference":
        request.getfixturevalue("cuda_half")
    if request.param == "plain":
        request.getfixturevalue("monkeypatch").setenv("LIGHTNING_FP8_BACKEND", "reference")


@pytest.mark.usefixtures("half")
def test_counts_are_those_of_the_codes(request: pytest.FixtureRequest) -> None:
    model, x, dy = known_counts()
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.weight[0, 0] = 7.0
    state = scaling_state(model)
    state.cast_counts.start(request)
    model(x).backward(dy)
    # numbers, saturated, nonzero, underflowed; a NaN is counted in none of them
    # no weight values are lost: its scale follows from its amax of 7
    assert state.cast_counts.values.tolist() == [[16, 3, 15, 2], [16, 1, 15, 1], [64, 0, 64, 0]]
    codes = fp8_numpy.saturating_cast(x.numpy(), state.scale[0].numpy(), "e4m3")
    assert ((codes & 0x7F == 0) & (x.numpy() != 0)).sum() == 2
    # as when the model is moved between two micro-batches
    assert state.to("cpu").cast_counts.values.tolist()[0] == [16, 3, 15, 2]
    state.cast_counts.stop(request)
    assert state.cast_counts.values is None


def test_counting_that_begins_after_a_move_is_done_where_the_state_is(request: pytest.FixtureRequest) -> None:
    state = scaling_state(known_counts()[0]).to("meta")
    state.cast_counts.start(request)
    counts = state.cast_counts
    assert {counts.values.device, counts.noise.device, counts.exponents.device} == {torch.device("meta")}


@pytest.mark.usefixtures("half")
def test_counts_with_a_scale_for_each_block(request: pytest.FixtureRequest) -> None:
    """Twice the same small number: it becomes zero only in the block with the larger amax."""
    model = convert(nn.Linear(256, 128, bias=False), BlockScaling())
    x, dy = torch.full((2, 256), 1e-3), torch.ones(2, 128)
    small = 1e-6
    # 448e-6 is less than 2**-10, half of the smallest number; with an amax of 1e-3 the scale is 1000 times larger
    x[0, 0], x[0, 1], x[0, 129], dy[1, 5] = 1.0, small, small, small
    with torch.no_grad():
        model.weight.fill_(1e-3)
        model.weight[0, 0], model.weight[127, 127], model.weight[127, 128] = 1.0, small, small
    state = scaling_state(model)
    state.cast_counts.start(request)
    model(x).backward(dy)
    counted = dict(zip(state.names, state.cast_counts.values.tolist(), strict=True))
    assert counted == {
        "input": [512, 0, 512, 1],
        "grad_output": [256, 0, 256, 1],
        "weight": [128 * 256, 0, 128 * 256, 1],
    }


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("recipe", [BlockScaling(), MXScaling(), MXScaling(weight_blocks=(32, 32))], ids=str)
def test_exponents_are_those_of_the_blocks(request: pytest.FixtureRequest, recipe: Recipe) -> None:
    model = convert(nn.Linear(160, 144, bias=False), recipe)
    state, generator = scaling_state(model), torch.Generator().manual_seed(0)
    x, dy, weight = (torch.randn(*shape, generator=generator) for shape in ((48, 160), (48, 144), (144, 160)))
    # All are far above 0, the smallest inside of the tensor; zeros have no exponent, nor in MX an infinity and a NaN.
    x *= torch.logspace(4, 8, 160)
    x[:, 50] *= 0.02
    dy *= torch.logspace(9, 5, 48)[:, None]
    x[:, 64:128], dy[3, 5], dy[40, 140], x[7] = 0.0, float("inf"), float("nan"), 0.0
    with torch.no_grad():
        model.weight.copy_(weight * torch.logspace(-3, 3, 144)[:, None])
    state.cast_counts.start(request)
    model(x.requires_grad_()).backward(dy)
    found = tensor_statistics(state, lambda counts, op: counts)
    for name, values in (("input", x.detach()), ("grad_output", dy), ("weight", model.weight.detach())):
        squares = name == "weight" and recipe != MXScaling()
        exponents = np.concatenate([log2_of_blocks(one, recipe, squares) for one in (values, values.t())])
        got = [found[f"{end}_exponent"][state.names.index(name)].item() for end in ("smallest", "largest")]
        assert got == pytest.approx([exponents.min(), exponents.max()], abs=1e-5), name
        assert not isinstance(recipe, MXScaling) or got == [round(number) for number in got]


def log2_of_blocks(x: torch.Tensor, recipe: Recipe, squares: bool) -> np.ndarray:
    """log2 of amax / 448 of each block, rounded up in MX, in fp64; if not finite, it is left out in MX, else 0."""
    size = 32 if isinstance(recipe, MXScaling) else 128
    rows = range(0, len(x), size if squares else 1)
    numbers = x.double().numpy()
    blocks = [numbers[r : r + (size if squares else 1), c : c + size] for r in rows for c in range(0, x.shape[1], size)]
    amaxes = np.array([np.abs(block).max() for block in blocks])
    is_finite = np.isfinite(amaxes)
    log2 = np.log2(amaxes[is_finite & (amaxes > 0)] / 448)
    return np.ceil(log2) if isinstance(recipe, MXScaling) else np.append(log2, np.zeros((~is_finite).sum()))


def test_counts_of_a_feed_forward_block(request: pytest.FixtureRequest) -> None:
    def counts() -> torch.Tensor:
        torch.manual_seed(0)
        model = convert(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16)))
        state = scaling_state(model)
        # part of the activation's output, and part of the gradient of its input, is out of range, and part becomes zero
        state.amax[: state.delayed] = torch.tensor([1.0, 0.5, 1e-3, 1e-2])
        state.update()
        state.cast_counts.start(model)
        x = torch.randn(40, 16)
        fp8_feed_forward(model[0], "relu", model[1], x).backward(torch.randn(40, 16).exp() * 1e-2)
        return state.cast_counts.values

    expected = counts()
    request.getfixturevalue("cuda_half")
    # sums in a different order make a few products zero or nonzero
    assert (counts() - expected).abs().max() <= 5
    of_hidden, of_its_gradient = expected[1].tolist(), expected[2].tolist()
    assert 0 < of_hidden[1] < of_hidden[2] < of_hidden[0] == 40 * 24
    assert 0 < of_its_gradient[1] < of_its_gradient[2] < of_its_gradient[0] == 40 * 24


def test_nan_is_no_number() -> None:
    model, x, _ = known_counts()
    state = scaling_state(model)
    state.cast_counts.start(model)
    x[1, 0] = float("nan")
    model(x).sum().backward()
    assert state.cast_counts.values[0].tolist() == [15, 2, 14, 2]


def test_evaluation_and_other_steps_count_nothing(tmp_path: Path) -> None:
    counting: list[bool] = []

    class Watching(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            counting.append(scaling_state(self).cast_counts.values is not None)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            before = scaling_state(self).cast_counts.values
            super().validation_step(batch, batch_idx)
            assert before is None

    trainer = make_trainer(
        tmp_path,
        callbacks=[ScaleFactorLogger(every_n_steps=2), ScaleFactorLogger(every_n_steps=3)],
        logger=CSVLogger(tmp_path),
        accumulate_grad_batches=2,
    )
    model = seeded(Watching)
    trainer.fit(model, loader(rows=16 * 12), loader())
    # two micro-batches a step; steps 2, 3, 4 and 6 are logged by either
    assert counting == [step in (2, 3, 4, 6) for step in range(1, 7) for _ in range(2)]
    assert scaling_state(model).cast_counts.values is None


@pytest.mark.parametrize(
    ("options", "schedule", "drawn"),
    [
        # by role, the layers that have a scale in the last step
        ({"overrides": {"*": {"dgrad": "bf16", "wgrad": "bf16"}}}, None, {"input": [0, 2], "weight": [0, 2]}),
        ({}, {2: {"dgrad": "bf16", "wgrad": "bf16"}}, {"input": [0, 2], "weight": [0, 2]}),
        ({}, {0: "bf16"}, {}),
        ({"overrides": {"net.2": "bf16"}}, None, {role: [0] for role in ROLES}),
        # a weight with inf has no scale in E8M0
        ({"recipe": "fp8-mx"}, None, {"input": [0, 2], "grad_output": [0, 2], "weight": [2]}),
    ],
)
def test_histograms_have_the_tensors_with_a_scale(
    options: Any, schedule: Any, drawn: dict[str, list[int]], tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class InfiniteWeight(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if options.get("recipe") == "fp8-mx" and batch_idx == 3:
                self.net[0].weight.data[0, 0] = math.inf

    logger, model = TensorBoardLogger(tmp_path), seeded(InfiniteWeight)
    callbacks: list[Any] = [ScaleFactorLogger(every_n_steps=4)]
    callbacks += [] if schedule is None else [PrecisionSchedule(schedule)]
    make_trainer(tmp_path, logger=logger, plugins=Fp8Precision(**options), callbacks=callbacks).fit(model, loader())
    events = EventAccumulator(logger.log_dir).Reload()
    state, found = scaling_state(model), {}
    for name in events.Tags()["histograms"]:
        histogram = events.Histograms(name)[-1].histogram_value
        found[name] = [histogram.num, histogram.min, histogram.max, histogram.sum]
    expected = {}
    for role, layers in drawn.items():
        bits = [math.log2(state.scale[state.names.index(f"net.{layer}.{role}")]) for layer in layers]
        expected[f"fp8/{role}/log2_scale"] = pytest.approx([len(bits), min(bits), max(bits), sum(bits)], rel=1e-6)
    assert found == expected


def test_fractions_are_those_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has cast as many numbers, and has lost all of them."""
    asked = []

    def reduce(strategy: Any, counts: torch.Tensor, group: Any = None, reduce_op: str = "mean") -> torch.Tensor:
        if counts.shape != (6, 4):
            return counts
        asked.append(reduce_op)
        numbers, saturated, nonzero, underflowed = counts.unbind(1)
        return torch.stack([2 * numbers, saturated + numbers, 2 * nonzero, underflowed + nonzero], 1)

    monkeypatch.setattr(SingleDeviceStrategy, "reduce", reduce)
    logger = CSVLogger(tmp_path)
    make_trainer(tmp_path, logger=logger, callbacks=[ScaleFactorLogger(every_n_steps=4)]).fit(seeded(), loader())
    assert asked == ["sum"]
    (last,) = [row for row in rows_of(logger) if row.get("fp8/net.0.input/scale")]
    for name in ("net.0.input", "net.2.grad_output", "net.0.weight"):
        for fraction in ("saturated_fraction", "underflowed_fraction"):
            assert 0.5 <= float(last[f"fp8/{name}/{fraction}"]) < 0.6


def test_exponents_are_those_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has had exponents from -100 to 90."""

    def reduce(strategy: Any, tensor: torch.Tensor, group: Any = None, reduce_op: str = "mean") -> torch.Tensor:
        wider = tensor.clamp(min=torch.tensor([100.0, 90.0])) if tensor.shape == (6, 2) else tensor
        return wider if (reduce_op == "max") == (tensor.shape == (6, 2)) else tensor * 0

    monkeypatch.setattr(SingleDeviceStrategy, "reduce", reduce)
    logger, callback = CSVLogger(tmp_path), ScaleFactorLogger(every_n_steps=4, patterns=())
    make_trainer(tmp_path, precision="fp8-mx", logger=logger, callbacks=[callback]).fit(seeded(), loader())
    (last,) = [row for row in rows_of(logger) if row.get("fp8/input/scale/min")]
    for role in ROLES:
        ends = [float(last[f"fp8/{role}/{end}_exponent/median"]) for end in ("smallest", "largest")]
        assert ends == [-100.0, 90.0]
