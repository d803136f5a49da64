"""The specification of a model's scales, in numpy's fp32 and without torch."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from fp8_numpy import DEFINITIONS, code_values, saturating_cast

from lightning_fp8 import DelayedScaling

FP32_MAX = np.finfo(np.float32).max
# the notices that a model gives once, by words in them
NOTICES = {
    "evaluation": "is evaluated without scales",
    "other weights": "is evaluated with weights other than",
    "no update": "nothing has updated its scales",
    "nonfinite": "inf or NaN in",
}


def scale_of(amax: np.float32, fmt: str, margin: int = 0) -> np.float32:
    """``FP8_MAX / (amax * 2**margin)``, at most the largest finite fp32."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.minimum(np.float32(DEFINITIONS[fmt][3]) / (amax * np.float32(2**margin)), FP32_MAX)


def scale_of_current(amax: np.float32, fmt: str) -> np.float32:
    return scale_of(amax, fmt) if np.isfinite(amax) else np.float32(1)


def largest(x: np.ndarray) -> np.float32:
    return np.abs(x).max()


def quantized(x: np.ndarray, scale: np.float32, fmt: str) -> np.ndarray:
    """``x`` quantized to FP8, in fp64."""
    return code_values(fmt)[saturating_cast(x, scale, fmt)] / np.float64(scale)


_versions = itertools.count()


class Delayed:
    """An input or a gradient, whose scale follows a history, newest first."""

    def __init__(self, fmt: str) -> None:
        self.fmt = fmt
        self.nonfinite_steps = 0
        self.forget()

    def forget(self) -> None:
        self.history: list[np.float32] = []
        self.scale, self.amax = np.float32(1), np.float32(0)

    def cast(self, x: np.ndarray, record: bool, use_history: bool) -> np.ndarray:
        if record:
            self.amax = np.maximum(self.amax, largest(x))
        delayed = use_history and self.history
        return quantized(x, self.scale if delayed else scale_of_current(largest(x), self.fmt), self.fmt)

    def update(self, recipe: DelayedScaling) -> None:
        if not np.isfinite(self.amax):
            self.nonfinite_steps += 1
        elif self.amax > 0:
            self.history = [self.amax, *self.history][: recipe.amax_history_len]
            chosen = self.history[0] if recipe.amax_compute_algo == "most_recent" else max(self.history)
            self.scale = scale_of(chosen, self.fmt, recipe.margin)
        self.amax = np.float32(0)

    def load(self, other: Delayed, window: int) -> None:
        self.history = other.history[:window]
        self.scale, self.amax, self.nonfinite_steps = other.scale, other.amax, other.nonfinite_steps


class Weight:
    """A weight is cast with the scale of its current values; the state shows those of the last cast."""

    def __init__(self) -> None:
        self.nonfinite_steps = 0
        # what it is, and what it was when the histories were recorded; None if that is not known
        self.version = self.held = next(_versions)
        self.amax, self.scale = np.float32(0), np.float32(1)
        self.forget_casts()

    def forget_casts(self) -> None:
        """For another parameter, or another layer."""
        # what the kept cast was made of, and whether a forward has used the last one
        self.kept: tuple[int, int] | None = None
        self.is_used = False

    def changed(self) -> None:
        """A change that leaves a trace."""
        self.version = next(_versions)

    def is_kept(self) -> bool:
        return self.kept == (self.version, Steps.made)

    def cast(self, weight: np.ndarray) -> None:
        self.amax = largest(weight)
        self.scale = scale_of_current(self.amax, "e4m3")

    def keep(self, is_used: bool) -> None:
        self.kept, self.is_used = (self.version, Steps.made), is_used

    def update(self) -> None:
        self.nonfinite_steps += not np.isfinite(self.amax)


class Steps:
    """All optimizer steps and updates of the process: each ends all kept casts."""

    made = 0


class ScaledLayer:
    """The three tensors of one layer."""

    def __init__(self, recipe: DelayedScaling) -> None:
        self.input, self.weight = Delayed("e4m3"), Weight()
        self.grad_output = Delayed("e5m2" if recipe.fp8_format == "HYBRID" else "e4m3")
        self.has_fallen = self.is_scheduled = False

    @property
    def in_fp8(self) -> bool:
        return not (self.has_fallen or self.is_scheduled)

    def move(self, has_fallen: bool | None = None, is_scheduled: bool | None = None) -> None:
        """A tensor that is not cast any more has no history."""
        was_in_fp8 = self.in_fp8
        self.has_fallen = self.has_fallen if has_fallen is None else has_fallen
        self.is_scheduled = self.is_scheduled if is_scheduled is None else is_scheduled
        for tensor in (self.input, self.grad_output) if was_in_fp8 and not self.in_fp8 else ():
            tensor.forget()


class ModelScales:
    """The scales of all layers of a model, with the notices given and the notices due."""

    def __init__(self, recipe: DelayedScaling, names: Iterable[str]) -> None:
        self.recipe = recipe
        self.layers = {name: ScaledLayer(recipe) for name in names}
        # the first layer that has run since the last update, then those since the weights were last looked at; the
        # number of steps at that time, and what was found
        self.cast: list[str] = []
        self.updates, self.steps_at_look = 0, None
        self.fit, self.must_empty = True, False
        # the layers that have recorded
        self.recording: set[str] = set()
        # steps of an optimizer, and whether one is in progress or, without an optimizer, due after an update
        self.optimizer_steps, self.is_stepping = 0, False
        # whether anything has been recorded since the last update, and whether any was recorded before it
        self.recorded = self.may_have_scales = False
        self.steps = 0
        self.new_state()

    def new_state(self) -> None:
        """A copied or loaded state, which gives all notices anew."""
        self.said: set[str] = set()
        self.due: set[str] = set()
        self.may_say: set[str] = set()
        self.steps = 0
        # by layer: forwards without gradients since the last update
        self.forwards: Counter[str] = Counter()

    def in_fp8(self, name: str) -> ScaledLayer | None:
        layer = self.layers.get(name)
        return layer if layer is not None and layer.in_fp8 else None

    def delayed(self) -> list[Delayed]:
        return [tensor for layer in self.layers.values() for tensor in (layer.input, layer.grad_output)]

    def on_weight(self, name: str, record: bool) -> None:
        """When a forward begins, all weights are looked at: if one has changed by anything but an optimizer, the
        histories are emptied if the forward records, and not used if it does not.
        """
        if record:
            self.recording.add(name)
        begins, own = name in self.cast or not self.cast, self.layers[name].weight
        self.cast = self.cast[:1] if begins else self.cast
        if begins or (self.fit and own.version != own.held):
            self.look()
            if not self.optimizer_steps:
                self.is_stepping = False
        self.cast += [name] if name not in self.cast else []
        if record and not self.fit:
            if self.must_empty:
                for tensor in self.delayed():
                    tensor.forget()
                self.may_have_scales = False
            for layer in self.layers.values():
                layer.weight.held = layer.weight.version
            self.fit = True

    def cast_weight(self, name: str, weights: Mapping[str, np.ndarray], records: Collection[str]) -> np.ndarray:
        """The weight of a layer as it is now used, of all weights. A forward that records keeps its cast for the rest
        of the step, and makes at once those that are due of the layers that record and that ran when they last did.
        """
        weight = self.layers[name].weight
        if name not in records:
            weight.cast(weights[name])
        elif weight.is_kept():
            weight.is_used = True
        else:
            for other, layer in self.layers.items():
                if other in records and layer.in_fp8 and layer.weight.is_used and not layer.weight.is_kept():
                    layer.weight.cast(weights[other])
                    layer.weight.keep(is_used=False)
            weight.cast(weights[name])
            weight.keep(is_used=True)
        return quantized(weights[name], scale_of_current(largest(weights[name]), "e4m3"), "e4m3")

    def switch(self, name: str) -> None:
        """Between training and evaluation, or a load: no cast outlives it."""
        if name in self.layers:
            self.layers[name].weight.kept = None

    def look(self) -> None:
        steps = self.updates, self.optimizer_steps
        has_stepped = self.steps_at_look not in (None, steps)
        self.steps_at_look, self.fit, self.must_empty = steps, True, False
        for name, layer in self.layers.items():
            weight = layer.weight
            if weight.held is None or self.is_stepping or (has_stepped and name not in self.recording):
                weight.held = weight.version
            elif weight.held != weight.version:
                self.fit = False
                self.must_empty |= name in self.recording

    def uses_histories(self, record: bool) -> bool:
        return record or self.fit

    def on_weights_stepped(self, names: Collection[str]) -> None:
        """An optimizer has stepped: the histories remain valid for what it made of these weights."""
        if self.optimizer_steps:
            self.is_stepping = False
        self.look()
        self.optimizer_steps, self.is_stepping = self.optimizer_steps + 1, False
        for name in set(names) & set(self.layers):
            self.layers[name].weight.changed()
            self.layers[name].weight.held = self.layers[name].weight.version

    def on_cast(self, record: bool, evaluated: str | None) -> None:
        if record:
            self.recorded = True
        elif evaluated and not (self.may_have_scales and self.fit):
            self.forwards[evaluated] += 1
            if self.forwards[evaluated] > 2:
                self.due.add("other weights" if self.may_have_scales else "evaluation")

    def update(self) -> None:
        before = self._nonfinite_steps()
        for tensor in self.delayed():
            tensor.update(self.recipe)
        for layer in self.layers.values():
            layer.weight.update()
        Steps.made += 1
        if self._nonfinite_steps() > before:
            self.due.add("nonfinite")
        self.may_have_scales |= self.recorded
        self.recorded, self.steps = False, 0
        self.updates += 1
        self.is_stepping = not self.optimizer_steps
        self.cast.clear()
        self.forwards.clear()

    def _nonfinite_steps(self) -> int:
        weights = [layer.weight for layer in self.layers.values()]
        return sum(tensor.nonfinite_steps for tensor in (*self.delayed(), *weights))

    def discard(self) -> None:
        for tensor in self.delayed():
            tensor.amax = np.float32(0)

    def on_optimizer_step(self) -> None:
        Steps.made += 1
        self.steps += self.recorded
        if self.steps >= 3:
            self.due.add("no update")

    def on_weights_changed(self, names: Collection[str]) -> None:
        """Something other than an optimizer has changed these weights, and left a trace."""
        for name in set(names) & set(self.layers):
            self.layers[name].weight.changed()

    def load(self, saved: ModelScales) -> None:
        for name, layer in self.layers.items():
            # a checkpoint holds moves, and no schedule
            layer.has_fallen = saved.layers[name].has_fallen
            layer.input.load(saved.layers[name].input, self.recipe.amax_history_len)
            layer.grad_output.load(saved.layers[name].grad_output, self.recipe.amax_history_len)
        self.may_have_scales = any(tensor.history for tensor in self.delayed())
        self.recorded = any(tensor.amax != 0 for tensor in self.delayed())
        self.said.discard("nonfinite")
        self.on_histories_replaced()
        # they belong to the weights of the next forward, which may be loaded later
        for layer in self.layers.values():
            layer.weight.held = None
        self.cast.clear()

    def on_histories_replaced(self) -> None:
        self.recording = {
            name for name, layer in self.layers.items() if layer.input.history or layer.grad_output.history
        }
        self.may_have_scales = bool(self.recording)

    def saved(self) -> ModelScales:
        """What a checkpoint holds: no histories of other weights than those that the model has now."""
        self.look()
        other = copy.deepcopy(self)
        for tensor in other.delayed() if not self.fit else ():
            tensor.forget()
        return other

    def copy(self) -> ModelScales:
        """Of a copied model, whose weights are new ones."""
        other = copy.deepcopy(self)
        other.cast, other.steps_at_look = [], None
        other.fit, other.optimizer_steps, other.is_stepping = True, 0, False
        for layer in other.layers.values():
            weight = layer.weight
            is_known = weight.held in (None, weight.version)
            weight.changed()
            weight.held = weight.version if is_known else -1
            weight.forget_casts()
        other.on_histories_replaced()
        other.new_state()
        return other

    def convert_again(self, names: Sequence[str]) -> None:
        """Layers that stay converted keep their scales."""
        if list(names) != list(self.layers):
            before = copy.copy(self.layers)
            self.layers = {name: before.get(name, ScaledLayer(self.recipe)) for name in names}
            self.cast, self.updates, self.steps_at_look = [], 0, None
            self.fit, self.optimizer_steps, self.is_stepping = True, 0, False
            for layer in self.layers.values():
                layer.weight.forget_casts()
                if layer.weight.held is None:
                    layer.weight.held = layer.weight.version
            self.on_histories_replaced()
            self.new_state()

    def check_said(self, said: Sequence[str]) -> None:
        """The due notices, once each, and no others."""
        assert len(said) == len(set(said)), said
        assert self.due - self.said <= set(said) <= (self.due | self.may_say) - self.said
        self.said |= set(said)
        self.due, self.may_say = set(), set()
