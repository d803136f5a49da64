"""Any sequence of operations on a converted model, compared with the specification of its scales in plain floats."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from observed_chain import LAYERS, WIDTH, Chain, Observer, Subject
from scales_in_numpy import NOTICES, ModelScales
from torch import Tensor, nn

from lightning_fp8 import DelayedScaling, convert, scaling_state, unconvert
from lightning_fp8.conversion import fall_back
from lightning_fp8.modules import Fp8Linear
from lightning_fp8.scaling.precision import AS_SET, BF16

SETTINGS = settings(
    max_examples=24,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
)
which = st.integers(0, 1)
seeds = st.integers(0, 99)
# 448 / 1e-37 is infinite in fp32
magnitudes = st.sampled_from([1.0, 30.0, 1e4, 1e-4, 1e-37, 0.0])
poisons = st.sampled_from([None, None, None, float("inf"), float("nan")])
layers = st.sampled_from(LAYERS)
some_layers = st.frozensets(layers, max_size=2)
recipes = st.builds(
    DelayedScaling,
    margin=st.sampled_from([0, 2]),
    fp8_format=st.sampled_from(["HYBRID", "E4M3"]),
    amax_history_len=st.integers(1, 4),
    amax_compute_algo=st.sampled_from(["max", "most_recent"]),
)


def random(seed: int, magnitude: float, poison: float | None = None, rows: int = 3) -> Tensor:
    x = magnitude * torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    if poison is not None:
        x[1, 2] = poison
    return x


def write_in_place(parameter: nn.Parameter, weight: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(weight)


def assign_data(parameter: nn.Parameter, weight: Tensor) -> None:
    parameter.data = weight


WRITES: dict[str, Callable[[nn.Parameter, Tensor], Any]] = {
    "in place": write_in_place,
    ".data": assign_data,
}


class ConvertedModel(RuleBasedStateMachine):
    """At most two models, the second a copy of the first, and their saved states."""

    @initialize(recipe=recipes, steps=st.integers(0, 3))
    def start(self, recipe: DelayedScaling, steps: int) -> None:
        torch.manual_seed(0)
        self.subjects = [Subject(convert(Chain(), recipe), ModelScales(recipe, LAYERS[:3]))]
        self.saved: list[tuple[bytes, ModelScales]] = []
        for seed in range(steps):
            self.forward_and_backward(0, seed, 2.0 - seed, 1.0, None, frozenset(), True, "no", "after")
            self.save(0)

    @contextmanager
    def acting(self, number: int) -> Iterator[Subject]:
        """One of the models; asserts that the operation inside gives exactly the notices that are due."""
        subject = self.subjects[number % len(self.subjects)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield subject
        messages = [str(warning.message) for warning in caught]
        said = [next(kind for kind in NOTICES if NOTICES[kind] in text) for text in messages if "lightning_fp8" in text]
        subject.scales.check_said(said)

    @rule(
        number=which,
        seed=seeds,
        magnitude=magnitudes,
        of_gradient=magnitudes,
        poison=poisons,
        skipped=some_layers,
        training=st.sampled_from([True, True, True, False]),
        recompute=st.sampled_from(["no", "no", "each", "all", "each reentrant", "all reentrant"]),
        update=st.sampled_from(["later", "after", "after", "between"]),
    )
    def forward_and_backward(
        self,
        number: int,
        seed: int,
        magnitude: float,
        of_gradient: float,
        poison: float | None,
        skipped: frozenset[str],
        training: bool,
        recompute: str,
        update: str,
    ) -> None:
        with self.acting(number) as subject:
            subject.set_training(training)
            observer = Observer(subject)
            y = subject.net(random(seed, magnitude, poison).requires_grad_(), skipped, recompute)
            if update == "between":
                self.update_one(subject)
            y.backward(random(seed + 1, of_gradient))
            observer.close()
            if update == "after":
                self.update_one(subject)

    @rule(
        number=which,
        seed=seeds,
        magnitude=magnitudes,
        poison=poisons,
        skipped=some_layers,
        training=st.booleans(),
        swapped=st.booleans(),
        times=st.integers(1, 3),
    )
    def evaluate(
        self,
        number: int,
        seed: int,
        magnitude: float,
        poison: float | None,
        skipped: frozenset[str],
        training: bool,
        swapped: bool,
        times: int = 1,
    ) -> None:
        with self.acting(number) as subject, torch.no_grad():
            subject.set_training(training)
            weights = [parameter.data for parameter in subject.net.parameters()]
            versions = {name: layer.weight.version for name, layer in subject.scales.layers.items()}
            for parameter in subject.net.parameters() if swapped else ():
                parameter.data = 0.25 * parameter.data
            if swapped:
                subject.scales.on_weights_changed(versions)
            observer = Observer(subject)
            for _ in range(times):
                subject.net(random(seed, magnitude, poison), skipped)
            observer.close()
            for parameter, weight in zip(subject.net.parameters(), weights, strict=True):
                parameter.data = weight
            # the same as before
            for name, version in versions.items():
                subject.scales.layers[name].weight.version = version

    @staticmethod
    def update_one(subject: Subject) -> None:
        scaling_state(subject.net).update()
        subject.scales.update()

    @rule(number=which)
    def update(self, number: int) -> None:
        with self.acting(number) as subject:
            self.update_one(subject)

    @rule(number=which)
    def discard(self, number: int) -> None:
        with self.acting(number) as subject:
            scaling_state(subject.net).discard()
            subject.scales.discard()

    @rule(number=which, updated=st.booleans())
    def optimizer_step(self, number: int, updated: bool) -> None:
        with self.acting(number) as subject:
            if updated:
                self.update_one(subject)
            for parameter in subject.net.parameters():
                if parameter.grad is not None:
                    parameter.grad.nan_to_num_().clamp_(-1, 1)
            subject.optimizer.step()
            subject.optimizer.zero_grad()
            subject.scales.on_optimizer_step()
            stepped = {id(parameter) for part in subject.optimizer.param_groups for parameter in part["params"]}
            names = [name for name, layer in subject.net.named_children() if id(layer.weight) in stepped]
            subject.scales.on_weights_changed(names)

    @rule(number=which)
    def reset(self, number: int) -> None:
        with self.acting(number) as subject:
            scaling_state(subject.net).reset()
            subject.scales.reset()

    @rule(
        number=which,
        left_out=some_layers,
        seed=seeds,
        magnitude=st.sampled_from([1.0, 0.1, 0.0, 100.0]),
        poison=poisons,
        how=st.sampled_from(list(WRITES)),
    )
    def write_weights(
        self, number: int, left_out: frozenset[str], seed: int, magnitude: float, poison: float | None, how: str
    ) -> None:
        with self.acting(number) as subject:
            for name, layer in subject.net.named_children():
                if name not in left_out:
                    WRITES[how](layer.weight, random(seed, magnitude, poison, rows=WIDTH))
                    subject.scales.on_weights_changed([name])

    @rule(number=which, frozen=some_layers)
    def freeze(self, number: int, frozen: frozenset[str]) -> None:
        self.subjects[number % len(self.subjects)].frozen = frozen

    @rule(number=which, name=layers)
    def fall_back(self, number: int, name: str) -> None:
        with self.acting(number) as subject:
            if name in subject.scales.layers:
                fall_back(subject.net, name)
                subject.scales.layers[name].move(has_fallen=True)

    @rule(number=which, in_bf16=some_layers)
    def schedule(self, number: int, in_bf16: frozenset[str]) -> None:
        with self.acting(number) as subject:
            state = scaling_state(subject.net)
            chosen = {at: BF16 if name in in_bf16 else AS_SET for at, name in enumerate(state.module_names)}
            state.switch("schedule", chosen)
            for name, layer in subject.scales.layers.items():
                layer.move(is_scheduled=name in in_bf16)

    @rule(number=which)
    def save(self, number: int) -> None:
        with self.acting(number) as subject:
            file = io.BytesIO()
            torch.save({"weights": subject.net.state_dict(), "scaling": scaling_state(subject.net).state_dict()}, file)
            self.saved = [*self.saved[-1:], (file.getvalue(), copy.deepcopy(subject.scales))]

    @precondition(lambda self: self.saved)
    @rule(
        number=which,
        of=which,
        parts=st.lists(st.sampled_from(["weights", "scales"]), min_size=1, max_size=3),
        left_out=st.frozensets(layers, max_size=3),
        assign=st.booleans(),
    )
    def load(self, number: int, of: int, parts: list[str], left_out: frozenset[str], assign: bool) -> None:
        data, scales = self.saved[of % len(self.saved)]
        with self.acting(number) as subject:
            for part in parts:
                saved = torch.load(io.BytesIO(data), weights_only=True)
                if part == "scales":
                    self.load_scales_into(subject, saved, scales)
                    continue
                weights = {key: weight for key, weight in saved["weights"].items() if key.split(".")[0] not in left_out}
                subject.net.load_state_dict(weights, strict=False, assign=assign)
                loaded = {key.split(".")[0] for key in weights}
                subject.scales.on_weights_loaded(loaded)
                for name in list(subject.scales.layers):
                    subject.scales.switch(name)
                    if assign and name in loaded:
                        subject.scales.layers[name].weight.forget_casts()
                if assign:
                    subject.new_optimizer()

    @staticmethod
    def load_scales_into(subject: Subject, saved: dict[str, Any], scales: ModelScales) -> None:
        if set(scales.layers) & set(subject.scales.layers):
            scaling_state(subject.net).load_state_dict(saved["scaling"])
            subject.scales.load(scales)
        else:
            with pytest.raises(ValueError, match="no layer is in both"):
                scaling_state(subject.net).load_state_dict(saved["scaling"])

    @rule(number=which)
    def copy_model(self, number: int) -> None:
        with self.acting(number) as subject:
            self.subjects = [subject, subject.copy()]

    @rule(number=which, ignored=some_layers, add=st.booleans())
    def convert_again(self, number: int, ignored: frozenset[str], add: bool) -> None:
        with self.acting(number) as subject:
            if add and not hasattr(subject.net, "d"):
                subject.net.d = nn.Linear(WIDTH, WIDTH, bias=False)
                subject.new_optimizer()
            names = [name for name, _ in subject.net.named_children()]
            convert(subject.net, ignore_modules=[name for name in ignored if name in names])
            subject.scales.convert_again([name for name in names if name not in ignored])

    @rule(number=which, recipe=recipes, ignored=some_layers)
    def convert_anew(self, number: int, recipe: DelayedScaling, ignored: frozenset[str]) -> None:
        with self.acting(number) as subject:
            unconvert(subject.net)
            names = [name for name, _ in subject.net.named_children()]
            convert(subject.net, recipe, ignore_modules=[name for name in ignored if name in names])
            subject.scales = ModelScales(recipe, [name for name in names if name not in ignored])

    @invariant()
    def the_state_is_as_specified(self) -> None:
        for subject in self.subjects:
            state, scales = scaling_state(subject.net), subject.scales
            converted = {name for name, layer in subject.net.named_children() if isinstance(layer, Fp8Linear)}
            assert converted == set(scales.layers) == set(state.module_names)
            assert set(state.fallbacks) == {name for name, layer in scales.layers.items() if layer.has_fallen}
            for row, full_name in enumerate(state.names):
                name, role = full_name.split(".")
                amax, scale, nonfinite = (t[row].numpy() for t in (state.amax, state.scale, state.nonfinite_steps))
                expected = getattr(scales.layers[name], role)
                assert nonfinite == expected.nonfinite_steps, full_name
                assert is_same(amax, expected.amax), full_name
                assert is_same(scale, expected.scale), full_name
                if role != "weight":
                    history = state.amax_history[:, row].tolist()
                    assert [value for value in history if value] == expected.history, full_name
                    assert history[: len(expected.history)] == expected.history, full_name
            if state.every_tensor_has_history:
                cast = [layer for layer in scales.layers.values() if layer.in_fp8]
                assert all(layer.input.history and layer.grad_output.history for layer in cast)


def is_same(actual: np.ndarray, expected: np.float32) -> bool:
    """Bit for bit, with all NaN equal."""
    return np.array_equal(actual, np.float32(expected), equal_nan=True)


@pytest.mark.parametrize("half", ["cpu", "cuda_half"])
def test_any_sequence(half: str, request: pytest.FixtureRequest) -> None:
    if half != "cpu":
        request.getfixturevalue(half)
    examples = SETTINGS.max_examples if half == "cpu" else 12
    run_state_machine_as_test(ConvertedModel, settings=settings(SETTINGS, max_examples=examples))


def train(machine: ConvertedModel, update: str, skipped: str = "") -> None:
    machine.forward_and_backward(0, 5, 1.0, 1.0, None, frozenset(skipped), True, "no", update)


def write_and_train(machine: ConvertedModel, seed: int, skipped: str) -> None:
    machine.write_weights(0, frozenset(), seed, 1.0, None, "in place")
    train(machine, "after", skipped)


# that the random choice may leave out
RARE: dict[str, Callable[[ConvertedModel], None]] = {
    "weights alone": lambda machine: machine.load(0, 0, ["weights"], frozenset("b"), assign=False),
    "weights, their scales, other weights": lambda machine: machine.load(
        0, 0, ["weights", "scales", "weights"], frozenset(), assign=False
    ),
    "a write in place between two micro-batches": lambda machine: (
        train(machine, "later"),
        machine.write_weights(0, frozenset(), 7, 1.0, None, "in place"),
        train(machine, "after"),
    ),
    "a file for a layer that is added later": lambda machine: (
        machine.convert_again(0, frozenset(), add=True),
        train(machine, "after"),
        machine.save(0),
        machine.convert_again(0, frozenset("d"), add=False),
        machine.load(0, 1, ["scales"], frozenset(), assign=False),
        machine.convert_again(0, frozenset(), add=False),
        train(machine, "after"),
    ),
    "a file with another window, in a model of another margin and algorithm": lambda machine: (
        machine.convert_anew(
            0, DelayedScaling(amax_history_len=1, margin=2, amax_compute_algo="most_recent"), frozenset()
        ),
        machine.load(0, 1, ["scales", "weights"], frozenset(), assign=False),
        train(machine, "after"),
    ),
    "scales are loaded, the model is copied, and the weights come then": lambda machine: (
        machine.load(0, 1, ["scales"], frozenset(), assign=False),
        machine.copy_model(0),
        machine.load(1, 1, ["weights"], frozenset(), assign=False),
    ),
    "a layer that no longer runs is cast once more": lambda machine: (
        write_and_train(machine, 7, "b"),
        write_and_train(machine, 8, "b"),
    ),
    "a layer in evaluation is not cast with the others": lambda machine: (
        machine.freeze(0, frozenset("b")),
        write_and_train(machine, 7, "b"),
    ),
}


@pytest.mark.parametrize("half", ["cpu", "cuda_half"])
@pytest.mark.parametrize("what", RARE)
def test_rare_sequence(what: str, half: str, request: pytest.FixtureRequest) -> None:
    if half != "cpu":
        request.getfixturevalue(half)
    machine = ConvertedModel()
    machine.start(DelayedScaling(amax_history_len=2), steps=2)
    RARE[what](machine)
    machine.the_state_is_as_specified()
