"""Precision over time: a switched run is the run that is restarted with the new precision, wherever it is resumed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lit import Regression, loader, make_trainer, same, seeded
from logged_runs import rows_of
from moved import to_bf16
from projections import MEMBERS, Shared, train
from small_models import small_mlp
from torch import Tensor, nn

from lightning_fp8 import (
    BlockScaling,
    DelayedScaling,
    Fp8Precision,
    PrecisionSchedule,
    convert,
    describe,
    scaling_state,
    unconvert,
)
from lightning_fp8.conversion.schedule import Schedule

# an epoch of one batch, so that a run can be resumed at each step
STEPS = 8


def data() -> Any:
    return loader(16)


class Keeping(pl.Callback):
    """Keeps a checkpoint of each step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path / f"{trainer.global_step}.ckpt")


def fit(path: Path, *callbacks: Any, start: int = 0, **settings: Any) -> Regression:
    model = seeded()
    trainer = make_trainer(path, callbacks=list(callbacks), max_epochs=STEPS, **settings)
    trainer.fit(model, data(), ckpt_path=str(path / f"{start}.ckpt") if start else None)
    assert trainer.global_step == STEPS
    return model


def assert_same(one: Regression, other: Regression) -> None:
    """The same losses, from the second one's first on, and the same weights at the end, to the last bit."""
    count = len(other.losses)
    assert torch.equal(torch.stack(one.losses[-count:]), torch.stack(other.losses))
    assert all(map(torch.equal, one.parameters(), other.parameters()))


# what the run begins with, what it changes to at step 4, and the settings of a run that has that precision anyway
NEW: dict[str, tuple[dict[int, Any], dict[str, Any]]] = {
    "bf16": ({4: "bf16"}, {"precision": "bf16-mixed"}),
    "fprop": ({4: {"fprop": "bf16"}}, {"plugins": Fp8Precision(overrides={"*": {"fprop": "bf16"}})}),
    "gradients": (
        {4: {"dgrad": "bf16", "wgrad": "bf16"}},
        {"plugins": Fp8Precision(overrides={"*": {"dgrad": "bf16", "wgrad": "bf16"}})},
    ),
    "current": ({4: "fp8-current"}, {"precision": "fp8-current"}),
    "a layer": ({4: {"net.0": "bf16"}}, {"plugins": Fp8Precision(ignore_modules=["net.0"])}),
    "back to FP8": ({0: "bf16", 4: "fp8"}, {"precision": "fp8-delayed"}),
}


@pytest.mark.parametrize("name", NEW)
def test_a_switched_run_is_one_restarted_with_the_new_precision(name: str, tmp_path: Path) -> None:
    schedule, settings = NEW[name]
    switched = fit(tmp_path, PrecisionSchedule(schedule), Keeping(tmp_path))
    restarts = tmp_path
    if name == "a layer":
        # a plain layer has no scales
        restarts, checkpoint = tmp_path / "plain", torch.load(tmp_path / "4.ckpt", weights_only=False)
        scales = checkpoint["Fp8Precision"]
        checkpoint["Fp8Precision"] = {key: value for key, value in scales.items() if not key.startswith("net.0")}
        restarts.mkdir()
        torch.save(checkpoint, restarts / "4.ckpt")
    restarted = fit(restarts, start=4, **settings)
    assert len(restarted.losses) == 4
    assert_same(switched, restarted)
    # and not one that goes on as before
    unchanged = fit(tmp_path, start=4, **({"precision": "bf16-mixed"} if "back" in name else {}))
    assert not torch.equal(torch.stack(switched.losses[4:]), torch.stack(unchanged.losses))


def test_it_is_resumed_exactly_wherever_it_stopped(tmp_path: Path) -> None:
    schedule = {0: {"net.2": "bf16"}, 3: "bf16", 5: "fp8", 6: {"fprop": "bf16"}, 7: "fp8-current"}
    whole = fit(tmp_path, PrecisionSchedule(schedule), Keeping(tmp_path))
    for start in range(1, STEPS):
        resumed = fit(tmp_path, PrecisionSchedule(schedule), start=start)
        assert len(resumed.losses) == STEPS - start
        assert_same(whole, resumed)
        assert same(whole, resumed)
        assert [*map(str, describe(resumed))] == [*map(str, describe(whole))]


def test_a_layer_back_in_fp8_begins_as_at_first_use() -> None:
    model, fresh = convert(small_mlp()), convert(small_mlp())
    fresh.load_state_dict(model.state_dict())
    x, state = torch.randn(8, 32), scaling_state(model)
    (model(100 * x)).sum().backward()
    state.update()
    schedule = PrecisionSchedule({1: {"fprop": "bf16", "wgrad": "bf16"}, 2: "fp8"})
    schedule.before_step(model, 1)
    # inputs are not cast any more, gradients are
    filled = (state.amax_history[0] > 0).tolist()
    assert filled == [False, False, True, True]
    assert state.scale[:2].eq(1).all()
    schedule.before_step(model, 2)
    assert torch.equal(model(x), fresh(x))


def test_the_strings_of_a_trainer_name_precisions_too() -> None:
    model = convert(small_mlp(), "fp8-block")
    schedule = PrecisionSchedule({1: "bf16-mixed", 2: "fp8-block", 3: {"0": "bf16-mixed"}})
    in_fp8 = []
    for step in range(4):
        schedule.before_step(model, step)
        in_fp8.append([row.converted for row in describe(model)])
    assert in_fp8 == [[True, True], [False, False], [True, True], [False, True]]


def test_it_adds_to_the_settings_and_to_moves(tmp_path: Path) -> None:
    model = convert(small_mlp(), DelayedScaling(wgrad="bf16"), overrides={"2": {"dgrad": "bf16"}})
    state = scaling_state(model)

    def products() -> list[tuple[str, ...]]:
        return [one.in_bf16 for one in state.precisions]

    as_set = products()
    assert as_set == [("wgrad",), ("dgrad", "wgrad")]
    schedule = PrecisionSchedule({1: {"fprop": "bf16"}, 2: {"0": "bf16", "*": {"dgrad": "fp8"}}, 3: "fp8"})
    schedule.before_step(model, 1)
    assert products() == [("fprop", "wgrad"), ("fprop", "dgrad", "wgrad")]
    # described, with what a checkpoint holds: moves and no schedule
    rows = [row.reason for row in describe(model)]
    assert rows[0].startswith("converted, 32 -> 64; wgrad in bf16; by the schedule fprop in bf16")
    assert [bool(entry["in_fp8"]) for entry in state.state_dict().values()] == [True] * 4
    schedule.before_step(model, 2)
    # in this entry the pattern that comes later takes dgrad of the first layer out of bf16 again
    assert products() == [("fprop", "wgrad"), ("dgrad", "wgrad")]
    to_bf16(state, "2")
    schedule.before_step(model, 3)
    assert products() == [("wgrad",), ("fprop", "dgrad", "wgrad")]
    assert state.fallbacks == ("2",)
    convert(model, overrides={})
    assert products() == [("wgrad",), ("fprop", "dgrad", "wgrad")]


def test_layers_with_one_input_change_their_scaling_together() -> None:
    model = convert(Shared())
    PrecisionSchedule({0: {"k": "fp8-current"}}).before_step(model, 0)
    precisions = scaling_state(model).precisions
    names = scaling_state(model).module_names
    assert [name for name, one in zip(names, precisions) if one.is_current] == list(MEMBERS)


def test_the_others_keep_the_history_of_an_input_that_they_share() -> None:
    """The layer in whose row the input is recorded leaves FP8; the others go on as without it."""
    model, owner = convert(Shared()), MEMBERS[0]
    train(model)
    without = Shared()
    without.load_state_dict(model.state_dict())
    convert(without, ignore_modules=[owner])
    saved = scaling_state(model).state_dict()
    scaling_state(without).load_state_dict({key: one for key, one in saved.items() if not key.startswith(f"{owner}.")})
    PrecisionSchedule({0: {owner: "bf16"}}).before_step(model, 0)
    x = torch.randn(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        # with scales from the past, not those of the values
        assert torch.equal(model(x), without(x))
    state, other = scaling_state(model), scaling_state(without)
    rows = [state.names.index(name) for name in other.names]
    assert torch.equal(state.amax_history[:, rows[: other.delayed]], other.amax_history)


def test_a_schedule_serves_one_loop_after_another() -> None:
    schedule, models = PrecisionSchedule({0.5: "bf16"}), [convert(small_mlp()) for _ in range(2)]
    for model in models:
        for step in range(4):
            schedule.before_step(model, step, 4)
            assert scaling_state(model).precisions[0].in_fp8 == (step < 2)
    for step in range(8):
        schedule.before_step(models[1], step, 8)
        assert scaling_state(models[1]).precisions[0].in_fp8 == (step < 4)


@pytest.mark.parametrize("between", ["another fit", "converted anew", "a second schedule"])
def test_a_loop_goes_on_after_something_else_has_ended_the_schedule(between: str, tmp_path: Path) -> None:
    schedule, model = PrecisionSchedule({2: {"net.0": "bf16"}, 9: "bf16"}), convert(seeded())
    schedule.before_step(model, 2)
    if between == "another fit":
        make_trainer(tmp_path).fit(model, data())
    elif between == "converted anew":
        convert(unconvert(model))
    else:
        PrecisionSchedule({0: "fp8"}).before_step(model, 0)
    assert scaling_state(model).precisions[0].in_fp8
    for _ in range(2):
        schedule.before_step(model, 3)
        assert [one.in_fp8 for one in scaling_state(model).precisions] == [False, True]


def test_micro_batches_of_one_step_have_one_precision(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    class Watching(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append((self.trainer.global_step, scaling_state(self).precisions[0].in_fp8))
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(tmp_path, callbacks=[PrecisionSchedule({0.5: "bf16"})], accumulate_grad_batches=3)
    trainer.fit(seeded(Watching), loader(16 * 12))
    assert seen == [(step, step < 2) for step in range(4) for _ in range(3)]


@pytest.mark.parametrize("share", ["0.7", "0.29", "1e-05", "0.999"])
def test_a_share_is_rounded_down_to_a_step(share: str) -> None:
    model, (mantissa, _, exponent) = convert(small_mlp()), share.partition("e")
    digits = mantissa.partition(".")[2]
    scale = 10 ** (len(digits) - int(exponent or 0))
    for planned in (1, 10, 100, 701, 12_345):
        schedule = Schedule({float(share): "bf16"})
        schedule.start(model, planned)
        first = int(mantissa.replace(".", "")) * planned // scale
        assert (schedule.entry_at(first - 1), schedule.entry_at(first)) == (0, 1)


def test_what_it_says_and_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = CSVLogger(tmp_path)
    schedule = PrecisionSchedule({2: {"net.0": "bf16"}, 0.75: "bf16"})
    with caplog.at_level(logging.INFO):
        fit(tmp_path, schedule, logger=logger)
    said = [record.message for record in caplog.records if "PrecisionSchedule" in record.message]
    assert [text.partition(". ")[0] for text in said] == [
        "PrecisionSchedule: {'net.0': 'bf16'} from optimizer step 2 on",
        "PrecisionSchedule: 'bf16' from optimizer step 6 on",
    ]
    assert "1 of 2 layers run in another precision than the conversion gave them" in said[0]
    logged = [(int(row["step"]), float(row["fp8/schedule"])) for row in rows_of(logger) if row.get("fp8/schedule")]
    # at the first step, around each switch, and at the end
    assert logged == [(0, 0), (1, 0), (2, 1), (5, 1), (6, 2), (8, 2)]


def test_the_next_fit_begins_as_converted(tmp_path: Path) -> None:
    model = fit(tmp_path, PrecisionSchedule({0: "bf16"}))
    assert not any(row.converted for row in describe(model))
    make_trainer(tmp_path).validate(model, data(), verbose=False)
    assert not any(row.converted for row in describe(model))
    make_trainer(tmp_path, max_epochs=1).fit(model, data())
    assert all(row.converted for row in describe(model))


def test_other_precisions_have_nothing_to_switch(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="PrecisionSchedule: no layer runs in FP8 under precision='bf16-mixed'"):
        fit(tmp_path, PrecisionSchedule({0.5: "bf16"}), precision="bf16-mixed")


@pytest.mark.parametrize(
    ("schedule", "error", "message"),
    [
        ({}, TypeError, r"must be a mapping of steps or shares to precisions, such as \{0.9: \"bf16\"\}, got \{\}"),
        ("bf16", TypeError, "got 'bf16'"),
        ({1.0: "bf16"}, ValueError, r"got 1\.0"),
        ({-1: "bf16"}, ValueError, r"got -1"),
        ({True: "bf16"}, ValueError, r"got True"),
        ({float("nan"): "bf16"}, ValueError, r"got nan"),
        ({"soon": "bf16"}, ValueError, r"got 'soon'"),
        ({0.9: "bf16", 0.5: "fp8"}, ValueError, r"in increasing order, got 0\.9, 0\.5"),
        ({0.9: "fp16"}, ValueError, r"at 0\.9 must be one of 'fp8', 'bf16', 'fp8-delayed'.*got 'fp16'"),
        ({0.9: {}}, ValueError, r"or either by pattern of layers, got \{\}"),
        ({0.9: {"fprop": "fp8-current"}}, ValueError, r"a product has 'fp8' or 'bf16', got \{'fprop': 'fp8-current'\}"),
        ({0.9: {"fprop": "bf16", "net.0": "bf16"}}, ValueError, "products alone, or patterns of layers alone"),
        ({0.9: {"net.0": {"net.0": "bf16"}}}, ValueError, r"at 0\.9 for 'net\.0' must be a precision, or"),
        ({0.9: {"net.0": 16}}, ValueError, r"for 'net\.0' must be a precision, or precisions by product, got 16"),
    ],
)  # fmt: skip
def test_what_is_no_schedule(schedule: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"PrecisionSchedule.*{message}"):
        PrecisionSchedule(schedule)


def endless() -> Iterator[Any]:
    while True:
        yield from data()


REFUSED: dict[str, tuple[dict[Any, Any], dict[str, Any], str]] = {
    "unknown pattern": ({0.9: {"nett.*": "bf16"}}, {}, r"PrecisionSchedule at 0\.9` pattern 'nett\.\*' matches no"),
    "unknown product": ({0.9: {"frop": "bf16"}}, {}, r"'frop' is none of the products .*Did you mean 'fprop'\?"),
    "no FP8 layer": ({0.9: {"net.1": "bf16"}}, {}, r"the pattern 'net\.1' matches no layer that runs in FP8"),
    "order of both kinds": ({6: "bf16", 0.5: "fp8"}, {}, r"got 6, 0\.5, which are the steps \[6, 4\]"),
    "two at one step": ({0.5: "bf16", 0.51: "fp8"}, {}, r"which are the steps \[4, 4\]"),
    "no planned steps": ({0.9: "bf16"}, {"max_epochs": -1}, r"0\.9 is a share of the planned steps.*`max_steps`"),
    "another recipe": ({0.9: "fp8-block"}, {}, r"'fp8-delayed' cannot go on in 'fp8-block'.*'bf16' or 'fp8-current'"),
    "without histories": (
        {0.9: "fp8-current"},
        {"plugins": Fp8Precision(BlockScaling())},
        r"'fp8-block' cannot go on in 'fp8-current'.*It can in 'bf16'; for",
    ),
    "gathered in FP8": (
        {0.9: "bf16"},
        {"plugins": Fp8Precision(fp8_all_gather=True)},
        r"a `PrecisionSchedule` with bf16 and `fp8_all_gather=True` cannot be combined.*Gather in bf16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_run_cannot_do_is_refused_when_it_starts(name: str, tmp_path: Path) -> None:
    schedule, settings, message = REFUSED[name]
    model = seeded()
    trainer = make_trainer(tmp_path, callbacks=[PrecisionSchedule(schedule)], **{"max_epochs": STEPS, **settings})
    with pytest.raises(ValueError, match=message):
        trainer.fit(model, endless() if name == "no planned steps" else data())
    assert trainer.global_step == 0
    assert all(row.converted for row in describe(model))


def test_weights_in_fp8_only_are_refused() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].requires_grad_(False)
    convert(model, frozen_weights="fp8")
    with pytest.raises(ValueError, match=r"at 7: the frozen weight of '0' exists in FP8 only, and fprop in bf16 needs"):
        PrecisionSchedule({7: {"fprop": "bf16"}}).before_step(model, 0)
    # its gradient needs none of it
    PrecisionSchedule({7: {"1": "bf16", "0": {"wgrad": "bf16"}}}).before_step(model, 0)


def test_an_entry_behind_the_end_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="PrecisionSchedule: the run has 8 steps, and never reaches 8, 100"):
        fit(tmp_path, PrecisionSchedule({2: "bf16", 8: "fp8", 100: "bf16"}))


class ByHand(Regression):
    """Two optimizer steps in each batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


def test_manual_optimization_has_its_steps_from_max_steps_alone(tmp_path: Path) -> None:
    def trainer(schedule: Any, **settings: Any) -> pl.Trainer:
        return make_trainer(tmp_path, callbacks=[PrecisionSchedule(schedule)], **settings)

    with pytest.raises(ValueError, match=r"Set `max_steps` \(with manual optimization nothing else says it"):
        trainer({0.5: "bf16"}, max_epochs=4).fit(seeded(ByHand), data())
    model, plain = seeded(ByHand), seeded(ByHand)
    trainer({0.5: "bf16"}, max_steps=8, max_epochs=-1).fit(model, data())
    # the third batch is the first one at which four steps have been made
    trainer({4: "bf16"}, max_epochs=4).fit(plain, data())
    assert_same(model, plain)
    assert not scaling_state(model).precisions[0].in_fp8


@pytest.mark.parametrize("value", [{"fprop": "bf16"}, "fp8-current"])
def test_compiled_code_is_compiled_once_more(value: Any) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    model = convert(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run, x, schedule = torch.compile(model, backend=backend, fullgraph=True), torch.randn(4, 16), {6: value}
    counts, changes = [], PrecisionSchedule(schedule)
    for step in range(12):
        changes.before_step(model, step)
        run(x).sum().backward()
        scaling_state(model).update()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(len(graphs))
    assert counts[6:] == [counts[5] + 1] * 6
